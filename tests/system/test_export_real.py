"""Exported files, read by the real tools: each tool's own parser and validation, in a throw-away environment.

Needs the package index; a tool that does not install is skipped with the reason. ORC_TOOLS_PYTHON names an interpreter
that has them all already. Megatron-LM itself is no package: ORC_MEGATRON_LM names a checkout of it, megatron-core alone
is read without.
"""
import dataclasses
import functools
import json
import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout, ParallelDims, split_layers
from orchestrator.request import ParallelRequest
from orchestrator.dialects import nearest
from orchestrator.export import ACCELERATE_CP, MEGATRON_CP, MEGATRON_SHARDING, TITAN_SCHEDULES, export
from orchestrator.foreign import read_request
from orchestrator.planner.plan import Plan, PlannedJob
from tests.helpers.planning import LLAMA3_8B, LLAMA3_70B, LLAMA3_405B, SMALL, cpu, plan_for, training

pytestmark = pytest.mark.slow
READERS = Path(__file__).parents[1] / "helpers" / "tool_readers.py"
# Installed without their dependencies, which ask for CUDA: only what parsing and validating a config imports.
HUGGING_FACE = ["accelerate==1.15.0", "transformers", "tokenizers", "huggingface_hub", "safetensors", "regex", "numpy",
                "packaging", "psutil", "pyyaml", "tqdm", "filelock", "fsspec", "httpx", "requests"]
PACKAGES = {
    "accelerate": HUGGING_FACE,
    "axolotl": [*HUGGING_FACE, "axolotl==0.19.0", "pydantic", "addict", "colorama", "python-dotenv"],
    "torchtitan": [*HUGGING_FACE, "torchtitan==0.3.0", "tyro", "spmd_types==0.2.3", "torchdata", "torch_checkpointing",
                   "datasets<4.8", "tensorboard", "wandb", "einops", "pillow", "rich"],
    "megatron_core": ["megatron-core==0.16.1", "numpy", "packaging", "pyyaml"],
}
WITHOUT_DEPENDENCIES = ("axolotl", "torchtitan", "torchdata", "megatron-core", "accelerate", "torch_checkpointing",
                        "spmd_types")
PACKAGES["megatron"] = [*PACKAGES["megatron_core"], "transformers", "einops", "triton"]

DEEPSEEK = ModelSpec(name="deepseek-v3", vocab_size=129280, dim=7168, num_layers=61, num_heads=128, num_kv_heads=128,
                     ffn_dim=18432)
# name → model, degrees, the rest of the layout; two sequences of 4096 tokens or more per data-parallel share
CASES = {
    "8b ddp": (LLAMA3_8B, {"dp_replicate": 8}, {"num_microbatches": 2}),
    "8b zero3": (LLAMA3_8B, {"dp_shard": 64}, {"num_microbatches": 4, "recompute": "full"}),
    "8b zero2 every": (LLAMA3_8B, {"dp_shard": 64}, {"num_microbatches": 4, "zero_stage": 2,
                                                     "reduce_every_microbatch": True, "microbatch_size": 2}),
    "8b hsdp tp": (LLAMA3_8B, {"dp_replicate": 2, "dp_shard": 8, "tp": 4}, {"num_microbatches": 2}),
    "8b cp": (LLAMA3_8B, {"dp_shard": 4, "cp": 4}, {"num_microbatches": 2}),
    "8b cp allgather": (LLAMA3_8B, {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2},
                        {"num_microbatches": 2, "cp_method": "allgather", "zero_stage": 2}),
    "8b zero1 selective": (LLAMA3_8B, {"dp_shard": 16, "tp": 2}, {"zero_stage": 1, "recompute": "selective",
                                                                  "num_microbatches": 2, "layers_per_unit": 2}),
    "70b 1f1b": (LLAMA3_70B, {"dp_shard": 4, "tp": 8, "pp": 4}, {"num_microbatches": 8, "zero_stage": 1}),
    "70b gpipe": (LLAMA3_70B, {"dp_shard": 4, "tp": 8, "pp": 4}, {"num_microbatches": 8, "schedule": "gpipe"}),
    "70b interleaved": (LLAMA3_70B, {"dp_replicate": 2, "dp_shard": 2, "tp": 8, "pp": 4},
                        {"num_microbatches": 8, "zero_stage": 1, "schedule": "interleaved_1f1b", "virtual_stages": 5}),
    "405b uneven": (LLAMA3_405B, {"dp_shard": 16, "cp": 2, "tp": 8, "pp": 16},
                    {"num_microbatches": 16, "zero_stage": 1, "recompute": "full"}),
    "405b zbv": (LLAMA3_405B, {"dp_shard": 32, "tp": 8, "pp": 16},
                 {"num_microbatches": 32, "zero_stage": 2, "schedule": "zbv", "virtual_stages": 2}),
    "moe ep": (DEEPSEEK, {"dp_shard": 32, "tp": 2, "pp": 16, "ep": 8}, {"num_microbatches": 32, "zero_stage": 1}),
    "moe ep zero3": (DEEPSEEK, {"dp_shard": 64, "ep": 16}, {"num_microbatches": 2}),
}
FLAT = [name for name, (_, degrees, rest) in CASES.items() if degrees.get("pp", 1) == degrees.get("ep", 1) == 1]
MEGATRON = [name for name, (_, _, rest) in CASES.items() if rest.get("schedule") not in ("gpipe", "zbv")]
TITAN_MODELS = {"llama3-8b": ("llama3", "llama3_8b"), "llama3-70b": ("llama3", "llama3_70b"),
                "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b")}
# Its 405B is in float8 and asks for another package.
TITAN = [name for name, (model, _, _) in CASES.items() if model.name in TITAN_MODELS]


def planned(name: str) -> Plan:
    """What `orc plan` would have chosen: a plan's layout and job; its prices do not reach another tool."""
    model, degrees, rest = CASES[name]
    dims = ParallelDims(**degrees)
    layout = Layout(**{"dims": dims, "microbatch_size": 1,
                       "layers_per_stage": split_layers(model.num_layers,
                                                        dims.pp * rest.get("virtual_stages", 1))} | rest)
    job = PlannedJob(model=model.name, num_params=1, cluster="h100", num_nodes=-(-dims.world_size // 8),
                     gpus_per_node=8, gpu="h100", seq_len=4096, global_batch_size=layout.slots, param_dtype="bfloat16",
                     headroom=0.1)
    return dataclasses.replace(priced(), job=job, layout=layout)


@functools.cache
def priced() -> Plan:
    return plan_for(SMALL, cpu(2), training(global_batch_size=16))


@pytest.fixture(scope="module")
def python_of(tmp_path_factory):
    """tool → an interpreter that can import it; each environment lies on top of this one's torch."""
    @functools.cache
    def build(tool: str) -> str:
        if "ORC_TOOLS_PYTHON" in os.environ:
            return os.environ["ORC_TOOLS_PYTHON"]
        folder = tmp_path_factory.mktemp(tool)
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        inside = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        (inside / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        alone = [name for name in PACKAGES[tool] if name.partition("==")[0] in WITHOUT_DEPENDENCIES]
        rest = [name for name in PACKAGES[tool] if name not in alone]
        for packages in (["--no-deps", *alone], rest):
            done = subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], capture_output=True,
                                  text=True)
            if done.returncode:
                pytest.skip(f"{tool} does not install here: {done.stderr.strip().splitlines()[-1:]}")
        return str(python)

    return build


def read(tool: str, name: str, python: str, folder: Path, *own: str) -> dict:
    plan = planned(name)
    file = folder / "file"
    file.write_text(export(plan, to=tool.removesuffix("_core")))
    done = subprocess.run([python, READERS, tool, file, str(plan.layout.dims.world_size), *own], capture_output=True,
                          text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def holds(found: dict, wanted: dict) -> None:
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", FLAT)
def test_accelerate_launches_what_was_planned(name, python_of, tmp_path):
    layout = nearest(planned(name).layout, to="accelerate")
    dims, found = layout.dims, read("accelerate", name, python_of("accelerate"), tmp_path)
    holds(found, {"processes": dims.world_size, "machines": max(1, dims.world_size // 8), "mixed_precision": "bf16",
                  "num_microbatches": layout.num_microbatches, "reduce_every": layout.reduce_every_microbatch,
                  "fsdp": dims.fsdp > 1, "multi_gpu": dims.fsdp == 1})
    if dims.fsdp > 1:
        holds(found, {axis: getattr(dims, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp")} | {
            "cp_method": ACCELERATE_CP[layout.cp_method] if dims.cp > 1 else None, "total": dims.world_size,
            "reshard": layout.reshard_after_forward, "recompute": layout.recompute == "full", "offload": False,
            "wraps": "transformer_auto_wrap_policy"})


@pytest.mark.parametrize("name", FLAT)
def test_axolotl_trains_what_was_planned(name, python_of, tmp_path):
    layout = nearest(planned(name).layout, to="axolotl")
    dims, found = layout.dims, read("axolotl", name, python_of("axolotl"), tmp_path)
    holds(found, {axis: getattr(dims, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp")} | {
        "unread": [], "microbatch_size": layout.microbatch_size, "num_microbatches": layout.num_microbatches,
        "seq_len": 4096, "recompute": layout.recompute == "full", "reduce_every": layout.reduce_every_microbatch,
        "reshard": layout.reshard_after_forward if dims.fsdp > 1 else None,
        "wraps": "TRANSFORMER_BASED_WRAP" if dims.fsdp > 1 else None,
        "ring": "RingAttnFunc.BATCH_RING" if dims.cp > 1 else ""})


@pytest.mark.parametrize("name", TITAN)
def test_torchtitan_trains_what_was_planned(name, python_of, tmp_path):
    plan = planned(name)
    layout = nearest(plan.layout, to="torchtitan")
    module, config = TITAN_MODELS[plan.job.model]
    dims, found = layout.dims, read("torchtitan", name, python_of("torchtitan"), tmp_path, "--module", module,
                                    "--config", config)
    pipelined = dims.pp > 1
    policy = {"none": "NoneType", "selective": "SelectiveAC.Config", "full": "FullAC.Config"}[layout.recompute]
    holds(found, {axis: getattr(dims, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")} | {
        "accumulation": 1 if pipelined else layout.num_microbatches, "seq_len": 4096, "dtype": "bfloat16",
        "local": layout.microbatch_size * (layout.num_microbatches if pipelined else 1),
        "microbatch_size": layout.microbatch_size, "recompute": policy, "missing": [], "sequence_parallel": True,
        "reshard": "always" if layout.zero_stage == 3 else "never",
        "stages": list(layout.layers_per_stage) if pipelined else None})
    if pipelined:
        assert TITAN_SCHEDULES[layout.schedule] in found["schedule"]


def megatron_of(name: str) -> tuple[Layout, dict, list[str]]:
    """The layout as Megatron runs it, what its config must hold, and the model's own arguments."""
    model, layout = CASES[name][0], nearest(planned(name).layout, to="megatron")
    dims = layout.dims
    wanted = {axis: getattr(dims, axis) for axis in ("cp", "tp", "pp", "ep")} | {
        "sequence_parallel": dims.tp > 1 and layout.sequence_parallel, "virtual": layout.virtual_stages,
        "recompute": "full" if layout.recompute == "full" else None,
        "stages": list(layout.layers_per_stage) if dims.pp > 1 else None,
        "sharding": MEGATRON_SHARDING[layout.zero_stage] if dims.fsdp > 1 and layout.zero_stage > 1 else False,
        "distributed_optimizer": dims.fsdp > 1, "dp_replicate": dims.dp_replicate if dims.fsdp > 1 else 1}
    if dims.cp > 1:
        wanted["cp_method"] = MEGATRON_CP[layout.cp_method]
    if dims.ep > 1:
        wanted["etp"] = 1
    own = ["--num-layers", model.num_layers, "--hidden-size", model.dim, "--num-attention-heads", model.num_heads]
    return layout, wanted, list(map(str, own))


@pytest.mark.parametrize("name", MEGATRON)
def test_the_configs_of_megatron_core_hold_what_was_planned(name, python_of, tmp_path):
    _, wanted, own = megatron_of(name)
    own += ["--num-moe-experts", "256"] if wanted["ep"] > 1 else []
    holds(read("megatron_core", name, python_of("megatron_core"), tmp_path, *own), wanted | {"unknown": []})


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_lm_parses_and_accepts_what_was_planned(name, python_of, tmp_path):
    if "ORC_MEGATRON_LM" not in os.environ:
        pytest.skip("ORC_MEGATRON_LM names no checkout of Megatron-LM, whose arguments are in no package")
    layout, wanted, own = megatron_of(name)
    own += ["--num-experts", "256"] if wanted["ep"] > 1 else []
    own += ("--max-position-embeddings 8192 --lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer "
            "--vocab-size 1000").split()
    holds(read("megatron", name, python_of("megatron"), tmp_path, *own), wanted | {
        "dp": layout.dims.dp, "microbatch_size": layout.microbatch_size, "batch": layout.slots, "seq_len": 4096,
        "overlap": layout.dims.fsdp > 1})


@pytest.mark.parametrize("tool", ["accelerate", "axolotl"])
@pytest.mark.parametrize("name", FLAT)
def test_what_the_tools_accept_comes_back_as_the_same_degrees(name, tool, tmp_path):
    file = tmp_path / "file.yaml"
    file.write_text(export(planned(name), to=tool))
    fixed, flat = read_request(file, request=ParallelRequest()).fixed(), nearest(planned(name).layout, to=tool).flat()
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    assert {axis: fixed[axis] for axis in axes} == {axis: flat[axis] for axis in axes}
