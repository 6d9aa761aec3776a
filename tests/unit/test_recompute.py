"""Recompute runs what it promises a second time, and gives the same gradients."""
import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jobs.model.transformer import Transformer
from jobs.parallel.recompute import apply_recompute, repeat_activations
from jobs.spec.model import ModelSpec

SPEC = ModelSpec(name="small", vocab_size=32, dim=16, num_layers=3, num_heads=2, num_kv_heads=2, ffn_dim=24)
MATMULS = 7 * SPEC.num_layers + 1  # q, k, v, o, gate, up, down of each layer, and the output

# recompute → (matmuls, silus, attentions) of a forward and a backward; a backward has two matmuls for one
CASES = {
    "none": (3 * MATMULS, SPEC.num_layers, SPEC.num_layers),
    "selective": (3 * MATMULS, 2 * SPEC.num_layers, SPEC.num_layers),  # of any block
    "activations": (3 * MATMULS, 2 * SPEC.num_layers, SPEC.num_layers),  # of our own decoder
    # checkpoint stops early: the last matmul of a layer, whose output nothing needs, is not run again
    "full": (3 * MATMULS + 6 * SPEC.num_layers, 2 * SPEC.num_layers, 2 * SPEC.num_layers),
}


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


def run(recompute: str) -> tuple[collections.Counter, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Transformer(SPEC, layers=range(SPEC.num_layers), is_first=True, is_last=True)
    if recompute == "activations":
        repeat_activations(model)
    else:
        apply_recompute(model.layers.values(), recompute=recompute)
    with Count() as count:
        model(torch.arange(12).view(2, 6)).square().sum().backward()
    return count.calls, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("recompute", CASES)
def test_what_is_kept_is_not_computed_twice(recompute):
    calls, gradients = run(recompute)
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert (calls["aten::mm"], calls["aten::silu"], calls[attention]) == CASES[recompute]
    assert all(torch.equal(a, b) for a, b in zip(gradients, run("none")[1], strict=True))


def test_names_of_parameters_stay():
    model = Transformer(SPEC, layers=range(SPEC.num_layers), is_first=True, is_last=True)
    names = list(dict(model.named_parameters()))
    apply_recompute(model.layers.values(), recompute="full")
    assert list(dict(model.named_parameters())) == names
