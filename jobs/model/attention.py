"""Causal grouped-query attention with rotary positions.

Built by jobs.model.transformer. Knows nothing of parallelism: the number of heads is inferred from the
projections' width, so that a module holding a slice of the heads works unchanged, and `Attention.inner`
is the seam where another algorithm for softmax(QKᵀ)V may be put.
"""
from typing import Literal, Protocol

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from jobs.model.chunked import chunked_attention
from jobs.model.flex import flex_attention
from jobs.model.layers import Norm
from jobs.model.places import Tokens
from jobs.model.rule import AttentionKind, Rule
from jobs.spec.model import ModelSpec


class RotaryTable:
    """cos and sin of positions, computed once for all layers (RoFormer, arXiv:2104.09864).

    Deliberately not a module with buffers: it is cheap to compute, must stay float32 whatever the parameters'
    dtype, and must not appear in a checkpoint.
    """

    def __init__(self, *, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self._table: tuple[Tensor, Tensor] | None = None

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [seq] or [batch, seq] → two float32 tensors [..., seq, 1, head_dim/2]. Without documents a rank
        sees the same positions of every sequence, in every step: they are looked at once."""
        if positions.ndim > 1:
            return self._compute(positions)
        table = self._table
        if table is None or table[0].shape[0] != len(positions) or table[0].device != positions.device:
            self._table = self._compute(positions)
        return self._table

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=positions.device) / self.head_dim
        angles = (positions.to(torch.float32)[..., None] * self.theta ** -exponents)[..., None, :]
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of each head against each other by the position's angles. x: [batch, seq, heads, head_dim]"""
    first, second = x.chunk(2, dim=-1)
    # cos and sin are float32: the product is, too, until it is cast back
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Inner(Protocol):
    """An algorithm for attention; the seam where it may be replaced."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, rule: Rule) -> Tensor:
        """q, k, v → out; [batch, seq, heads, head size], k and v possibly with fewer heads, v of another head size."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, rule: Rule) -> Tensor:
    """An `Inner` over whole sequences."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    match algorithm(rule, seq_len=q.shape[2], head_dim=q.shape[3], device_type=q.device.type):
        case "fused":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.kind.scale,
                                                 enable_gqa=q.shape[1] != k.shape[1])
        case "flex":
            out = flex_attention(q, k, v, rule=rule)
        case "chunked":
            out = chunked_attention(q, k, v, rule=rule)
    return out.transpose(1, 2)


def algorithm(rule: Rule, *, seq_len: int, head_dim: int, device_type: str) -> Literal["fused", "flex", "chunked"]:
    """The fastest that computes the rule. Fused kernels know causality alone. FlexAttention generates one for caps and
    masks, on CUDA only: it has no backward on CPU, and a kernel's matmuls want 16 elements. Neither drops weights so
    that they are the same in every layout."""
    kind = rule.kind
    windowed = kind.window is not None and kind.window < seq_len
    if not (rule.drops or kind.softcap is not None or windowed or rule.starts is not None):
        return "fused"
    return "flex" if device_type == "cuda" and not rule.drops and head_dim >= 16 else "chunked"


class Attention(nn.Module):
    """[batch, seq, dim] → [batch, seq, dim]."""

    def __init__(self, spec: ModelSpec, *, layer: int) -> None:
        super().__init__()
        self.head_dim = spec.head_size
        self.kind = AttentionKind.of(spec, layer=layer, head_dim=self.head_dim)
        self.inner: Inner = causal_attention
        self.wq = nn.Linear(spec.dim, spec.num_heads * self.head_dim, bias=spec.bias)
        self.wk = nn.Linear(spec.dim, spec.num_kv_heads * self.head_dim, bias=spec.bias)
        self.wv = nn.Linear(spec.dim, spec.num_kv_heads * self.head_dim, bias=spec.bias)
        self.wo = nn.Linear(spec.num_heads * self.head_dim, spec.dim, bias=spec.bias)
        self.q_norm = Norm(self.head_dim, spec=spec, rms=True) if spec.qk_norm else None
        self.k_norm = Norm(self.head_dim, spec=spec, rms=True) if spec.qk_norm else None

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        q, k, v = (out.unflatten(-1, (-1, self.head_dim)) for out in self.project(x))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if tokens.angles is not None:  # else positions are in the embedding
            q, k = rotate(q, *tokens.angles), rotate(k, *tokens.angles)
        out = self.inner(q, k, v, rule=Rule(kind=self.kind, tokens=tokens))  # [batch, seq, heads, head_dim]
        return self.wo(out.flatten(-2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """→ q, k, v, [batch, seq, heads·head_dim] each. One method, so that a split model may compute them together."""
        return self.wq(x), self.wk(x), self.wv(x)
