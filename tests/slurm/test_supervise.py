"""Whole runs on a real cluster through `orc submit`: what the end of the job says about the run, and vice versa.

The ranks run a `command:` of a few lines, so that these tests are about jobs and not about training.
"""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.spec.rundir import RunDir
from orchestrator.submission.slurm import SlurmExecutor
from tests.helpers.slurm import REPOSITORY, wait_until, wait_until_over

pytestmark = pytest.mark.slurm

ONCE = "import os, signal, sys; os.environ['RANK'] == '3' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and "
RUNS = [
    # what each rank executes                       restarts  job in accounting   last line of the history  attempts
    ("pass", 0, "COMPLETED|0:0", "completed", 1),
    ("import sys; sys.exit(5)", 0, "FAILED|1:0", "failed", 1),
    (ONCE + "os.kill(os.getpid(), signal.SIGKILL)", 2, "COMPLETED|0:0", "completed", 2),
]
SLEEP = "import pathlib, os, time; pathlib.Path(os.environ['STARTED'] + os.environ['RANK']).touch(); time.sleep(600)"


def orc(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "orchestrator.cli", *argv], capture_output=True, text=True,
                          cwd=REPOSITORY)


@pytest.fixture
def submit(slurm_cluster, tmp_path, monkeypatch):
    """Submits eight ranks on four nodes that execute a line of Python; gives the job id and the run directory."""
    monkeypatch.setenv("STARTED", f"{tmp_path}/started-")

    def run(code: str, *overrides: str) -> tuple[str, RunDir]:
        config = tmp_path / "run.yaml"
        config.write_text(json.dumps({
            "run": "r", "root": str(tmp_path / "runs"), "wandb": {"mode": "disabled"},
            "command": [sys.executable, "-c", code],
            "policy": {"max_restarts": 0, "settle_s": 0.2, "backoff_s": 0.1},
            "cluster": {"include": "slurm", "num_nodes": 4, "gpus_per_node": 2,
                        "slurm": {"time_min": 5, "cpus_per_node": 2, "gres": "gpu:2", "signal_lead_s": 60}}}))
        done = orc("submit", str(config), *overrides)
        assert done.returncode == 0, done.stderr
        run_dir = RunDir(tmp_path / "runs" / "r")
        job_id = json.loads(run_dir.submissions.read_text())["job_id"]
        jobs.append(job_id)
        return job_id, run_dir

    jobs: list[str] = []
    yield run
    for job_id in jobs:
        SlurmExecutor().cancel(job_id)


def history(run_dir: RunDir, event: str) -> list[dict]:
    lines = run_dir.events.read_text().splitlines() if run_dir.events.exists() else []
    return [line for line in map(json.loads, lines) if line["event"] == event]


def wait_for_ranks(tmp_path: Path, run_dir: RunDir) -> None:
    wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 8, what="eight ranks",
               details=run_dir.supervisor_log.read_text)


@pytest.mark.parametrize("code, restarts, job, state, attempts", RUNS, ids=[state for *_, state, _ in RUNS])
def test_the_jobs_end_is_the_runs(submit, code, restarts, job, state, attempts):
    job_id, run_dir = submit(code, f"policy.max_restarts={restarts}")
    assert wait_until_over(job_id) == job
    assert history(run_dir, "run_ended")[-1]["state"] == state
    assert len(history(run_dir, "attempt_started")) == attempts
    assert {line["job_id"] for line in history(run_dir, "run_started")} == {job_id}
    assert all(run_dir.agent_log(node).exists() for node in ("n1", "n2", "n3", "n4"))
    logs = orc("logs", "r", "--root", str(run_dir.path.parent))
    assert f"is job {job_id} on n1, n2, n3, n4" in logs.stdout, logs.stderr


def test_scancel_ends_the_run_without_a_restart_and_leaves_no_rank(slurm_cluster, submit, tmp_path, monkeypatch):
    job_id, run_dir = submit(SLEEP, "policy.max_restarts=5")
    wait_for_ranks(tmp_path, run_dir)
    monkeypatch.delenv("STARTED")  # or the search would find itself
    look = "grep -zl ^STARTED= /proc/[0-9]*/environ 2>/dev/null; true"
    assert "/proc/" in slurm_cluster.command("exec", "n3", "sh", "-c", look)
    subprocess.run(["scancel", job_id], check=True)
    assert wait_until_over(job_id).startswith("CANCELLED by 0|")
    assert SlurmExecutor().state(job_id) == "cancelled"
    assert len(history(run_dir, "attempt_started")) == 1
    assert history(run_dir, "run_ended")[-1]["state"] == "stopped"
    for node in ("n1", "n2", "n3", "n4"):
        assert slurm_cluster.command("exec", node, "sh", "-c", look) == "", f"processes left on {node}"


def test_slurms_warning_ends_the_run_as_a_time_limit(submit, tmp_path):
    job_id, run_dir = submit(SLEEP, "policy.max_restarts=5")
    wait_for_ranks(tmp_path, run_dir)
    subprocess.run(["scancel", "--batch", "--signal=USR2", job_id], check=True)
    assert wait_until_over(job_id).startswith("FAILED|")
    assert [line["kind"] for line in history(run_dir, "diagnosis")] == ["time_limit"]


def test_a_refused_submission_leaves_no_run_and_exits_2(slurm_cluster, tmp_path):
    done = orc("submit", "configs/runs/demo.yaml", "run=r", f"root={tmp_path / 'runs'}", "cluster=slurm",
               "cluster.slurm.partition=nope", "data.pattern=this.py")
    assert done.returncode == 2 and "cluster.slurm.partition must be one of: main, short, low" in done.stderr
    assert not (tmp_path / "runs" / "r").exists()


def test_dry_run_prints_the_script_and_writes_nothing(slurm_cluster, tmp_path):
    done = orc("submit", "configs/runs/demo.yaml", "--dry-run", "run=r", f"root={tmp_path / 'runs'}", "cluster=slurm")
    assert done.returncode == 0 and done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=r\n")
    assert list(tmp_path.iterdir()) == []
