"""The planner's predictions and a fitted roofline's, side by side, on every group of a table of published runs.

    python -m tests.benchmarks.accuracy TABLE.csv

Both were fitted on the same groups; the others were seen by neither. The constants of the planner are refitted by
tests.benchmarks.refit.
"""
import dataclasses
import sys
from pathlib import Path

from orchestrator.planner.constants import FITTED_GROUPS
from orchestrator.validation.predict import Predicted, predict
from orchestrator.validation.report import GroupStatistics, report_of
from orchestrator.validation.settle import settle
from orchestrator.validation.table import read_table
from tests.benchmarks.roofline import fitted


def main(table: Path) -> None:
    rows = read_table(table, group_by="group")
    ours, cases = predict(rows), settle(rows)
    roofline = fitted([(one.row.group, case, one.measured_step_time_s) for one, case in zip(ours, cases)
                       if one.row.group in FITTED_GROUPS and one.ape is not None])
    theirs = tuple(one if one.ape is None else dataclasses.replace(one, predicted_step_time_s=roofline.step_s(case))
                   for one, case in zip(ours, cases))
    print(f"{'group':28s}     rows   MAPE  roofline     τ  roofline  regret  roofline")
    for mine, other in zip(report_of(ours).groups, report_of(theirs).groups):
        if mine.timed:
            print(_line(mine, other))
    print(roofline)
    famous = ("vtrain", "megatron21", "korthikanti")
    hopper = ("H100", "H200")
    for name, chosen in (("fitted, dense", lambda p: _fitted(p) and not p.mixture),
                         ("not fitted, dense", lambda p: not _fitted(p) and not p.mixture),
                         ("mixtures of experts", lambda p: p.mixture),
                         ("vTrain, Narayanan, Korthikanti", lambda p: p.row.group.startswith(famous)),
                         ("dense, H100 and H200", lambda p: not p.mixture and p.row.gpu.startswith(hopper))):
        mine, other = ([p.ape for p in side if p.ape is not None and chosen(p)] for side in (ours, theirs))
        if mine:
            print(f"{name:32s} {len(mine):4d} rows  MAPE {_mean(mine):6.1%}  roofline {_mean(other):6.1%}")


def _line(mine: GroupStatistics, other: GroupStatistics) -> str:
    figures = [f"{mine.mape:6.1%} {other.mape:9.1%}"]
    for name, form in (("tau", "5.2f"), ("regret", "7.3f")):
        for side in (mine, other):
            value = getattr(side, name)
            figures.append(f"{'–':>8s}" if value is None else f"{value:{form}}".rjust(8))
    return f"{mine.group:28s} {'fit' if mine.fitted else '   '} {mine.timed:4d} " + " ".join(figures)


def _fitted(one: Predicted) -> bool:
    return one.row.group in FITTED_GROUPS


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
