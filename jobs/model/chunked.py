"""Causal attention that no fused kernel offers, some queries at a time: capped scores (Gemma 2) and sliding windows.

Called by jobs.model.attention. A chunk of queries meets only the keys that it can see, so a window costs
seq · window and not seq², and never more than one chunk's scores exist. Tensors are [batch, heads, seq, head size],
keys and values possibly with fewer heads.
"""
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 256  # queries: their scores stay in cache, and a matmul is still long


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int) -> Tensor:
    """Each token sees itself and the window − 1 before it."""
    grouped = q.shape[1] != k.shape[1]
    out = []
    for queries, keys in _chunks(q.shape[2], window=window, size=max(CHUNK, window)):
        seen = _visible(queries, keys, window=window, device=q.device)
        out.append(F.scaled_dot_product_attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], attn_mask=seen,
                                                  scale=scale, enable_gqa=grouped))
    return torch.cat(out, dim=2)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float, window: int | None) -> Tensor:
    """softmax(softcap · tanh(scale·QKᵀ / softcap) + mask)·V. Keeps q, k and v for its backward, as fused kernels do."""
    return _Capped.apply(q, k, v, scale, softcap, window)


class _Capped(torch.autograd.Function):
    """Backward computes each chunk's scores again rather than keep seq × seq of them."""

    @staticmethod
    def forward(ctx, q, k, v, scale, softcap, window):
        ctx.save_for_backward(q, k, v)
        ctx.options = {"scale": scale, "softcap": softcap, "window": window}
        return torch.cat([_capped_chunk(q[:, :, queries], k[:, :, keys], v[:, :, keys], queries=queries, keys=keys,
                                        **ctx.options) for queries, keys in _chunks(q.shape[2], window=window)], dim=2)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        dq = torch.empty_like(q)
        # a key is in many chunks: what they add is summed in float32
        dk, dv = (torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (k, v))
        for queries, keys in _chunks(q.shape[2], window=ctx.options["window"]):
            with torch.enable_grad():
                parts = [t.detach().requires_grad_() for t in (q[:, :, queries], k[:, :, keys], v[:, :, keys])]
                out = _capped_chunk(*parts, queries=queries, keys=keys, **ctx.options)
            dq[:, :, queries], dk_part, dv_part = torch.autograd.grad(out, parts, grad[:, :, queries])
            dk[:, :, keys] += dk_part
            dv[:, :, keys] += dv_part
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _capped_chunk(q: Tensor, k: Tensor, v: Tensor, *, queries: slice, keys: slice, scale: float, softcap: float,
                  window: int | None) -> Tensor:
    grouped = q.unflatten(1, (k.shape[1], -1))  # [batch, kv heads, groups, queries, head size]
    scores = grouped @ k.transpose(-1, -2)[:, :, None] * scale
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_visible(queries, keys, window=window, device=q.device), -torch.inf)
    shares = scores.softmax(dim=-1, dtype=torch.promote_types(v.dtype, torch.float32)).to(v.dtype)
    return (shares @ v[:, :, None]).flatten(1, 2)


def _chunks(seq_len: int, *, window: int | None, size: int = CHUNK) -> Iterator[tuple[slice, slice]]:
    """Queries, and the keys that at least one of them sees."""
    for first in range(0, seq_len, size):
        stop = min(first + size, seq_len)
        yield slice(first, stop), slice(0 if window is None else max(0, first - window + 1), stop)


def _visible(queries: slice, keys: slice, *, window: int | None, device: torch.device) -> Tensor:
    """Bool [queries, keys]: which keys a query sees."""
    behind = (torch.arange(queries.start, queries.stop, device=device)[:, None]
              - torch.arange(keys.start, keys.stop, device=device))
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)
