"""Parameters and FLOPs of every ModelSpec, the one place where they are counted.

Planner, trainer and validation read these counts, so a predicted and a measured MFU mean the same thing.
Layers differ (dense or mixture of experts, local or global attention), so a count is of one layer or of all.
"""
from jobs.spec.model import AttentionConvention, ModelSpec


# ------------------------------------------------------------------ parameters
def attention_matmul_params(model: ModelSpec) -> int:
    """Weights of one attention block that tokens are multiplied with."""
    if model.mla is None:
        q = model.num_heads * model.head_size
        kv = model.num_kv_heads * model.head_size
        return model.dim * (2 * q + 2 * kv)
    mla, heads = model.mla, model.num_heads
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    q = model.dim * queries if mla.q_lora_rank is None else mla.q_lora_rank * (model.dim + queries)
    down = model.dim * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return q + down + up + heads * mla.v_head_dim * model.dim


def attention_params(model: ModelSpec) -> int:
    """One attention block: projections, their biases, and the norms inside (of heads, of MLA's latents)."""
    return attention_matmul_params(model) + attention_bias_params(model) + attention_norm_params(model)


def attention_bias_params(model: ModelSpec) -> int:
    """Biases of the projections. MLA's latents have none."""
    if not model.bias or model.mla is not None:
        return 0
    return model.head_size * (model.num_heads + 2 * model.num_kv_heads) + model.dim


def attention_norm_params(model: ModelSpec) -> int:
    """RMSNorms inside attention: of each head's queries and keys, of MLA's two latents."""
    heads = 2 * model.head_size if model.qk_norm and model.mla is None else 0
    latents = 0 if model.mla is None else model.mla.kv_lora_rank + (model.mla.q_lora_rank or 0)
    return heads + latents


def num_ffn_matrices(model: ModelSpec) -> int:
    """gate, up, down; GELU has no gate."""
    return 2 if model.ffn == "gelu" else 3


def ffn_params(model: ModelSpec) -> int:
    """One dense feed-forward block."""
    matrices = num_ffn_matrices(model)
    biases = (matrices - 1) * model.ffn_dim + model.dim if model.bias else 0
    return matrices * model.dim * model.ffn_dim + biases


def expert_params(model: ModelSpec) -> int:
    """One routed expert: matrices without biases."""
    return 0 if model.moe is None else num_ffn_matrices(model) * model.dim * model.moe.ffn_dim


def router_params(model: ModelSpec) -> int:
    """The router. The bias of bias-balanced routing is state, not a parameter: no gradient reaches it."""
    return 0 if model.moe is None else model.dim * model.moe.num_experts


def shared_expert_params(model: ModelSpec) -> int:
    """The block of all shared experts."""
    return 0 if model.moe is None else model.moe.num_shared_experts * expert_params(model)


def norm_params(model: ModelSpec) -> int:
    """One norm over the hidden state."""
    return model.dim * (2 if model.norm == "layernorm" else 1)


def layer_norm_params(model: ModelSpec) -> int:
    """The norms of one layer that lie on the residual stream."""
    return norm_params(model) * (4 if model.post_norms else 2)


def layer_params(model: ModelSpec, layer: int = 0) -> int:
    """One decoder layer, whole: all experts of a mixture."""
    return attention_params(model) + layer_norm_params(model) + _ffn_of(model, layer, experts=_num_experts(model))


def embedding_params(model: ModelSpec) -> int:
    """The table of tokens; as many weights as the output projection."""
    return model.vocab_size * model.dim


def position_params(model: ModelSpec) -> int:
    """Learned positions."""
    return (model.max_positions or 0) * model.dim if model.positions == "learned" else 0


def num_params(model: ModelSpec) -> int:
    """All parameters; a tied output projection is counted once."""
    return _ends(model) + sum(layer_params(model, layer) for layer in range(model.num_layers))


def _ends(model: ModelSpec) -> int:
    tables = embedding_params(model) * (1 if model.tie_embeddings else 2)
    return tables + position_params(model) + norm_params(model)


def _num_experts(model: ModelSpec) -> int:
    return 0 if model.moe is None else model.moe.num_experts


def _top_k(model: ModelSpec) -> int:
    return 0 if model.moe is None else model.moe.top_k


def _ffn_of(model: ModelSpec, layer: int, *, experts: int) -> int:
    if not model.is_moe(layer):
        return ffn_params(model)
    return router_params(model) + shared_expert_params(model) + experts * expert_params(model)


# ------------------------------------------------------------------ FLOPs
def layer_matmul_params(model: ModelSpec, layer: int = 0) -> int:
    """Weights of a layer that one token is multiplied with: no norms, no biases, top_k of the experts."""
    if model.is_moe(layer):
        ffn = router_params(model) + shared_expert_params(model) + _top_k(model) * expert_params(model)
    else:
        ffn = num_ffn_matrices(model) * model.dim * model.ffn_dim
    return attention_matmul_params(model) + ffn


def matmul_params(model: ModelSpec) -> int:
    """N of the 6N rule: weights every token is multiplied with (the input embedding is a look-up, and
    norms are not matmuls; the output projection counts whether or not it is tied)."""
    return sum(layer_matmul_params(model, layer) for layer in range(model.num_layers)) + embedding_params(model)


def attended(model: ModelSpec, layer: int, *, seq_len: int) -> float:
    """Tokens that a token attends to under the causal mask, on average: T/2, in a window w less: w − w²/2T."""
    window = min(seq_len, model.window(layer) or seq_len)
    return window - window * window / (2 * seq_len)


def layer_attention_flops_per_token(model: ModelSpec, layer: int, *, seq_len: int,
                                    convention: AttentionConvention) -> float:
    """QKᵀ and AV of one layer, forward and backward: 3 · 2 · H·(d_qk + d_v) per token attended to."""
    sizes = 2 * model.head_size if model.mla is None else (
        model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim + model.mla.v_head_dim)
    visible = 6 * model.num_heads * sizes * attended(model, layer, seq_len=seq_len)
    return visible if convention == "causal" else 2 * visible


def attention_flops_per_token(model: ModelSpec, *, seq_len: int, convention: AttentionConvention) -> float:
    """QKᵀ and AV, forward and backward: 12·L·H·Q·T with full attention (PaLM, arXiv:2204.02311, app. B), half of
    it where the masked half is not counted. Windows count what they see."""
    return sum(layer_attention_flops_per_token(model, layer, seq_len=seq_len, convention=convention)
               for layer in range(model.num_layers))


def model_flops_per_token(model: ModelSpec, *, seq_len: int, convention: AttentionConvention) -> float:
    """Forward + backward FLOPs per token without recomputation: 6N + attention."""
    return 6 * matmul_params(model) + attention_flops_per_token(model, seq_len=seq_len, convention=convention)
