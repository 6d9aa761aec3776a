"""A plan in other trainers' terms, and theirs in ours: round trips, refusals, and the real Accelerate package."""
import dataclasses
import json
import os
import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

from jobs.spec.load import SpecError
from jobs.spec.parallel import Layout, ParallelDims
from orchestrator.config import ParallelRequest
from orchestrator.export import export, stage_layout
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
    flat = plan.layout.flat()
    assert {axis: fixed[axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")} == {
        axis: flat[axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")}
    for name in ("num_microbatches", "zero_stage", "cp_method", "microbatch_size", "recompute"):
        assert fixed.get(name, flat[name]) == flat[name]


def test_axolotl_gets_its_own_fields():
    data = yaml.safe_load(export(planned(**FLAT[1]), to="axolotl"))
    assert (data["dp_shard_size"], data["tensor_parallel_size"], data["context_parallel_size"]) == (4, 2, 1)
    assert data["micro_batch_size"] * data["gradient_accumulation_steps"] * data["dp_shard_size"] == 16
    assert data["fsdp_version"] == 2 and data["fsdp_config"]["reshard_after_forward"] is True


def test_torchtitan_gets_a_toml_with_every_layer_in_one_stage():
    layout = {"dims": {"pp": 2, "dp_shard": 2, "tp": 2}, "num_microbatches": 8, "schedule": "1f1b"}
    data = tomllib.loads(export(planned(**layout), to="torchtitan"))
    parts = data["parallelism"]["module_fqns_per_model_part"]
    assert [name for part in parts for name in part] == [
        "tok_embeddings", *(f"layers.{i}" for i in range(SMALL.num_layers)), "norm", "output"]
    assert data["parallelism"]["pipeline_parallel_schedule"] == "1F1B" and len(parts) == 2
    assert data["parallelism"]["data_parallel_shard_degree"] == 2
    assert data["training"]["local_batch_size"] * 2 == data["training"]["global_batch_size"] == 16


def test_megatron_gets_arguments_with_the_stages_written_out():
    dims = ParallelDims(pp=2, dp_shard=2, dp_replicate=2)
    layout = Layout(dims=dims, microbatch_size=1, num_microbatches=4, layers_per_stage=(1, 1, 1, 1), zero_stage=3,
                    schedule="interleaved_1f1b", virtual_stages=2, recompute="full")
    text = export(dataclasses.replace(BASE, layout=layout), to="megatron")
    for argument in ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-layout Et|t|t|tL",
                     "--data-parallel-sharding-strategy optim_grads_params", "--num-distributed-optimizer-instances 2",
                     "--recompute-granularity full", "--micro-batch-size 1", "--global-batch-size 16"):
        assert argument in text


def test_the_stage_string_holds_every_layer_once():
    layout = layout_of(dataclasses.replace(SMALL, num_layers=61), dims={"pp": 8})
    text = stage_layout(layout)
    assert text.count("t") == 61 and text.count("|") == 7 and text[0] == "E" and text[-1] == "L"


# tool, layout, what the refusal must name
UNSAYABLE = [
    ("accelerate", {"dims": {"pp": 2, "dp_shard": 4}, "num_microbatches": 4},
     "layout.pp: 2 has no field in accelerate"),
    ("axolotl", {"dims": {"dp_shard": 8}, "num_microbatches": 2, "zero_stage": 1}, "layout.zero_stage: 1"),
    ("accelerate", {"dims": {"dp_shard": 8}, "num_microbatches": 2, "recompute": "selective"}, "layout.recompute"),
    ("accelerate", {"dims": {"dp_replicate": 4, "tp": 2}, "num_microbatches": 4}, "layout.dp_shard"),
    ("axolotl", {"dims": {"dp_shard": 8}, "num_microbatches": 3}, "has no weightless ones"),
    ("megatron", {"dims": {"pp": 2, "dp_shard": 4}, "num_microbatches": 4, "schedule": "zbv", "virtual_stages": 2},
     "layout.schedule: 'zbv' has no field in megatron; plan again with parallel.schedule=interleaved_1f1b"),
    ("torchtitan", {"dims": {"dp_shard": 8}, "num_microbatches": 2, "layers_per_unit": 2}, "layout.layers_per_unit"),
    ("lightning", {"dims": {"dp_shard": 8}, "num_microbatches": 2}, "is no tool; valid: accelerate"),
]


@pytest.mark.parametrize("tool,layout,message", UNSAYABLE)
def test_what_a_tool_cannot_say_is_refused_not_left_out(tool, layout, message):
    with pytest.raises(SpecError) as refused:
        export(planned(**layout), to=tool)
    assert message in str(refused.value)


# file, request → what the refusal must name
UNREADABLE = [
    ("{a: 1}", {}, "is neither Accelerate's YAML"),
    ("[1, 2]", {}, "is not a mapping"),
    ("a: [", {}, "cannot be read"),
    ("distributed_type: FSDP\nparallelism_config: {parallelism_config_tp_size: two}", {}, "is not a whole number"),
    ("distributed_type: FSDP\nparallelism_config: {parallelism_config_sp_size: 2}", {}, "Ulysses"),
    ("base_model: x\ntensor_parallel_size: 4", {"tp": 2}, "parallel.tp: 2 contradicts tp=4 of config.yaml"),
    ("base_model: x\nfsdp_config: {offload_params: true}", {}, "fsdp_config.offload_params"),
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


# ------------------------------------------------------------------ the real Accelerate
READ = """
import json, os, sys
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser, _validate_launch_command
from accelerate.utils.launch import prepare_multi_gpu_env
args = launch_command_parser().parse_args(["--config_file", sys.argv[1], "script.py"])
args, _, _ = _validate_launch_command(args)
os.environ.update({k: str(v) for k, v in prepare_multi_gpu_env(args).items()})
from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
config, plugin = ParallelismConfig(), FullyShardedDataParallelPlugin()
print(json.dumps({"dp_replicate": config.dp_replicate_size, "dp_shard": config.dp_shard_size, "tp": config.tp_size,
                  "cp": config.cp_size, "total": config.total_size, "fsdp_version": plugin.fsdp_version,
                  "reshard": plugin.reshard_after_forward, "recompute": plugin.activation_checkpointing,
                  "wraps": plugin.auto_wrap_policy.__name__ if callable(plugin.auto_wrap_policy) else
                  str(plugin.auto_wrap_policy), "processes": args.num_processes}))
"""


@pytest.fixture(scope="module")
def accelerate_python(tmp_path_factory) -> Path:
    """A throw-away environment with Accelerate (whose tp asks for transformers), on top of this one's torch."""
    folder = tmp_path_factory.mktemp("accelerate")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    inside = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
                            capture_output=True, text=True, check=True).stdout.strip()
    (Path(inside) / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", "accelerate==1.15.0", "transformers"],
                          capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"accelerate does not install here: {done.stderr.strip().splitlines()[-1:]}")
    return python


@pytest.mark.slow
def test_accelerate_reads_what_was_written(accelerate_python, tmp_path):
    for layout in FLAT:
        if layout["dims"].get("dp_replicate", 1) == 8:
            continue  # plain replication is not FSDP there
        plan = planned(**layout)
        file = tmp_path / "config.yaml"
        file.write_text(export(plan, to="accelerate"))
        done = subprocess.run([accelerate_python, "-c", READ, str(file)], capture_output=True, text=True,
                              env={**os.environ, "ACCELERATE_USE_FSDP": "true"}, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        read, flat = json.loads(done.stdout.splitlines()[-1]), plan.layout.flat()
        assert {axis: read[axis] for axis in ("dp_replicate", "dp_shard", "tp", "cp")} == {
            axis: flat[axis] for axis in ("dp_replicate", "dp_shard", "tp", "cp")}
        assert read["total"] == read["processes"] == plan.layout.dims.world_size and read["fsdp_version"] == 2
        assert read["reshard"] is plan.layout.reshard_after_forward
        assert read["recompute"] is (flat["recompute"] == "full")
        assert "transformer_auto_wrap_policy" in read["wraps"]
