"""A plan in other trainers' terms, and theirs in ours: round trips, what is lost, refusals. The tools themselves read
the files in tests/system/test_export_real.py."""
import dataclasses

import pytest
import yaml

from jobs.spec.load import SpecError
from jobs.spec.parallel import Layout, ParallelDims
from orchestrator.request import ParallelRequest
from orchestrator.dialects import DIALECTS, losses, nearest, wishes_for
from orchestrator.export import export, notes, stage_layout
from orchestrator.foreign import read_request
from orchestrator.planner.plan import Plan
from tests.helpers.planning import SMALL, cpu, layout_of, plan_for, training

BASE = plan_for(SMALL, cpu(2), training(global_batch_size=16), tp=2, pp=1, cp=1, recompute="none", layers_per_unit=1,
                reduce_every_microbatch=False, zero_stage=3, dp_shard=4)
# degrees and details → what each of these tools can say; batch 16 in each
FLAT = [
    {"dims": {"dp_shard": 8}, "num_microbatches": 2},
    {"dims": {"dp_shard": 4, "tp": 2}, "num_microbatches": 4, "recompute": "full"},
    {"dims": {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, "num_microbatches": 4, "zero_stage": 2},
    {"dims": {"dp_shard": 2, "cp": 2, "tp": 2}, "microbatch_size": 2, "num_microbatches": 4, "cp_method": "allgather"},
    {"dims": {"dp_replicate": 8}, "num_microbatches": 2},
    {"dims": {"tp": 4, "dp_shard": 2}, "microbatch_size": 8, "num_microbatches": 1},
]


def planned(*, batch: int = 16, **layout) -> Plan:
    job = dataclasses.replace(BASE.job, global_batch_size=batch)
    return dataclasses.replace(BASE, job=job, layout=layout_of(SMALL, **layout))


@pytest.mark.parametrize("tool", ["accelerate", "axolotl"])
@pytest.mark.parametrize("layout", FLAT, ids=lambda one: str(one["dims"]))
def test_what_is_written_reads_back_as_the_same_degrees(tool, layout, tmp_path):
    plan = planned(**layout)
    file = tmp_path / "config.yaml"
    file.write_text(export(plan, to=tool))
    fixed = read_request(file, request=ParallelRequest()).fixed()
    flat = nearest(plan.layout, to=tool).flat()
    assert {axis: fixed[axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")} == {
        axis: flat[axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")}
    for name in ("num_microbatches", "zero_stage", "cp_method", "microbatch_size", "recompute",
                 "reduce_every_microbatch"):
        assert fixed.get(name, flat[name]) == flat[name]


def test_axolotl_gets_its_own_fields():
    data = yaml.safe_load(export(planned(**FLAT[1]), to="axolotl"))
    assert (data["dp_shard_size"], data["tensor_parallel_size"], data["context_parallel_size"]) == (4, 2, 1)
    assert data["micro_batch_size"] * data["gradient_accumulation_steps"] * data["dp_shard_size"] == 16
    assert data["fsdp_version"] == 2 and data["fsdp_config"]["reshard_after_forward"] is True


def arguments(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_torchtitan_gets_arguments_with_every_layer_in_one_stage():
    layout = {"dims": {"pp": 2, "dp_shard": 2, "tp": 2}, "num_microbatches": 8, "schedule": "1f1b"}
    lines = arguments(export(planned(**layout), to="torchtitan"))
    given = dict(line.removeprefix("--").partition(" ")[::2] for line in lines)
    stages = given["parallelism.module_fqns_per_model_part"].split(" ")
    assert [name for stage in stages for name in stage.split(",")] == [
        "tok_embeddings", *(f"layers.{i}" for i in range(SMALL.num_layers)), "norm", "lm_head"]
    assert given["parallelism.pipeline_parallel_schedule"] == "1F1B" and len(stages) == 2
    assert given["parallelism.data_parallel_shard_degree"] == "2" and "training.disable-cuda-graphs" in given
    assert int(given["training.local_batch_size"]) * 2 == int(given["training.global_batch_size"]) == 16
    assert lines[-1] == "activation-checkpoint:none"  # a subcommand: nothing may follow it


def test_megatron_gets_arguments_with_the_stages_written_out():
    dims = ParallelDims(pp=2, dp_shard=2, dp_replicate=2)
    layout = Layout(dims=dims, microbatch_size=1, num_microbatches=4, layers_per_stage=(1, 1, 1, 1), zero_stage=3,
                    schedule="interleaved_1f1b", virtual_stages=2, recompute="full")
    text = export(dataclasses.replace(BASE, layout=layout), to="megatron")
    for argument in ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-layout Et|t|t|tL",
                     "--data-parallel-sharding-strategy optim_grads_params", "--num-distributed-optimizer-instances 2",
                     "--recompute-granularity full", "--micro-batch-size 1", "--global-batch-size 16",
                     "--overlap-grad-reduce", "--ckpt-format fsdp_dtensor"):
        assert argument in text


def test_the_stage_string_holds_every_layer_once():
    layout = layout_of(dataclasses.replace(SMALL, num_layers=61), dims={"pp": 8})
    text = stage_layout(layout)
    assert text.count("t") == 61 and text.count("|") == 7 and text[0] == "E" and text[-1] == "L"


# tool, layout, what the refusal must name
UNSAYABLE = [
    ("accelerate", {"dims": {"pp": 2, "dp_shard": 4}, "num_microbatches": 4},
     "layout.pp: 2 has no words in accelerate, which knows 1; `orc plan RUN.yaml --for accelerate`"),
    ("accelerate", {"dims": {"dp_replicate": 4, "tp": 2}, "num_microbatches": 4}, "layout.dp_shard"),
    ("accelerate", {"dims": {"dp_replicate": 4, "cp": 2}, "num_microbatches": 4}, "layout.dp_shard"),
    ("axolotl", {"dims": {"tp": 8}, "num_microbatches": 16}, "nothing to shard over"),
    ("axolotl", {"dims": {"dp_shard": 8}, "num_microbatches": 3}, "has no weightless ones"),
    ("megatron", {"dims": {"pp": 2, "dp_shard": 4}, "num_microbatches": 4, "schedule": "zbv", "virtual_stages": 2},
     "layout.schedule: 'zbv' has no words in megatron, which knows 1f1b, interleaved_1f1b"),
    ("lightning", {"dims": {"dp_shard": 8}, "num_microbatches": 2}, "is not known; valid: accelerate"),
]


@pytest.mark.parametrize("tool,layout,message", UNSAYABLE)
def test_what_would_be_another_plan_is_refused(tool, layout, message):
    with pytest.raises(SpecError) as refused:
        export(planned(**layout), to=tool)
    assert message in str(refused.value)


def test_megatrons_interleaved_schedule_asks_for_whole_rounds():
    layout = Layout(dims=ParallelDims(pp=2), microbatch_size=1, num_microbatches=3, layers_per_stage=(1, 1, 1, 1),
                    schedule="interleaved_1f1b", virtual_stages=2)
    job = dataclasses.replace(BASE.job, global_batch_size=3)
    with pytest.raises(SpecError, match="no multiple of pp=2.*try 4"):
        export(dataclasses.replace(BASE, job=job, layout=layout), to="megatron")


SHARDED = {"dims": {"dp_shard": 8}, "num_microbatches": 2, "reduce_every_microbatch": True}
# tool, layout, what is lost (the field, and what is done instead); an empty list: nothing
LOST = [
    ("accelerate", SHARDED, []),
    ("accelerate", SHARDED | {"recompute": "selective"}, ["recompute: selective", "which does full"]),
    ("axolotl", SHARDED | {"zero_stage": 1, "reduce_every_microbatch": False}, ["zero_stage: 1", "which does 2"]),
    ("axolotl", SHARDED | {"layers_per_unit": 2}, ["layers_per_unit: 2", "which does 1"]),
    ("axolotl", {"dims": {"dp_shard": 4, "tp": 2}, "num_microbatches": 4}, ["sequence_parallel", "more memory"]),
    ("axolotl", {"dims": {"dp_shard": 4, "cp": 2}, "num_microbatches": 4, "cp_method": "allgather"}, ["cp_method"]),
    ("torchtitan", SHARDED, []),
    ("torchtitan", SHARDED | {"reduce_every_microbatch": False}, ["reduce_every_microbatch: False", "less memory"]),
    ("torchtitan", {"dims": {"dp_shard": 4, "cp": 2}, "num_microbatches": 4, "reduce_every_microbatch": True},
     ["cp_method: ring", "which does allgather"]),
    ("torchtitan", SHARDED | {"recompute": "selective"}, ["every second matmul"]),
    ("torchtitan", {"dims": {"dp_replicate": 2, "pp": 2, "dp_shard": 2}, "num_microbatches": 4},
     ["mesh_order", "cross the slow links"]),
    ("torchtitan", {"dims": {"dp_shard": 4, "pp": 2}, "num_microbatches": 4, "zero_stage": 2,
                    "reduce_every_microbatch": True}, ["reduce_every_microbatch: True", "more memory"]),
    ("megatron", {"dims": {"pp": 2, "dp_shard": 4}, "num_microbatches": 4, "zero_stage": 1}, []),
    ("megatron", {"dims": {"dp_shard": 4}, "num_microbatches": 4, "zero_stage": 1, "recompute": "selective"},
     ["recompute: selective"]),
]


@pytest.mark.parametrize("tool,layout,said", LOST)
def test_what_a_tool_does_otherwise_is_said_in_the_file_and_beside_it(tool, layout, said):
    plan = planned(**layout)
    lines = losses(plan.layout, to=tool)
    assert bool(lines) == bool(said) and all(part in " ".join(lines) for part in said)
    comments = " ".join(line.removeprefix("# ") for line in export(plan, to=tool).splitlines() if line[:1] == "#")
    assert all(line in comments for line in notes(plan, to=tool))
    assert notes(plan, to=tool)[-1].startswith(f"{tool} lacks: ")


@pytest.mark.parametrize("tool", DIALECTS)
def test_what_is_planned_for_a_tool_can_be_said_in_it(tool):
    request = wishes_for(ParallelRequest(), tool=tool)
    fixed = {name: value for name, value in request.fixed().items()} | {"uneven_batch": False}
    plan = plan_for(SMALL, cpu(2), training(global_batch_size=16), **fixed)
    export(plan, to=tool)
    lost = losses(plan.layout, to=tool)
    assert all(line.startswith("reduce_every_microbatch") for line in lost), lost  # no wish says when
    assert losses(nearest(plan.layout, to=tool), to=tool) == []


def test_a_wish_that_a_tool_has_no_words_for_is_refused_before_the_search():
    with pytest.raises(SpecError, match="parallel.pp: 2 has no words in accelerate.*leave it auto"):
        wishes_for(ParallelRequest(pp=2), tool="accelerate")
    assert wishes_for(ParallelRequest(schedule=["zbv", "1f1b"]), tool="megatron").schedule == "1f1b"


def test_a_name_cannot_end_the_comment():
    plan = planned(**SHARDED)
    evil = dataclasses.replace(plan, job=dataclasses.replace(plan.job, model="a\nbase_model: b"))
    assert "base_model" not in yaml.safe_load(export(evil, to="axolotl"))


# file, request → what the refusal must name
FSDP = "distributed_type: FSDP\n"
UNREADABLE = [
    ("{a: 1}", {}, "is neither Accelerate's YAML"),
    ("[1, 2]", {}, "is not a mapping"),
    ("a: [", {}, "cannot be read"),
    ("base_model: x\nbase_model: y", {}, "duplicate key base_model in line 2"),
    (FSDP + "parallelism_config: {parallelism_config_tp_size: two}", {}, "is not a whole number"),
    (FSDP + "parallelism_config: {parallelism_config_tp_size: true}", {}, "is not a whole number"),
    (FSDP + "parallelism_config: {parallelism_config_sp_size: 2}", {}, "Ulysses"),
    (FSDP + "parallelism_config: {parallelism_config_tp_sise: 2}", {}, "unknown key; did you mean 'tp_size'?"),
    (FSDP + "parallelism_config: 3", {}, "parallelism_config: 3 is not a mapping"),
    (FSDP + "fsdp_config: [1]", {}, "fsdp_config: [1] is not a mapping"),
    (FSDP + "num_processes: 8\nparallelism_config: {parallelism_config_tp_size: 2}", {},
     "num_processes: 8 contradicts the 2 ranks"),
    (FSDP + "num_processes: 8\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}", {}, "is not read; try one of"),
    ("distributed_type: DEEPSPEED", {}, "distributed_type: 'DEEPSPEED' has a layout of its own"),
    ("base_model: x\ntensor_parallel_size: 4", {"tp": 2}, "parallel.tp: 2 contradicts tp=4 of config.yaml"),
    ("base_model: x\nfsdp_config: {offload_params: true}", {}, "fsdp_config.offload_params"),
    ("base_model: x\nexpert_parallel_size: 4", {}, "is an axis beside the others"),
    ("base_model: x\ndp_sharding_size: 4", {}, "dp_sharding_size: unknown key; did you mean 'dp_shard_size'?"),
    ("base_model: x\ndeepspeed: zero3.json", {}, "deepspeed: 'zero3.json' is not read"),
    ("base_model: x\ncontext_parallel_size: 2\nring_attn_func: 7", {}, "ring_attn_func: 7 is not read"),
]


@pytest.mark.parametrize("text,request_,message", UNREADABLE)
def test_files_that_say_nothing_or_something_else_are_refused(text, request_, message, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as refused:
        read_request(file, request=ParallelRequest(**request_))
    assert message in str(refused.value)


def test_plain_fsdp_shards_over_all_processes(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_reshard_after_forward: true}\n")
    fixed = read_request(file, request=ParallelRequest()).fixed()
    assert (fixed["dp_shard"], fixed["dp_replicate"], fixed["tp"], fixed["zero_stage"]) == (8, 1, 1, 3)
