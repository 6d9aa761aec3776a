"""The commands of `orc` as a person types them: bad input refused in one message, published forms kept."""
import json
from pathlib import Path

import pytest

from tests.helpers.orc import ROOT, command_run, orc, training_run

DEMO = ROOT / "configs" / "runs" / "demo.yaml"
NO_SLURM = {"PATH": "/nowhere"}

# name, arguments after `orc plan DEMO`, what stderr must hold
REFUSED_PLANS = [
    ("heads", ["model.num_heads=6", "model.num_kv_heads=6", "model.head_dim=32", "parallel.tp=4", "parallel.pp=1"],
     ["tp", "6"]),
    ("batch below dp", ["training.global_batch_size=1"], ["global_batch_size"]),
    ("product", ["parallel.tp=4", "parallel.pp=4"], ["8"]),
    ("unknown key", ["paralel.tp=2"], ["paralel: unknown key; did you mean 'parallel'?"]),
    ("missing data", ["data.path=/no/such/folder"], ["data.path: '/no/such/folder' does not exist"]),
    ("two at once", ["training.steps=x", "foo=1"], ["training.steps", "foo: unknown key"]),
    ("product", ["parallel.cp=2"], ["cp=2", "16 ranks"]),
]


@pytest.mark.parametrize("arguments, parts", [c[1:] for c in REFUSED_PLANS], ids=[c[0] for c in REFUSED_PLANS])
def test_an_impossible_plan_exits_2_with_its_reasons(arguments: list[str], parts: list[str]) -> None:
    done = orc("plan", DEMO, *arguments)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


def test_plan_json_has_the_published_form() -> None:
    plan = json.loads(orc("plan", DEMO, "--json", check=True).stdout)
    layout = plan["layout"]
    assert {k: layout[k] for k in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")} == {
        "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "pp": 2, "ep": 1}
    assert {"microbatch_size", "num_microbatches", "schedule", "recompute"} <= layout.keys()
    assert {"step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "mfu_convention", "memory_gib"} \
        <= plan["predicted"].keys()
    assert plan["candidates"] > 1 and plan["search_s"] > 0
    assert all({"layout", "reason"} <= rejected.keys() for rejected in plan["rejected"]) and plan["rejected"]


def test_a_run_needs_a_free_name_and_leaves_the_other_alone(tmp_path: Path) -> None:
    run_file = command_run(tmp_path, "pass", nodes=1, ranks=1)
    orc("run", run_file, check=True)
    before = sorted(p.name for p in (tmp_path / "runs" / "tiny").iterdir())
    done = orc("run", run_file)
    assert done.returncode == 2 and "run: 'tiny' is in use" in done.stderr and "orc resume" in done.stderr
    assert sorted(p.name for p in (tmp_path / "runs" / "tiny").iterdir()) == before


def test_a_refusal_of_the_planner_names_where_the_value_was_written() -> None:
    assert "(command line)" in orc("plan", DEMO, "parallel.tp=3", "parallel.dp_shard=auto").stderr


def test_a_secret_written_into_the_config_is_refused(tmp_path: Path) -> None:
    run_file = command_run(tmp_path, "pass", nodes=1, ranks=1)
    done = orc("run", run_file, 'command=[sh,-c,"echo ${oc.env:SITE_API_KEY}"]', SITE_API_KEY="0123456789abcdef")
    assert done.returncode == 2 and "SITE_API_KEY" in done.stderr and "0123456789abcdef" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_names_are_no_markup(tmp_path: Path) -> None:
    done = orc("run", command_run(tmp_path, "pass", nodes=1, ranks=1), "run=x[red]y")
    assert done.returncode == 2 and "'x[red]y'" in done.stderr


def test_data_without_text_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    run_file = training_run(tmp_path, nodes=1, ranks=1)
    done = orc("run", run_file, "data.pattern=*.nothing")
    assert done.returncode == 2 and "data" in done.stderr and "*.nothing" in done.stderr
    assert not (tmp_path / "runs" / "tiny").exists()


def test_submitting_without_slurm_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    done = orc("submit", DEMO, "cluster=slurm", f"root={tmp_path}", "run=nope", **NO_SLURM)
    assert done.returncode == 2 and "sbatch" in done.stderr and "PATH" in done.stderr
    assert not (tmp_path / "nope").exists()


def test_a_dry_run_shows_the_script_and_makes_nothing(tmp_path: Path) -> None:
    done = orc("submit", DEMO, "cluster=slurm", f"root={tmp_path}", "run=try", "--dry-run", check=True,
               WANDB_API_KEY="0123456789abcdef", **NO_SLURM)
    for line in ("#!/bin/bash", "#SBATCH --job-name=try", "#SBATCH --nodes=2", "#SBATCH --no-kill"):
        assert line in done.stdout
    assert "0123456789abcdef" not in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["status", "report", "stop", "resume", "logs"])
def test_an_unknown_run_is_refused(command: str, tmp_path: Path) -> None:
    done = orc(command, "nosuchrun", "--root", tmp_path)
    assert done.returncode == 2 and "nosuchrun" in done.stderr and "Traceback" not in done.stderr


def test_no_secret_leaves_its_file(tmp_path: Path) -> None:
    run_file = training_run(tmp_path, nodes=1, ranks=1, wandb={"mode": "offline"})
    key = "f00dfeed" * 5
    orc("run", run_file, check=True, WANDB_API_KEY=key)
    run_dir = tmp_path / "runs" / "tiny"
    secret = (run_dir / "secret").read_text().strip()
    assert (run_dir / "secret").stat().st_mode & 0o777 == 0o600 and len(secret) == 64
    for path in run_dir.rglob("*"):
        if path.is_file() and path.name != "secret":
            content = path.read_bytes()
            assert secret.encode() not in content and key.encode() not in content, path


def test_logs_are_found_by_rank_node_and_by_default(tmp_path: Path) -> None:
    run_file = command_run(tmp_path, "import os; print('hello from', os.environ['RANK'])", nodes=1)
    orc("run", run_file, check=True)
    run_dir = tmp_path / "runs" / "tiny"
    assert "hello from 1" in orc("logs", run_dir, "--rank", "1", check=True).stdout
    assert "shutdown" in orc("logs", run_dir, "--node", "node-0", check=True).stdout
    assert "AgentJoined" in orc("logs", run_dir, check=True).stdout
    both = orc("logs", run_dir, "--rank", "1", "--node", "node-0")
    assert both.returncode == 2 and "are two logs; give one" in both.stderr
    assert orc("logs", run_dir, "-n", "0").returncode == 2
    missing = orc("logs", run_dir, "--rank", "7")
    assert missing.returncode == 2 and "rank-00007.log" in missing.stderr


def test_help_names_every_command() -> None:
    text = orc("--help", check=True).stdout
    for command in ("plan", "run", "submit", "status", "report", "logs", "stop", "resume"):
        assert command in text
