"""Virtual nodes on one machine, behind the same interfaces as Slurm: no allocation, no account.

The supervisor runs detached in a session of its own and starts one agent per virtual node; everything
above and below is what runs on a cluster.
"""
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from jobs.spec.rundir import RunDir
from orchestrator.submission import JobState, SlurmRequest, SubmissionError, agent_argv

CANCEL_S = 10.0  # for a supervisor to end its ranks


class LocalExecutor:
    """Implements Executor. A job id is local-<pid>-<start>: a pid alone may be used again."""

    def preview(self, request: SlurmRequest, run_dir: Path) -> str:
        return " ".join(_supervisor_argv(run_dir, request.num_nodes)) + "\n"

    def submit(self, request: SlurmRequest, run_dir: Path) -> str:
        log = RunDir(run_dir).supervisor_log
        log.parent.mkdir(parents=True, exist_ok=True)
        # a signal that comes while Python starts must wait until the supervisor can answer it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2))
        try:
            with log.open("ab") as out:
                process = subprocess.Popen(_supervisor_argv(run_dir, request.num_nodes), stdin=subprocess.DEVNULL,
                                           stdout=out, stderr=out, start_new_session=True)
        except OSError as error:
            raise SubmissionError(f"the supervisor could not be started: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return job_id_of(process.pid)

    def state(self, job_id: str) -> JobState:
        if _find(job_id) is not None:
            return "running"
        # agents outlive their supervisor for a while: over is the job only with the last of them
        return "unknown" if _session(job_id) else "ended"

    def cancel(self, job_id: str) -> None:
        supervisor = _find(job_id)
        members = [supervisor] if supervisor is not None else _session(job_id)
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(members, timeout=CANCEL_S)


class LocalLauncher:
    """Implements Launcher: virtual nodes node-0, node-1, … on 127.0.0.1."""

    address = "127.0.0.1"

    def __init__(self, num_nodes: int) -> None:
        self.nodes = tuple(f"node-{i}" for i in range(num_nodes))
        self.job_id = job_id_of(os.getpid())

    async def start_agents(self, nodes: tuple[str, ...], *, run_dir: Path,
                           port: int) -> list[asyncio.subprocess.Process]:
        return [await self._start_agent(node, run_dir, port) for node in nodes]

    async def end_time(self) -> float | None:
        return None

    async def _start_agent(self, node: str, run_dir: Path, port: int) -> asyncio.subprocess.Process:
        log = RunDir(run_dir).agent_log(node)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            return await asyncio.create_subprocess_exec(
                *agent_argv(run_dir, address=self.address, port=port, node=node), stdin=subprocess.DEVNULL,
                stdout=out, stderr=out)


def job_id_of(pid: int) -> str:
    return f"local-{pid}-{_born(pid)}"


def _born(pid: int) -> int:
    """Clock ticks from boot to its start: a time of day would be another one once the clock has been set. Raises
    NoSuchProcess."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError) as gone:
        raise psutil.NoSuchProcess(pid) from gone


def _find(job_id: str) -> psutil.Process | None:
    """The living process of a job id."""
    pid = int(job_id.split("-")[1])
    try:
        process = psutil.Process(pid)
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE and job_id_of(pid) == job_id
        return process if alive else None
    except psutil.NoSuchProcess:
        return None


def _session(job_id: str) -> list[psutil.Process]:
    """What is left of a job whose supervisor is dead: its agents, which share its session."""
    session, born = (int(part) for part in job_id.split("-")[1:])
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if (os.getsid(process.pid) == session and _born(process.pid) >= born
                    and process.status() != psutil.STATUS_ZOMBIE):
                found.append(process)
    return found


def _supervisor_argv(run_dir: Path, num_nodes: int) -> list[str]:
    return [sys.executable, "-m", "orchestrator.supervision", str(run_dir), "--local-nodes", str(num_nodes)]
