"""A rank's voice: reports to the agent of its node over a Unix socket.

Called by the trainer and by the fork server's rank wrapper. A rank without an agent (a test, a trainer
started by hand) reports to nobody. Sending never blocks a step for long: the agent only queues.
"""
import os
import socket
import struct
import time
from typing import Any

from jobs.spec.events import RankProgress
from jobs.spec.wire import encode

AGENT_SOCKET = "ORC_AGENT_SOCKET"  # the agent's Unix socket, in the rank's environment; "@…" is an abstract name
SEND_TIMEOUT_S = 30  # an agent that does not read for so long is dead or stopped


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
        # Sent several times a step, by code that computing has driven out of every cache: 90 µs as a dataclass that is
        # encoded, 15 µs as a line in which three fields are filled in.
        line = encode(RankProgress(attempt=attempt, rank=rank, step="%d", phase="%s", t="%f"))
        self._progress = line.replace(b'"%d"', b"%d").replace(b'"%f"', b"%f")

    @classmethod
    def from_environment(cls, *, attempt: int) -> "Recorder":
        return cls(os.environ.get(AGENT_SOCKET), attempt=attempt, rank=int(os.environ["RANK"]))

    def report(self, message: Any) -> None:
        """Send one report of jobs.spec.events. Raises OSError if the agent is gone."""
        if self._socket is not None:
            self._socket.sendall(encode(message))

    def progress(self, step: int, phase: str) -> None:
        """Announce that this rank enters `phase`, `step` updates being completed."""
        self.step = step
        if self._socket is not None:
            self._socket.sendall(self._progress % (step, phase.encode(), time.time()))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
