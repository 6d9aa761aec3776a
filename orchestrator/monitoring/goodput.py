"""The goodput ledger: where the wall time of a run went, from its events alone.

Called by status, report and W&B. The time from the first submission to the end (or to `now`) is walked once,
front to back; every stretch is given to exactly one part, so the parts sum to the wall time. Goodput is the
productive share (the effective training time ratio, ETTR, of arXiv 2410.21680, with queueing in the wall time).
"""
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from jobs.spec.events import (OWN_LAYOUT, AgentLost, AttemptStarted, CheckpointCommitted, Decision, Diagnosis, Event,
                              RunEnded, RunStarted)
from jobs.spec.reports import CheckpointSaved, RankError, RankExit, StepReport, ValidationReport
from orchestrator.monitoring.history import Submission, last_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Seconds per part, to the microsecond; the parts sum to `wall_s`."""

    productive_s: float  # steps whose result the run kept
    lost_work_s: float  # steps computed and lost again, and the step a failure interrupted
    detection_s: float  # from the failure (where unknown: from the last step) to the diagnosis
    restart_s: float  # from the diagnosis to the next attempt's first step
    validation_s: float  # of steps whose result the run kept; of others it is lost work
    checkpoint_stall_s: float  # ranks waited for a save
    queue_s: float  # submitted, not started
    startup_s: float  # job start to first step of the run
    other_s: float  # shutdown, pauses after a stop, the step in progress
    wall_s: float
    goodput: float | None  # productive ÷ wall; None while no step has been reported
    steps_productive: int
    steps_lost: int


PARTS = tuple(f.name for f in fields(Goodput) if f.name.endswith("_s") and f.name != "wall_s")


def goodput(events: list[Event], *, submissions: Sequence[Submission] = (), now: float | None = None) -> Goodput:
    """The ledger of a history. `now` (seconds since the epoch) is where a run without an end is cut off;
    None cuts it at its last event."""
    timed = _timeline(events, submissions)
    if not timed:
        return Goodput(**dict.fromkeys(PARTS, 0.0), wall_s=0.0, goodput=None, steps_productive=0, steps_lost=0)
    end = max(t for t, _ in timed)
    waits = isinstance(timed[-1][1], Submission)  # a resume that has not started yet
    if now is not None and (waits or not isinstance(last_of(events, RunStarted | RunEnded), RunEnded)):
        end = max(end, now)
    start = min([timed[0][0], *(submission.t for submission in submissions)])
    walk = _Walk(start=start, end=end, kept=kept_steps(events))
    for t, event in timed:
        walk.visit(t, event)
    return walk.result()


def kept_steps(events: list[Event]) -> dict[int, int | None]:
    """Per attempt, the last step whose result outlived the attempt; None if nothing limits it (yet).

    A later attempt keeps what lies at or below the step it resumed from; where a trainer of the user's own has told
    of no checkpoint, what lies below its first step. A run that failed or was stopped keeps what a checkpoint covers.
    """
    kept: dict[int, int | None] = {}
    committed = 0
    own = silent = False  # silent: nothing is known yet of where this attempt goes on
    for event in events:
        if isinstance(event, AttemptStarted):
            own = event.layout == OWN_LAYOUT
            silent = own and event.resume_step is None
            if not silent:
                _limit(kept, event.resume_step or 0)
            kept[event.attempt] = None
        elif isinstance(event, StepReport) and silent:
            silent = False
            _limit(kept, event.step - 1)
            kept[event.attempt] = None
        elif isinstance(event, CheckpointCommitted | CheckpointSaved):
            committed = max(committed, event.step)
        elif isinstance(event, Decision) and event.act == "restart" and (event.resume_step is not None or not own):
            _limit(kept, event.resume_step or 0)
        elif isinstance(event, RunEnded) and event.state != "completed" and not (own and committed == 0):
            _limit(kept, committed)
    return kept


def is_kept(step: int, *, attempt: int, kept: dict[int, int | None]) -> bool:
    limit = kept.get(attempt)
    return limit is None or step <= limit


def _limit(kept: dict[int, int | None], step: int) -> None:
    for attempt, limit in kept.items():
        kept[attempt] = step if limit is None else min(limit, step)


def _timeline(events: list[Event], submissions: Sequence[Submission]) -> list[tuple[float, Event | Submission]]:
    """Each submission just before the start of its job; those that still wait come last.

    Events keep the order in which they were recorded: clocks of different nodes differ, the order of the
    one writer does not lie.
    """
    jobs = {submission.job_id: submission for submission in submissions}
    merged: list[tuple[float, Event | Submission]] = []
    last_start = float("-inf")
    for event in events:
        if isinstance(event, RunStarted):
            last_start = event.t
            if submission := jobs.pop(event.job_id, None):
                merged.append((submission.t, submission))
        merged.append((event.t, event))
    # One that is older than a start it did not cause was withdrawn, or replaced by a later one.
    return merged + [(submission.t, submission) for submission in jobs.values() if submission.t > last_start]


Phase = Literal["queued", "starting", "training", "failed", "diagnosed", "idle"]


class _Walk:
    """A cursor that moves over the wall time once; every stretch it passes goes to one part."""

    def __init__(self, *, start: float, end: float, kept: dict[int, int | None]) -> None:
        self.spent_us = dict.fromkeys(PARTS, 0)  # whole microseconds: their sum is exact
        self.start_us, self.end_us = _us(start), _us(end)
        self.cursor_us = self.start_us
        self.kept = kept
        self.phase: Phase = "queued"
        self.stall_us = 0  # of a save that the next gap between steps may contain
        self.steps = {True: 0, False: 0}  # kept, lost

    @property
    def part(self) -> str:
        """What time is spent on in this phase, unless an event knows better."""
        first = not any(self.steps.values())
        return {"queued": "queue_s", "starting": "startup_s" if first else "restart_s", "training": "other_s",
                "failed": "detection_s", "diagnosed": "restart_s", "idle": "other_s"}[self.phase]

    def spend(self, until_us: int, part: str) -> None:
        until_us = min(max(until_us, self.cursor_us), self.end_us)
        self.spent_us[part] += until_us - self.cursor_us
        self.cursor_us = until_us

    def visit(self, t: float, event: Event | Submission) -> None:
        match event:
            case Submission():
                self.interrupted(t)
                self.phase = "queued"
            case RunStarted():
                # A new supervisor may find the ranks training on: then the next step report decides.
                if self.phase != "training":
                    self.spend(_us(t), self.part)
                    self.phase = "starting"
            case AttemptStarted():
                self.interrupted(t)
                self.phase = "starting"
            case StepReport():
                self.step(event)
            case ValidationReport():
                self.validation(event)
            case CheckpointCommitted():
                self.stall_us = _us(event.save_s)
            case RankExit() | RankError() | AgentLost():
                self.failure(t, event)
            case Diagnosis():
                self.diagnosed(t, event)
            case Decision() if self.phase != "training":
                self.spend(_us(t), self.part)
                self.phase = "diagnosed" if event.act == "restart" else "idle"
            case RunEnded():
                self.finished(_us(t))

    def interrupted(self, t: float) -> None:
        """Training has stopped some time before `t`, and nobody recorded why."""
        self.spend(_us(t), "detection_s" if self.phase == "training" else self.part)

    def step(self, event: StepReport) -> None:
        end_us = _us(event.t)
        self.before(end_us - _us(event.step_time_s or 0.0))
        self.spend(min(self.cursor_us + _us(event.checkpoint_s or 0.0), end_us), "checkpoint_stall_s")
        kept = is_kept(event.step, attempt=event.attempt, kept=self.kept)
        self.spend(end_us, "productive_s" if kept else "lost_work_s")
        self.steps[kept] += 1
        self.phase = "training"

    def validation(self, event: ValidationReport) -> None:
        end_us = _us(event.t)
        self.before(end_us - _us(event.validation_s or 0.0))
        kept = is_kept(event.step, attempt=event.attempt, kept=self.kept)
        self.spend(end_us, "validation_s" if kept else "lost_work_s")

    def before(self, begin_us: int) -> None:
        """Up to where something began that an event tells of at its end."""
        self.gap(begin_us) if self.phase == "training" else self.spend(begin_us, self.part)

    def gap(self, until_us: int) -> None:
        """Between two steps: a save if one was committed since, else nothing we know of."""
        self.spend(min(until_us, self.cursor_us + self.stall_us), "checkpoint_stall_s")
        self.stall_us = 0
        self.spend(until_us, "other_s")

    def failure(self, t: float, event: RankExit | RankError | AgentLost) -> None:
        """The first sign of a failure; later ones are its echoes."""
        if self.phase not in ("starting", "training") or (isinstance(event, RankExit) and event.exit_code == 0):
            return
        if self.phase == "starting":
            self.spend(_us(t), self.part)
        elif not isinstance(event, AgentLost):
            self.spend(_us(t), "lost_work_s")  # the step it interrupted
        # An agent is given up only after a time-out; when its node failed is unknown, so all the time
        # since the last step is detection.
        self.phase = "failed"

    def diagnosed(self, t: float, event: Diagnosis) -> None:
        if event.kind in ("completed", "stopped"):
            self.finished(_us(t))
        else:
            self.interrupted(t)  # if nothing had failed but progress, it was a hang
            self.phase = "diagnosed"

    def finished(self, t_us: int) -> None:
        self.before(t_us)
        self.phase = "idle"

    def result(self) -> Goodput:
        self.spend(self.end_us, self.part)
        wall_us = self.end_us - self.start_us
        stepped = any(self.steps.values())
        return Goodput(**{part: us / 1e6 for part, us in self.spent_us.items()}, wall_s=wall_us / 1e6,
                       goodput=self.spent_us["productive_s"] / wall_us if stepped and wall_us else None,
                       steps_productive=self.steps[True], steps_lost=self.steps[False])


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
