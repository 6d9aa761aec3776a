"""What Slurm says of a job, seen through SlurmExecutor.state: also when half of Slurm is not there."""
import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.submission import SubmissionError
from orchestrator.submission.nodes import expand_nodelist, order_by_switch
from orchestrator.submission.slurm import SlurmExecutor
from tests.helpers.slurm import started_at, wait_until
from tests.helpers.slurm_jobs import told

pytestmark = pytest.mark.slurm

SHELL_JOBS = [
    # sbatch options                            body                                state
    ([], "true", "completed"),
    ([], "exit 3", "failed"),
    ([], "kill -9 $$", "failed"),
    (["--hold"], "true", "pending"),
    ([], "sleep 600", "running"),
    (["--requeue"], "if [ -z $SLURM_RESTART_COUNT ]; then scontrol requeue $SLURM_JOB_ID; sleep 60; fi", "completed"),
]
NODELISTS = [("n[1-3,4]", ("n1", "n2", "n3", "n4")), ("gpu[008-010]", ("gpu008", "gpu009", "gpu010")),
             ("rack[1-2]node[01-02]", ("rack1node01", "rack1node02", "rack2node01", "rack2node02")),
             ("ip-10-0-231-[1,86]", ("ip-10-0-231-1", "ip-10-0-231-86")), ("a[1-2], b3", ("a1", "a2", "b3")),
             ("(null)", ()), ("None assigned", ()), ("", ())]


@pytest.fixture
def sbatch(slurm_cluster, tmp_path):
    """Submits a shell line; cancels at the end what is still there."""
    started = []

    def submit(options: list[str], body: str) -> str:
        done = subprocess.run(["sbatch", "--parsable", f"--chdir={tmp_path}", "--time=5", *options],
                              input=f"#!/bin/bash\n{body}\n", capture_output=True, text=True, check=True)
        started.append(done.stdout.strip())
        return started[-1]

    yield submit
    subprocess.run(["scancel", *started], check=True)


@pytest.fixture
def path_without(tmp_path, monkeypatch):
    """Hides commands of Slurm, as on a site without accounting or on a machine that is no login node."""
    def hide(*names: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in {"sacct", "squeue", "scontrol", "scancel"} - set(names):
            (folder / name).symlink_to(Path("/usr/bin") / name)
        monkeypatch.setenv("PATH", str(folder))
    return hide


def wait_for_state(job_id: str, state: str) -> None:
    wait_until(lambda: SlurmExecutor().state(job_id) == state, what=f"job {job_id} {state}",
               details=lambda: SlurmExecutor().state(job_id))


@pytest.mark.parametrize("options, body, state", SHELL_JOBS)
def test_state_is_the_same_from_sacct_and_from_squeue(sbatch, path_without, options, body, state):
    job_id = sbatch(options, body)
    wait_for_state(job_id, state)
    path_without("sacct")
    assert SlurmExecutor().state(job_id) == state


def test_a_requeued_job_is_judged_by_its_latest_life(sbatch):
    job_id = sbatch(["--requeue"], "if [ -z $SLURM_RESTART_COUNT ]; then scontrol requeue $SLURM_JOB_ID; fi; sleep 99")

    def rows() -> list[str]:
        return subprocess.run(["sacct", "-DXnPj", job_id, "-o", "State"], capture_output=True, text=True,
                              check=True).stdout.split()

    wait_until(lambda: rows() == ["REQUEUED", "RUNNING"], what="two lives", details=lambda: str(rows()))
    assert SlurmExecutor().state(job_id) == "running"


def test_a_job_is_known_at_once_after_its_submission(sbatch):
    assert SlurmExecutor().state(sbatch([], "sleep 99")) in ("pending", "running")


def test_preempted_and_cancelled_jobs_say_so(sbatch, slurm_cluster):
    whole = ["--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=15"]
    low = sbatch(["--partition=low", "--no-requeue", *whole], "exec sleep 600")
    wait_for_state(low, "running")
    main = sbatch(["--partition=main", *whole], "exec sleep 600")
    wait_for_state(main, "running")
    wait_for_state(low, "preempted")
    SlurmExecutor().cancel(main)
    wait_for_state(main, "cancelled")
    SlurmExecutor().cancel(main)  # once more is no error


def test_a_job_that_loses_its_node_is_a_node_failure(sbatch, slurm_cluster):
    job_id = sbatch(["--no-requeue", "--nodelist=n4"], "sleep 600")
    wait_for_state(job_id, "running")
    slurm_cluster.kill_node("n4")
    try:
        wait_for_state(job_id, "node_failure")
    finally:
        slurm_cluster.revive_node("n4")


def test_no_answer_is_unknown(sbatch, path_without):
    job_id = sbatch([], "sleep 99")
    assert SlurmExecutor().state("1") == "unknown"  # Slurm answers, but does not know it
    path_without("sacct", "squeue")
    assert SlurmExecutor().state(job_id) == "unknown"


def test_an_unreachable_controller_and_accounting_are_unknown(sbatch, tmp_path, monkeypatch):
    job_id = sbatch([], "sleep 99")
    wait_for_state(job_id, "running")
    elsewhere = tmp_path / "slurm.conf"
    text = Path(os.environ["SLURM_CONF"]).read_text()
    elsewhere.write_text(text.replace(f"Port={os.environ['SLURM_LAB_PORT']}", "Port=9").replace(
        f"AccountingStoragePort={int(os.environ['SLURM_LAB_PORT']) + 1}", "AccountingStoragePort=9"))
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", str(elsewhere))
        assert SlurmExecutor().state(job_id) == "unknown"
    assert SlurmExecutor().state(job_id) == "running"


@pytest.mark.parametrize("nodelist, expected", NODELISTS)
def test_nodelists_are_expanded_by_slurm_itself(slurm_cluster, nodelist, expected):
    assert expand_nodelist(nodelist) == expected


def test_nodes_of_one_switch_stay_together(slurm_cluster):
    assert order_by_switch(("n4", "n2", "n3", "n1")) == ("n1", "n2", "n3", "n4")


def test_a_nodelist_that_slurm_cannot_read_is_an_error(slurm_cluster):
    with pytest.raises(SubmissionError, match="could not expand the node list"):
        expand_nodelist("n[3-1]")


def test_a_time_limit_warns_the_batch_process_first(limited_job):
    job_id, path = limited_job
    # the job may be over by now: what is told after the warning does not matter
    lines = wait_until(lambda: (seen := told(path)) and len(seen) > 1 and seen, what="the warning",
                       details=lambda: str(told(path)))
    start, warning = lines[:2]
    assert start["end"] == started_at(job_id) + 120 and warning["event"] == "SIGUSR2"
    left_s = start["end"] - warning["t"]
    # asked for 20; Slurm looks every 30 s, to the minute
    assert 0 < left_s <= 20 + 60, f"warned {left_s:.0f} s before the end"
    SlurmExecutor().cancel(job_id)
