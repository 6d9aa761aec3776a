"""The channel over real TCP: who is let in, what is resent, who is noticed missing."""
import asyncio
import dataclasses

import pytest

from jobs.spec.control import (Challenge, Command, CommandAccepted, Hello, Knock, Shutdown, Spooled, ToAgent, Welcome,
                               prove, proves)
from jobs.spec.reports import CheckpointSaved
from jobs.spec.wire import decode, encode, to_wire
from orchestrator.supervision.channel import SPARE_CONNECTIONS, Channel, Dropped, Joined, Received

SECRET = "s3cret"
PATIENCE_S = 60.0
WELCOME = Welcome(term=4, ack_seq=0, heartbeat_s=1.0, sample_s=1.0, orphan_s=9.0, preload=False)


class Client:
    """Speaks the agent's side by hand."""

    @classmethod
    async def connect(cls, port: int) -> "Client":
        client = cls()
        client.reader, client.writer = await asyncio.open_connection("127.0.0.1", port)
        await client.say(Knock(nonce="mine"))
        client.challenge = decode(await client.reader.readline(), Challenge | Welcome)
        return client

    async def say(self, message) -> None:
        self.writer.write(encode(message))
        await self.writer.drain()

    async def hear(self):
        line = await asyncio.wait_for(self.reader.readline(), PATIENCE_S)
        return decode(line, ToAgent | CommandAccepted) if line else None

    def proof(self, role: str, *said, secret: str = SECRET) -> str:
        return prove(secret, role, "mine", self.challenge.nonce, *said)

    def hello(self, *, secret: str = SECRET, node: str = "n1", term: int = 0, pid: int = 77,
              role: str = "agent") -> Hello:
        return Hello(proof=self.proof(role, node, pid, term, secret=secret), node=node, host="h", address="127.0.0.1",
                     pid=pid, gpus=0, term=term, attempt=0)


def run(scenario) -> None:
    async def with_channel() -> None:
        channel = Channel(secret=SECRET, nodes=("n1", "n2"), welcome=WELCOME)
        port = await channel.listen()
        try:
            await scenario(channel, port)
        finally:
            await channel.close()

    asyncio.run(with_channel())


async def next_item(channel: Channel):
    return await asyncio.wait_for(channel.inbox.get(), PATIENCE_S)


def report(seq: int) -> Spooled:
    return Spooled(seq=seq, report=to_wire(CheckpointSaved(attempt=1, rank=0, step=1, t=0.0)))


def test_both_sides_prove_that_they_know_the_secret_the_listener_first() -> None:
    async def scenario(channel: Channel, port: int) -> None:
        client = await Client.connect(port)
        said = ("supervisor", "mine", client.challenge.nonce, 4)
        assert proves(client.challenge.proof, SECRET, *said) and not proves(client.challenge.proof, "other", *said)
        await client.say(client.hello())
        assert (await client.hear()).term == 4
        assert isinstance(await next_item(channel), Joined) and channel.connected("n1")

    run(scenario)


@pytest.mark.parametrize("wrong", [{"secret": "guess"}, {"node": "n3"}, {"term": 5}, {"role": "supervisor"},
                                   {"role": "command"}], ids=str)
def test_strangers_and_agents_of_a_higher_term_are_refused(wrong: dict) -> None:
    async def scenario(channel: Channel, port: int) -> None:
        client = await Client.connect(port)
        await client.say(client.hello(**wrong))
        assert await client.hear() is None
        assert channel.inbox.empty() and not channel.connected("n1")

    run(scenario)


def test_a_proof_is_of_no_use_for_anything_else() -> None:
    async def scenario(channel: Channel, port: int) -> None:
        client = await Client.connect(port)
        hello = client.hello(pid=77)
        await client.say(dataclasses.replace(hello, pid=78))  # another agent
        assert await client.hear() is None
        other = await Client.connect(port)  # another connection
        await other.say(hello)
        assert await other.hear() is None
        third = await Client.connect(port)  # the listener's own proof, sent back
        await third.say(dataclasses.replace(third.hello(), proof=third.challenge.proof))
        assert await third.hear() is None
        fourth = await Client.connect(port)
        await fourth.say(Command(proof=fourth.proof("command", "stop", "a"), verb="stop", reason="b"))
        assert await fourth.hear() is None
        assert channel.inbox.empty()

    run(scenario)


UNREADABLE = [b"GET / HTTP/1.1\r\n\r\n", b'{"event": []}\n', b"[" * 5000 + b"]" * 2000 + b"\n", b"[]\n", b"\xff\xfe\n",
              b'{"event": "hello", "proof": "\xc3\xa9"}\n', b'{"event": "command", "proof": "0", "verb": "go"}\n',
              b"x" * 20_000]


@pytest.mark.parametrize("line", UNREADABLE, ids=lambda line: repr(line[:12]))
def test_an_unreadable_line_ends_only_its_own_connection(line: bytes, capsys) -> None:
    async def scenario(channel: Channel, port: int) -> None:
        for knocks in (False, True):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if knocks:
                writer.write(encode(Knock(nonce="mine")))
                await reader.readline()
            writer.write(line)
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        good = await Client.connect(port)
        await good.say(good.hello())
        assert isinstance(await next_item(channel), Joined)

    run(scenario)
    assert "Traceback" not in capsys.readouterr().err


def test_unproven_connections_are_few() -> None:
    async def scenario(channel: Channel, port: int) -> None:
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * 2 + SPARE_CONNECTIONS + 5)]
        for reader, _ in crowd[-5:]:
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        assert not any(reader.at_eof() for reader, _ in crowd[:-5])
        for _, writer in crowd:
            writer.close()

    run(scenario)


def test_a_dismissed_agent_is_told_to_end_itself() -> None:
    async def scenario(channel: Channel, port: int) -> None:
        first = await Client.connect(port)
        await first.say(first.hello(pid=77))
        await next_item(channel)
        channel.dismiss("n1", "no heartbeat")
        assert await next_item(channel) == Dropped("n1", "no heartbeat")
        again = await Client.connect(port)
        await again.say(again.hello(pid=77))
        assert await again.hear() == Shutdown(term=4, reason="no heartbeat")
        successor = await Client.connect(port)
        await successor.say(successor.hello(pid=78))
        assert isinstance(await successor.hear(), Welcome)

    run(scenario)


def test_of_two_agents_on_one_node_the_older_is_told_to_end_itself() -> None:
    async def scenario(channel: Channel, port: int) -> None:
        clients = [await Client.connect(port) for _ in range(3)]
        for client, pid, answer in zip(clients, (77, 78, 77), (Welcome, Welcome, Shutdown)):
            await client.say(client.hello(pid=pid))
            assert isinstance(await client.hear(), answer)
        assert channel.connected("n1") and channel.agents["n1"].pid == 78

    run(scenario)


def test_a_resent_report_is_known_after_a_reconnect_of_the_same_agent_only() -> None:
    async def scenario(channel: Channel, port: int) -> None:
        client = await Client.connect(port)
        await client.say(client.hello())
        await next_item(channel)
        await client.say(report(1))
        received = await next_item(channel)
        assert channel.is_new("n1", received.message)
        channel.acknowledge("n1", 1)
        client.writer.close()
        assert isinstance(await next_item(channel), Dropped)

        again = await Client.connect(port)
        await again.say(again.hello())
        assert (await again.hear()).ack_seq == 1
        assert (await next_item(channel)).returned
        assert not channel.is_new("n1", report(1)) and channel.is_new("n1", report(2))

        other = await Client.connect(port)  # a new agent process counts from one again
        await other.say(other.hello(pid=78))
        assert (await other.hear()).ack_seq == 0
        assert not (await next_item(channel)).returned
        assert channel.is_new("n1", report(1))

    run(scenario)


def test_a_replaced_connection_is_no_loss() -> None:
    async def scenario(channel: Channel, port: int) -> None:
        old, new = await Client.connect(port), await Client.connect(port)
        for client in (old, new):
            await client.say(client.hello())
            assert isinstance(await next_item(channel), Joined)
        assert await old.hear() and await old.hear() is None  # welcomed, then closed
        await new.say(report(1))
        assert isinstance(await next_item(channel), Received)

    run(scenario)


def test_silence_is_noticed_and_dropping_tells_why() -> None:
    async def scenario(channel: Channel, port: int) -> None:
        client = await Client.connect(port)
        await client.say(client.hello())
        await next_item(channel)
        assert channel.silent_for(60) == [] and channel.silent_for(-1) == ["n1"]
        channel.drop("n1", "no heartbeat")
        assert await next_item(channel) == Dropped("n1", "no heartbeat")
        await asyncio.sleep(0)
        assert channel.inbox.empty()

    run(scenario)


def test_a_command_is_answered_and_handed_on() -> None:
    async def scenario(channel: Channel, port: int) -> None:
        client = await Client.connect(port)
        command = Command(proof=client.proof("command", "stop", "enough"), verb="stop", reason="enough")
        await client.say(command)
        assert await client.hear() == CommandAccepted(message="stop: accepted")
        assert await next_item(channel) == command

    run(scenario)
