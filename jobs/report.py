"""What a trainer of the user's own may tell orc: its steps and its checkpoints. Two functions; both do nothing where
the trainer was not started by orc, so a script may call them always.

    from jobs import report
    report.step(step, loss=loss, tokens=tokens)     # after every update, on every rank
    report.checkpoint(step)                         # once it is safe on disk: a restart will continue from it

Steps give the history, W&B, goodput and the progress line what they show, and are where faults of the run's YAML
strike; each is a sign of life of its rank. Needs nothing but Python's standard library.
"""
import functools
import json
import operator
import os
import resource
import time
from pathlib import Path
from typing import Any

from jobs.faults import strike
from jobs.recorder import AGENT_SOCKET, Recorder
from jobs.spec.events import CheckpointSaved, StepReport
from jobs.spec.job import FaultSpec
from jobs.spec.load import from_dict
from jobs.spec.rundir import RunDir

RUN_DIR = "ORC_RUN_DIR"  # in every rank's environment


def step(step: int, *, loss: float | None = None, tokens: int | None = None, grad_norm: float | None = None,
         lr: float | None = None) -> None:
    """Update number `step` (from 1) is done. To be called on every rank; rank 0's figures are recorded. `tokens`: of
    the step, all ranks. What is not given is unknown, not zero. Raises ValueError for what is no such number."""
    if (reporter := _reporter()) is not None:
        reporter.step(_count(step, "step"), loss=loss, tokens=None if tokens is None else _count(tokens, "tokens"),
                      grad_norm=grad_norm, lr=lr)


def checkpoint(step: int) -> None:
    """Whatever happens now, a restart continues behind `step`. To be called by one rank, when all have saved. Raises
    ValueError for what is no step."""
    if (reporter := _reporter()) is not None:
        recorder, step = reporter.recorder, _count(step, "step")
        recorder.report(CheckpointSaved(attempt=recorder.attempt, rank=recorder.rank, step=step, t=time.time()))


@functools.cache
def _reporter() -> "_Reporter | None":
    """This process's; None where nobody listens."""
    return _Reporter() if AGENT_SOCKET in os.environ and "RANK" in os.environ else None


class _Reporter:
    """One rank's steps, with the time between them."""

    def __init__(self) -> None:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
        self.recorder = Recorder.from_environment(attempt=attempt)
        job = json.loads(RunDir(Path(os.environ[RUN_DIR])).job(attempt).read_text())
        self.faults = from_dict(tuple[FaultSpec, ...], job.get("faults", []), origin="job.json")
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.before: float | None = None  # when the step before was done

    def step(self, step: int, *, loss: float | None, tokens: int | None, grad_norm: float | None,
             lr: float | None) -> None:
        recorder, now = self.recorder, time.perf_counter()
        where = {"attempt": recorder.attempt, "rank": recorder.rank, "recorder": recorder}
        if self.before is None:
            strike(self.faults, step=step, **where)  # nobody could be asked before the first
        seconds, self.before = None if self.before is None else now - self.before, now
        recorder.progress(step, "step")
        if recorder.rank == 0:
            rate = tokens / seconds if tokens is not None and seconds else None
            recorder.report(StepReport(
                attempt=recorder.attempt, rank=0, step=step, t=time.time(), loss=_number(loss), tokens=tokens,
                grad_norm=_number(grad_norm), lr=_number(lr), step_time_s=seconds, tokens_per_s=rate,
                tokens_per_s_per_gpu=rate and rate / self.world_size,
                peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
        strike(self.faults, step=step + 1, **where)


def _count(value: Any, name: str) -> int:
    """Told to the caller: sent, it would end the connection, and all that is reported later would fail."""
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if not 0 <= count < 2**63:
        raise ValueError(f"{name}: {value!r} is not a whole number; give one from 0")
    return count


def _number(value: Any) -> float | None:
    """A tensor of one element is a number, too."""
    return None if value is None else float(value)
