"""Steps inside a real allocation: where agents start, and what a dead task or node does not take along."""
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.spec.rundir import RunDir
from orchestrator.submission.nodes import expand_nodelist
from orchestrator.submission.slurm import SlurmExecutor, executor_for
from tests.helpers import slurm_jobs
from tests.helpers.slurm import slurm_request, started_at, wait_until, wait_until_over
from tests.helpers.slurm_jobs import told

pytestmark = pytest.mark.slurm

NODES = ("n1", "n2", "n3", "n4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A job of four nodes with a stand-in for an agent on each, led from its batch step."""

    job_id: str
    folder: Path

    def started(self) -> dict[str, dict]:
        """`node.step` → what the stand-in told at its start."""
        return {path.name.removesuffix(".started"): json.loads(path.read_text())
                for path in self.folder.glob("*.started") if path.stat().st_size}

    def beats(self, name: str) -> bool:
        """Whether the stand-in `node.step`, or the leader, beats after now."""
        path, now = self.folder / f"{name}.beat", time.time()
        wait_until(lambda: path.exists() and path.stat().st_mtime > now, what=f"a beat of {name}",
                   details=self.log)
        return True

    def order(self, node: str) -> None:
        with (self.folder / "orders").open("a") as file:
            file.write(f"{node}\n")

    def end(self, name: str, code: int) -> None:
        written = self.folder / f"{name}.code"
        written.write_text(str(code))
        written.rename(self.folder / f"{name}.end")  # the task must not find it empty

    def log(self) -> str:
        return RunDir(self.folder / "run").supervisor_log.read_text()


@pytest.fixture
def allocation(slurm_cluster, tmp_path):
    request = slurm_request(num_nodes=4, cpus_per_node=3, gres="gpu:2")
    job = executor_for(request, tmp_path / "run").submit(slurm_jobs.lead_steps, str(tmp_path / "told"),
                                                    str(tmp_path / "orders"))
    allocation = Allocation(job_id=job.job_id, folder=tmp_path)
    wait_until(lambda: len(allocation.started()) == 4, what="four tasks", details=allocation.log)
    yield allocation
    SlurmExecutor().cancel(job.job_id)
    wait_until_over(job.job_id)


def test_launcher_knows_its_nodes_address_and_end(allocation):
    seen = told(allocation.folder / "told")[0]
    assert tuple(seen["nodes"]) == NODES and seen["cpus"] == 3
    own = subprocess.run(["scontrol", "show", "node", "n1"], capture_output=True, text=True, check=True).stdout
    assert f"NodeAddr={seen['address']} " in own
    assert seen["end"] == started_at(allocation.job_id) + 300


def test_one_agent_per_node_with_all_of_the_nodes_share(allocation):
    started = allocation.started()
    assert sorted(started) == [f"{node}.0" for node in NODES]
    assert {(task["cpus"], task["gpus"]) for task in started.values()} == {("3", "0,1")}
    assert all(RunDir(allocation.folder).agent_log(node).exists() for node in NODES)


def test_a_dead_task_leaves_the_others_alive_and_is_replaced(slurm_cluster, allocation):
    slurm_cluster.command("exec", "n2", "kill", "-9", str(allocation.started()["n2.0"]["pid"]))
    allocation.end("n3.0", 5)  # and one that exits by itself
    allocation.order("n2")
    wait_until(lambda: "n2.1" in allocation.started(), what="a new task on n2", details=allocation.log)
    assert allocation.started()["n2.1"]["gpus"] == "0,1"
    assert all(allocation.beats(name) for name in ("n1.0", "n4.0", "n2.1", "leader"))
    for name in ("n1.0", "n4.0", "n2.1"):
        allocation.end(name, 0)
    (allocation.folder / "finish").touch()
    wait_until(lambda: SlurmExecutor().state(allocation.job_id) == "completed", what="job completed")
    assert told(allocation.folder / "told")[-1]["ends"] == [137, 0]


def test_a_second_step_runs_beside_the_first_on_the_same_node(allocation):
    allocation.order("n4")
    wait_until(lambda: "n4.1" in allocation.started(), what="a second task on n4",
               details=allocation.log)
    assert allocation.beats("n4.0") and allocation.beats("n4.1")


def test_a_killed_node_ends_neither_the_job_nor_the_others(slurm_cluster, allocation):
    slurm_cluster.kill_node("n3")
    try:
        wait_until(lambda: "n3" not in nodes_of(allocation.job_id), what="the job to shrink")
        assert SlurmExecutor().state(allocation.job_id) == "running"
        assert all(allocation.beats(name) for name in ("n1.0", "n2.0", "n4.0", "leader"))
        slurm_cluster.command("exec", "n2", "kill", "-9", str(allocation.started()["n2.0"]["pid"]))
        allocation.order("n2")  # in the allocation that has shrunk
        wait_until(lambda: "n2.1" in allocation.started(), what="a new task on n2",
                   details=allocation.log)
        assert allocation.beats("n2.1")
    finally:
        slurm_cluster.revive_node("n3")


def test_cancel_ends_every_task(slurm_cluster, allocation):
    SlurmExecutor().cancel(allocation.job_id)
    wait_until_over(allocation.job_id)
    for name, task in allocation.started().items():
        look = f"tr '\\0' ' ' < /proc/{task['pid']}/cmdline 2>/dev/null; true"
        assert str(allocation.folder) not in slurm_cluster.command("exec", name.split(".")[0], "sh", "-c", look)


def nodes_of(job_id: str) -> tuple[str, ...]:
    listed = subprocess.run(["squeue", "-h", "-j", job_id, "-o", "%N"], capture_output=True, text=True, check=True)
    return expand_nodelist(listed.stdout.strip())
