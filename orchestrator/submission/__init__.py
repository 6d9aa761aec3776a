"""How a run gets machines: the request, and the interfaces that Slurm and the local machine both implement.

`Executor` is used on the login node (submit, look, cancel); `Launcher` inside the allocation, by the
supervisor, to start one agent per node.
"""
import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

# "unknown" is what we say when Slurm gives no answer: it is neither failed nor fine. "ended" is a job that is
# certainly over while nobody but the run's own history can say how it went.
JobState = Literal["pending", "running", "completed", "failed", "cancelled", "time_limit", "preempted", "node_failure",
                   "ended", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmRequest:
    """One allocation: everything the sbatch script asks for."""

    job_name: str = "orc"
    num_nodes: int = 1  # spares included
    gres: str | None = None
    cpus_per_node: int | None = None
    mem_gb: int | None = None  # per node
    time_min: int = 60
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    exclude: tuple[str, ...] = ()
    signal_lead_s: int = 120
    setup: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


class SubmissionError(RuntimeError):
    """The scheduler refused or could not be reached; the message says what to do."""


class Executor(Protocol):
    """Login-node side: one job per submission."""

    def preview(self, request: SlurmRequest, run_dir: Path) -> str:
        """The exact script that submit() would hand over. Writes nothing."""
        ...

    def submit(self, request: SlurmRequest, run_dir: Path) -> str:
        """Start the supervisor of `run_dir`; returns the job id. Raises SubmissionError."""
        ...

    def state(self, job_id: str) -> JobState: ...

    def cancel(self, job_id: str) -> None: ...


class Launcher(Protocol):
    """Inside the allocation: the nodes it has, and agents on them."""

    job_id: str
    nodes: tuple[str, ...]  # in topology order
    address: str  # where the other nodes reach this host

    async def start_agents(self, nodes: tuple[str, ...], *, run_dir: Path,
                           port: int) -> list[asyncio.subprocess.Process]:
        """Start one agent on each of `nodes`; they connect to address:port by themselves.

        The processes returned are what was started here (one srun, or one agent per virtual node);
        their ends are logged, but whether an agent lives is known from its connection alone.
        """
        ...

    async def end_time(self) -> float | None:
        """When the allocation will end, in seconds since 1970. None: no limit, or no answer."""
        ...


def agent_argv(run_dir: Path, *, address: str, port: int, node: str | None = None) -> list[str]:
    """Command line of an agent. `node` None: the agent asks Slurm's SLURMD_NODENAME."""
    argv = [sys.executable, "-m", "jobs.agent", "--run-dir", str(run_dir), "--supervisor", f"{address}:{port}"]
    return argv + (["--node", node] if node else [])
