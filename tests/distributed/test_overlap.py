"""Messages travel while ranks compute: what starts before what, and that nothing waits in between. Times are the
benchmarks' (tests.benchmarks.core); pipelines' messages: test_schedules.py."""
import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from jobs.model.rule import AttentionKind, Rule
from jobs.parallel.boundary import Boundary
from jobs.parallel.bucket import Bucket
from jobs.parallel.buckets import _Round
from jobs.parallel.columns import column_parallel
from jobs.parallel.context import ContextAttention
from jobs.parallel.expert import LocalExperts
from tests.distributed.test_own_model import MIXER
from tests.distributed.test_own_model import TIED as OWN_TIED
from tests.helpers.models import MIXTURE
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, build_model, job, layout

pytestmark = pytest.mark.distributed

# as they reach the dispatcher → one word each; a receive is a part of its hop
WORDS = {"mm": "mm", "addmm_": "mm", "addmm": "mm", "allreduce_": "sum", "alltoall_base_": "scatter",
         "_allgather_base_": "gather", "send": "hop", "_scaled_dot_product_flash_attention_for_cpu": "attend",
         "_scaled_dot_product_flash_attention_for_cpu_backward": "attend"}


class Order(TorchDispatchMode):
    """Words of what is started, and `wait` for each time the rank waits for a message."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def __enter__(self):
        wait, words = dist.Work.wait, self.words
        self._wait = wait
        dist.Work.wait = lambda work, *args, **rest: words.append("wait") or wait(work, *args, **rest)
        return super().__enter__()

    def __exit__(self, *error):
        dist.Work.wait = self._wait
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if word := WORDS.get(func.overloadpacket.__name__):
            self.words.append(word)
        return func(*args, **kwargs or {})


# ------------------------------------------------------------------ gradients
LAYERS = TINY.num_layers
TIED = dataclasses.replace(TINY, tie_embeddings=True)
# layout → the message of a unit, and how many are under way before the last matmul, which is of the first layer's
# weights: those of the other layers, and of norm and output; tied, these are complete with the embedding. Experts on
# other ranks are a unit of their own, which is complete before the rest of their layer; their tokens travel in the same
# messages, so there buckets are counted.
REDUCTIONS = {
    "replicas": (dict(dp_replicate=2), TINY, "sum", LAYERS),
    "replicas, tied": (dict(dp_replicate=2), TIED, "sum", LAYERS - 1),
    "replicas, experts": (dict(dp_replicate=2), MIXTURE, "sum", LAYERS),
    "ZeRO-1, experts on other ranks": (dict(dp_shard=4, ep=2, zero_stage=1, microbatch_size=2), MIXTURE, "bucket",
                                       2 * LAYERS),
    "ZeRO-1": (dict(dp_shard=2, zero_stage=1), TINY, "scatter", LAYERS),
    "ZeRO-1, an own model, tied": (dict(dp_shard=2, zero_stage=1), OWN_TIED, "scatter", LAYERS - 1),
    "ZeRO-2": (dict(dp_shard=2, zero_stage=2), TINY, "scatter", LAYERS),
    "ZeRO-3": (dict(dp_shard=2), TINY, "scatter", LAYERS),
    "ZeRO-3, tied": (dict(dp_shard=2), TIED, "scatter", LAYERS - 1),
    "ZeRO-3, an own model": (dict(dp_shard=2), MIXER, "scatter", LAYERS),
}


def order_of_a_step(spec) -> list[str]:
    parallel = build_model(spec)
    batch = torch.randint(0, 256, (spec.layout.microbatch_size, 16))
    parallel.forward_backward(batch, batch)
    reduce = Bucket.reduce
    with Order() as order, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "reduce", lambda *args, **rest: order.words.append("bucket") or reduce(*args, **rest))
        parallel.forward_backward(batch, batch)
    return order.words


@pytest.mark.parametrize("case", REDUCTIONS)
def test_gradients_are_reduced_while_backward_goes_on(case, tmp_path):
    arguments, model, message, under_way = REDUCTIONS[case]
    where = layout(**{"microbatch_size": 4, "layers_per_stage": (LAYERS,), **arguments})
    spec = job(tmp_path, where, model=model)
    for words in run_ranks(order_of_a_step, world_size=spec.world_size, args=(spec,)):
        last = len(words) - words[::-1].index("mm")
        assert words[:last].count(message) == under_way
        if case == "replicas":
            assert "wait" not in words[words.index(message):last]
        if case in ("ZeRO-1", "ZeRO-2"):  # the one before is waited for; FSDP waits for some at once
            assert (message, "wait") not in itertools.pairwise(words[:last])


def left_when_tokens_are_alike(spec) -> tuple[int, list[int]]:
    """How often this rank's experts got no token, and how many buckets the end of a backward found unreduced."""
    parallel, idle, left = build_model(spec), 0, []
    compute, rest = LocalExperts.forward, _Round.rest

    def counting(experts, x, counts):
        nonlocal idle
        idle += len(x) == 0
        return compute(experts, x, counts)

    layout = spec.layout
    batch = torch.zeros(layout.microbatch_size * layout.num_microbatches, 16, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalExperts, "forward", counting)
        patch.setattr(_Round, "rest", lambda round: left.append(len(found := rest(round))) or found)
        parallel.forward_backward(batch, batch)
    return idle, left


# ffn_dim of the experts: by the grouped kernel; one by one
@pytest.mark.parametrize("ffn_dim", [MIXTURE.moe.ffn_dim, MIXTURE.moe.ffn_dim - 1])
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_experts_without_a_token_hold_up_no_reduction(ffn_dim, zero_stage, tmp_path):
    model = dataclasses.replace(MIXTURE, moe=dataclasses.replace(MIXTURE.moe, ffn_dim=ffn_dim))
    spec = job(tmp_path, layout(model=model, dp_shard=2, ep=2, zero_stage=zero_stage), model=model)
    by_rank = run_ranks(left_when_tokens_are_alike, world_size=2, args=(spec,))
    assert max(idle for idle, _ in by_rank) > 0
    assert {count for _, left in by_rank for count in left} == {0}


def order_of_a_forward(spec) -> list[str]:
    """Behind an update."""
    parallel = build_model(spec)
    batch = torch.zeros(4, 16, dtype=torch.int64)
    parallel.forward_backward(batch, batch)
    parallel.gradients.clear()
    with Order() as order:
        parallel.refresh_weights()
        parallel.model_parts[0](batch)
    return order.words


# model → gathers under way when the first layer computes: two at once, one more for each unit that is used until then
GATHERS = {
    "untied": (TINY, 4),
    "tied": (TIED, 4),
    "an own one": (MIXER, 4),
}


@pytest.mark.parametrize("case", GATHERS)
def test_updated_weights_are_gathered_while_those_before_them_compute(case, tmp_path):
    model, under_way = GATHERS[case]
    spec = job(tmp_path, layout(dp_shard=2, zero_stage=1, microbatch_size=4), model=model)
    for words in run_ranks(order_of_a_forward, world_size=2, args=(spec,)):
        assert words[:words.index("mm")].count("gather") == under_way
        assert words.count("gather") == LAYERS + 1 + (model is not TIED)


# ------------------------------------------------------------------ keys, activations
def order_of_a_ring(value_dim: int) -> tuple[list[str], list[str]]:
    """Of forward and backward."""
    q, k, v = (torch.randn(1, 8, heads, size, requires_grad=True) for heads, size in ((4, 16), (2, 16), (2, value_dim)))
    with Order() as forward:
        out = ContextAttention(group=dist.group.WORLD, method="ring")(q, k, v, rule=Rule(kind=AttentionKind(scale=1.0)))
    with Order() as backward:
        out.sum().backward()
    return forward.words, backward.words


@pytest.mark.parametrize("value_dim", [16, 8], ids=["values as wide as keys", "narrower values, as MLA's"])
def test_the_next_keys_travel_while_the_present_ones_are_met(value_dim):
    """By fused kernels: a whole block of scores would be quadratic in the length of a sequence."""
    meet = ["hop", "attend", "wait", "wait"]  # for what is sent and for what arrives
    for forward, backward in run_ranks(order_of_a_ring, world_size=3, args=(value_dim,)):
        assert forward == [*meet, *meet, "attend"]
        assert [word for word in backward if word != "wait"] == ["hop", "attend", "hop"] * 2 + ["attend", "hop"]
        assert backward[:2] == ["hop", "attend"] and backward[-2:] == ["wait", "wait"]


def order_of_columns(sequence_parallel: bool) -> list[str]:
    """Of the backward of two maps."""
    maps = [nn.Linear(16, 8, bias=False) for _ in range(2)]
    for one in maps:  # as a DTensor's to_local: what the function sees is no leaf
        weight = one.weight
        del one.weight
        one.weight = weight * 1
    x = torch.randn(2, 4 if sequence_parallel else 8, 16, requires_grad=True)
    outs = column_parallel(x, *maps, boundary=Boundary(dist.group.WORLD, sequence_parallel=sequence_parallel),
                           regather=sequence_parallel)
    with Order() as order:
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    return order.words


@pytest.mark.parametrize("sequence_parallel, wanted", [
    (True, ["gather", "mm", "mm", "scatter", "wait", "mm", "mm", "wait"]),
    (False, ["mm", "mm", "sum", "mm", "mm", "wait"])], ids=["sequence parallel", "whole sequences"])
def test_activations_travel_while_gradients_are_computed(sequence_parallel, wanted):
    assert run_ranks(order_of_columns, world_size=2, args=(sequence_parallel,)) == [wanted] * 2
