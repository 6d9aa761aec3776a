"""The config.json that `transformers` wants beside a model's weights.

Called by jobs.export. Says of a ModelSpec which of the covered families it is, and its options in that
family's words; what the words are is each family's configuration class in `transformers`.
"""
from typing import Any

from jobs.spec.model import ModelSpec
from jobs.weights import family


ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "mixtral": "MixtralForCausalLM",
                 "qwen3_moe": "Qwen3MoeForCausalLM", "gemma2": "Gemma2ForCausalLM",
                 "deepseek_v3": "DeepseekV3ForCausalLM"}


def hub_config(spec: ModelSpec, *, seq_len: int, dtype: str) -> dict[str, Any]:
    """The content of config.json; see jobs.weights.hub_problems for models that have none."""
    name = family(spec)
    return {
        "architectures": [ARCHITECTURES[name]], "model_type": name, "torch_dtype": dtype,
        "vocab_size": spec.vocab_size, "hidden_size": spec.dim, "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads,
        "intermediate_size": spec.ffn_dim, "max_position_embeddings": seq_len, "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta, "tie_word_embeddings": spec.tie_embeddings, "initializer_range": spec.init_std,
        "attention_bias": spec.bias, "mlp_bias": spec.bias,
    } | _special(spec, seq_len=seq_len)


def _special(spec: ModelSpec, *, seq_len: int) -> dict[str, Any]:
    """What only this family has, or has another word for."""
    name, moe = family(spec), spec.moe
    if name == "deepseek_v3":
        return _latent(spec) | _mixture(spec) | {"hidden_act": "silu"}
    if name == "gemma2":
        return _gemma(spec, seq_len=seq_len)
    special = {"hidden_act": "silu", "head_dim": spec.head_size}
    if name == "mixtral":  # its experts have the size that is otherwise a dense block's
        special |= {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k,
                    "intermediate_size": moe.ffn_dim, "router_aux_loss_coef": _loss_rate(spec)}
    if name == "qwen3_moe":
        special |= {"num_experts": moe.num_experts, "num_experts_per_tok": moe.top_k, "decoder_sparse_step": 1,
                    "mlp_only_layers": list(range(moe.first_layer)), "moe_intermediate_size": moe.ffn_dim,
                    "norm_topk_prob": moe.normalize_weights, "router_aux_loss_coef": _loss_rate(spec)}
    return special


def _loss_rate(spec: ModelSpec) -> float:
    return spec.moe.balance_rate if spec.moe.balance == "loss" else 0.0


def _gemma(spec: ModelSpec, *, seq_len: int) -> dict[str, Any]:
    kinds = ["full_attention" if spec.window(i) is None else "sliding_attention" for i in range(spec.num_layers)]
    scale = spec.head_size**-0.5 if spec.attention_scale is None else spec.attention_scale
    return {"hidden_activation": "gelu_pytorch_tanh", "head_dim": spec.head_size,
            "query_pre_attn_scalar": round(scale**-2),
            "sliding_window": spec.sliding_window or seq_len, "layer_types": kinds,
            "attn_logit_softcapping": spec.attention_softcap, "final_logit_softcapping": spec.output_softcap}


def _latent(spec: ModelSpec) -> dict[str, Any]:
    mla = spec.mla
    return {"q_lora_rank": mla.q_lora_rank, "kv_lora_rank": mla.kv_lora_rank, "v_head_dim": mla.v_head_dim,
            "qk_nope_head_dim": mla.qk_nope_head_dim, "qk_rope_head_dim": mla.qk_rope_head_dim}


def _mixture(spec: ModelSpec) -> dict[str, Any]:
    moe = spec.moe
    if moe is None:
        return {"first_k_dense_replace": spec.num_layers}
    return {"n_routed_experts": moe.num_experts, "n_shared_experts": moe.num_shared_experts,
            "moe_intermediate_size": moe.ffn_dim, "num_experts_per_tok": moe.top_k,
            "first_k_dense_replace": moe.first_layer, "n_group": moe.num_groups, "topk_group": moe.top_groups,
            "norm_topk_prob": moe.normalize_weights, "routed_scaling_factor": moe.scale}
