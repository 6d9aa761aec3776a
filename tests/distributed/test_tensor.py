"""Column-parallel maps alone: exact in every form, each collective once however the backward is split, and only the
rank's own tokens kept; and gloo's reduce-scatter."""
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from jobs.parallel.boundary import Boundary
from jobs.parallel.collectives import reduce_scatter
from jobs.parallel.columns import column_parallel
from jobs.verify.collectives import CollectiveLog
from tests.helpers.communication import sent
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.distributed

BATCH, SEQ, DIM, COLUMNS = 2, 8, 16, (12, 8, 4)  # columns of each map, over all ranks
WHOLE = {"dtype": torch.float64}  # in float32 how sums are rounded differs between CPUs by as much as 1e-6
TOLERANCE = 1e-13

# what is special about the case → (sequence_parallel, regather, bias, ranks)
FORMS = {
    "whole sequences": (False, False, False, 2),
    "whole sequences, biases": (False, False, True, 2),
    "sequence parallel, gathered input kept": (True, False, True, 2),
    "sequence parallel, gathered again": (True, True, False, 2),
    "sequence parallel, gathered again, biases, four ranks": (True, True, True, 4),
}
# what a backward is asked for → what it sends, of "sequence parallel, gathered again"
HALVES = {"all": {"all_gather": 1, "reduce_scatter": 1}, "input": {"reduce_scatter": 1}, "weights": {"all_gather": 1}}


def maps(*, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(DIM, columns, bias=bias, **WHOLE) for columns in COLUMNS]


def share(whole: list[nn.Linear]) -> list[nn.Linear]:
    """This rank's columns of each."""
    found = []
    for one in whole:
        mine = nn.Linear(DIM, one.out_features // dist.get_world_size(), bias=one.bias is not None, **WHOLE)
        for name, parameter in mine.named_parameters():
            parameter.data = getattr(one, name).detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
        found.append(mine)
    return found


def tokens_of(x: torch.Tensor) -> torch.Tensor:
    """This rank's tokens under sequence parallelism: a share of the flattened ones."""
    mine = x.flatten(0, 1).chunk(dist.get_world_size())[dist.get_rank()]
    return mine.view(BATCH, SEQ // dist.get_world_size(), DIM)


def errors(sequence_parallel: bool, regather: bool, bias: bool) -> list[float]:
    """Largest differences from the maps as a whole: outputs, then gradients of the input and of every parameter."""
    whole, x = maps(bias=bias), torch.randn(BATCH, SEQ, DIM, requires_grad=True, **WHOLE)
    outs = [one(x) for one in whole]
    wanted_grads = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, wanted_grads)
    mine, size, rank = share(whole), dist.get_world_size(), dist.get_rank()
    entered = (tokens_of(x) if sequence_parallel else x).detach().requires_grad_()
    boundary = Boundary(dist.group.WORLD, sequence_parallel=sequence_parallel)
    found = column_parallel(entered, *mine, boundary=boundary, regather=regather)
    torch.autograd.backward(found, [grad.chunk(size, dim=-1)[rank] for grad in wanted_grads])
    pairs = [(a, b.chunk(size, dim=-1)[rank]) for a, b in zip(found, outs)]
    pairs.append((entered.grad, tokens_of(x.grad) if sequence_parallel else x.grad))
    pairs += [(a.grad, b.grad.chunk(size)[rank]) for m, w in zip(mine, whole)
              for a, b in zip(m.parameters(), w.parameters())]
    return [(a - b).abs().max().item() for a, b in pairs]


@pytest.mark.parametrize("form", FORMS)
def test_maps_of_one_input_are_exact(form):
    sequence_parallel, regather, bias, ranks = FORMS[form]
    for found in run_ranks(errors, world_size=ranks, args=(sequence_parallel, regather, bias)):
        assert len(found) == 4 + len(COLUMNS) * (1 + bias)
        assert max(found) < TOLERANCE


def sent_by(asked: str) -> dict[str, int]:
    mine = share(maps(bias=False))
    leaf = tokens_of(torch.randn(BATCH, SEQ, DIM, **WHOLE)).requires_grad_()
    held = [one.weight for one in mine]
    for one in mine:  # as a DTensor's to_local: what the function sees is no leaf
        weight = one.weight
        del one.weight
        one.weight = weight.view_as(weight)
    outs = column_parallel(leaf * 1, *mine, boundary=Boundary(dist.group.WORLD, sequence_parallel=True), regather=True)
    wanted = {"all": [leaf, *held], "input": [leaf], "weights": held}[asked]
    with CollectiveLog() as log:
        torch.autograd.grad(outs, wanted, [torch.ones_like(out) for out in outs])
    found = sent(log.collectives())
    return {op: sum(n for (name, _), n in found.items() if name == op) for op, _ in found}


@pytest.mark.parametrize("asked", HALVES)
def test_half_a_backward_sends_half(asked):
    assert run_ranks(sent_by, world_size=2, args=(asked,)) == [HALVES[asked]] * 2


def kept(regather: bool) -> int:
    """Elements of activations held between forward and backward."""
    mine, held = share(maps(bias=False)), []
    x = tokens_of(torch.randn(BATCH, SEQ, DIM, **WHOLE)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        column_parallel(x, *mine, boundary=Boundary(dist.group.WORLD, sequence_parallel=True), regather=regather)
    return sum(t.numel() for t in held) - sum(one.weight.numel() for one in mine)


@pytest.mark.parametrize("regather, ranks", [(False, 2), (True, 2), (True, 4)])
def test_gathering_again_keeps_the_ranks_own_tokens(regather, ranks):
    whole = BATCH * SEQ * DIM
    assert run_ranks(kept, world_size=ranks, args=(regather,)) == [whole // ranks if regather else whole] * ranks


def scattered(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, and the same from all ranks' inputs by hand in float64."""
    inputs = [torch.randn(dist.get_world_size(), 3, 5, generator=torch.Generator().manual_seed(rank)).to(dtype)
              for rank in range(dist.get_world_size())]
    mine = inputs[dist.get_rank()]
    out = torch.empty(3, 5, dtype=dtype)
    reduce_scatter(out, mine, group=dist.group.WORLD).wait()
    return out, sum(one[dist.get_rank()].double() for one in inputs)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_gloos_reduce_scatter_sums_each_ranks_part(dtype, tolerance):
    for found, wanted in run_ranks(scattered, world_size=3, args=(dtype,)):
        assert (found.double() - wanted).abs().max() <= tolerance * wanted.abs().max()
