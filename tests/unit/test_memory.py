"""The planner's memory model against the papers' formulas and figures."""
import dataclasses

import pytest

from jobs.spec.counts import layer_params, num_params
from jobs.spec.model import MlaSpec, ModelSpec, MoeSpec
from orchestrator.planner.activations import BlockShape, block_activation_bytes, block_shape
from orchestrator.planner.cost import heaviest
from orchestrator.planner.held import held, logits_held
from orchestrator.planner.memory import in_flight, stage_memory
from orchestrator.planner.peaks import peak_held
from orchestrator.planner.software import OURS, Software
from orchestrator.planner.uneven import stage_splits
from orchestrator.planner.weights import stage_weights
from tests.helpers.planning import LLAMA3_8B, LLAMA3_70B, SMALL, h100, layout_of, training

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
# ZeRO stage → the same on 1, 4, 8 and 32 GPUs of a trainer that keeps what it does not shard (arXiv:1910.02054)
ZERO_7B_GB = {1: (112.0, 70.0, 63.0, 57.75), 2: (112.0, 49.0, 38.5, 30.625), 3: (112.0, 28.0, 14.0, 3.5)}

# Korthikanti et al.: L, h, a, microbatch, p, v of the 22B, 175B, 530B and 1T models, t = 8, s = 2048
MODELS = {"22b": (48, 6144, 64, 4, 1, 1), "175b": (96, 12288, 96, 1, 8, 3), "530b": (105, 20480, 128, 1, 35, 3),
          "1t": (128, 25600, 160, 1, 64, 1)}
# GiB that the first pipeline rank keeps for its layers: sbhL(10 + 24/t + 5as/(ht)) with tensor parallelism alone, and
# 34·sbhL/t with sequence parallelism and selective recompute; interleaved × (1 + (p−1)/(pv))
GIB = {"22b": (59.25, 9.56), "175b": (66.84, 12.35), "530b": (114.02, 23.08), "1t": (131.25, 26.56)}
DEEPSEEK = ModelSpec(name="mla", vocab_size=129280, dim=7168, num_layers=61, num_heads=128, num_kv_heads=128,
                     ffn_dim=18432, mla=MlaSpec(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128,
                                                qk_rope_head_dim=64, v_head_dim=128))
PUBLISHED = Software(flash_attention=False, dropout=True, regathers_inputs=True, selective="attention")

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
    layout = layout_of(LLAMA3_8B, dims={"dp_shard": gpus}, num_microbatches=2, reduce_every_microbatch=True)
    memory = stage_memory(LLAMA3_8B, layout, training=spec, stage=0, device="cuda")
    states = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert states / num_params(LLAMA3_8B) * 7e9 == pytest.approx(gb * 1e9, rel=1e-6)


def test_accumulating_microbatches_keeps_unsharded_gradients():
    spec = training(global_batch_size=16)
    once, accumulated = (stage_memory(SMALL, layout_of(SMALL, dims={"dp_shard": 4}, num_microbatches=m),
                                      training=spec, stage=0, device="cuda").gradients_bytes for m in (1, 4))
    # with one microbatch there is at most this rank's part of them, and what is on its way
    assert once <= num_params(SMALL)
    assert accumulated == pytest.approx(4 * num_params(SMALL), rel=0.02)  # of the model's end rows have taken the place


@pytest.mark.parametrize("dims", [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 4}, {"pp": 3}])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_together_hold_the_model_once(dims, tied):
    model = ModelSpec(name="m", vocab_size=64, dim=32, num_layers=7, num_heads=4, num_kv_heads=2, ffn_dim=64,
                      tie_embeddings=tied)
    layout = layout_of(model, dims=dims)
    tp, pp = layout.dims.tp, layout.dims.pp
    norms = (2 * model.num_layers + 1) * model.dim  # on every tp rank
    copies = model.vocab_size * model.dim if tied and pp > 1 else 0  # of a tied embedding, on the last stage
    held = tp * sum(stage_weights(model, layout, stage).total for stage in range(pp))
    assert held == num_params(model) + (tp - 1) * norms + copies


# option → what tp ranks hold more than once, per layer
MODELS_HELD = {
    "experts": ({"moe": MoeSpec(num_experts=4, top_k=2, ffn_dim=16, num_shared_experts=1, first_layer=2)}, 0),
    "latent attention": ({"mla": MlaSpec(kv_lora_rank=8, q_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2,
                                         v_head_dim=4)}, 32 * (8 + 2 + 6) + 8 + 6),
    "biases": ({"bias": True, "norm": "layernorm", "ffn": "gelu"}, 2 * 32),  # behind the partial sums of wo and of down
    "learned positions": ({"positions": "learned", "max_positions": 11}, 0),
}


@pytest.mark.parametrize("name", MODELS_HELD)
def test_stages_hold_every_kind_of_model_once(name):
    options, repeated = MODELS_HELD[name]
    model = ModelSpec(name="m", vocab_size=64, dim=32, num_layers=6, num_heads=4, num_kv_heads=4, ffn_dim=64, **options)
    for dims in ({}, {"pp": 2}, {"pp": 3}):
        layout = layout_of(model, dims=dims)
        assert sum(stage_weights(model, layout, s).total for s in range(layout.dims.pp)) == num_params(model)
    if model.moe is None:
        whole = layout_of(model, dims={"tp": 2})
        norms = (2 * model.num_layers + 1) * model.dim * (2 if model.norm == "layernorm" else 1)
        positions = (model.max_positions or 0) * model.dim
        assert 2 * stage_weights(model, whole, 0).total == (
            num_params(model) + norms + positions + model.num_layers * repeated)


def test_a_stage_without_layers_holds_its_end_of_the_model():
    """Other trainers have such stages."""
    layout = dataclasses.replace(layout_of(SMALL, dims={"pp": 2, "dp_shard": 2}, num_microbatches=4),
                                 layers_per_stage=(0, SMALL.num_layers))
    memory = stage_memory(SMALL, layout, training=training(global_batch_size=8), stage=0, device="cuda")
    assert memory.optimizer_bytes == 8 * stage_weights(SMALL, layout, 0).total / 2 == 4 * SMALL.vocab_size * SMALL.dim
    assert memory.total_bytes > memory.optimizer_bytes


@pytest.mark.parametrize("pp,m,expected", IN_FLIGHT)
def test_1f1b_microbatches_in_flight(pp, m, expected):
    layout = layout_of(SMALL, dims={"pp": pp}, num_microbatches=m)
    assert [in_flight(layout, stage) for stage in range(pp)] == expected


def test_logits_weigh_on_the_last_stage_only():
    spec = training(global_batch_size=4, seq_len=8192, param_dtype="bfloat16")
    layout = layout_of(LLAMA3_8B, dims={"pp": 2}, num_microbatches=4)
    logits = [stage_memory(LLAMA3_8B, layout, training=spec, stage=s, device="cuda").logits_bytes for s in range(2)]
    assert logits == [0, 14 * 8192 * 128256]  # bf16, float32 and two gradients of it


def test_single_float32_rank_gathers_nothing():
    memory = stage_memory(SMALL, layout_of(SMALL), training=training(global_batch_size=1), stage=0, device="cuda")
    assert memory.gathered_bytes == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("column", [0, 1], ids=["tensor parallel", "sequence parallel, selective"])
def test_the_eight_figures_of_korthikanti(name, column):
    layers, h, a, b, p, v = MODELS[name]
    model = ModelSpec(name=name, vocab_size=51200, dim=h, num_layers=layers, num_heads=a, num_kv_heads=a, ffn_dim=4 * h,
                      ffn="gelu")
    shape = block_shape(model, microbatch_size=b, seq_len=2048, element_bytes=2, device="cuda", software=PUBLISHED)
    block = block_activation_bytes(shape, tp=8, sequence_parallel=column == 1, recompute=("none", "selective")[column])
    held = peak_held("interleaved_1f1b" if v > 1 else "1f1b", rank=0, pp=p, virtual_stages=v, num_microbatches=4 * p)
    computed = sum(held) * layers / (p * v) * block / 2**30
    s, t = 2048, 8
    formula = (s * b * h * (10 + 24 / t + 5 * a * s / (h * t)), 34 * s * b * h / t)[column]
    interleaving = 1 + (p - 1) / (p * v) if v > 1 else 1.0
    assert computed == pytest.approx(formula * layers * interleaving / 2**30, abs=1e-6)
    assert computed == pytest.approx(GIB[name][column], abs=0.01)


@pytest.mark.parametrize("stage", ZERO_7B_GB)
def test_zero_stages_of_a_7b_model(stage):
    for gpus, gb in zip((1, 4, 8, 32), ZERO_7B_GB[stage]):
        layout = layout_of(LLAMA3_8B, dims={"dp_shard": gpus}, zero_stage=stage)
        memory = stage_memory(LLAMA3_8B, layout, training=training(global_batch_size=gpus), stage=0, device="cuda",
                              software=Software(keeps_half_weights=True))
        states = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
        assert states / num_params(LLAMA3_8B) * 7e9 == pytest.approx(gb * 1e9, rel=1e-6)


def test_our_float32_zero1_keeps_masters_as_rows_of_the_weights():
    one, two = (stage_memory(SMALL, layout_of(SMALL, dims={"dp_shard": 4}, zero_stage=1, num_microbatches=m),
                             training=training(global_batch_size=4 * m), stage=0, device="cuda") for m in (1, 2))
    params, layer = num_params(SMALL), layer_params(SMALL)
    assert (two.parameters_bytes, two.optimizer_bytes) == (params, 8 * params / 4)
    assert two.gradients_bytes == pytest.approx(4 * params, rel=0.01)  # rows of the first that is reduced beside them
    # where one microbatch is all, gradients are reduced unit by unit: rows are what is left, and at most two messages,
    # what comes of one of them, and a matrix's gradient
    beside = one.parameters_bytes + one.gathered_bytes - 4 * params
    assert 0 <= beside <= 4 * ((2 + 1 / 4) * layer + SMALL.dim * SMALL.ffn_dim)
    assert one.gradients_bytes <= params  # this rank's rows, of what backward has left


def test_microbatches_of_whole_weights_are_summed_in_the_message():
    """None comes on top of the gradients, unless it is to be of another type than their sum."""
    def gathered(num_microbatches: int, param_dtype: str, reduce_dtype: str) -> int:
        layout = layout_of(SMALL, dims={"dp_replicate": 4}, num_microbatches=num_microbatches)
        spec = dataclasses.replace(training(global_batch_size=4 * num_microbatches, param_dtype=param_dtype),
                                   reduce_dtype=reduce_dtype)
        return stage_memory(SMALL, layout, training=spec, stage=0, device="cuda").gathered_bytes

    for param_dtype in ("float32", "bfloat16"):
        assert gathered(2, param_dtype, "float32") == gathered(1, param_dtype, "float32")
    cast = gathered(2, "bfloat16", "bfloat16") - gathered(1, "bfloat16", "bfloat16")
    assert 0 < cast <= 2 * num_params(SMALL)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_unit_is_no_larger_than_a_stage(zero):
    """Whatever number of layers it may have."""
    pp = SMALL.num_layers // 2
    two, many = (stage_memory(SMALL, layout_of(SMALL, dims={"dp_shard": 2, "pp": pp}, num_microbatches=2 * pp,
                                               layers_per_unit=n, zero_stage=zero, reduce_every_microbatch=zero > 1),
                              training=training(global_batch_size=4 * pp), stage=0, device="cuda") for n in (2, 8))
    assert two == many


def test_reducing_every_microbatch_keeps_sharded_gradients():
    spec = training(global_batch_size=16)
    layout = layout_of(SMALL, dims={"dp_shard": 4}, num_microbatches=4, reduce_every_microbatch=True)
    memory = stage_memory(SMALL, layout, training=spec, stage=0, device="cuda")
    assert memory.gradients_bytes == num_params(SMALL)


def test_the_attention_matrix_of_128k_tokens_and_32_heads_is_a_terabyte():
    shapes = [BlockShape(seq_len=131072, microbatch_size=1, dim=4096, num_heads=32, num_kv_heads=32, head_dim=128,
                         ffn_dim=16384, flash_attention=flash) for flash in (True, False)]
    fused, unfused = (block_activation_bytes(s, tp=1, sequence_parallel=False, recompute="none") for s in shapes)
    assert (unfused - fused) / 2 == pytest.approx(1.0e12, rel=0.1)  # softmax and what dropout makes of it


# schedule, virtual stages → layers' worth of microbatches in flight on the first rank of four, eight layers
SCHEDULES = [("gpipe", 1, 16 * 2), ("1f1b", 1, 4 * 2), ("interleaved_1f1b", 2, 11), ("interleaved_zero_bubble", 2, 8),
             ("zbv", 2, 8), ("dualpipev", 2, 9)]


@pytest.mark.parametrize("schedule,v,worth", SCHEDULES)
def test_schedules_hold_what_their_papers_say(schedule, v, worth):
    model = dataclasses.replace(SMALL, num_layers=8)
    layout = dataclasses.replace(layout_of(model, dims={"pp": 4}, num_microbatches=16), schedule=schedule,
                                 virtual_stages=v, layers_per_stage=(8 // (4 * v),) * (4 * v), zero_stage=2)
    spec = training(global_batch_size=16, seq_len=128, param_dtype="bfloat16")
    shape = block_shape(model, microbatch_size=1, seq_len=128, element_bytes=2, device="cuda")
    block = block_activation_bytes(shape, tp=1, sequence_parallel=True, recompute="none")
    microbatches = peak_held(schedule, rank=0, pp=4, virtual_stages=v, num_microbatches=16)
    each = held(model, layout, training=spec, rank=0, device="cuda", software=OURS).each
    boundaries = sum(microbatches) * 2 * 2 * 128 * model.dim
    assert sum(n * one for n, one in zip(microbatches, each)) == pytest.approx(worth * block + boundaries)
    assert in_flight(layout, 0) == max(microbatches)


def test_experts_are_held_by_their_ep_ranks_and_sharded_over_the_rest():
    model = dataclasses.replace(SMALL, moe=MoeSpec(num_experts=16, top_k=2, ffn_dim=512))
    alone, spread = (stage_memory(model, layout_of(model, dims={"dp_shard": 8, "ep": ep}, zero_stage=3),
                                  training=training(global_batch_size=8), stage=0, device="cuda") for ep in (1, 8))
    assert spread.parameters_bytes == pytest.approx(alone.parameters_bytes, rel=0.01)  # sharded by 8 either way
    assert spread.gathered_bytes < alone.gathered_bytes / 2


def test_latent_attention_keeps_its_latents_whole():
    shape = block_shape(DEEPSEEK, microbatch_size=1, seq_len=1, element_bytes=2, device="cuda")
    one, eight = (block_activation_bytes(shape, tp=t, sequence_parallel=True, recompute="none") for t in (1, 8))
    assert eight > one / 8 + 2 * (512 + 64 + 1536) * 7 / 8 - 1


def test_context_parallelism_divides_activations_and_logits():
    spec = training(global_batch_size=1, seq_len=8192, param_dtype="bfloat16")
    one, four = (stage_memory(LLAMA3_8B, layout_of(LLAMA3_8B, dims={"cp": cp}), training=spec, stage=0, device="cuda")
                 for cp in (1, 4))
    assert four.activations_bytes == pytest.approx(one.activations_bytes / 4)
    logits = [logits_held(LLAMA3_8B, layout_of(LLAMA3_8B, dims={"cp": cp}), training=spec, software=OURS)
              for cp in (1, 4)]
    assert logits[0] == tuple(4 * each for each in logits[1]) and four.communication_bytes > one.communication_bytes


# schedule, virtual stages, microbatches for pp=8, recompute, ZeRO: some ranks hold all microbatches at their peak
TELLING = [(schedule, virtual, m, recompute, zero)
           for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2),
                                     ("zbv", 2), ("dualpipev", 2))
           for m in (8, 16, 24) for recompute in ("none", "selective", "full") for zero in (1, 2)
           if schedule != "dualpipev" or m > 8]


@pytest.mark.parametrize("schedule,virtual,m,recompute,zero", TELLING)
@pytest.mark.parametrize("layers", [30, 32, 40])
def test_the_heaviest_rank_is_among_those_that_are_looked_at(schedule, virtual, m, recompute, zero, layers):
    model = dataclasses.replace(LLAMA3_70B, num_layers=layers)
    spec = training(global_batch_size=8 * m, seq_len=8192, param_dtype="bfloat16")
    layout = dataclasses.replace(
        layout_of(model, dims={"pp": 8, "tp": 4, "dp_shard": 8}, num_microbatches=m, schedule=schedule,
                  virtual_stages=virtual, recompute=recompute, zero_stage=zero),
        layers_per_stage=stage_splits(model, num_stages=8 * virtual, seq_len=8192, recompute=recompute)[0])
    every = [stage_memory(model, layout, training=spec, stage=rank, device="cuda").total_bytes for rank in range(8)]
    assert heaviest(model, layout, training=spec, cluster=h100(32)).total_bytes == max(every)
