"""The model's sizes and options: what a decoder is. Read by everyone; counted in jobs.spec.counts."""
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
    num_groups: int = 1  # of consecutive experts; a token chooses from the top_groups of them (DeepSeek-V3)
    top_groups: int = 1
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
    dropout: float = 0.0  # of embeddings and of what attention and feed-forward give
    attention_dropout: float = 0.0  # of attention's weights, behind softmax: no fused kernel does that here
    embedding_scale: bool = False  # embeddings times √dim (Gemma)
    attention_scale: float | None = None  # on QKᵀ; None: 1/√head_dim
    attention_softcap: float | None = None
    output_softcap: float | None = None
    sliding_window: int | None = None  # tokens a local layer looks back
    global_every: int = 1  # with sliding_window: every n-th layer is global, the last of each n
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None

    def __hash__(self) -> int:
        """Of a few fields: a search asks for it by the million, and equality still tells models apart."""
        return hash((self.name, self.num_layers, self.dim))

    @property
    def head_size(self) -> int:
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.moe.first_layer

    def window(self, layer: int) -> int | None:
        """Tokens that layer looks back; None: all."""
        is_global = self.sliding_window is None or (layer + 1) % self.global_every == 0
        return None if is_global else self.sliding_window
