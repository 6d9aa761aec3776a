"""The planner's activations are what a real layer of the model keeps for its backward, on CPU."""
import pytest
import torch

from jobs.model.attention import RotaryTable
from jobs.model.places import Places, locate
from jobs.model.transformer import Layer
from jobs.spec.training import DTYPE_BYTES
from orchestrator.planner.activations import block_activation_bytes, block_shape
from tests.helpers.planning import SMALL
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.distributed  # forked: a torch operation in the parent would hang later forks

BATCH, SEQ_LEN = 2, 128
# Not in the formula: attention's logsumexp, the norms' 1/rms, rotary tables shared by all layers.
SMALL_PRINT = 0.01


def kept_bytes(dtype: str) -> int:
    """Distinct storages that autograd holds after one layer's forward, parameters aside."""
    layer = Layer(SMALL).to(getattr(torch, dtype))
    x = torch.randn(BATCH, SEQ_LEN, SMALL.dim, dtype=getattr(torch, dtype), requires_grad=True)
    tokens = locate(x, places=Places(), keys=None, weights=None,
                    rotary=RotaryTable(head_dim=SMALL.head_size, theta=1e4))
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: list[torch.Tensor] = []  # alive, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, tokens)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for address, size in storages.items() if address not in parameters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_layer_keeps_what_the_plan_says(dtype):
    measured = run_ranks(kept_bytes, world_size=1, args=(dtype,))[0]
    shape = block_shape(SMALL, microbatch_size=BATCH, seq_len=SEQ_LEN, element_bytes=DTYPE_BYTES[dtype], device="cpu")
    planned = block_activation_bytes(shape, tp=1, sequence_parallel=False, recompute="none")
    assert planned == pytest.approx(measured, rel=SMALL_PRINT)
