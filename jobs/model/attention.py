"""Causal grouped-query attention with rotary positions.

Built by jobs.model.transformer. Knows nothing of parallelism: the number of heads is inferred from the
projections' width, so that a module holding a slice of the heads works unchanged, and `Attention.inner`
is the seam where another algorithm for softmax(QKᵀ)V may be put.
"""
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from jobs.model.chunked import capped_attention, windowed_attention
from jobs.model.layers import Norm
from jobs.model.places import Places
from jobs.spec.model import ModelSpec

Inner = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v → out; [batch, seq, heads, head size]


class RotaryTable:
    """cos and sin of every position, computed once for all layers (RoFormer, arXiv:2104.09864).

    Deliberately not a module with buffers: it is cheap to compute, must stay float32 whatever the parameters'
    dtype, and must not appear in a checkpoint.
    """

    def __init__(self, *, head_dim: int, theta: float, places: Places | None = None) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self.places = places or Places()
        self._table: tuple[Tensor, Tensor] | None = None

    def __call__(self, seq_len: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
        """Two float32 tensors [seq_len, 1, head_dim/2]."""
        if self._table is None or self._table[0].shape[0] != seq_len or self._table[0].device != device:
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
            positions = self.places.positions(seq_len, device).to(torch.float32)
            angles = torch.outer(positions, self.theta ** -exponents)[:, None, :]
            self._table = angles.cos(), angles.sin()
        return self._table


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of each head against each other by the position's angles. x: [batch, seq, heads, head_dim]"""
    first, second = x.chunk(2, dim=-1)
    # cos and sin are float32: the product is, too, until it is cast back
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKind:
    """What an algorithm for softmax(QKᵀ)V has to compute; whoever replaces `inner` reads it."""

    scale: float  # on QKᵀ
    softcap: float | None = None  # scores become softcap · tanh(scores / softcap)
    window: int | None = None  # a token sees itself and window − 1 before it; None: all before it

    @classmethod
    def of(cls, spec: ModelSpec, *, layer: int, head_dim: int) -> "AttentionKind":
        scale = head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        return cls(scale=scale, softcap=spec.attention_softcap, window=spec.window(layer))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, kind: AttentionKind) -> Tensor:
    """softmax(scale·QKᵀ + causal mask)·V; [batch, seq, heads, head size], k and v possibly with fewer heads, v of
    another head size."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if kind.softcap is not None:
        out = capped_attention(q, k, v, scale=kind.scale, softcap=kind.softcap, window=kind.window)
    elif kind.window is None or kind.window >= q.shape[2]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=kind.scale,
                                             enable_gqa=q.shape[1] != k.shape[1])
    else:
        out = windowed_attention(q, k, v, scale=kind.scale, window=kind.window)
    return out.transpose(1, 2)


class Attention(nn.Module):
    """[batch, seq, dim] → [batch, seq, dim]."""

    def __init__(self, spec: ModelSpec, *, layer: int, rotary: RotaryTable | None) -> None:
        super().__init__()
        self.head_dim = spec.head_size
        self.rotary = rotary  # None: positions are in the embedding
        self.kind = AttentionKind.of(spec, layer=layer, head_dim=self.head_dim)
        self.inner: Inner = functools.partial(causal_attention, kind=self.kind)
        self.wq = nn.Linear(spec.dim, spec.num_heads * self.head_dim, bias=spec.bias)
        self.wk = nn.Linear(spec.dim, spec.num_kv_heads * self.head_dim, bias=spec.bias)
        self.wv = nn.Linear(spec.dim, spec.num_kv_heads * self.head_dim, bias=spec.bias)
        self.wo = nn.Linear(spec.num_heads * self.head_dim, spec.dim, bias=spec.bias)
        self.q_norm = Norm(self.head_dim, spec=spec, rms=True) if spec.qk_norm else None
        self.k_norm = Norm(self.head_dim, spec=spec, rms=True) if spec.qk_norm else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.wq, self.wk, self.wv))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            cos, sin = self.rotary(q.shape[1], device=q.device)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = self.inner(q, k, v)  # [batch, seq, heads, head_dim]
        return self.wo(out.flatten(-2))
