"""Injected faults do what they are named after, where and when they are meant, and are told first."""
import dataclasses
import os
import subprocess
import sys

import pytest

from jobs.faults import AGENT_PID, EXIT_CODE, InjectedFault, strike
from jobs.recorder import Recorder
from jobs.spec.job import FaultSpec
from jobs.spec.reports import FaultInjected
from tests.helpers.ranks import collect_ranks

HERE = dict(attempt=1, step=5, rank=0)
ELSEWHERE = [dict(attempt=2), dict(step=4), dict(rank=1)]
DEATHS = {"sigkill": "exit code -9", "exit": f"exit code {EXIT_CODE}"}


class Told(Recorder):
    """Fails if a fault is told after it has struck; keeps what was told."""

    def __init__(self) -> None:
        super().__init__(None, attempt=1, rank=0)
        self.told: list = []

    def report(self, message) -> None:
        self.told.append(message)


def struck(kind: str) -> None:
    strike((FaultSpec(**HERE, kind=kind),), **HERE, recorder=Told())


@pytest.mark.parametrize("kind", DEATHS)
def test_a_deadly_fault_ends_the_rank(kind):
    assert DEATHS[kind] in collect_ranks(struck, world_size=1, args=(kind,))[0].error


def test_an_exception_is_raised_and_told_before():
    recorder = Told()
    with pytest.raises(InjectedFault, match="before step 5 on rank 0"):
        strike((FaultSpec(**HERE, kind="exception"),), **HERE, recorder=recorder)
    (told,) = recorder.told
    assert isinstance(told, FaultInjected) and (told.step, told.rank, told.fault) == (5, 0, "exception")


def test_agent_kill_ends_the_agent_and_not_the_rank(monkeypatch):
    agent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setitem(os.environ, AGENT_PID, str(agent.pid))
    strike((FaultSpec(**HERE, kind="agent_kill"),), **HERE, recorder=Told())
    assert agent.wait(timeout=60) == -9
    agent.stdin.close()


@pytest.mark.parametrize("change", ELSEWHERE)
def test_a_fault_meant_for_elsewhere_does_nothing(change):
    recorder = Told()
    fault = dataclasses.replace(FaultSpec(**HERE, kind="exception"), **change)
    strike((fault,), **HERE, recorder=recorder)
    assert recorder.told == []
