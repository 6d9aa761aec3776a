"""A real Slurm cluster for tests: four nodes of two (fake) GPUs on this machine, from deploy/slurm.

`slurm_cluster` brings it up once per session and takes it down again, unless SLURM_LAB_DIR names one
that was up before. Tests skip, with the reason, only where Slurm cannot be installed.
"""
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from orchestrator.submission import SlurmRequest
from orchestrator.submission.client import ask

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "deploy" / "slurm" / "cluster.sh"
NUM_NODES, GPUS_PER_NODE = 4, 2
PATIENCE_S = 300.0  # for what hangs: no machine is so slow
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmCluster:
    """Handle on a running cluster: the nodes are n1, n2, …"""

    directory: Path
    num_nodes: int = NUM_NODES
    gpus_per_node: int = GPUS_PER_NODE

    def command(self, *argv: str) -> str:
        """Run a cluster.sh command; returns its output."""
        done = subprocess.run([str(SCRIPT), *argv], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"cluster.sh {' '.join(argv)}: {done.stderr}"
        return done.stdout

    def kill_node(self, node: str) -> None:
        """Power loss; Slurm is told at once, where it would notice by itself after some ten seconds."""
        self.command("kill-node", node)
        subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=killed"], check=True)

    def revive_node(self, node: str) -> None:
        self.command("revive-node", node)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    if reason := why_not_here():
        pytest.skip(reason)
    number = os.getpid() % 100  # several checkouts may test at once
    own = {"SLURM_LAB_DIR": f"/tmp/orc-slurm-{os.getpid()}", "SLURM_LAB_NET": f"10.{100 + number}.7",
           "SLURM_LAB_PORT": str(18000 + 40 * number),
           "SLURM_LAB_NODE_TIMEOUT": "120"}  # busy nodes may be slow to answer; kill_node tells Slurm itself
    patch = pytest.MonkeyPatch()
    for name, value in own.items():
        patch.setenv(name, os.environ.get(name, value))
    cluster = SlurmCluster(directory=Path(os.environ["SLURM_LAB_DIR"]))
    found_running = (cluster.directory / "shape").exists()
    try:
        cluster.command("up", str(NUM_NODES), str(GPUS_PER_NODE))
        patch.setenv("SLURM_CONF", str(cluster.directory / "etc" / "slurm.conf"))
        yield cluster
    finally:
        if not found_running:
            cluster.command("down")
            shutil.rmtree(cluster.directory, ignore_errors=True)  # logs only; pytest shows what matters
            Path(f"{cluster.directory}.lock").unlink(missing_ok=True)
        patch.undo()


def why_not_here() -> str | None:
    """Why no cluster can be brought up on this machine; None where one can."""
    if os.geteuid() != 0:
        return "a Slurm cluster needs root (namespaces, munge, slurmd)"
    installed = all(map(shutil.which, ("slurmctld", "slurmd", "slurmdbd", "sbatch", "munged", "mariadbd")))
    if not installed and shutil.which("apt-get") is None:
        return "Slurm is not installed, and this is not Debian or Ubuntu"
    return None


def slurm_request(**changes) -> SlurmRequest:
    """A small request that the cluster can fulfil at once. Jobs import the tests' helpers from their cwd."""
    values = {"job_name": "test", "num_nodes": 1, "gres": None, "cpus_per_node": 1, "mem_gb": 1, "time_min": 5,
              "partition": None, "account": None, "qos": None, "exclude": (), "signal_lead_s": 60, "setup": (),
              "extra": {}} | changes
    return SlurmRequest(**values | {"extra": {"chdir": str(REPOSITORY)} | values["extra"]})


def wait_until(condition: Callable[[], T], *, what: str, details: Callable[[], str] = str) -> T:
    """Poll until `condition` gives something true, and return that."""
    end = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {PATIENCE_S:.0f} s. {details()}"
        time.sleep(0.1)
    return value


def ended(job_id: str) -> str:
    """`State|ExitCode` in accounting; empty while the job is not over."""
    row = subprocess.run(["sacct", "-XnPj", job_id, "--format=End,State,ExitCode"], capture_output=True, text=True,
                         check=True).stdout.strip()
    end, _, rest = row.partition("|")
    return "" if end in ("", "Unknown") else rest


def started_at(job_id: str) -> float:
    """When the job started, as accounting has it."""
    def start() -> str:
        return ask("sacct", "-XnPj", job_id, "--format=Start").strip()

    return float(wait_until(lambda: start().isdigit() and start(), what=f"start of job {job_id} in accounting"))


def wait_until_over(job_id: str) -> str:
    """Until the job has ended, its nodes are free and accounting knows; returns `State|ExitCode`.

    A cancelled job is CANCELLED at once, while its processes are still being ended (COMPLETING).
    """
    def busy() -> str:
        return subprocess.run(["squeue", "-ho", "%i", "-t", "pending,running,suspended,completing", "-j", job_id],
                              capture_output=True, text=True, check=True).stdout

    wait_until(lambda: not busy(), what=f"job {job_id} over", details=lambda: ended(job_id))
    return wait_until(lambda: ended(job_id), what=f"job {job_id} in accounting")
