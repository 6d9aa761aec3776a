"""Layouts that crashed or silently misbehaved in other trainers: each is refused with the axis and the nearest legal
value, or planned right. Facts and numbers are from the public issues named beside them."""
import dataclasses

import pytest

from jobs.spec.load import SpecError
from jobs.spec.model import MlaSpec, ModelSpec, MoeSpec
from jobs.spec.training import TrainingSpec
from orchestrator.planner import PlanError, plan
from orchestrator.planner.question import Question
from orchestrator.planner.rules import padded_vocabulary
from orchestrator.planner.space import every_layout
from orchestrator.request import ParallelRequest
from tests.helpers.planning import SMALL, cpu, h100, plan_for, training


def model(**sizes) -> ModelSpec:
    return dataclasses.replace(SMALL, head_dim=32, **sizes)


HEADS = {"dim": 256, "vocab_size": 9600, "ffn_dim": 9600}  # divisible by whatever tp is tried
EXPERTS = model(moe=MoeSpec(num_experts=8, top_k=2, ffn_dim=256))
MLA = model(num_heads=8, num_kv_heads=2, mla=MlaSpec(kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=32,
                                                     qk_rope_head_dim=16, v_head_dim=32))

# issue → model, GPUs of one node, global batch, sequence, fixed; what the refusal must say
REFUSED = {
    "ep not a multiple of cp·tp: pytorch/torchtitan#2087": (
        EXPERTS, 8, 16, 128, {"tp": 2, "cp": 2, "dp_shard": 2, "pp": 1, "ep": 2},
        ["parallel.ep: 2 is not a multiple of cp × tp = 2 × 2", "try 1, 4, 8"]),
    "ep beyond its ranks: pytorch/torchtitan#2087": (
        EXPERTS, 8, 16, 128, {"tp": 2, "cp": 2, "dp_shard": 1, "pp": 2, "ep": 8},
        ["parallel.ep: 8 does not divide dp_shard × cp × tp = 1 × 2 × 2 = 4", "try 1, 4"]),
    "experts as the size of ep: deepspeedai/DeepSpeed#7551": (
        model(moe=MoeSpec(num_experts=6, top_k=2, ffn_dim=256)), 4, 16, 128, {"ep": 4},
        ["parallel.ep: 4 does not divide model.moe.num_experts=6", "try 1, 2, 3, 6"]),
    "tp above kv heads: pytorch/torchtitan#932": (
        model(num_heads=32, num_kv_heads=8, **HEADS), 16, 16, 128, {"tp": 16},
        ["parallel.tp: 16 does not divide model.num_kv_heads=8", "try 1, 2, 4, 8"]),
    "fractional kv heads: pytorch/torchtitan#2574": (
        model(num_heads=16, num_kv_heads=2, **HEADS), 8, 16, 128, {"tp": 4},
        ["parallel.tp: 4 does not divide model.num_kv_heads=2", "try 1, 2"]),
    "kv heads of 10: NVIDIA-NeMo/Automodel#799": (
        model(num_heads=40, num_kv_heads=10, **HEADS), 20, 16, 128, {"tp": 4},
        ["parallel.tp: 4 does not divide model.num_kv_heads=10", "try 1, 2, 5, 10"]),
    "52 heads: deepspeedai/DeepSpeed#3634": (
        model(num_heads=52, num_kv_heads=52, **HEADS), 8, 16, 128, {"tp": 8},
        ["parallel.tp: 8 does not divide model.num_heads=52", "try 1, 2, 4"]),
    "40 heads over 3: vllm-project/vllm#596": (
        model(num_heads=40, num_kv_heads=40, **HEADS), 3, 15, 128, {"tp": 3},
        ["parallel.tp: 3 does not divide model.num_heads=40", "try 1"]),
    "25 heads: vllm-project/vllm#8097": (
        model(num_heads=25, num_kv_heads=25, **HEADS), 4, 16, 128, {"tp": 4},
        ["parallel.tp: 4 does not divide model.num_heads=25", "try 1"]),
    "12 heads: hpcaitech/ColossalAI#3043": (
        model(num_heads=12, num_kv_heads=12, **HEADS), 8, 16, 128, {"tp": 8},
        ["parallel.tp: 8 does not divide model.num_heads=12", "try 1, 2, 4"]),
    "28 heads over 8": (
        model(num_heads=28, num_kv_heads=28, **HEADS), 8, 16, 128, {"tp": 8},
        ["parallel.tp: 8 does not divide model.num_heads=28", "try 1, 2, 4"]),
    "a split that drops layers: NVIDIA/Megatron-LM#1778": (
        model(num_layers=20), 2, 16, 128, {"pp": 1, "layers_per_stage": [1]},
        ["parallel.layers_per_stage: [1] has 1 layers, but model.num_layers=20; 19 more would do"]),
    "a split without its first stage: NVIDIA/Megatron-LM#1584": (
        model(num_layers=20), 4, 16, 128,
        {"pp": 4, "schedule": "interleaved_1f1b", "virtual_stages": 2, "layers_per_stage": [3, 2, 2]},
        ["has 7 layers, but model.num_layers=20", "has 3 stages, but pp × virtual_stages = 4 × 2 = 8"]),
    "fewer microbatches than stages: NVIDIA-NeMo/NeMo#14288": (
        model(num_layers=12), 6, 3, 128, {"pp": 6, "tp": 1, "cp": 1, "schedule": "interleaved_1f1b",
                                          "num_microbatches": 3,
                                          "microbatch_size": 1},
        ["parallel.pp: 6 needs at least 6 microbatches for interleaved_1f1b", "leaves 3; try pp=3"]),
    "no rounds of pp: pytorch/pytorch#129597": (
        model(num_layers=8), 4, 10, 128, {"pp": 4, "tp": 1, "cp": 1, "schedule": "interleaved_1f1b",
                                          "microbatch_size": 1,
                                          "num_microbatches": 10, "uneven_batch": False},
        ["parallel.num_microbatches: 10 is not a multiple of pp=4, as interleaved_1f1b needs; try 8 or 12"]),
    "a sequence cut short: NVIDIA/Megatron-LM#1669": (
        SMALL, 2, 16, 7, {"cp": 2}, ["parallel.cp: 2 needs training.seq_len=7 to be a multiple of 2·cp = 4",
                                     "seq_len=8"]),
    "cp with sequence parallelism: ISEEKYAN/mbridge#158": (
        SMALL, 4, 16, 12, {"cp": 2, "tp": 2, "sequence_parallel": True},
        ["parallel.cp: 2 needs training.seq_len=12 to be a multiple of 2·cp·tp = 8", "seq_len=16"]),
    "packed sequences under cp: NVIDIA-NeMo/Megatron-Bridge#1292": (
        SMALL, 4, 16, 126, {"cp": 4}, ["parallel.cp: 4 needs training.seq_len=126 to be a multiple of 2·cp = 8"]),
    "an odd vocabulary: hpcaitech/ColossalAI#6167": (
        model(vocab_size=65535), 2, 16, 128, {"tp": 2},
        ["parallel.tp: 2 does not divide model.vocab_size=65535 (padded, 65536 would do)", "try 1"]),
    "vocabulary 250,682 over 8: vllm-project/vllm#440": (
        model(vocab_size=250682, num_kv_heads=8), 8, 16, 128, {"tp": 8}, ["does not divide model.vocab_size=250682 "
                                                                          "(padded, "
                                                                          "250880 would do)"]),
    "vocabulary 151,552 over 6: sgl-project/sglang": (
        model(vocab_size=151552, num_heads=12, num_kv_heads=12, ffn_dim=9600), 6, 12, 128, {"tp": 6},
        ["does not divide model.vocab_size=151552", "152064 would do"]),
    "vocabulary 129,280 over 24": (
        model(vocab_size=129280, num_heads=24, num_kv_heads=24, ffn_dim=9600), 24, 24, 120, {"tp": 24},
        ["does not divide model.vocab_size=129280", "132096 would do"]),
    "vocabulary 32,001 over 2": (
        model(vocab_size=32001), 2, 16, 128, {"tp": 2}, ["does not divide model.vocab_size=32001", "32256 would do"]),
    "accumulation floored: OpenRLHF/OpenRLHF#346": (
        SMALL, 7, 256, 128, {"tp": 1, "pp": 1, "cp": 1, "microbatch_size": 2, "num_microbatches": 18},
        ["parallel.num_microbatches: 18 × microbatch_size × dp = 18 × 2 × 7 = 252 slots cannot hold "
         "training.global_batch_size=256", "try num_microbatches=19", "or global_batch_size=252"]),
    "64 is not 4·8·1: bigcode-project/starcoder#77": (
        SMALL, 1, 64, 128, {"microbatch_size": 4, "num_microbatches": 8},
        ["4 × 1 = 32 slots cannot hold training.global_batch_size=64", "try num_microbatches=16"]),
    "a truncated batch: mosaicml/examples#41": (
        SMALL, 4, 30, 128, {"tp": 1, "pp": 1, "cp": 1, "uneven_batch": False},
        ["training.global_batch_size: 30 is not a multiple of dp × microbatch_size = 4 × 1 = 4; try 28 or 32"]),
    "a late assertion: verl-project/verl#1811": (
        SMALL, 4, 36, 128, {"tp": 1, "pp": 1, "cp": 1, "microbatch_size": 2, "uneven_batch": False},
        ["training.global_batch_size: 36 is not a multiple of dp × microbatch_size = 4 × 2 = 8; try 32 or 40"]),
    "zero bubble with dropped parameters": (
        model(num_layers=8), 4, 16, 128, {"pp": 2, "schedule": "zbv", "zero_stage": 3, "dp_shard": 2},
        ["parallel.zero_stage: 3 drops parameters after each use, but zbv needs them", "try zero_stage 1 or 2"]),
}


@pytest.mark.parametrize("issue", REFUSED)
def test_what_broke_elsewhere_is_refused_with_axis_and_nearest_legal_value(issue):
    spec, gpus, batch, seq_len, fixed, messages = REFUSED[issue]
    with pytest.raises(PlanError) as refused:
        plan_for(spec, cpu(1, gpus), training(global_batch_size=batch, seq_len=seq_len), **fixed)
    for message in messages:
        assert message in str(refused.value)
    assert all(p.where.startswith(("parallel", "training", "model")) for p in refused.value.problems)


# issue → model, GPUs, global batch, fixed; what the planned layout must have
HANDLED = {
    "axes of size 1: huggingface/accelerate#3798": (
        SMALL, 2, 16, {"tp": 2, "dp_shard": 1, "cp": 1}, {"tp": 2, "dp_shard": 1, "cp": 1, "dp_replicate": 1}),
    "replication alone: huggingface/accelerate#3804": (
        SMALL, 2, 16, {"dp_replicate": 2, "dp_shard": 1, "tp": 1, "cp": 1}, {"dp_replicate": 2, "pp": 1}),
    "80 layers over 16 · 2: NVIDIA/Megatron-LM#468": (
        model(num_layers=80), 16, 16, {"pp": 16, "schedule": "interleaved_1f1b", "virtual_stages": 2}, {"pp": 16}),
    "an odd number of layers: pytorch/torchtitan#963": (model(num_layers=27), 2, 16, {"pp": 2}, {"pp": 2}),
    "126 layers over 8 · 8: MLPerf training v5.0": (
        model(num_layers=126), 8, 8, {"pp": 8, "schedule": "interleaved_1f1b", "virtual_stages": 8}, {"pp": 8}),
    "cp above the kv heads: hiyouga/LLaMA-Factory#10794": (
        model(num_heads=8, num_kv_heads=2), 4, 16, {"cp": 4}, {"cp": 4}),
    "latent attention has no kv heads to divide": (MLA, 4, 16, {"tp": 4}, {"tp": 4}),
    "a batch of 256 over 7 replicas": (
        SMALL, 7, 256, {"tp": 1, "pp": 1, "cp": 1, "microbatch_size": 2}, {"dp_shard": None}),
}


@pytest.mark.parametrize("issue", HANDLED)
def test_what_broke_elsewhere_is_planned_with_every_layer_and_every_sample(issue):
    spec, gpus, batch, fixed, has = HANDLED[issue]
    chosen = plan_for(spec, cpu(1, gpus), training(global_batch_size=batch), **fixed)
    layout = chosen.layout
    assert sum(layout.layers_per_stage) == spec.num_layers and min(layout.layers_per_stage) >= 1
    assert len(layout.layers_per_stage) == layout.dims.pp * layout.virtual_stages
    assert batch <= layout.slots < batch + layout.dims.dp * layout.microbatch_size * max(1, layout.dims.pp)
    assert all(getattr(layout.dims, axis) == degree for axis, degree in has.items() if degree is not None)


def test_126_layers_with_their_ends_are_128():
    """8 ranks · 8 chunks · 2 layers, one of each end being the embedding or the loss."""
    chosen = plan_for(model(num_layers=126), cpu(1, 8), training(global_batch_size=8), pp=8,
                      schedule="interleaved_1f1b",
                      virtual_stages=8)
    assert sorted(chosen.layout.layers_per_stage) == [1, 1] + [2] * 62


@pytest.mark.parametrize("vocab,tp", [(151936, 2), (128256, 8), (65535, 1), (50257, 8), (32001, 2), (129280, 24)])
def test_padding_adds_less_than_one_multiple(vocab, tp):
    """151,936 was once doubled: NVIDIA-NeMo/Megatron-Bridge#5353."""
    padded = padded_vocabulary(vocab, tp=tp)
    assert vocab <= padded < vocab + 128 * tp and padded % (128 * tp) == 0


def test_fp8_needs_rows_in_sixteens_behind_the_cp_split():
    """5,504 tokens leave 184 per rank, which is no multiple of 16: NVIDIA/NeMo#8869."""
    spec = TrainingSpec(steps=1, seq_len=5504 // 32 * 2, global_batch_size=8, param_dtype="float8")
    question = Question(model=SMALL, training=spec, cluster=h100(1), request=ParallelRequest(cp=2), num_nodes=1,
                        allow_tp_across_nodes=False)
    with pytest.raises(SpecError) as refused:
        plan(question, headroom=0.1)
    assert "parallel.cp: 2 leaves 172 tokens per rank, which float8 needs to be a multiple of 16" in str(refused.value)
    assert "try seq_len=352" in str(refused.value)


def test_no_legal_layout_breaks_a_rule_that_others_broke():
    """Of a whole space: every layer once, heads whole, groups of experts whole, the batch held."""
    spec = training(global_batch_size=6)
    question = Question(model=EXPERTS, training=spec, cluster=cpu(1), request=ParallelRequest(recompute="none"),
                        num_nodes=1, allow_tp_across_nodes=False)
    layouts = list(every_layout(question))
    assert len(layouts) > 1000
    for layout in layouts:
        dims = layout.dims
        assert sum(layout.layers_per_stage) == EXPERTS.num_layers and layout.slots >= spec.global_batch_size
        assert EXPERTS.num_heads % dims.tp == EXPERTS.num_kv_heads % dims.tp == spec.seq_len % (2 * dims.cp) == 0
        assert EXPERTS.moe.num_experts % dims.ep == (dims.dp_shard * dims.cp * dims.tp) % dims.ep == 0
        assert dims.ep == 1 or dims.ep % (dims.cp * dims.tp) == 0
        if layout.schedule == "interleaved_1f1b" and dims.pp > 1:
            assert layout.num_microbatches % dims.pp == 0
