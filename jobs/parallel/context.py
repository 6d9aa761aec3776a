"""Context parallelism: every sequence split over the `cp` axis; keys and values travel, queries stay.

Called by jobs.parallel on a model built on the meta device; the seams are `Attention.inner` and `Places.positions`.
A sequence is cut in 2·cp chunks and rank r holds chunks r and 2·cp−1−r, so that under the causal mask all ranks do
the same work (as in arXiv:2407.21783, §3.3.2). Both methods are exact: softmax over blocks of keys is put together
from each block's log-sum-exp (ring: arXiv:2310.01889; the arithmetic: jobs.model.blockwise).

Collectives over cp, per microbatch and layer; K = microbatch_size·seq_len/cp·(key + value width)/tp elements, the
keys and values of one rank (width = num_kv_heads·head_dim each), e = bytes(param_dtype):

    cp_method    op               bytes        when
    ring         send / recv      e·K          forward cp−1 times; backward cp−1 times
                 send / recv      4·K          backward cp times: their gradients, summed in float32
    allgather    all_gather       e·K·cp       forward once, backward once: gathered keys are not kept
                 reduce_scatter   4·K·cp       backward once
    recompute    the forward's once more (full)
"""
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jobs.model.blockwise import CHUNK, Partial, block_gradients
from jobs.model.rule import Block, Rule, split
from jobs.model.transformer import Transformer
from jobs.parallel.collectives import reduce_scatter
from jobs.spec.parallel import CpMethod, cp_chunks


def apply_context_parallel(model: Transformer, *, mesh: DeviceMesh, method: CpMethod) -> None:
    """Make each layer attend to whole sequences, of which this rank of the 1-D mesh `cp` holds two chunks."""
    group = mesh.get_group()
    model.places.positions = _Positions(cp_chunks(group.size(), group.rank()), num_chunks=2 * group.size())
    for layer in model.layers.values():
        layer.attention.inner = ContextAttention(group=group, method=method)


class _Positions:
    """Places.positions of a rank that holds some of num_chunks equal chunks of each sequence."""

    def __init__(self, chunks: tuple[int, ...], *, num_chunks: int) -> None:
        self.chunks = chunks
        self.num_chunks = num_chunks

    def __call__(self, seq_len: int, device: torch.device) -> Tensor:
        size = seq_len // len(self.chunks)
        return torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in self.chunks])


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextAttention:
    """An `Inner` of this rank's chunks: q, k, v [batch, seq/cp, heads, head size] → their output."""

    group: dist.ProcessGroup
    method: CpMethod

    @torch.compiler.disable  # which blocks and hops there are is decided on the host
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, rule: Rule) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [batch, heads, seq/cp, head size]
        function = _Ring if self.method == "ring" else _AllGather
        return function.apply(q, k.contiguous(), v.contiguous(), rule, self.group).transpose(1, 2)


# ------------------------------------------------------------------ which queries meet which keys
def _blocks(mine: tuple[int, ...], theirs: tuple[int, ...], *, seq_len: int, rule: Rule) -> list[Block]:
    """Blocks of this rank's queries and another's keys, seq_len of each in two chunks, that hold a visible pair. Each
    query's own key comes first, so that every query sees a key from the start. Chunks are joined where a fused kernel
    can take them so: where nothing but causality counts."""
    size = seq_len // 2
    everything, head, tail = slice(0, seq_len), slice(0, size), slice(size, seq_len)
    if _is_plain(rule):
        if mine == theirs:  # chunks are in order: the mask of the whole is that of each pair
            return [Block(queries=everything, keys=everything, first_query=0, first_key=0)]
        queries, keys = (everything, head) if theirs < mine else (tail, everything)
        return [Block(queries=queries, keys=keys, first_query=size * mine[queries.start // size],
                      first_key=size * theirs[0])]
    pairs = [Block(queries=queries, keys=keys, first_query=query_chunk * size, first_key=key_chunk * size)
             for queries, query_chunk in zip((head, tail), mine) for keys, key_chunk in zip((head, tail), theirs)]
    pairs.sort(key=lambda block: block.first_query != block.first_key)
    return [part for pair in pairs for part in split(pair, rule, size=CHUNK)]


def _blocks_of_all(seq_len: int, rule: Rule, group: dist.ProcessGroup) -> list[Block]:
    """This rank's queries, two chunks of seq_len/2, against the keys of the whole sequence: of each chunk its diagonal
    and all that lies before for fused kernels, else all it sees, some queries at a time."""
    size, found = seq_len // 2, []
    for i, chunk in enumerate(cp_chunks(group.size(), group.rank())):
        queries, start = slice(i * size, (i + 1) * size), chunk * size
        if not _is_plain(rule):
            found += split(Block(queries=queries, keys=slice(0, start + size), first_query=start, first_key=0), rule,
                           size=CHUNK)
            continue
        found.append(Block(queries=queries, keys=slice(start, start + size), first_query=start, first_key=start))
        if start:
            found.append(Block(queries=queries, keys=slice(0, start), first_query=start, first_key=0))
    return found


def _is_plain(rule: Rule) -> bool:
    return rule.is_only_causal and rule.kind.softcap is None and not rule.drops


# ------------------------------------------------------------------ what both methods begin and end with
def _finish(ctx, total: Partial, q: Tensor, k: Tensor, v: Tensor, rule: Rule, group: dist.ProcessGroup) -> Tensor:
    """Output of a forward that has added up all blocks; what backward needs is kept."""
    out = total.out.to(q.dtype)
    ctx.rule, ctx.group = rule, group
    ctx.save_for_backward(q, k, v, out, total.lse)
    return out


def _as_inputs(gradients: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The float32 sums as autograd wants them: of the inputs' dtypes, and none for rule and group."""
    return *(total.to(t.dtype) for total, t in zip(gradients, inputs, strict=True)), None, None


# ------------------------------------------------------------------ ring
class _Hop:
    """One flat tensor on its way to the next rank, while that of the rank before arrives."""

    def __init__(self, flat: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self._sent, self._arriving = flat, torch.empty_like(flat)
        ops = [dist.P2POp(dist.isend, flat, group=group, group_peer=(rank + 1) % size),
               dist.P2POp(dist.irecv, self._arriving, group=group, group_peer=(rank - 1) % size)]
        self._work = dist.batch_isend_irecv(ops)

    def wait(self) -> Tensor:
        for work in self._work:
            work.wait()
        return self._arriving


def _flat(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def _unflat(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of `flat` with the shapes of k and v."""
    first, second = flat.split((k.numel(), v.numel()))
    return first.view(k.shape), second.view(v.shape)


class _Ring(torch.autograd.Function):
    """The next keys are on their way while attention to the present ones is computed."""

    @staticmethod
    def forward(ctx, q, k, v, rule, group):
        rank, size = group.rank(), group.size()
        mine, total = cp_chunks(size, rank), Partial(q, v)
        travelling = _flat(k, v)
        for hop in range(size):
            coming = _Hop(travelling, group) if hop < size - 1 else None
            keys, values = _unflat(travelling, k, v)
            for block in _blocks(mine, cp_chunks(size, (rank - hop) % size), seq_len=q.shape[2], rule=rule):
                total.add(block, q, keys, values, rule=rule)
            travelling = travelling if coming is None else coming.wait()
        return _finish(ctx, total, q, k, v, rule, group)

    @staticmethod
    def backward(ctx, grad):
        (q, k, v, out, lse), rule, group = ctx.saved_tensors, ctx.rule, ctx.group
        rank, size = group.rank(), group.size()
        mine, dq = cp_chunks(size, rank), torch.zeros_like(q, dtype=torch.float32)
        travelling, gradients = _flat(k, v), None
        for hop in range(size):
            coming = _Hop(travelling, group) if hop < size - 1 else None
            keys, values = _unflat(travelling, k, v)
            here = torch.zeros_like(travelling, dtype=torch.float32)
            dk, dv = _unflat(here, k, v)
            for block in _blocks(mine, cp_chunks(size, (rank - hop) % size), seq_len=q.shape[2], rule=rule):
                block_gradients(block, grad, q, keys, values, out, lse, into=(dq, dk, dv), rule=rule)
            # the gradients of these keys, as the ranks before have summed them up, arrive only now
            here = here if gradients is None else here.add_(gradients.wait())
            gradients = _Hop(here, group)
            travelling = travelling if coming is None else coming.wait()
        dk, dv = _unflat(gradients.wait(), k, v)  # after `size` hops they are home
        return _as_inputs((dq, dk, dv), (q, k, v))


# ------------------------------------------------------------------ all-gather
class _AllGather(torch.autograd.Function):
    """All keys and values at once, in the order of the sequence; gathered again for backward."""

    @staticmethod
    def forward(ctx, q, k, v, rule, group):
        keys, values = _gather(k, v, group)
        total = Partial(q, v)
        for block in _blocks_of_all(q.shape[2], rule, group):
            total.add(block, q, keys, values, rule=rule)
        return _finish(ctx, total, q, k, v, rule, group)

    @staticmethod
    def backward(ctx, grad):
        (q, k, v, out, lse), rule, group = ctx.saved_tensors, ctx.rule, ctx.group
        keys, values = _gather(k, v, group)
        dq, dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (q, keys, values))
        for block in _blocks_of_all(q.shape[2], rule, group):
            block_gradients(block, grad, q, keys, values, out, lse, into=(dq, dk, dv), rule=rule)
        return _as_inputs((dq, *_scatter_sum(dk, dv, k, v, group)), (q, k, v))


def _gather(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """[batch, heads, seq/cp, head size] of every rank → [batch, heads, seq, head size] in the order of the sequence"""
    flat = _flat(k, v)
    out = flat.new_empty(group.size(), flat.numel())
    dist.all_gather_single(out.view(-1), flat, group=group)
    parts = [_unflat(part, k, v) for part in out]
    return tuple(_in_order([part[i] for part in parts]) for i in (0, 1))


def _in_order(parts: list[Tensor]) -> Tensor:
    heads, tails = zip(*(part.chunk(2, dim=2) for part in parts), strict=True)
    return torch.cat((*heads, *reversed(tails)), dim=2)


def _scatter_sum(dk: Tensor, dv: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Of every rank's gradients for all keys → this rank's keys' sums; the inverse of `_gather`."""
    size = group.size()
    chunks = [t.chunk(2 * size, dim=2) for t in (dk, dv)]
    flat = dk.new_empty(size, k.numel() + v.numel())  # once: for long sequences it is the largest there is
    for rank, part in enumerate(flat):
        for into, of in zip(_unflat(part, k, v), chunks):
            torch.cat([of[chunk] for chunk in cp_chunks(size, rank)], dim=2, out=into)
    out = flat.new_empty(flat.shape[1])
    reduce_scatter(out, flat, group=group).wait()
    return _unflat(out, k, v)
