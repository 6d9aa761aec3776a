"""Ring attention and gathered keys are attention: forward and backward, whatever is grouped, capped or windowed; and a
model trained with sequences split over ranks is the model trained on one."""
import dataclasses

import pytest
import torch
import torch.distributed as dist

from jobs.model.attention import AttentionKind, causal_attention
from jobs.parallel.context import ContextAttention
from jobs.spec.parallel import cp_chunks
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, assert_matches_single_rank, layout

pytestmark = pytest.mark.distributed

BATCH, SEQ, SIZE = 2, 48, 16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}  # of the largest element; a few roundings
METHODS = ("ring", "allgather")

# heads, kv heads, size of a value head, what is computed, dtype
PLAIN = AttentionKind(scale=SIZE**-0.5)
KINDS = {
    "as many key heads as heads": (4, 4, SIZE, PLAIN, torch.float32),
    "grouped": (4, 2, SIZE, PLAIN, torch.float32),
    "one key head, another scale": (4, 1, SIZE, AttentionKind(scale=0.7), torch.float32),
    "bfloat16": (4, 2, SIZE, PLAIN, torch.bfloat16),
    "values of another size": (4, 4, 8, PLAIN, torch.float32),
    "capped": (4, 2, SIZE, AttentionKind(scale=0.5, softcap=2.0), torch.float32),
    "a window within a chunk": (4, 2, SIZE, AttentionKind(scale=0.25, window=3), torch.float32),
    "a window over several chunks": (4, 2, SIZE, AttentionKind(scale=0.25, window=21), torch.float32),
    "capped, with a window": (4, 2, SIZE, AttentionKind(scale=0.5, softcap=2.0, window=13), torch.float32),
}


def columns(cp: int, rank: int) -> torch.Tensor:
    size = SEQ // (2 * cp)
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in cp_chunks(cp, rank)])


def errors_by_kind(cp: int, method: str) -> dict[str, list[float]]:
    """Of output and gradients of q, k, v on this rank, against attention over the whole sequence in float64; relative
    to the largest element."""
    return {name: errors(cp, method, *case) for name, case in KINDS.items()}


def errors(cp: int, method: str, heads: int, kv_heads: int, value: int, kind, dtype) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, SIZE), (kv_heads, SIZE), (kv_heads, value), (heads, value)]
    whole = [torch.randn(BATCH, SEQ, *shape, generator=generator).to(dtype) for shape in shapes]
    *inputs, grad = [t.double().requires_grad_() for t in whole]
    out = causal_attention(*inputs, kind=kind)
    wanted = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    mine = columns(cp, dist.get_rank())
    *parts, part_grad = [t[:, mine].clone().requires_grad_() for t in whole]
    part_out = ContextAttention(kind=kind, group=dist.group.WORLD, method=method)(*parts)
    found = [part_out, *torch.autograd.grad(part_out, parts, part_grad)]
    assert all(t.dtype == dtype for t in found)
    return [((a.double() - b[:, mine]).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_split_attention_is_attention(method, cp):
    for by_kind in run_ranks(errors_by_kind, world_size=cp, args=(cp, method)):
        for kind, found in by_kind.items():
            assert max(found) < TOLERANCE[KINDS[kind][-1]], (kind, found)


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_ranks_share_the_work_equally(cp):
    """Every rank's queries see equally many pairs of chunks, and every chunk is on one rank."""
    held = [cp_chunks(cp, rank) for rank in range(cp)]
    assert sorted(chunk for chunks in held for chunk in chunks) == list(range(2 * cp))
    assert len({sum(chunks) for chunks in held}) == 1


TIED = dataclasses.replace(TINY, tie_embeddings=True)
V = dict(schedule="zbv", virtual_stages=2)

FAST = {
    "cp2": (dict(cp=2), TINY),
    "cp2, gathered keys": (dict(cp=2, cp_method="allgather"), TINY),
    "cp2 × dp_shard2": (dict(cp=2, dp_shard=2), TINY),
}
SLOW = {
    "cp4": (dict(cp=4), TINY),
    "cp4, gathered keys, tied": (dict(cp=4, cp_method="allgather"), TIED),
    "cp2, ZeRO-1": (dict(cp=2, zero_stage=1), TINY),
    "cp2, ZeRO-2": (dict(cp=2, zero_stage=2), TINY),
    "cp2, recompute full": (dict(cp=2, recompute="full"), TINY),
    "cp2, recompute selective": (dict(cp=2, recompute="selective"), TINY),
    "cp2, gathered keys, recompute selective": (dict(cp=2, cp_method="allgather", recompute="selective"), TINY),
    "cp2 × tp2": (dict(cp=2, tp=2), TINY),
    "cp2 × tp2 without sequence parallelism": (dict(cp=2, tp=2, sequence_parallel=False), TINY),
    "cp2 × tp2, gathered keys": (dict(cp=2, tp=2, cp_method="allgather"), TINY),
    "cp2 × pp2, tied": (dict(cp=2, pp=2), TIED),
    "cp2 × pp2, backward in two halves": (dict(cp=2, pp=2, zero_stage=1, **V), TIED),
    "cp2 × dp_replicate2": (dict(cp=2, dp_replicate=2), TINY),
    "cp2 × dp_shard2, ZeRO-1": (dict(cp=2, dp_shard=2, zero_stage=1), TINY),
    "cp2 outside dp_shard2": (dict(cp=2, dp_shard=2, order=("dp_replicate", "pp", "cp", "dp_shard", "tp")), TINY),
    "cp2 and dp_shard2 with tp between": (dict(cp=2, dp_shard=2, tp=2,
                                               order=("dp_replicate", "cp", "pp", "tp", "dp_shard")), TINY),
    "tp2 × cp2 × dp_shard2": (dict(tp=2, cp=2, dp_shard=2), TINY),
    "tp2 × cp2 × dp_shard2, ZeRO-1, tied": (dict(tp=2, cp=2, dp_shard=2, zero_stage=1), TIED),
    "pp2 × cp2 × dp_shard2": (dict(pp=2, cp=2, dp_shard=2), TINY),
    "pp2 × cp2 × tp2": (dict(pp=2, cp=2, tp=2), TINY),
    "dp_replicate2 × cp2 × dp_shard2": (dict(dp_replicate=2, cp=2, dp_shard=2), TINY),
    "dp_replicate2 × cp2 × tp2": (dict(dp_replicate=2, cp=2, tp=2), TINY),
    "sliding windows": (dict(cp=2), dataclasses.replace(TINY, sliding_window=5, global_every=2)),
    "capped scores": (dict(cp=2, cp_method="allgather"), dataclasses.replace(TINY, attention_softcap=5.0)),
}


@pytest.mark.parametrize("case", FAST)
def test_split_sequences_match_single_rank(case, tmp_path):
    arguments, model = FAST[case]
    assert_matches_single_rank(tmp_path, layout(model=model, **arguments), model=model)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_split_sequences_combined_match_single_rank(case, tmp_path):
    arguments, model = SLOW[case]
    assert_matches_single_rank(tmp_path, layout(model=model, **arguments), model=model)
