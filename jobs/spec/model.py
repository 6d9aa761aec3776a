"""The model's sizes, and the one place where its parameters and FLOPs are counted.

Planner and trainer both use these counts, so a predicted and a measured MFU mean the same thing.
"""
from dataclasses import dataclass
from typing import Literal

AttentionConvention = Literal["full", "causal"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """Mixture-of-experts feed-forward in every layer from `first_layer` on."""

    num_experts: int
    top_k: int
    ffn_dim: int  # of one routed expert
    num_shared_experts: int = 0  # always active; one block of num_shared_experts · ffn_dim
    first_layer: int = 0  # layers before it are dense
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_weights: bool = True  # the top_k weights sum to one
    scale: float = 1.0  # on the routed experts' output
    balance: Literal["loss", "bias", "none"] = "loss"  # auxiliary loss, or a bias on the selection (aux-loss-free)
    balance_rate: float = 1e-3  # weight of the loss, or step of the bias


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): K and V from one compressed latent."""

    kv_lora_rank: int
    q_lora_rank: int | None  # None: queries are not compressed
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder. The defaults are Llama's: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

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
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    post_norms: bool = False  # a second norm behind attention and feed-forward (Gemma 2)
    norm_offset: bool = False  # RMSNorm scales by 1 + weight (Gemma)
    ffn: Literal["swiglu", "geglu", "gelu"] = "swiglu"  # gelu: two matrices, the others three
    bias: bool = False  # on every linear layer but the output projection
    qk_norm: bool = False  # RMSNorm on each head's queries and keys (Qwen 3)
    positions: Literal["rotary", "learned"] = "rotary"
    max_positions: int | None = None  # rows of learned positions
    dropout: float = 0.0
    embedding_scale: bool = False  # embeddings times √dim (Gemma)
    attention_scale: float | None = None  # on QKᵀ; None: 1/√head_dim
    attention_softcap: float | None = None
    output_softcap: float | None = None
    sliding_window: int | None = None  # tokens a local layer looks back
    global_every: int = 1  # with sliding_window: every n-th layer is global, the last of each n
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None

    @property
    def head_size(self) -> int:
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.moe.first_layer

    def window(self, layer: int) -> int | None:
        """Tokens that layer looks back; None: all."""
        is_global = self.sliding_window is None or (layer + 1) % self.global_every == 0
        return None if is_global else self.sliding_window


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
