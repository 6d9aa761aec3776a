"""Attention that no fused kernel offers, some queries at a time: capped scores (Gemma 2), windows, documents, dropped
weights.

Called by jobs.model.attention. A chunk of queries meets only the keys that it can see, so a window costs
seq · window and not seq², short documents little more than their own squares, and never more than one chunk's scores
exist: backward computes them again. Tensors are [batch, heads, seq, head size].
"""
import torch
from torch import Tensor

from jobs.model.blockwise import CHUNK, Partial, block_gradients, wide
from jobs.model.rule import Block, Rule, split


@torch.compiler.disable  # which blocks there are is decided on the host, microbatch by microbatch
def chunked_attention(q: Tensor, k: Tensor, v: Tensor, *, rule: Rule) -> Tensor:
    """Keys and values possibly with fewer heads. Keeps q, k, v and the output for its backward, as fused kernels do."""
    return _Chunked.apply(q, k, v, rule)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, rule):
        total = Partial(q, v)
        for block in _chunks(q, rule):
            total.add(block, q, k, v, rule=rule)
        out = total.out.to(q.dtype)
        ctx.rule = rule
        ctx.save_for_backward(q, k, v, out, total.lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        gradients = tuple(torch.zeros_like(t, dtype=wide(t)) for t in (q, k, v))
        for block in _chunks(q, ctx.rule):
            block_gradients(block, grad, q, k, v, out, lse, into=gradients, rule=ctx.rule)
        return *(total.to(t.dtype) for total, t in zip(gradients, (q, k, v), strict=True)), None


def _chunks(q: Tensor, rule: Rule) -> list[Block]:
    everything = slice(0, q.shape[2])
    return split(Block(queries=everything, keys=everything, first_query=0, first_key=0), rule, size=CHUNK)
