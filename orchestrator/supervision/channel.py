"""The supervisor's end of the channel: one authenticated TCP connection per agent, and people's commands.

Used by the supervisor only. It authenticates, decodes and keeps who is connected; what a message means
is the supervisor's business, who reads them all from one queue.
"""
import asyncio
import secrets
import sys
import time
from dataclasses import dataclass

from jobs.spec.control import (LINE_LIMIT, Ack, Challenge, Command, CommandAccepted, Hello, Spooled, ToSupervisor,
                               Welcome, prove, proves)
from jobs.spec.events import decode, encode
from jobs.spec.load import SpecError

HANDSHAKE_S = 10.0  # to answer the challenge


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
        self.welcome = welcome  # template: proof and ack_seq differ per agent
        self.inbox: asyncio.Queue = asyncio.Queue()
        self.agents: dict[str, Hello] = {}
        self.last_heard: dict[str, float] = {}  # node → time.monotonic()
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._seen: dict[tuple[str, int], int] = {}  # (node, agent pid) → last report received
        self._server: asyncio.Server | None = None
        self._conversations: set[asyncio.Task] = set()

    async def listen(self) -> int:
        """Start listening; returns the port."""
        self._server = await asyncio.start_server(self._serve, "0.0.0.0", 0, limit=LINE_LIMIT, backlog=4096)
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

    # -------------------------------------------------------------- connections
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._conversations.add(task)
        try:
            first = await asyncio.wait_for(self._challenge(reader, writer), HANDSHAKE_S)
            if isinstance(first, Command):
                writer.write(encode(CommandAccepted(message=f"{first.verb}: accepted")))
                await writer.drain()
                self.inbox.put_nowait(first)
            elif first is not None:
                await self._serve_agent(first, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            peer = writer.get_extra_info("peername")
            print(f"channel: connection from {peer} ended: {type(error).__name__}: {error}", file=sys.stderr)
        except asyncio.CancelledError:
            pass  # the channel closes; asyncio's streams would log a cancelled handler as a defect
        finally:
            self._conversations.discard(task)
            writer.close()

    async def _challenge(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Hello | Command | None:
        """Who it is, or None for someone who does not know the secret."""
        nonce = secrets.token_hex(16)
        writer.write(encode(Challenge(nonce=nonce)))
        first = decode(await reader.readline() or b"{}", Hello | Command, origin="new connection")
        if not proves(self.secret, nonce, first.proof):
            print(f"channel: refused {writer.get_extra_info('peername')}: wrong proof", file=sys.stderr)
            return None
        if isinstance(first, Hello) and (first.node not in self.nodes or first.term > self.welcome.term):
            print(f"channel: refused agent of {first.node} (term {first.term})", file=sys.stderr)
            return None
        return first

    async def _serve_agent(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node, previous = hello.node, self.agents.get(hello.node)
        if (old := self._writers.pop(node, None)) is not None:
            old.close()  # the agent has come back before the old connection was found broken
        self.agents[node], self._writers[node] = hello, writer
        self.last_heard[node] = time.monotonic()
        writer.write(encode(Welcome(
            proof=prove(self.secret, hello.nonce), term=self.welcome.term, ack_seq=self._seen.get((node, hello.pid), 0),
            heartbeat_s=self.welcome.heartbeat_s, sample_s=self.welcome.sample_s, orphan_s=self.welcome.orphan_s,
            preload=self.welcome.preload)))
        self.inbox.put_nowait(Joined(hello, returned=previous is not None and previous.pid == hello.pid))
        reason = "it closed the connection"
        try:
            while line := await reader.readline():
                self.last_heard[node] = time.monotonic()
                self.inbox.put_nowait(Received(node, decode(line, ToSupervisor, origin=f"agent {node}")))
        except (OSError, SpecError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            if self._writers.get(node) is writer:
                self.drop(node, reason)
