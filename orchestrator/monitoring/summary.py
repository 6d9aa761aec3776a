"""What a run has come to, as data: state, losses, attempts, rates, goodput, W&B.

Called by `orc status`, `orc report` (their --json is `summary_json`) and the plots. Pure: the caller reads the
files, and asks the scheduler about the job where the history has no end.
"""
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from jobs.spec.events import AttemptEnded, AttemptStarted, Decision, Diagnosis, Event, RunEnded, RunStarted
from jobs.spec.load import to_dict
from jobs.spec.reports import StepReport, ValidationReport
from jobs.spec.rundir import RunDir
from orchestrator.monitoring.goodput import Goodput, goodput, is_kept, kept_steps
from orchestrator.monitoring.history import Submission, last_of
from orchestrator.submission import JobState

RunState = Literal["pending", "running", "completed", "failed", "stopped", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSummary:
    """One start of all ranks. `end` None: it runs, or nobody recorded its end."""

    n: int
    start: float  # seconds since the epoch
    end: float | None
    diagnosis: str | None  # kind
    suspects: tuple[str, ...]
    decision: str | None  # act
    first_step: int | None
    last_step: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbLocation:
    id: str | None  # None: no supervisor has started yet, or W&B is disabled
    dir: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    state: RunState
    final_step: int | None  # last update of the newest attempt
    final_loss: float | None
    losses: dict[int, float]  # the last attempt that computed a step wins
    validation_losses: dict[int, float]  # by step, the same
    attempts: tuple[AttemptSummary, ...]
    tokens_per_s: float | None  # median over the steps that were kept
    mfu: float | None
    goodput: Goodput
    wandb: WandbLocation


def summarize(events: Sequence[Event], *, run_dir: RunDir, submissions: Sequence[Submission] = (),
              job_state: JobState | None = None, now: float | None = None) -> RunSummary:
    """`job_state` is the scheduler's word on the newest job (None: not asked); it decides only where the
    history has no end. `now` is where the ledger of a live run is cut off (None: at its last event)."""
    events = list(events)
    steps = [event for event in events if isinstance(event, StepReport)]
    kept = kept_steps(events)
    productive = [s for s in steps if is_kept(s.step, attempt=s.attempt, kept=kept)]
    losses = {s.step: s.loss for s in steps if s.loss is not None}
    final_step = _final_step(events)
    state = _state(events, job_state=job_state)
    return RunSummary(
        state=state,
        final_step=final_step,
        final_loss=losses.get(final_step) if final_step is not None else None,
        losses=dict(sorted(losses.items())),
        validation_losses=dict(sorted((e.step, e.loss) for e in events if isinstance(e, ValidationReport))),
        attempts=tuple(_attempts(events)),
        tokens_per_s=_median(s.tokens_per_s for s in productive),
        mfu=_median(s.mfu for s in productive),
        goodput=goodput(events, submissions=submissions,
                         now=now if state in ("pending", "running") else None),
        wandb=_wandb(last_of(events, RunStarted), run_dir=run_dir),
    )


def _wandb(started: RunStarted | None, *, run_dir: RunDir) -> WandbLocation:
    if started is None:
        return WandbLocation(id=None, dir=str(run_dir.wandb))
    return WandbLocation(id=started.wandb_id, dir=str(run_dir.wandb) if started.wandb_id else None)


def summary_json(summary: RunSummary) -> str:
    """Strict JSON: what is not a number (a loss of NaN, an unknown rate) is null."""
    return json.dumps(_strict(to_dict(summary)), allow_nan=False)


def _state(events: list[Event], *, job_state: JobState | None) -> RunState:
    mark = last_of(events, RunStarted | RunEnded)
    if job_state == "pending":  # also a resume that waits in the queue
        return "pending"
    if isinstance(mark, RunEnded):
        return mark.state
    if job_state in (None, "running"):
        return "running" if mark or job_state else "pending"
    return "unknown"  # the job is over, or nobody knows of it, and the supervisor did not say how it ended


def _final_step(events: list[Event]) -> int | None:
    step = None
    for event in events:
        if isinstance(event, AttemptStarted):
            step = event.resume_step
        elif isinstance(event, StepReport):
            step = event.step
    return step


def _attempts(events: list[Event]) -> Iterable[AttemptSummary]:
    own: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if isinstance(event, AttemptStarted | StepReport | Diagnosis | Decision | AttemptEnded):
            own[event.attempt].append(event)
    for n in sorted(own):
        start = last_of(own[n], AttemptStarted)
        if start is None:  # a diagnosis of what failed before any rank was started
            continue
        diagnosis, decision = last_of(own[n], Diagnosis), last_of(own[n], Decision)
        end = last_of(own[n], AttemptEnded)
        steps = [event.step for event in own[n] if isinstance(event, StepReport)]
        yield AttemptSummary(
            n=n,
            start=start.t,
            end=end.t if end else None,
            diagnosis=diagnosis.kind if diagnosis else None,
            suspects=diagnosis.suspects if diagnosis else (),
            decision=decision.act if decision else None,
            first_step=min(steps) if steps else None,
            last_step=max(steps) if steps else None,
        )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return median(known) if known else None


def _strict(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, dict):
        return {key: _strict(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_strict(value) for value in data]
    return data
