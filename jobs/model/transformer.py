"""The decoder: embedding, layers of attention and feed-forward, output projection; its options are ModelSpec's.

Built by jobs.train through jobs.parallel. A Transformer may be one chunk of a longer decoder: parts it
does not hold are None, and layers keep their number in the whole. It knows no mesh and no group.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from jobs.model.attention import Attention, RotaryTable
from jobs.model.latent import LatentAttention
from jobs.model.layers import Dropout, FeedForward, Norm
from jobs.model.moe import MoE
from jobs.model.places import Places, Tokens, locate
from jobs.spec.model import ModelSpec


class Layer(nn.Module):
    """Pre-norm attention and feed-forward (or experts), each with its residual; norms behind them, too, where the
    spec says so."""

    def __init__(self, spec: ModelSpec, *, layer: int = 0) -> None:
        super().__init__()
        attention = Attention if spec.mla is None else LatentAttention
        self.attention_norm = Norm(spec.dim, spec=spec)
        self.attention = attention(spec, layer=layer)
        self.attention_post_norm = Norm(spec.dim, spec=spec) if spec.post_norms else None
        self.attention_dropout = Dropout(spec.dropout, site=2 * layer + 1)
        self.ffn_norm = Norm(spec.dim, spec=spec)
        self.ffn = MoE(spec) if spec.is_moe(layer) else FeedForward(spec, ffn_dim=spec.ffn_dim, bias=spec.bias)
        self.ffn_post_norm = Norm(spec.dim, spec=spec) if spec.post_norms else None
        self.ffn_dropout = Dropout(spec.dropout, site=2 * layer + 2)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        out = self.attention(self.attention_norm(x), tokens)
        out = out if self.attention_post_norm is None else self.attention_post_norm(out)
        x = x + self.attention_dropout(out, tokens)
        normed = self.ffn_norm(x)
        out = self.ffn(normed, tokens) if isinstance(self.ffn, MoE) else self.ffn(normed)
        out = out if self.ffn_post_norm is None else self.ffn_post_norm(out)
        return x + self.ffn_dropout(out, tokens)


class TokenEmbedding(nn.Embedding):
    """The look-up table, and its use as output projection where the two are tied."""

    def unembed(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] → logits [batch, seq, vocab]"""
        return F.linear(x, self.weight)


class PositionEmbedding(nn.Embedding):
    """Learned positions: positions [batch, seq] → [batch, seq, dim]."""


class Transformer(nn.Module):
    """Token ids [batch, seq] → logits [batch, seq, vocab]; a chunk takes or gives hidden [batch, seq, dim].

    `layers` is the chunk's range of layers. The first chunk holds the embedding, the last the final norm
    and the output projection (with tied embeddings: the embedding once more).
    """

    def __init__(self, spec: ModelSpec, *, layers: range, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.is_last = is_last
        self.places = Places()
        self.embedding_scale = math.sqrt(spec.dim) if spec.embedding_scale else None
        self.output_softcap = spec.output_softcap
        tied_output = is_last and spec.tie_embeddings
        size = spec.head_size if spec.mla is None else spec.mla.qk_rope_head_dim
        self.rotary = RotaryTable(head_dim=size, theta=spec.rope_theta) if spec.positions == "rotary" else None
        learned = is_first and spec.positions == "learned"
        self.embedding = TokenEmbedding(spec.vocab_size, spec.dim) if is_first or tied_output else None
        self.position_embedding = PositionEmbedding(spec.max_positions, spec.dim) if learned else None
        self.embedding_dropout = Dropout(spec.dropout, site=0)
        self.layers = nn.ModuleDict({str(i): Layer(spec, layer=i) for i in layers})
        self.norm = Norm(spec.dim, spec=spec) if is_last else None
        self.output = nn.Linear(spec.dim, spec.vocab_size, bias=False) if is_last and not tied_output else None

    def forward(self, x: Tensor, keys: Tensor | None = None, weights: Tensor | None = None,
                starts: Tensor | None = None) -> Tensor:
        """keys: int64 [batch], random keys of the sequences for dropout (none: nothing is dropped). weights: float32
        [batch], each sequence's share in the step's mean loss (none: experts are not balanced). starts: int32 [batch,
        seq] of whole sequences, best on the host: the position at which the document of each token begins, before which
        it sees nothing (none: sequences are not packed)."""
        if self.is_first:
            x = self.embedding(x)
        tokens = locate(x, places=self.places, keys=keys, weights=weights, starts=starts, rotary=self.rotary)
        if self.is_first:
            x = self._embedded(x, tokens)
        for layer in self.layers.values():
            x = layer(x, tokens)
        if self.is_last:
            x = self.norm(x)
            x = self.output(x) if self.output is not None else self.embedding.unembed(x)
            if self.output_softcap is not None:
                x = self.output_softcap * torch.tanh(x / self.output_softcap)
        return x

    def _embedded(self, x: Tensor, tokens: Tokens) -> Tensor:
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        if self.position_embedding is not None:
            x = x + self.position_embedding(tokens.positions)
        return self.embedding_dropout(x, tokens)
