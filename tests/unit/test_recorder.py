"""What a rank's recorder sends, what its page says, and what happens when nobody reads it."""
import asyncio
import os
import socket
import time

import pytest

from jobs import recorder
from jobs.listener import Listener
from jobs.recorder import RankProgress, Recorder
from jobs.spec.reports import CheckpointSaved


@pytest.fixture
def listening():
    """A listening socket, and its name as ranks are told it."""
    name = f"@orc-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(name.replace("@", "\0", 1))
        server.listen()
        yield server, name


@pytest.mark.parametrize("step, phase", [(0, "start"), (7, "forward_backward"), (2**40, "checkpoint")])
def test_an_agent_sees_what_a_rank_does_and_hears_what_it_reports(step, phase):
    heard = []
    saved = CheckpointSaved(attempt=3, rank=12, step=step, t=1.5)

    async def listen() -> list[list[RankProgress]]:
        listener = Listener(hear=heard.append)
        async with await listener.open():
            earlier, sender = (Recorder(listener.name, attempt=3, rank=12) for _ in range(2))  # a user's script, too
            sender.report(saved)
            await _until(lambda: heard)
            looks = [listener.progress()]
            earlier.progress(0, "forward_backward_of_another_page")
            for at in ((step, "a phase with a longer name"), (step, phase)):  # nothing of the first is left
                sender.progress(*at)
            looks.append(listener.progress())
            earlier.close()
            sender.close()
            assert sender.step == step
            await listener.heard_out(os.getpid())
            return [*looks, listener.progress()]

    before = time.time()
    nothing, told, gone = asyncio.run(listen())
    assert heard == [saved] and nothing == gone == []
    assert told[-1] == RankProgress(attempt=3, rank=12, step=step, phase=phase, t=told[-1].t) and len(told) == 2
    assert before <= told[0].t <= told[1].t <= time.time()


async def _until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_progress_wakes_nobody(listening):
    server, name = listening
    sender = Recorder(name, attempt=1, rank=0)
    with server.accept()[0] as connection:
        assert connection.recv(100).strip().isdigit()  # where its page is
        sender.progress(1, "data")
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(1)
    sender.close()


def test_an_agent_that_does_not_read_is_an_error_and_not_a_wait_for_ever(listening, monkeypatch):
    monkeypatch.setattr(recorder, "SEND_TIMEOUT_S", 1)
    sender = Recorder(listening[1], attempt=1, rank=0)
    start = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - start < 60:
            sender.report(CheckpointSaved(attempt=1, rank=0, step=1, t=1.5))
    assert time.monotonic() - start >= 0.9  # it was given its time
    sender.close()


def test_without_an_agent_nobody_is_told():
    silent = Recorder(None, attempt=1, rank=0)
    silent.progress(4, "data")
    assert silent.step == 4
