"""The model's sizes, and the one place where its parameters and FLOPs are counted.

Planner and trainer both use these counts, so a predicted and a measured MFU mean the same thing.
"""
from dataclasses import dataclass
from typing import Literal

AttentionConvention = Literal["full", "causal"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    name: str
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    head_dim: int | None = None  # None: dim / num_heads
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02

    @property
    def head_size(self) -> int:
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim


def attention_params(model: ModelSpec) -> int:
    """Weights of one attention block: q, k, v, o."""
    q = model.num_heads * model.head_size
    kv = model.num_kv_heads * model.head_size
    return model.dim * (2 * q + 2 * kv)


def ffn_params(model: ModelSpec) -> int:
    """Weights of one SwiGLU block: gate, up, down."""
    return 3 * model.dim * model.ffn_dim


def layer_params(model: ModelSpec) -> int:
    """One decoder layer, its two norms included."""
    return attention_params(model) + ffn_params(model) + 2 * model.dim


def embedding_params(model: ModelSpec) -> int:
    return model.vocab_size * model.dim


def num_params(model: ModelSpec) -> int:
    """All parameters; a tied output projection is counted once."""
    ends = embedding_params(model) * (1 if model.tie_embeddings else 2) + model.dim
    return model.num_layers * layer_params(model) + ends


def matmul_params(model: ModelSpec) -> int:
    """N of the 6N rule: weights every token is multiplied with (the input embedding is a look-up, and
    norms are not matmuls; the output projection counts whether or not it is tied)."""
    return model.num_layers * (attention_params(model) + ffn_params(model)) + embedding_params(model)


def attention_flops_per_token(model: ModelSpec, *, seq_len: int, convention: AttentionConvention) -> float:
    """QKᵀ and AV, forward and backward: 12·L·H·Q·T with full attention (PaLM, app. B), half if causal."""
    full = 12 * model.num_layers * model.num_heads * model.head_size * seq_len
    return full if convention == "full" else full / 2


def model_flops_per_token(model: ModelSpec, *, seq_len: int, convention: AttentionConvention) -> float:
    """Forward + backward FLOPs per token without recomputation: 6N + attention."""
    return 6 * matmul_params(model) + attention_flops_per_token(model, seq_len=seq_len, convention=convention)
