"""The fork server of a node: forks ranks in milliseconds from a process that has already imported torch.

Started by the agent, one per node, `python -m jobs.forkserver FD`. It stays single-threaded, runs no
torch operation and makes no CUDA context: a fork of anything else hangs. A rank with a `command:` is
exec'd instead. It knows nothing of supervisors, attempts or placement.
"""
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass

from jobs.process import cuda_driver_is_initialized, die_with_parent, num_threads
from jobs.rank_process import run_rank
from jobs.spec.job import JobSpec
from jobs.spec.wire import decode, encode


# ------------------------------------------------------------------ agent → fork server
@dataclass(frozen=True, kw_only=True, slots=True)
class Preload:
    """Import torch and everything a first step would import lazily."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    job: JobSpec
    rank: int
    env: dict[str, str]  # the whole environment of the rank
    log_path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """Send to every living rank and all its children."""

    signum: int


# ------------------------------------------------------------------ fork server → agent
@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What was to be imported is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forked:
    rank: int
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Exited:
    """Exactly one of exit_code and signal is set."""

    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    t: float


Order = Preload | Fork | Signal
Answer = Ready | Forked | Exited


class ForkServer:
    """Answers orders on `channel` until the agent closes it; then ends every rank."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.buffer = b""
        self.ranks: dict[int, tuple[int, int]] = {}  # pidfd → (rank, pid)
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ)

    def serve(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.channel:
                    if not self._read_orders():
                        self._signal(signal.SIGKILL)
                        return
                else:
                    self._reap(key.fd)

    def _read_orders(self) -> bool:
        data = self.channel.recv(1 << 20)
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            match decode(line, Order):
                case Preload():
                    self._preload()
                case Fork() as order:
                    self._fork(order)
                case Signal(signum=signum):
                    self._signal(signum)
        return bool(data)

    def _preload(self) -> None:
        from jobs.runtime import preload  # torch is loaded only where ranks are forked, not exec'd

        preload()
        self._answer(Ready())

    def _fork(self, order: Fork) -> None:
        _assert_forkable()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_rank(order, parent)  # does not return
        pidfd = os.pidfd_open(pid)
        self.ranks[pidfd] = (order.rank, pid)
        self.selector.register(pidfd, selectors.EVENT_READ)
        self._answer(Forked(rank=order.rank, pid=pid))

    def _become_rank(self, order: Fork, parent: int) -> None:
        code = 1
        try:
            os.setsid()  # a process group of its own: the rank's children die with it
            die_with_parent(parent)
            self.selector.close()
            self.channel.close()
            for pidfd in self.ranks:
                os.close(pidfd)
            _redirect_output(order.log_path)
            os.environ.clear()
            os.environ.update(order.env)
            code = run_rank(order.job)
        except BaseException:
            traceback.print_exc()
        finally:
            _flush()
            os._exit(code)

    def _signal(self, signum: int) -> None:
        for _, pid in self.ranks.values():
            for send in (os.killpg, os.kill):  # before its setsid() a rank leads no group yet
                try:
                    send(pid, signum)
                except ProcessLookupError:
                    pass  # it has ended, and will be reaped

    def _reap(self, pidfd: int) -> None:
        rank, pid = self.ranks.pop(pidfd)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        try:
            os.killpg(pid, signal.SIGKILL)  # while the zombie still holds the pid: no other group can have it
        except ProcessLookupError:
            pass
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._answer(Exited(rank=rank, pid=pid, exit_code=code if code >= 0 else None,
                            signal=-code if code < 0 else None, t=time.time()))

    def _answer(self, answer: Answer) -> None:
        self.channel.sendall(encode(answer))


def _assert_forkable() -> None:
    if (threads := num_threads()) != 1:
        raise RuntimeError(f"fork server has {threads} OS threads; a forked rank would hang in its first matmul")
    if cuda_driver_is_initialized():
        raise RuntimeError("fork server has initialised CUDA; forked ranks could not use it")


def _redirect_output(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    sys.stdout.reconfigure(line_buffering=True)  # a log that stops at the crash, not a block before it


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass  # a full disk must not change the rank's exit code


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a person's Ctrl-C is the supervisor's to answer
    ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
