"""The supervisor's end of the channel: one authenticated TCP connection per agent, and people's commands.

Used by the supervisor only. It authenticates, decodes and keeps who is connected; what a message means
is the supervisor's business, who reads them all from one queue.
"""
import asyncio
import dataclasses
import secrets
import sys
import time
from dataclasses import dataclass

from jobs.spec.control import (Ack, Challenge, Command, CommandAccepted, Hello, Knock, Shutdown, Spooled, ToSupervisor,
                               Welcome, prove, proves)
from jobs.spec.lines import CHUNK, PROVEN_LIMIT, Lines
from jobs.spec.wire import decode, encode

HANDSHAKE_S = 10.0  # for both proofs
SPARE_CONNECTIONS = 64  # that may be greeting at once, beyond two per node


@dataclass(frozen=True, slots=True)
class Joined:
    """An agent has proved itself; it may be one that comes back."""

    hello: Hello
    returned: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    node: str
    message: object  # of ToSupervisor, without Hello


class Channel:
    """Listens on all interfaces; `inbox` yields Joined, Dropped, Received and Command in order of arrival."""

    def __init__(self, *, secret: str, nodes: tuple[str, ...], welcome: Welcome) -> None:
        self.secret = secret
        self.nodes = nodes
        self.welcome = welcome  # template: ack_seq differs per agent
        self.inbox: asyncio.Queue = asyncio.Queue()
        self.agents: dict[str, Hello] = {}
        self.last_heard: dict[str, float] = {}  # node → time.monotonic()
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._seen: dict[tuple[str, int], int] = {}  # (node, agent pid) → last report received
        self._dismissed: dict[tuple[str, int], str] = {}  # (node, agent pid) → why it must end itself
        self._server: asyncio.Server | None = None
        self._conversations: set[asyncio.Task] = set()
        self._unproven = 0

    async def listen(self) -> int:
        """Start listening; returns the port."""
        self._server = await asyncio.start_server(self._serve, "0.0.0.0", 0, limit=CHUNK, backlog=4096)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        for writer in list(self._writers.values()):
            try:
                await asyncio.wait_for(writer.drain(), HANDSHAKE_S)
            except (OSError, TimeoutError):
                pass  # the agent is gone, which is what closing is for
            writer.close()
        if self._server is not None:
            self._server.close()
        for conversation in self._conversations:
            conversation.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)

    def connected(self, node: str) -> bool:
        return node in self._writers

    def silent_for(self, seconds: float) -> list[str]:
        """Connected nodes that have said nothing for so long."""
        now = time.monotonic()
        return [node for node in self._writers if now - self.last_heard[node] > seconds]

    def drop(self, node: str, reason: str) -> None:
        """Close a connection that is no use any more; the inbox gets a Dropped."""
        if (writer := self._writers.pop(node, None)) is not None:
            writer.close()
            self.inbox.put_nowait(Dropped(node, reason))

    def send(self, node: str, message) -> None:
        """To one agent. A message to an agent that is gone is lost: its loss is reported by itself."""
        if (writer := self._writers.get(node)) is not None:
            writer.write(encode(message))

    def acknowledge(self, node: str, seq: int) -> None:
        """The report is recorded: the agent may forget it."""
        if (hello := self.agents.get(node)) is not None:
            key = (node, hello.pid)
            self._seen[key] = max(seq, self._seen.get(key, 0))
            self.send(node, Ack(seq=seq))

    def is_new(self, node: str, spooled: Spooled) -> bool:
        """False for a report that was resent although it had arrived."""
        hello = self.agents.get(node)
        return hello is not None and spooled.seq > self._seen.get((node, hello.pid), 0)

    def dismiss(self, node: str, reason: str) -> None:
        """The agent that was last heard of on `node` is given up: should it come back, it is told to end
        itself, or it and its successor would oust each other for ever."""
        if (hello := self.agents.pop(node, None)) is not None:
            self._dismissed[node, hello.pid] = reason
            self.send(node, Shutdown(term=self.welcome.term, reason=reason))
            self.drop(node, reason)

    # -------------------------------------------------------------- connections
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._unproven >= 2 * len(self.nodes) + SPARE_CONNECTIONS:
            writer.close()  # somebody connects without ever proving anything
            return
        task = asyncio.current_task()
        self._conversations.add(task)
        try:
            lines = Lines(reader)
            first = await self._greet(lines, writer)
            if isinstance(first, Command):
                writer.write(encode(CommandAccepted(message=f"{first.verb}: accepted")))
                await writer.drain()
                self.inbox.put_nowait(first)
            elif first is not None:
                lines.limit = PROVEN_LIMIT
                await self._serve_agent(first, lines, writer)
        except (OSError, TimeoutError, ValueError) as error:
            peer = writer.get_extra_info("peername")
            print(f"channel: connection from {peer} ended: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        except asyncio.CancelledError:
            pass  # the channel closes; asyncio's streams would log a cancelled handler as a defect
        finally:
            self._conversations.discard(task)
            writer.close()

    async def _greet(self, lines: Lines, writer: asyncio.StreamWriter) -> Hello | Command | None:
        self._unproven += 1
        try:
            return await asyncio.wait_for(self._challenge(lines, writer), HANDSHAKE_S)
        finally:
            self._unproven -= 1

    async def _challenge(self, lines: Lines, writer: asyncio.StreamWriter) -> Hello | Command | None:
        """Prove to know the secret, then learn who it is; None for someone who does not know it."""
        theirs = decode(await lines.next() or b"{}", Knock | Hello, origin="new connection").nonce
        nonces = theirs, secrets.token_hex(16)
        term = self.welcome.term
        writer.write(encode(Challenge(nonce=nonces[1], term=term,
                                      proof=prove(self.secret, "supervisor", *nonces, term))))
        first = decode(await lines.next() or b"{}", Hello | Command, origin="new connection")
        said = ("command", *nonces, first.verb, first.reason) if isinstance(first, Command) else (
            "agent", *nonces, first.node, first.pid, first.term)
        if not proves(first.proof, self.secret, *said):
            print(f"channel: refused {writer.get_extra_info('peername')}: wrong proof", file=sys.stderr)
            return None
        if isinstance(first, Hello) and (first.node not in self.nodes or first.term > term):
            print(f"channel: refused agent of {first.node} (term {first.term})", file=sys.stderr)
            return None
        return first

    async def _serve_agent(self, hello: Hello, lines: Lines, writer: asyncio.StreamWriter) -> None:
        node, previous = hello.node, self.agents.get(hello.node)
        if (reason := self._dismissed.get((node, hello.pid))) is not None:
            writer.write(encode(Shutdown(term=self.welcome.term, reason=reason)))
            await writer.drain()
            return
        returned = previous is not None and previous.pid == hello.pid
        if previous is not None and not returned:
            self._dismissed[node, previous.pid] = f"another agent, pid {hello.pid}, has taken its place"
        if (old := self._writers.pop(node, None)) is not None:
            old.close()  # the agent has come back before the old connection was found broken
        self.agents[node], self._writers[node] = hello, writer
        self.last_heard[node] = time.monotonic()
        writer.write(encode(dataclasses.replace(self.welcome, ack_seq=self._seen.get((node, hello.pid), 0))))
        self.inbox.put_nowait(Joined(hello, returned=returned))
        reason = "it closed the connection"
        try:
            while line := await lines.next():
                self.last_heard[node] = time.monotonic()
                self.inbox.put_nowait(Received(node, decode(line, ToSupervisor, origin=f"agent {node}")))
        except (OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            if self._writers.get(node) is writer:
                self.drop(node, reason)
