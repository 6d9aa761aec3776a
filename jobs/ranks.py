"""The ranks of one node as its agent keeps them: forked through the fork server, watched, ended.

Owned by the agent. Knows processes and their environment; knows nothing of the connection to the
supervisor: whatever happens is handed to the `report` function it was given.
"""
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from jobs.forkserver import Answer, Exited, Fork, Forked, Preload, Ready, Signal
from jobs.listener import Listener
from jobs.node import available_cpus, interface_of
from jobs.spec.control import RankState, Start
from jobs.spec.job import SCRUBBED_PREFIXES, RankSlot, rank_environment
from jobs.spec.lines import PROVEN_LIMIT
from jobs.spec.reports import RankExit
from jobs.spec.rundir import RunDir
from jobs.spec.wire import decode, encode

LOG_TAIL_BYTES = 8192
# A fork takes milliseconds and a SIGKILL less. A fork server that has done neither by then is stopped or stuck: it is
# killed, and the kernel takes its ranks along.
FORK_S, REAP_S = 60.0, 5.0  # the second well below what a supervisor waits for: policy.heartbeat_timeout_s


class Ranks:
    """At most one attempt's ranks at a time."""

    def __init__(self, *, node: str, run_dir: RunDir, report: Callable, listener: Listener,
                 extra_env: dict[str, str]) -> None:
        self.node = node
        self.run_dir = run_dir
        self.report = report
        self.listener = listener
        self.extra_env = extra_env
        self.attempt = 0
        self.slots: dict[int, RankSlot] = {}  # rank → slot, of ranks ordered and not yet ended
        self.pids: dict[int, int] = {}
        self.written: dict[int, float] = {}  # rank → when it last wrote to its log
        self._server: subprocess.Popen | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task | None = None
        self._forking: asyncio.Task | None = None
        self._ready = asyncio.Event()
        self._changed = asyncio.Event()  # set whenever a rank ends

    # -------------------------------------------------------------- fork server
    async def start_fork_server(self, *, preload: bool) -> None:
        """Bring up the fork server if none lives."""
        if self._server is not None and self._server.poll() is None:
            return
        ours, theirs = socket.socketpair()
        self._ready.clear()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "jobs.forkserver", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_fork_server_environment())
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=PROVEN_LIMIT)
        self._reading = asyncio.create_task(self._read_answers(reader))
        if preload:
            self._writer.write(encode(Preload()))
        else:
            self._ready.set()

    async def prepare(self, attempt: int, *, preload: bool) -> None:
        """A fork server that is ready, and no rank of an earlier attempt. Raises RuntimeError."""
        if self.slots:
            raise RuntimeError(f"ranks {sorted(self.slots)} of attempt {self.attempt} are still here")
        await self.start_fork_server(preload=preload)
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait([ready, self._reading], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._ready.is_set():
            raise RuntimeError(f"the fork server ended with code {self._server.wait()}; "
                               f"see {self.run_dir.agent_log(self.node)}")
        self.attempt = attempt

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionResetError):  # it was killed before it had read its last orders
            while line := await reader.readline():
                match decode(line, Answer, origin="fork server"):
                    case Ready():
                        self._ready.set()
                    case Forked(rank=rank, pid=pid):
                        self.pids[rank] = pid
                    case Exited() as end:
                        await self._ended(end)
        await self._lose_all()

    async def _lose_all(self) -> None:
        """The fork server is gone, and the kernel has killed its children."""
        for rank in list(self.slots):
            await self._ended(Exited(rank=rank, pid=self.pids.get(rank, 0), exit_code=None, signal=signal.SIGKILL,
                                     t=time.time()), note="its fork server is gone")

    async def _ended(self, end: Exited, note: str = "") -> None:
        """Report an exit, as the last thing that is told of the rank."""
        if end.rank not in self.slots:
            return
        await self.listener.heard_out(end.pid)
        slot = self.slots.pop(end.rank)
        self.pids.pop(end.rank, None)
        tail = _tail(self.run_dir.rank_log(self.attempt, end.rank)) + (f"\n[{note}]" if note else "")
        self.report(RankExit(attempt=self.attempt, rank=end.rank, local_rank=slot.local_rank, node=self.node,
                             pid=end.pid, t=end.t, exit_code=end.exit_code, signal=end.signal, log_tail=tail))
        self._changed.set()

    # -------------------------------------------------------------- an attempt
    async def start(self, order: Start, *, address: str) -> None:
        """Fork every rank of this node's slice."""
        self.slots = {slot.rank: slot for slot in order.slots}
        self.written.clear()
        if self._reading is None or self._reading.done():
            await self._lose_all()
            return
        for slot in order.slots:
            env = self._environment(order, slot, address)
            log = self.run_dir.rank_log(order.attempt, slot.rank)
            self._writer.write(encode(Fork(job=order.job, rank=slot.rank, env=env, log_path=str(log))))
        await self._writer.drain()
        self._forking = asyncio.create_task(self._expect_forks(order.attempt))

    async def _expect_forks(self, attempt: int) -> None:
        await asyncio.sleep(FORK_S)
        if self.attempt == attempt and self.slots.keys() - self.pids.keys():
            self._server.kill()  # reported, rank by rank, as what it is: _lose_all

    async def kill(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; returns when no rank and no child of one is left."""
        for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, REAP_S)):
            if not self.slots:
                break
            self._writer.write(encode(Signal(signum=signum)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended(), wait_s)
        if self.slots:
            self._server.kill()
            await self._all_ended()
        self._sweep()

    async def close(self) -> None:
        """End everything: the fork server's end takes its ranks along."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._sweep()

    async def _all_ended(self) -> None:
        while self.slots:
            self._changed.clear()
            await self._changed.wait()

    def _sweep(self) -> None:
        """Kill what ranks left behind: orphans of theirs become this process's children, in foreign sessions.
        The children of a killed one come next, so go on until none is found."""
        while strays := [child for child in psutil.Process().children() if _is_foreign(child)]:
            for stray in strays:
                with contextlib.suppress(psutil.NoSuchProcess):
                    stray.kill()
                    stray.wait()

    # -------------------------------------------------------------- what is known
    def states(self) -> tuple[RankState, ...]:
        progress = {p.rank: p for p in self.listener.progress() if p.attempt == self.attempt}
        known = ((rank, progress.get(rank)) for rank in self.slots)
        return tuple(RankState(rank=rank, pid=self.pids.get(rank, 0), step=p.step if p else 0,
                               phase=p.phase if p else "starting", t=p.t if p else 0.0,
                               active_t=max(p.t if p else 0.0, self.written.get(rank, 0.0))) for rank, p in known)

    def look_at_logs(self) -> None:
        """Note when each rank last wrote to its log. For a thread of its own: a file system may keep it waiting."""
        for rank in list(self.slots):
            with contextlib.suppress(OSError):
                status = self.run_dir.rank_log(self.attempt, rank).stat()
                self.written[rank] = status.st_mtime if status.st_size else 0.0

    def _environment(self, order: Start, slot: RankSlot, address: str) -> dict[str, str]:
        env = scrubbed(os.environ) | rank_environment(
            slot, world_size=order.job.world_size, local_world_size=len(order.slots), node_index=order.node_index,
            master_addr=order.master_addr, master_port=order.master_port, attempt=order.attempt,
            max_restarts=order.max_restarts, run=order.job.run) | self.extra_env
        threads = order.job.threads_per_rank or max(1, available_cpus() // len(order.slots))
        defaults = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        if interface := interface_of(address):
            defaults["GLOO_SOCKET_IFNAME"] = interface  # gloo would resolve the host name, often to 127.0.1.1
        return defaults | env


def _is_foreign(process: psutil.Process) -> bool:
    """In a session that is not this agent's. Its own children, the fork server among them, share its session."""
    try:
        return os.getsid(process.pid) != os.getsid(0)
    except ProcessLookupError:
        return False


def scrubbed(env) -> dict[str, str]:
    """The environment without what Slurm, MPI and submitit put into it."""
    return {name: value for name, value in env.items() if not name.startswith(SCRUBBED_PREFIXES)}


def _fork_server_environment() -> dict[str, str]:
    """One OS thread after `import torch`, and no CUDA context from merely asking whether there is CUDA."""
    single = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return scrubbed(os.environ) | single | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""  # it ended before it opened its log
