"""observe: the reports of one attempt, folded into what is known about it. Pure.

Nothing here judges: Health holds facts, in the order they arrived; diagnose draws the conclusion. Since
Health is a fold over recorded events, every diagnosis can be derived again from events.jsonl.
"""
import dataclasses
import math
from dataclasses import dataclass

from jobs.spec.events import AgentLost, Event, RanksSilent
from jobs.spec.reports import RankError, RankExit, StepReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Facts about one attempt."""

    attempt: int
    world_size: int
    nodes: tuple[str, ...]
    resume_step: int | None = None
    exits: tuple[RankExit, ...] = ()
    errors: tuple[RankError, ...] = ()
    lost: tuple[AgentLost, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    silent: RanksSilent | None = None
    diverged_step: int | None = None  # first step whose loss or gradient norm is no number

    @property
    def reached(self) -> int | None:
        """Updates completed: here, or before this attempt where it completed none."""
        return self.resume_step if self.last_step is None else self.last_step

    @property
    def failed(self) -> bool:
        """Something has happened after which this attempt cannot complete."""
        return self.diverged or self.silent is not None or bool(self.lost) or any(e.exit_code != 0 for e in self.exits)

    @property
    def diverged(self) -> bool:
        return self.diverged_step is not None

    @property
    def ended(self) -> bool:
        """Every rank has ended, and with its end told all that it had to tell."""
        return len({e.rank for e in self.exits}) == self.world_size

    @property
    def completed(self) -> bool:
        """Every rank has ended with exit code 0."""
        return not self.failed and self.ended


def diverged(report: StepReport) -> bool:
    """Whether its loss or gradient norm is no number."""
    return not all(value is None or math.isfinite(value) for value in (report.loss, report.grad_norm))


def observe(health: Health, event: Event) -> Health:
    """Health after one more event. Events of other attempts and other kinds change nothing."""
    if getattr(event, "attempt", health.attempt) != health.attempt:
        return health
    match event:
        case RankExit():
            return dataclasses.replace(health, exits=(*health.exits, event))
        case RankError():
            return dataclasses.replace(health, errors=(*health.errors, event))
        case AgentLost():
            return dataclasses.replace(health, lost=(*health.lost, event)) if event.node in health.nodes else health
        case RanksSilent():
            return dataclasses.replace(health, silent=event)
        case StepReport(step=step):
            first = step if health.first_step is None else health.first_step
            lost = step if health.diverged_step is None and diverged(event) else health.diverged_step
            return dataclasses.replace(health, first_step=first, last_step=max(step, health.last_step or 0),
                                       diverged_step=lost)
    return health
