"""Whatever a run's YAML, the command line or a stored plan says: every problem is one printable line that names the
value, where it stands and what to do; nothing hangs, and nothing is a traceback."""
import json
import os
import time

import pytest

from jobs.spec.load import Problem, SpecError
from orchestrator.load import load_traced
from orchestrator.planner import plan_json
from orchestrator.planner.page import check_writable
from orchestrator.planning import make_plan, read_plan
from tests.helpers.planning import SMALL, cpu, plan_for, training

RUN = """run: {run}
model: llama3-8b
cluster: {{include: h100, num_nodes: 2}}
data: {{path: {folder}}}
training: {{steps: 10, seq_len: 2048, global_batch_size: 64, param_dtype: bfloat16}}
"""
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi"))
# name → what is appended to the YAML, what the refusal must name
FILES = {
    "bottomless list": ("parallel: {tp: " + "[" * 3000 + "1" + "]" * 3000 + "}", "nested too deeply"),
    "bottomless mapping": ("wandb: " + "{a: " * 2000 + "1" + "}" * 2000, "nested too deeply"),
    "a key twice": ("run: other", "duplicate key run in line 6"),
    "aliases that multiply": (ALIASES, "exceeds the configured limit"),
    "more than a person writes": ("faults: [" + "{attempt: 1}, " * 30000 + "]", "larger than 256 KiB"),
    "code": ("wandb: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "keys that are no words": ("1: 2\ntrue: 3", "1: unknown key"),
    "a key with an escape": ('"\\e[31mred": 2', "'\\x1b[31mred': unknown key"),
    "an integer of 500 digits": ("checkpoint: {keep: 0x" + "f" * 400 + "}", "checkpoint.keep"),
    "an integer of 6,000 digits": ("checkpoint: {keep: 0x" + "f" * 5000 + "}", "checkpoint.keep"),
    "include of itself": ("include: run.yaml", "include: unknown key"),
}
# overrides, what the refusals must name
OVERRIDES = [
    (["model.num_layers=1000000"], ["model.num_layers: 1000000 is absurd; try at most 4,096"]),
    (["training.seq_len=1000000000000"], ["training.seq_len"]),
    (["cluster.num_nodes=1e30"], ["cluster.num_nodes: 1e+30"]),
    (["cluster.num_nodes=1000000000"], ["cluster.num_nodes: 1000000000 × gpus_per_node"]),
    (["cluster.gpus_per_node=0", "cluster.gpu=h999"], ["cluster.gpus_per_node: 0", "cluster.gpu: 'h999' is unknown"]),
    (["cluster.inter_node_gb_s=nan", "cluster.peak_tflops=-1"], ["inter_node_gb_s: nan", "peak_tflops: -1"]),
    (["cluster.inter_node_latency_us=1e300", "cluster.peak_tflops=1e300"],
     ["latency_us: 1e+300 is absurd", "1e-06 to 1e"]),
    (["cluster.matmul_efficiency=7", "cluster.nvlink_domain=7"], ["must be at most 1", "no multiple", "try 8"]),
    (["cluster.switches=[{nodes: 0, oversubscription: 0}]"], ["switches[0].nodes: 0", "oversubscription: 0"]),
    (["cluster.memory_bandwidth_gb_s=0", "cluster.memory_gib=1e300"], ["bandwidth_gb_s: 0", "memory_gib: 1e+300"]),
    (["model.num_heads=7", "parallel.tp=3"], ["model.num_heads: 7", "num_kv_heads", "parallel.tp: 3"]),
    (["parallel.tp={a: 1}"], ["parallel.tp: {'a': 1} is not a whole number", "(command line)"]),
    (["parallel.tp=[1, x]", "parallel.pp=-1"], ["parallel.tp: 'x'", "parallel.pp: -1"]),
    (["parallel.tp=16", "parallel.pp=2"], ["parallel.tp: 16"]),
    (["parallel.dp_shard=16", "parallel.tp=2"],
     ["dp_shard=16 × tp=2 = 32 does not divide 2 nodes × 8 GPUs", "try dp_shard="]),
    (["parallel=null"], ["parallel"]), (["training=[1]"], ["training"]), (["cluster=5"], ["cluster: 5"]),
    (["run=\"a\\nb\""], ["run: 'a\\nb' must be a plain name"]), (["run=" + "x" * 101], ["must be a plain name"]),
    (["run=.."], ["must be a plain name"]), (["run=\u202eevil"], ["must be a plain name"]),
    (["model=" + "../" * 50 + "etc/passwd"], ["has no file"]), (["model=" + "m" * 5000], ["has no file"]),
]
LIMIT_S = 20.0  # of one busy core; each takes well below one


def refused(path, overrides=()) -> tuple[Problem, ...]:
    began = time.process_time()
    with pytest.raises(SpecError) as error:
        make_plan(load_traced(path, overrides), trainable=False)
    assert time.process_time() - began < LIMIT_S
    lines = list(map(str, error.value.problems))
    assert all(line.isprintable() and len(line) < 2000 for line in lines), lines
    return error.value.problems


@pytest.fixture
def run_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(run="t", folder=tmp_path))
    return path


@pytest.mark.parametrize("name", FILES)
def test_hostile_yaml_is_refused(name, run_yaml):
    more, said = FILES[name]
    run_yaml.write_text(run_yaml.read_text() + more + "\n")
    assert said in "\n".join(map(str, refused(run_yaml)))


@pytest.mark.parametrize("overrides,said", OVERRIDES, ids=lambda one: str(one[0])[:40])
def test_hostile_overrides_are_refused_all_at_once(overrides, said, run_yaml):
    lines = "\n".join(map(str, refused(run_yaml, overrides)))
    assert all(part in lines for part in said), lines


def test_what_is_no_plain_file_is_not_read(tmp_path):
    """A device or a pipe may never end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing", tmp_path / "/dev/zero"):
        assert "cannot be read" in str(refused(path)[0])
        with pytest.raises(SpecError, match="cannot be read as a plan"):
            read_plan(path)


def test_a_page_that_cannot_be_written_is_refused_before_the_search(tmp_path):
    for path in (tmp_path, tmp_path / "no" / "page.html", tmp_path / ("x" * 5000)):
        with pytest.raises(SpecError, match="cannot be written.*give a file in a folder that exists"):
            check_writable(path)
    check_writable(tmp_path / "page.html")


# where in a stored plan, the value put there
SPOILT = [(("layout", "tp"), 0), (("layout", "pp"), -2), (("layout", "num_microbatches"), 0), (("layout", "tp"), 1.5),
          (("layout", "layers_per_stage"), [4, 4, 4]), (("layout", "layers_per_stage"), [0]), (("layout",), None),
          (("layout", "mesh_order"), ["tp", "tp", "tp", "tp", "tp"]), (("layout", "cp_method"), "x"), (("job",), []),
          (("rejected",), 3), (("job", "gpus_per_node"), 0)]


@pytest.mark.parametrize("where,value", SPOILT, ids=str)
def test_a_spoilt_plan_is_refused(where, value, tmp_path):
    data = plan_json(plan_for(SMALL, cpu(1), training(global_batch_size=16), pp=1))
    spoilt = data
    for key in where[:-1]:
        spoilt = spoilt[key]
    spoilt[where[-1]] = value
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(SpecError):
        read_plan(tmp_path)


def test_a_bottomless_plan_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text("[" * 100_000)
    with pytest.raises(SpecError, match="cannot be read as a plan"):
        read_plan(tmp_path)
