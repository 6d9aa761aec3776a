"""Parameter and FLOP counts of every kind of model, against published figures and small models counted by hand."""
import dataclasses
from pathlib import Path

import pytest
import yaml

from jobs.spec.counts import (attended, attention_flops_per_token, expert_params, layer_matmul_params,
                              layer_params, matmul_params, model_flops_per_token, num_params)
from jobs.spec.load import from_dict
from jobs.spec.model import MlaSpec, ModelSpec, MoeSpec
from tests.helpers.planning import LLAMA3_8B, LLAMA3_405B

MODELS = Path(__file__).parents[2] / "configs" / "models"
# preset → parameters, and those that one token passes, as published; billions
PUBLISHED = {
    "llama3-8b": (8.03, 8.03),
    "llama3-405b": (405.9, 405.9),
    "mixtral-8x7b": (46.7, 12.9),
    "deepseek-v3": (671.0, 37.6),  # 36.7 without the input embedding
    "qwen3-235b-a22b": (235.1, 22.2),
    "gemma2-27b": (27.2, 27.2),
    "gpt3-175b": (174.6, 174.6),
    "gpt-1t": (1008.0, 1008.0),
}

H, FFN, HEADS, KV, VOCABULARY, LAYERS = 8, 32, 4, 2, 16, 3
TINY = ModelSpec(name="tiny", vocab_size=VOCABULARY, dim=H, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV,
                 ffn_dim=FFN)
ATTENTION = H * (2 * 8 + 2 * 4)  # q and o of four heads of two, k and v of two
SWIGLU = 3 * H * FFN
MLA = MlaSpec(kv_lora_rank=6, q_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3)
MOE = MoeSpec(num_experts=4, top_k=2, ffn_dim=10, num_shared_experts=1, first_layer=1)

# option → parameters that it adds to TINY
ADDED = {
    "tied": ({"tie_embeddings": True}, -VOCABULARY * H),
    "layernorm": ({"norm": "layernorm"}, (2 * LAYERS + 1) * H),
    "post norms": ({"post_norms": True}, 2 * LAYERS * H),
    "biases": ({"bias": True}, LAYERS * ((8 + 4 + 4 + H) + (2 * FFN + H))),
    "gelu": ({"ffn": "gelu"}, -LAYERS * H * FFN),
    "gelu with biases": ({"ffn": "gelu", "bias": True}, LAYERS * (-H * FFN + (8 + 4 + 4 + H) + (FFN + H))),
    "learned positions": ({"positions": "learned", "max_positions": 9}, 9 * H),
    "norms of heads": ({"qk_norm": True}, LAYERS * 2 * 2),
    "wider heads": ({"head_dim": 4}, LAYERS * ATTENTION),
    "latent attention": ({"mla": MLA}, LAYERS * (
        H * 5 + 5 * HEADS * 6 + H * (6 + 2) + 6 * HEADS * (4 + 3) + HEADS * 3 * H + (5 + 6) - ATTENTION)),
    "latent attention, whole queries": ({"mla": dataclasses.replace(MLA, q_lora_rank=None)}, LAYERS * (
        H * HEADS * 6 + H * (6 + 2) + 6 * HEADS * (4 + 3) + HEADS * 3 * H + 6 - ATTENTION)),
    "experts": ({"moe": MOE}, (LAYERS - 1) * (H * 4 + (4 + 1) * 3 * H * 10 - SWIGLU)),
}

# window, sequence → tokens attended to on average
ATTENDED = [(None, 100, 50.0), (100, 100, 50.0), (200, 100, 50.0), (10, 100, 10 - 100 / 200), (1, 1000, 1 - 1 / 2000)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_their_published_parameters(name):
    model = from_dict(ModelSpec, yaml.safe_load((MODELS / f"{name}.yaml").read_text()))
    whole, active = PUBLISHED[name]
    assert num_params(model) / 1e9 == pytest.approx(whole, rel=6e-3)
    idle = 0 if model.moe is None else (model.moe.num_experts - model.moe.top_k) * expert_params(model) * sum(
        model.is_moe(layer) for layer in range(model.num_layers))
    assert (num_params(model) - idle) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("option", ADDED)
def test_each_option_adds_its_own_parameters(option):
    changes, added = ADDED[option]
    assert num_params(dataclasses.replace(TINY, **changes)) - num_params(TINY) == added


def test_a_dense_layer_is_counted_by_hand():
    assert layer_params(TINY) == ATTENTION + SWIGLU + 2 * H
    assert num_params(TINY) == LAYERS * (ATTENTION + SWIGLU + 2 * H) + 2 * VOCABULARY * H + H


def test_a_token_passes_top_k_experts_and_the_shared_ones():
    model = dataclasses.replace(TINY, moe=MOE)
    assert layer_matmul_params(model, 0) == ATTENTION + SWIGLU
    assert layer_matmul_params(model, 1) == ATTENTION + H * 4 + (2 + 1) * 3 * H * 10


@pytest.mark.parametrize("window,seq_len,expected", ATTENDED)
def test_windows_bound_what_is_attended_to(window, seq_len, expected):
    model = dataclasses.replace(TINY, sliding_window=window, global_every=10**6)
    assert attended(model, 0, seq_len=seq_len) == pytest.approx(expected)


def test_every_nth_layer_sees_everything():
    model = dataclasses.replace(TINY, num_layers=4, sliding_window=10, global_every=2)
    flops = attention_flops_per_token(model, seq_len=100, convention="causal")
    assert flops == pytest.approx(6 * HEADS * 4 * 2 * (50.0 + 9.5))


def test_6n_and_the_attention_of_palm():
    full = model_flops_per_token(LLAMA3_8B, seq_len=8192, convention="full")
    causal = model_flops_per_token(LLAMA3_8B, seq_len=8192, convention="causal")
    assert full == 6 * matmul_params(LLAMA3_8B) + 12 * 32 * 4096 * 8192
    assert full - causal == 6 * 32 * 4096 * 8192


def test_the_output_projection_counts_as_a_matmul_even_if_it_is_tied():
    assert matmul_params(dataclasses.replace(TINY, tie_embeddings=True)) == matmul_params(TINY)


def test_latent_attention_multiplies_its_own_head_sizes():
    model = dataclasses.replace(TINY, mla=MLA)
    flops = attention_flops_per_token(model, seq_len=64, convention="full")
    assert flops == 6 * LAYERS * HEADS * (4 + 2 + 3) * 64


def test_megatrons_formula_of_a_gpt():
    """72·B·L·s·h²(1 + s/6h + V/12Lh) model FLOPs (arXiv:2205.05198); biases and norms are not matmuls."""
    h, layers, vocabulary, s = 12288, 96, 51200, 2048
    model = ModelSpec(name="gpt", vocab_size=vocabulary, dim=h, num_layers=layers, num_heads=96, num_kv_heads=96,
                      ffn_dim=4 * h, ffn="gelu", bias=True, norm="layernorm", tie_embeddings=True)
    formula = 72 * layers * h**2 * (1 + s / (6 * h) + vocabulary / (12 * layers * h))
    assert model_flops_per_token(model, seq_len=s, convention="full") == pytest.approx(formula)


def test_experts_cost_less_than_they_weigh():
    dense_like = model_flops_per_token(LLAMA3_405B, seq_len=128, convention="causal") / num_params(LLAMA3_405B)
    model = dataclasses.replace(TINY, moe=dataclasses.replace(MOE, num_experts=64))
    sparse = model_flops_per_token(model, seq_len=128, convention="causal") / num_params(model)
    assert sparse < 0.5 * dense_like
