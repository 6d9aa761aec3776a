"""What a trainer of the user's own may tell orc: its steps, validations and checkpoints. The functions do nothing where
the trainer was not started by orc, so a script may call them always.

    from jobs import report
    report.step(step, loss=loss, tokens=tokens)     # after every update, on every rank
    report.validation(step, loss=loss)              # once it is known, on every rank
    report.checkpoint(step)                         # once it is safe on disk: a restart will continue from it

They give the history, W&B, goodput and the progress line what they show; faults of the run's YAML strike in steps.
Steps and validations are signs of life of their rank. Needs nothing but Python's standard library.
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
from jobs.spec.job import FaultSpec
from jobs.spec.load import from_dict
from jobs.spec.reports import CheckpointSaved, StepReport, ValidationReport
from jobs.spec.rundir import RunDir

RUN_DIR = "ORC_RUN_DIR"  # in every rank's environment


def step(step: int, *, loss: float | None = None, tokens: int | None = None, grad_norm: float | None = None,
         lr: float | None = None) -> None:
    """Update number `step` (from 1) is done. To be called on every rank; rank 0's figures are recorded. `tokens`: of
    the step, all ranks. What is not given is unknown, not zero. Raises ValueError for what is no such number."""
    if (reporter := _reporter()) is not None:
        reporter.step(_count(step, "step"), loss=loss, tokens=None if tokens is None else _count(tokens, "tokens"),
                      grad_norm=grad_norm, lr=lr)


def validation(step: int, *, loss: float, tokens: int | None = None) -> None:
    """The loss on data that is not trained on, after `step` updates. To be called on every rank; rank 0's figures are
    recorded. All that the rank did since it last told of a step or a validation counts as this one, and for no step.
    Raises ValueError for what is no such number."""
    if (reporter := _reporter()) is not None:
        reporter.validation(_count(step, "step"), loss=loss,
                            tokens=None if tokens is None else _count(tokens, "tokens"))


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
    """One rank's steps and validations, with the time between them."""

    def __init__(self) -> None:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
        self.recorder = Recorder.from_environment(attempt=attempt)
        job = json.loads(RunDir(Path(os.environ[RUN_DIR])).job(attempt).read_text())
        self.faults = from_dict(tuple[FaultSpec, ...], job.get("faults", []), origin="job.json")
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.before: float | None = None  # when the step before was done, or a validation behind it

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
            figures = {"loss": loss, "grad_norm": grad_norm, "lr": lr}
            recorder.report(StepReport(
                attempt=recorder.attempt, rank=0, step=step, t=time.time(), tokens=tokens, step_time_s=seconds,
                tokens_per_s=rate, tokens_per_s_per_gpu=rate and rate / self.world_size,
                **{name: _number(value, name) for name, value in figures.items() if value is not None},
                peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
        strike(self.faults, step=step + 1, **where)

    def validation(self, step: int, *, loss: float, tokens: int | None) -> None:
        recorder, now, seconds = self.recorder, time.perf_counter(), None
        if self.before is not None:  # else neither its time nor that of the first step is known
            seconds, self.before = now - self.before, now
        recorder.progress(step, "step")
        if recorder.rank == 0:
            recorder.report(ValidationReport(attempt=recorder.attempt, rank=0, step=step, t=time.time(),
                                             loss=_number(loss, "loss"), tokens=tokens, validation_s=seconds))


def _count(value: Any, name: str) -> int:
    """Told to the caller: sent, it would end the connection, and all that is reported later would fail."""
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if not 0 <= count < 2**63:
        raise ValueError(f"{name}: {value!r} is not a whole number; give one from 0")
    return count


def _number(value: Any, name: str) -> float:
    """A tensor of one element is a number, too."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last: torch's, for a tensor of more
        raise ValueError(f"{name}: {value!r} is not a number; give one") from None
