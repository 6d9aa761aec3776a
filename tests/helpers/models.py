"""The systems that the field learned from, each reduced in depth and width."""
import dataclasses

from jobs.spec.model import MlaSpec, ModelSpec, MoeSpec
from tests.helpers.training import TINY

# Megatron-LM 2021 (arXiv:2104.04473)
GPT = dataclasses.replace(TINY, name="gpt", num_kv_heads=4, norm="layernorm", ffn="gelu", bias=True,
                          positions="learned", max_positions=16, dropout=0.1, attention_dropout=0.1,
                          tie_embeddings=True)
# Llama 3 (arXiv:2407.21783)
LLAMA3 = dataclasses.replace(TINY, name="llama3", rope_theta=500000.0)
# Gemma 2 (arXiv:2408.00118)
GEMMA2 = dataclasses.replace(TINY, name="gemma2", head_dim=12, ffn="geglu", post_norms=True, norm_offset=True,
                             embedding_scale=True, tie_embeddings=True, attention_scale=0.3, attention_softcap=5.0,
                             output_softcap=3.0, sliding_window=6, global_every=2)
# DeepSeek-V3 (arXiv:2412.19437)
DEEPSEEK3 = dataclasses.replace(
    TINY, name="deepseek3",
    mla=MlaSpec(kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6),
    moe=MoeSpec(num_experts=8, top_k=2, ffn_dim=16, num_shared_experts=1, first_layer=1, score="sigmoid", num_groups=4,
                top_groups=2, scale=2.5, balance="bias", balance_rate=0.01))
# A Mixtral (arXiv:2401.04088) with Qwen 3's norms, balanced by a loss
MIXTURE = dataclasses.replace(TINY, name="mixture", qk_norm=True,
                              moe=MoeSpec(num_experts=4, top_k=2, ffn_dim=32, balance="loss", balance_rate=0.1))

ALL: dict[str, ModelSpec] = {model.name: model for model in (GPT, LLAMA3, GEMMA2, DEEPSEEK3, MIXTURE)}
