"""What a rank's recorder sends, and what happens when nobody reads it."""
import os
import socket
import time

import pytest

from jobs import recorder
from jobs.recorder import Recorder
from jobs.spec.events import RankFinished, RankProgress, RankReport
from jobs.spec.wire import decode


@pytest.fixture
def listening():
    """A listening socket, and its name as ranks are told it."""
    name = f"@orc-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(name.replace("@", "\0", 1))
        server.listen()
        yield server, name


@pytest.mark.parametrize("step, phase", [(0, "start"), (7, "forward_backward"), (2**40, "checkpoint")])
def test_progress_arrives_as_the_event_that_it_is(listening, step, phase):
    server, name = listening
    sender = Recorder(name, attempt=3, rank=12)
    before = time.time()
    sender.progress(step, phase)
    sender.report(RankFinished(attempt=3, rank=12, step=step, t=1.5))
    sender.close()
    with server.accept()[0] as connection, connection.makefile("rb") as lines:
        told, finished = [decode(line, RankReport) for line in lines]
    assert told == RankProgress(attempt=3, rank=12, step=step, phase=phase, t=told.t)
    assert before - 1e-3 <= told.t <= time.time() + 1e-3
    assert finished == RankFinished(attempt=3, rank=12, step=step, t=1.5)
    assert sender.step == step


def test_an_agent_that_does_not_read_is_an_error_and_not_a_wait_for_ever(listening, monkeypatch):
    monkeypatch.setattr(recorder, "SEND_TIMEOUT_S", 1)
    sender = Recorder(listening[1], attempt=1, rank=0)
    start = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - start < 20:
            sender.progress(1, "data")
    assert time.monotonic() - start >= 0.9  # it was given its time
    sender.close()


def test_without_an_agent_nobody_is_told():
    silent = Recorder(None, attempt=1, rank=0)
    silent.progress(4, "data")
    assert silent.step == 4
