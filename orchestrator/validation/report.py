"""Statistics of predictions per group: MAPE, worst row, Kendall τ, regret, memory; and their two printed forms.

Called by `orc validate`. It sees predictions and measurements and nothing of how they were made.
"""
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from jobs.spec.load import to_dict
from orchestrator.planner.constants import FITTED_GROUPS
from orchestrator.validation.predict import GIB_PER_GB, Predicted

COMPARABLE = 3  # rows of one job that τ and regret need


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStatistics:
    group: str
    rows: int
    refused: int
    timed: int  # rows with a predicted and a measured step time
    mape: float | None
    max_ape: float | None
    worst: str | None  # id of the row with max_ape
    tau: float | None
    regret: float | None
    memory_mape: float | None
    fitted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FitStatistics:
    """Does it fit? Positive: it ran."""

    ran_and_fits: int
    ran_but_refused: tuple[str, ...]
    failed_but_fits: tuple[str, ...]  # ids, the fragmentation rows among them
    failed_and_refused: int

    @property
    def precision(self) -> float | None:
        said = self.ran_and_fits + len(self.failed_but_fits)
        return self.ran_and_fits / said if said else None

    @property
    def recall(self) -> float | None:
        ran = self.ran_and_fits + len(self.ran_but_refused)
        return self.ran_and_fits / ran if ran else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    groups: tuple[GroupStatistics, ...]
    rows: tuple[Predicted, ...]
    fits: FitStatistics

    def to_json(self) -> dict[str, Any]:
        """The published form."""
        rows = [{"id": p.row.id, "predicted_step_time_s": p.predicted_step_time_s,
                 "measured_step_time_s": p.measured_step_time_s, "predicted_memory_gib": p.predicted_memory_gib,
                 "measured_memory_gb": p.row.memory_gb, "fits": p.fits, "refused": p.refused} for p in self.rows]
        fits = to_dict(self.fits) | {"precision": self.fits.precision, "recall": self.fits.recall}
        return {"groups": to_dict(self.groups), "rows": rows, "fits": fits}


def report_of(rows: tuple[Predicted, ...]) -> Report:
    by_group: dict[str, list[Predicted]] = defaultdict(list)
    for one in rows:
        by_group[one.row.group].append(one)
    return Report(groups=tuple(_statistics(name, members) for name, members in by_group.items()), rows=rows,
                  fits=_fits(rows))


def _statistics(name: str, members: list[Predicted]) -> GroupStatistics:
    timed = [one for one in members if one.ape is not None]
    worst = max(timed, key=lambda one: one.ape, default=None)
    jobs: dict[tuple, list[Predicted]] = defaultdict(list)
    for one in timed:
        jobs[one.job].append(one)
    comparable = [job for job in jobs.values() if len(job) >= COMPARABLE]
    memory = [abs(one.predicted_memory_gib / (one.row.memory_gb * GIB_PER_GB) - 1) for one in members
              if one.predicted_memory_gib is not None and one.row.memory_gb]
    return GroupStatistics(
        group=name, rows=len(members), refused=sum(one.refused is not None for one in members), timed=len(timed),
        mape=_mean([one.ape for one in timed]), max_ape=worst.ape if worst else None,
        worst=worst.row.id if worst else None, tau=_tau(comparable),
        regret=max((_regret(job) for job in comparable), default=None), memory_mape=_mean(memory),
        fitted=name in FITTED_GROUPS)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _tau(jobs: list[list[Predicted]]) -> float | None:
    """Kendall's τ-b over the pairs of rows of the same job; None where no pair differs in both."""
    agree = tied_predicted = tied_measured = pairs = 0
    for job in jobs:
        for i, a in enumerate(job):
            for b in job[:i]:
                predicted = a.predicted_step_time_s - b.predicted_step_time_s
                measured = a.measured_step_time_s - b.measured_step_time_s
                pairs += 1
                tied_predicted += predicted == 0
                tied_measured += measured == 0
                agree += (predicted * measured > 0) - (predicted * measured < 0)
    spread = ((pairs - tied_predicted) * (pairs - tied_measured)) ** 0.5
    return agree / spread if spread else None


def _regret(job: list[Predicted]) -> float:
    """Measured time of the layout that the prediction would have picked, over the best measured one."""
    picked = min(job, key=lambda one: one.predicted_step_time_s)
    return picked.measured_step_time_s / min(one.measured_step_time_s for one in job)


def _fits(rows: tuple[Predicted, ...]) -> FitStatistics:
    known = [one for one in rows if one.fits is not None and one.row.status is not None]
    return FitStatistics(
        ran_and_fits=sum(one.row.ran and one.fits for one in known),
        ran_but_refused=tuple(one.row.id for one in known if one.row.ran and not one.fits),
        failed_but_fits=tuple(f"{one.row.id}: {one.row.status}" for one in known if not one.row.ran and one.fits),
        failed_and_refused=sum(not one.row.ran and not one.fits for one in known))
