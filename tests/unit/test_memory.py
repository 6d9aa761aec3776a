"""The planner's memory model against the papers' formulas and figures."""
import pytest

from jobs.spec.counts import num_params
from jobs.spec.model import ModelSpec
from orchestrator.planner.memory import BlockShape, block_activation_bytes, in_flight, stage_memory, stage_params
from tests.helpers.planning import LLAMA3_8B, SMALL, layout_of, training

# Korthikanti et al., table 3: s, b, h, a of the 22B, 175B, 530B and 1T models
GPT = [(2048, 4, 6144, 64), (2048, 1, 12288, 96), (2048, 1, 20480, 128), (2048, 1, 25600, 160)]

# flash attention, sequence parallel, recompute → bytes of one block from s, b, h, a, t
KORTHIKANTI = [
    (False, False, "none", lambda s, b, h, a, t: s * b * h * (10 + 24 / t + 5 * a * s / (h * t))),
    (False, True, "none", lambda s, b, h, a, t: s * b * h / t * (34 + 5 * a * s / h)),
    (True, False, "none", lambda s, b, h, a, t: s * b * h * (10 + 24 / t)),
    (True, True, "none", lambda s, b, h, a, t: 34 * s * b * h / t),
    (True, False, "full", lambda s, b, h, a, t: 2 * s * b * h),
    (True, True, "full", lambda s, b, h, a, t: 2 * s * b * h / t),
]

# GPUs → GB per GPU of a 7-billion-parameter float32 model with everything sharded (ZeRO-3)
ZERO3_7B_GB = [(1, 112.0), (4, 28.0), (8, 14.0), (32, 3.5)]

# pp, num_microbatches → in flight per stage under 1F1B
IN_FLIGHT = [(1, 4, [1]), (2, 4, [2, 1]), (4, 8, [4, 3, 2, 1]), (4, 4, [4, 3, 2, 1])]


@pytest.mark.parametrize("s,b,h,a", GPT)
@pytest.mark.parametrize("t", [1, 8])
@pytest.mark.parametrize("flash,sequence_parallel,recompute,formula", KORTHIKANTI)
def test_block_activations_reduce_to_korthikanti(s, b, h, a, t, flash, sequence_parallel, recompute, formula):
    shape = BlockShape(seq_len=s, microbatch_size=b, dim=h, num_heads=a, num_kv_heads=a, head_dim=h // a, ffn_dim=4 * h,
                       gated_ffn=False, dropout=True, flash_attention=flash, regathers_inputs=True)
    computed = block_activation_bytes(shape, tp=t, sequence_parallel=sequence_parallel, recompute=recompute)
    assert computed == pytest.approx(formula(s, b, h, a, t))


def test_grouped_query_attention_keeps_fewer_keys_and_values():
    full, grouped = (BlockShape(seq_len=10, microbatch_size=1, dim=64, num_heads=8, num_kv_heads=kv, head_dim=8,
                                ffn_dim=128) for kv in (8, 2))
    options = {"tp": 1, "sequence_parallel": False, "recompute": "none"}
    saved = block_activation_bytes(full, **options) - block_activation_bytes(grouped, **options)
    assert saved == 2 * 10 * 2 * (8 - 2) * 8  # bf16, tokens, k and v, heads, head_dim


def test_recompute_keeps_less_the_more_it_recomputes():
    shape = BlockShape(seq_len=128, microbatch_size=1, dim=64, num_heads=8, num_kv_heads=8, head_dim=8, ffn_dim=256)
    none, selective, full = (block_activation_bytes(shape, tp=1, sequence_parallel=False, recompute=how)
                             for how in ("none", "selective", "full"))
    assert none > selective > full > 0


@pytest.mark.parametrize("gpus,gb", ZERO3_7B_GB)
def test_sharded_states_of_a_7b_model(gpus, gb):
    spec = training(global_batch_size=gpus)
    layout = layout_of(LLAMA3_8B, dims={"dp_shard": gpus})
    memory = stage_memory(LLAMA3_8B, layout, training=spec, stage=0, device="cuda")
    states = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert states / num_params(LLAMA3_8B) * 7e9 == pytest.approx(gb * 1e9, rel=1e-6)


def test_accumulating_microbatches_keeps_unsharded_gradients():
    spec = training(global_batch_size=16)
    once, accumulated = (stage_memory(SMALL, layout_of(SMALL, dims={"dp_shard": 4}, num_microbatches=m),
                                      training=spec, stage=0, device="cuda").gradients_bytes for m in (1, 4))
    assert (once, accumulated) == (num_params(SMALL), 4 * num_params(SMALL))


@pytest.mark.parametrize("dims", [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 4}, {"pp": 3}])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_together_hold_the_model_once(dims, tied):
    model = ModelSpec(name="m", vocab_size=64, dim=32, num_layers=7, num_heads=4, num_kv_heads=2, ffn_dim=64,
                      tie_embeddings=tied)
    layout = layout_of(model, dims=dims)
    tp, pp = layout.dims.tp, layout.dims.pp
    norms = (2 * model.num_layers + 1) * model.dim  # on every tp rank
    copies = model.vocab_size * model.dim if tied and pp > 1 else 0  # of a tied embedding, on the last stage
    held = tp * sum(stage_params(model, layout, stage) for stage in range(pp))
    assert held == num_params(model) + (tp - 1) * norms + copies


@pytest.mark.parametrize("pp,m,expected", IN_FLIGHT)
def test_1f1b_microbatches_in_flight(pp, m, expected):
    layout = layout_of(SMALL, dims={"pp": pp}, num_microbatches=m)
    assert [in_flight(layout, stage) for stage in range(pp)] == expected


def test_logits_weigh_on_the_last_stage_only():
    spec = training(global_batch_size=4, seq_len=8192, param_dtype="bfloat16")
    layout = layout_of(LLAMA3_8B, dims={"pp": 2}, num_microbatches=4)
    logits = [stage_memory(LLAMA3_8B, layout, training=spec, stage=s, device="cuda").logits_bytes for s in range(2)]
    assert logits == [0, 12 * 8192 * 128256]  # bf16, float32 and its gradient, bf16 gradient


def test_single_float32_rank_gathers_nothing():
    memory = stage_memory(SMALL, layout_of(SMALL), training=training(global_batch_size=1), stage=0, device="cuda")
    assert memory.gathered_bytes == 0
