"""Attention over one block of keys after the other, forward and backward.

Used by jobs.parallel.context; knows no group. Results of blocks are put together from their log-sum-exp
(arXiv:1805.02867; as a backward pass without stored scores: arXiv:2205.14135). Shapes: q, out
[batch, heads, queries, d]; k, v [batch, kv heads, keys, d or another size for v]; lse [batch, heads, queries], float32.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from jobs.model.attention import AttentionKind

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Some queries and some keys. `distance`: how far the first query lies behind the first key in the sequence."""

    queries: slice
    keys: slice
    causal: bool  # the first query is at the first key's position; otherwise all keys lie before all queries
    distance: int = 0


class Partial:
    """softmax(QKᵀ)V over the blocks so far. The first block of a query must show it at least one key."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float32)
        self.lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)

    def add(self, block: Block, q: Tensor, k: Tensor, v: Tensor, *, kind: AttentionKind) -> None:
        """q, k, v: whole, of which the block is a part."""
        out, lse = _forward(block, q[:, :, block.queries], k[:, :, block.keys], v[:, :, block.keys], kind=kind)
        before = self.lse[:, :, block.queries]
        together = torch.logaddexp(before, lse)
        kept = self.out[:, :, block.queries] * (before - together).exp()[..., None]
        self.out[:, :, block.queries] = kept + out * (lse - together).exp()[..., None]
        self.lse[:, :, block.queries] = together


def block_gradients(block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
                    into: tuple[Tensor, Tensor, Tensor], kind: AttentionKind) -> None:
    """Add to `into` (float32, of the shapes of q, k, v) what this block contributes to their gradients. `grad`, `out`
    and `lse` are of all blocks together: that is what makes the contributions add up."""
    queries, keys = block.queries, block.keys
    parts = _backward(block, grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys], out[:, :, queries],
                      lse[:, :, queries], kind=kind)
    for total, part, where in zip(into, parts, (queries, keys, keys), strict=True):
        total[:, :, where] += part


def _fused(q: Tensor, v: Tensor, *, kind: AttentionKind) -> bool:
    """Whether a fused kernel computes this: none caps scores or takes a window, and all want one head size."""
    plain = kind.softcap is None and kind.window is None and q.shape[-1] == v.shape[-1]
    return plain and (q.device.type == "cpu" or q.dtype in (torch.bfloat16, torch.float16))


def _forward(block: Block, q: Tensor, k: Tensor, v: Tensor, *, kind: AttentionKind) -> tuple[Tensor, Tensor]:
    if not _fused(q, v, kind=kind):
        return _written_out(block, q, k, v, kind=kind)
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, block.causal, scale=kind.scale)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, *_for_each_head(q, k, v), 0.0, block.causal,
                                                            scale=kind.scale)
    return out, lse


def _backward(block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
              kind: AttentionKind) -> tuple[Tensor, Tensor, Tensor]:
    if not _fused(q, v, kind=kind):
        return _gradients_written_out(block, grad, q, k, v, out, lse, kind=kind)
    grad, out, lse = grad.contiguous(), out.contiguous(), lse.contiguous()
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, block.causal, scale=kind.scale)
    no_dropout = torch.empty((), dtype=torch.int64, device=q.device)  # the state of a generator that is not used
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad, q, *_for_each_head(q, k, v), out, lse, None, None, q.shape[2], k.shape[2], 0.0, block.causal, no_dropout,
        no_dropout, scale=kind.scale)
    groups = q.shape[1] // k.shape[1]
    return dq, *(t.unflatten(1, (-1, groups)).sum(dim=2) for t in (dk, dv))


def _for_each_head(q: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
    groups = q.shape[1] // keys[0].shape[1]
    return tuple(t.repeat_interleave(groups, dim=1) for t in keys)


# ------------------------------------------------------------------ without a fused kernel: keeps no scores either
def _scores(block: Block, q: Tensor, k: Tensor, *, kind: AttentionKind) -> Tensor:
    """Capped, masked scores, float32 [batch, kv heads, groups, queries, keys]"""
    q = q.float().unflatten(1, (k.shape[1], -1))
    scores = q @ k.float()[:, :, None].transpose(-1, -2) * kind.scale
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    if not block.causal and kind.window is None:
        return scores
    rows = torch.arange(q.shape[-2], device=q.device)[:, None] + block.distance
    distances = rows - torch.arange(k.shape[-2], device=q.device)
    hidden = distances < 0
    if kind.window is not None:
        hidden |= distances >= kind.window
    return scores.masked_fill(hidden, -torch.inf)


def _written_out(block: Block, q: Tensor, k: Tensor, v: Tensor, *, kind: AttentionKind) -> tuple[Tensor, Tensor]:
    scores = _scores(block, q, k, kind=kind)
    lse = scores.logsumexp(dim=-1)  # −∞ where no key is visible
    weights = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    return (weights @ v.float()[:, :, None]).flatten(1, 2), lse.flatten(1, 2)


def _gradients_written_out(block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
                           kind: AttentionKind) -> tuple[Tensor, Tensor, Tensor]:
    shape = (k.shape[1], -1)
    scores = _scores(block, q, k, kind=kind)
    weights = (scores - lse.unflatten(1, shape)[..., None]).exp()
    grad, out = (t.float().unflatten(1, shape) for t in (grad, out))
    dv = (weights.transpose(-1, -2) @ grad).sum(dim=2)
    of_weights = grad @ v.float()[:, :, None].transpose(-1, -2)
    of_scores = weights * (of_weights - (grad * out).sum(dim=-1, keepdim=True))
    if kind.softcap is not None:  # d tanh(x) = 1 − tanh²(x); masked scores have weight 0
        of_scores = of_scores * (1 - (scores / kind.softcap).masked_fill(scores.isinf(), 0.0).square())
    of_scores = of_scores * kind.scale
    dq = of_scores @ k.float()[:, :, None]
    dk = (of_scores.transpose(-1, -2) @ q.float().unflatten(1, shape)).sum(dim=2)
    return dq.flatten(1, 2), dk, dv
