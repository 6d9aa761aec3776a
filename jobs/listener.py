"""Where the ranks of a node report: an abstract Unix socket that takes this user's processes alone; and their pages.

Opened by the agent, which hears every report in the order in which its rank sent it. Knows of no supervisor.
"""
import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable

from jobs.recorder import RankProgress, progress_on
from jobs.spec.lines import PROVEN_LIMIT
from jobs.spec.reports import RankReport
from jobs.spec.wire import decode

HEAR_OUT_S = 5.0  # for the last lines of a dead rank; a child of its own may hold the connection open
_UCRED = struct.Struct("3i")  # pid, uid, gid


class Listener:
    """Hands every report to `hear`; `name` is what a rank connects to."""

    def __init__(self, *, hear: Callable[[RankReport], None]) -> None:
        self.name = f"@orc-agent-{os.getpid()}-{secrets.token_hex(8)}"
        self._hear = hear
        self._conversations: dict[int, set[asyncio.Task]] = {}  # rank pid → its open connections
        self._pages: dict[asyncio.Task, int] = {}  # of each connection

    async def open(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._serve, self.name.replace("@", "\0", 1), limit=PROVEN_LIMIT)

    def progress(self) -> list[RankProgress]:
        """What connected processes do now; the newest last."""
        return sorted(filter(None, map(progress_on, self._pages.values())), key=lambda one: one.t)

    async def heard_out(self, pid: int) -> None:
        """Wait until all that a dead process had sent is read: its exit must be the last thing told of it."""
        if open_connections := self._conversations.pop(pid, None):
            await asyncio.wait(open_connections, timeout=HEAR_OUT_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, _ = _UCRED.unpack(credentials)
        if uid != os.getuid():  # an abstract socket has no file permissions
            writer.close()
            return
        task = asyncio.current_task()
        self._conversations.setdefault(pid, set()).add(task)
        try:
            if number := await reader.readline():
                with contextlib.suppress(OSError):  # it has ended, or hides its files: then its log is a sign of life
                    self._pages[task] = os.open(f"/proc/{pid}/fd/{int(number)}", os.O_RDONLY)
            while line := await reader.readline():
                self._hear(decode(line, RankReport, origin="rank"))
        except ConnectionResetError:
            pass  # the rank was killed: its exit is told by the fork server
        finally:
            self._conversations.get(pid, set()).discard(task)
            if (page := self._pages.pop(task, None)) is not None:
                os.close(page)
            writer.close()
