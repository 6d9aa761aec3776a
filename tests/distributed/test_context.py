"""Ring attention and gathered keys are attention: forward and backward, whatever is grouped, capped or windowed; and a
model trained with sequences split over ranks is the model trained on one."""
import dataclasses

import pytest
import torch
import torch.distributed as dist

from jobs.model.attention import causal_attention
from jobs.model.places import Places, Tokens, document_starts, locate, sequence_keys
from jobs.model.rule import AttentionKind, Rule
from jobs.parallel.context import ContextAttention, _blocks, _blocks_of_all
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
    "dropped": (4, 2, SIZE, AttentionKind(scale=0.25, dropout=0.3), torch.float32),
    "dropped, capped, in a window, values of another size": (4, 4, 8, AttentionKind(
        scale=0.25, dropout=0.3, softcap=2.0, window=13, layer=2), torch.float32),
}
# Lengths of the documents of each sequence: one that all ranks hold a part of, many within one chunk, and some that
# end with a chunk.
DOCUMENTS = {"whole sequences": None, "documents": ((41, 1, 6), (3, 9, 12, 1, 1, 1, 4, 17))}


def tokens(documents: str) -> Tokens:
    """Of whole sequences, with random keys."""
    starts, lengths = None, DOCUMENTS[documents]
    if lengths is not None:
        starts = document_starts(torch.tensor([[i for i, n in enumerate(of) for _ in range(n)] for of in lengths]))
    return locate(torch.empty(BATCH, SEQ, 1), places=Places(), weights=None, starts=starts,
                  keys=sequence_keys(torch.arange(BATCH), seed=3, step=5))


def columns(cp: int, rank: int) -> torch.Tensor:
    size = SEQ // (2 * cp)
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in cp_chunks(cp, rank)])


def errors_by_kind(cp: int, method: str, documents: str) -> dict[str, list[float]]:
    """Of output and gradients of q, k, v on this rank, against attention over the whole sequence in float64; relative
    to the largest element."""
    return {name: errors(cp, method, documents, *case) for name, case in KINDS.items()}


def errors(cp: int, method: str, documents: str, heads: int, kv_heads: int, value: int, kind, dtype) -> list[float]:
    generator, rule = torch.Generator().manual_seed(0), Rule(kind=kind, tokens=tokens(documents))
    shapes = [(heads, SIZE), (kv_heads, SIZE), (kv_heads, value), (heads, value)]
    whole = [torch.randn(BATCH, SEQ, *shape, generator=generator).to(dtype) for shape in shapes]
    *inputs, grad = [t.double().requires_grad_() for t in whole]
    out = causal_attention(*inputs, rule=rule)
    wanted = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    mine = columns(cp, dist.get_rank())
    *parts, part_grad = [t[:, mine].clone().requires_grad_() for t in whole]
    part_out = ContextAttention(group=dist.group.WORLD, method=method)(*parts, rule=rule)
    found = [part_out, *torch.autograd.grad(part_out, parts, part_grad)]
    assert all(t.dtype == dtype for t in found)
    return [((a.double() - b[:, mine]).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_split_attention_is_attention(method, cp, documents):
    for by_kind in run_ranks(errors_by_kind, world_size=cp, args=(cp, method, documents)):
        for kind, found in by_kind.items():
            assert max(found) < TOLERANCE[KINDS[kind][-1]], (kind, found)


def blocks_met(cp: int) -> tuple[int, int]:
    """Pairs of queries and keys that this rank computes, with short documents and without."""
    short = document_starts(torch.arange(SEQ).div(8, rounding_mode="floor").expand(BATCH, SEQ))
    found = []
    for starts in (short, None):
        rule = Rule(kind=AttentionKind(scale=1.0, softcap=2.0),
                    tokens=locate(torch.empty(BATCH, SEQ, 1), places=Places(), keys=None, weights=None, starts=starts))
        blocks = _blocks_of_all(SEQ // cp, rule, dist.group.WORLD)
        found.append(sum(block.num_queries * block.num_keys for block in blocks))
    return tuple(found)


def test_what_no_query_sees_is_not_computed():
    for with_documents, without in run_ranks(blocks_met, world_size=3, args=(3,)):
        assert with_documents == 2 * 8 * 8  # chunks of eight tokens, each one document
        assert without >= 2.4 * with_documents


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_every_chunk_of_a_sequence_is_on_one_rank(cp):
    assert sorted(chunk for rank in range(cp) for chunk in cp_chunks(cp, rank)) == list(range(2 * cp))


def pairs(blocks) -> int:
    """Of queries and keys, as the kernels compute them: of a block that is only causal the triangle."""
    causal = Rule(kind=PLAIN)
    return sum(block.num_queries * (block.num_queries + 1) // 2 if causal.is_triangle(block)
               else block.num_queries * block.num_keys for block in blocks)


@pytest.mark.parametrize("cp", [2, 3, 8])
def test_ranks_share_the_work_of_every_hop_equally(cp):
    """Ranks of a ring wait for each other at every hop: equal sums would not do."""
    rule, seq_len = Rule(kind=PLAIN), SEQ // cp // 2 * 2
    for hop in range(cp):
        work = {pairs(_blocks(cp_chunks(cp, rank), cp_chunks(cp, (rank - hop) % cp), seq_len=seq_len, rule=rule))
                for rank in range(cp)}
        assert len(work) == 1 and work != {0}, hop


def gathered_work(cp: int) -> int:
    return pairs(_blocks_of_all(SEQ // cp, Rule(kind=PLAIN), dist.group.WORLD))


def test_ranks_share_the_work_of_gathered_keys_equally():
    found = run_ranks(gathered_work, world_size=4, args=(4,))
    assert found == [SEQ * (SEQ + 1) // 2 // 4] * 4  # a quarter of all pairs that are seen, and no other


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
