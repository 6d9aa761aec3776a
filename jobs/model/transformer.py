"""Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Built by jobs.train through jobs.parallel. A Transformer may be one chunk of a longer decoder: parts it
does not hold are None, and layers keep their number in the whole. It knows no mesh and no group.
"""
import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from jobs.model.attention import Attention, RotaryTable
from jobs.spec.model import ModelSpec

# Rows of a weight that share one random generator: small enough that a rank which holds a slice draws
# little more than its own rows, large enough that seeding costs nothing.
INIT_ROWS = 256


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) · up(x)). [batch, seq, dim] → the same."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.up = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.down = nn.Linear(spec.ffn_dim, spec.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, spec: ModelSpec, *, rotary: RotaryTable) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.attention = Attention(spec, rotary=rotary)
        self.ffn_norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.ffn = FeedForward(spec)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class TokenEmbedding(nn.Embedding):
    """The look-up table, and its use as output projection where the two are tied."""

    def unembed(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] → logits [batch, seq, vocab]"""
        return F.linear(x, self.weight)


class Transformer(nn.Module):
    """Token ids [batch, seq] → logits [batch, seq, vocab]; a chunk takes or gives hidden [batch, seq, dim].

    `layers` is the chunk's range of layers. The first chunk holds the embedding, the last the final norm
    and the output projection (with tied embeddings: the embedding once more).
    """

    def __init__(self, spec: ModelSpec, *, layers: range, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.is_last = is_last
        rotary = RotaryTable(head_dim=spec.head_size, theta=spec.rope_theta)
        tied_output = is_last and spec.tie_embeddings
        self.embedding = TokenEmbedding(spec.vocab_size, spec.dim) if is_first or tied_output else None
        self.layers = nn.ModuleDict({str(i): Layer(spec, rotary=rotary) for i in layers})
        self.norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps) if is_last else None
        self.output = nn.Linear(spec.dim, spec.vocab_size, bias=False) if is_last and not tied_output else None

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.is_last:
            x = self.norm(x)
            x = self.output(x) if self.output is not None else self.embedding.unembed(x)
        return x


def initial_rows(name: str, shape: tuple[int, ...], *, rows: range, spec: ModelSpec, seed: int) -> Tensor:
    """Rows of a parameter's initial value, a function of (seed, name) alone: float32 on the CPU.

    Norms are one. Matrices are normal with init_std, the two projections into the residual stream divided
    by √(2·num_layers) (GPT-2), whoever asks and whichever rows are asked for.
    """
    if len(shape) == 1:
        return torch.ones(len(rows))
    std = spec.init_std
    if name.endswith(("attention.wo.weight", "ffn.down.weight")):
        std /= math.sqrt(2 * spec.num_layers)
    out = torch.empty(len(rows), *shape[1:])
    for block in range(rows.start // INIT_ROWS, -(-rows.stop // INIT_ROWS)):
        first = block * INIT_ROWS
        stop = min(first + INIT_ROWS, shape[0])
        values = torch.empty(stop - first, *shape[1:]).normal_(std=std, generator=_generator(seed, name, block))
        low, high = max(first, rows.start), min(stop, rows.stop)
        out[low - rows.start:high - rows.start] = values[low - first:high - first]
    return out


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}:{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
