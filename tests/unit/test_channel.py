"""The channel over real TCP: who is let in, what is resent, who is noticed missing."""
import asyncio

import pytest

from jobs.spec.control import (Challenge, Command, CommandAccepted, Hello, Spooled, ToAgent, Welcome, prove, proves)
from jobs.spec.events import RankFinished, decode, encode, to_wire
from orchestrator.supervision.channel import Channel, Dropped, Joined, Received

SECRET = "s3cret"
WELCOME = Welcome(proof="", term=4, ack_seq=0, heartbeat_s=1.0, sample_s=1.0, orphan_s=9.0, preload=False)


class Client:
    """Speaks the agent's side by hand."""

    @classmethod
    async def connect(cls, port: int) -> "Client":
        client = cls()
        client.reader, client.writer = await asyncio.open_connection("127.0.0.1", port)
        client.nonce = decode(await client.reader.readline(), Challenge | Welcome).nonce
        return client

    async def say(self, message) -> None:
        self.writer.write(encode(message))
        await self.writer.drain()

    async def hear(self):
        line = await asyncio.wait_for(self.reader.readline(), 5)
        return decode(line, ToAgent | CommandAccepted) if line else None

    def hello(self, *, secret: str = SECRET, node: str = "n1", term: int = 0, pid: int = 77) -> Hello:
        return Hello(proof=prove(secret, self.nonce), nonce="mine", node=node, host="h", address="127.0.0.1", pid=pid,
                     gpus=0, term=term, attempt=0, last_seq=0)


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
    return await asyncio.wait_for(channel.inbox.get(), 5)


def report(seq: int) -> Spooled:
    return Spooled(seq=seq, report=to_wire(RankFinished(attempt=1, rank=0, step=1, t=0.0)))


def test_both_sides_prove_that_they_know_the_secret() -> None:
    async def scenario(channel: Channel, port: int) -> None:
        client = await Client.connect(port)
        await client.say(client.hello())
        welcome = await client.hear()
        assert welcome.term == 4 and proves(SECRET, "mine", welcome.proof) and not proves("other", "mine", welcome.proof)
        assert isinstance(await next_item(channel), Joined) and channel.connected("n1")

    run(scenario)


@pytest.mark.parametrize("wrong", [{"secret": "guess"}, {"node": "n3"}, {"term": 5}], ids=str)
def test_strangers_and_agents_of_a_higher_term_are_refused(wrong: dict) -> None:
    async def scenario(channel: Channel, port: int) -> None:
        client = await Client.connect(port)
        await client.say(client.hello(**wrong))
        assert await client.hear() is None
        assert channel.inbox.empty() and not channel.connected("n1")

    run(scenario)


def test_a_line_that_is_no_json_ends_only_its_own_connection() -> None:
    async def scenario(channel: Channel, port: int) -> None:
        bad, good = await Client.connect(port), await Client.connect(port)
        bad.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await bad.hear() is None
        await good.say(good.hello())
        assert isinstance(await next_item(channel), Joined)

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
        command = Command(proof=prove(SECRET, client.nonce), verb="stop", reason="enough")
        await client.say(command)
        assert await client.hear() == CommandAccepted(message="stop: accepted")
        assert await next_item(channel) == command

    run(scenario)
