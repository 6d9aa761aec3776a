"""A rank's voice: reports to the agent of its node over a Unix socket, and a page that says what the rank does now.

Called by the trainer and by the fork server's rank wrapper; the page is read by the agent. A rank without an agent
(a test, a trainer started by hand) reports to nobody. Sending never blocks a step for long: the agent only queues.
"""
import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from jobs.spec.wire import encode

AGENT_SOCKET = "ORC_AGENT_SOCKET"  # the agent's Unix socket, in the rank's environment; "@…" is an abstract name
SEND_TIMEOUT_S = 30  # an agent that does not read for so long is dead or stopped
_PAGE = struct.Struct("=qqq32sd")  # the fields of RankProgress


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    """A rank's own heartbeat: it has entered this phase of this step. Kept by the agent, not recorded."""

    attempt: int
    rank: int
    step: int
    phase: str  # "start", "data", "forward_backward", "optimizer", "validation", "checkpoint"; 32 bytes
    t: float


def progress_on(page: int) -> RankProgress | None:
    """What a rank's page, a file descriptor, says; None as long as it says nothing."""
    while (found := os.pread(page, _PAGE.size, 0)) != os.pread(page, _PAGE.size, 0):
        pass  # it was being written
    if len(found) < _PAGE.size:
        return None
    attempt, rank, step, phase, t = _PAGE.unpack(found)
    return RankProgress(attempt=attempt, rank=rank, step=step, phase=phase.rstrip(b"\0").decode(), t=t)


class Recorder:
    """Connects on construction; `socket_path` None means: report to nobody."""

    def __init__(self, socket_path: str | None, *, attempt: int, rank: int) -> None:
        self.attempt = attempt
        self.rank = rank
        self.step = 0  # last step announced, for whoever reports this rank's end
        self._socket: socket.socket | None = None
        if socket_path is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # the kernel's own limit: with Python's a socket is polled before each message
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
            self._socket.connect(socket_path.replace("@", "\0", 1))
            # Written several times a step, read once a second: as messages these woke the agent each time, which took
            # 1 ms of a core from every step.
            self._page = os.memfd_create("orc-progress")
            self._socket.sendall(b"%d\n" % self._page)  # where the agent finds it

    @classmethod
    def from_environment(cls, *, attempt: int) -> "Recorder":
        return cls(os.environ.get(AGENT_SOCKET), attempt=attempt, rank=int(os.environ["RANK"]))

    def report(self, message: Any) -> None:
        """Send one report of jobs.spec.reports. Raises OSError if the agent is gone."""
        if self._socket is not None:
            self._socket.sendall(encode(message))

    def progress(self, step: int, phase: str) -> None:
        """Announce that this rank enters `phase`, `step` updates being completed."""
        self.step = step
        if self._socket is not None:
            os.pwrite(self._page, _PAGE.pack(self.attempt, self.rank, step, phase.encode(), time.time()), 0)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            os.close(self._page)
            self._socket = None
