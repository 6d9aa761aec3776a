"""Causal grouped-query attention with rotary positions.

Built by jobs.model.transformer. Knows nothing of parallelism: the number of heads is inferred from the
projections' width, so that a module holding a slice of the heads works unchanged, and `Attention.inner`
is the seam where another algorithm for softmax(QKᵀ)V may be put.
"""
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from jobs.spec.model import ModelSpec


class RotaryTable:
    """cos and sin of every position, computed once for all layers (RoFormer, arXiv:2104.09864).

    Deliberately not a module with buffers: it is cheap to compute, must stay float32 whatever the parameters'
    dtype, and must not appear in a checkpoint.
    """

    def __init__(self, *, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self._table: tuple[Tensor, Tensor] | None = None

    def __call__(self, seq_len: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
        """Two float32 tensors [seq_len, 1, head_dim/2]."""
        if self._table is None or self._table[0].shape[0] != seq_len or self._table[0].device != device:
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
            positions = torch.arange(seq_len, dtype=torch.float32, device=device)
            angles = torch.outer(positions, self.theta ** -exponents)[:, None, :]
            self._table = angles.cos(), angles.sin()
        return self._table


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of each head against each other by the position's angles. x: [batch, seq, heads, head_dim]"""
    first, second = x.chunk(2, dim=-1)
    # cos and sin are float32: the product is, too, until it is cast back
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(QKᵀ/√d + causal mask)·V; [batch, seq, heads, head_dim], k and v possibly with fewer heads."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


class Attention(nn.Module):
    """[batch, seq, dim] → [batch, seq, dim]."""

    def __init__(self, spec: ModelSpec, *, rotary: RotaryTable) -> None:
        super().__init__()
        self.head_dim = spec.head_size
        self.rotary = rotary
        self.inner: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention
        self.wq = nn.Linear(spec.dim, spec.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(spec.dim, spec.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(spec.dim, spec.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(spec.num_heads * self.head_dim, spec.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.wq, self.wk, self.wv))
        cos, sin = self.rotary(q.shape[1], device=q.device)
        out = self.inner(rotate(q, cos, sin), rotate(k, cos, sin), v)  # [batch, seq, heads, head_dim]
        return self.wo(out.flatten(-2))
