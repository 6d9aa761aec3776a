"""The report of `orc validate` as a person reads it: groups, totals of what was fitted and what was not, refusals.

Presentation only: every figure shown is a field of the Report.
"""
from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.planner.constants import FITTED_GROUPS
from orchestrator.validation.report import GroupStatistics, Report

SHOWN_FITS = 12


def show_report(report: Report, console: Console) -> None:
    """Print everything; reads well from 80 columns on. `no`: rows refused."""
    console.print(_groups(report))
    for line in _totals(report):
        console.print(line, highlight=False, markup=False)
    console.print(Text("fitted on: " + ", ".join(FITTED_GROUPS), "dim"), highlight=False)
    for reason, count in Counter(one.refused for one in report.rows if one.refused).most_common():
        console.print(Text(f"{count:4d} refused: {reason}", "dim"), highlight=False)
    for line in _fits(report):
        console.print(line, highlight=False, markup=False)  # a row's name may have brackets


def _groups(report: Report) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for column in ("group", "", "rows", "no", "MAPE", "worst", "τ", "regret", "memory", "worst row"):
        text = column in ("group", "worst row")
        table.add_column(column, justify="left" if text or not column else "right", no_wrap=not text, overflow="fold")
    for one in report.groups:
        table.add_row(Text(one.group), "fit" if one.fitted else "", str(one.rows), str(one.refused), _percent(one.mape),
                      _percent(one.max_ape), _figure(one.tau, "{:.2f}"), _figure(one.regret, "{:.3f}"),
                      _percent(one.memory_mape), Text(_end(one)))
    return table


def _end(one: GroupStatistics) -> str:
    """The worst row's id without the name of its group, which stands at the line's beginning."""
    worst = (one.worst or "").removeprefix(one.group).lstrip("-")
    return worst if len(worst) <= 24 else "…" + worst[-23:]


def _totals(report: Report) -> list[str]:
    """Mean over rows, fitted groups and others apart; mixtures apart from dense models."""
    fitted = {one.group for one in report.groups if one.fitted}
    lines = []
    dense = [p for p in report.rows if not p.mixture]
    for name, chosen in (("fitted, dense", [p for p in dense if p.row.group in fitted]),
                         ("not fitted, dense", [p for p in dense if p.row.group not in fitted]),
                         ("mixtures of experts", [p for p in report.rows if p.mixture])):
        errors = [p.ape for p in chosen if p.ape is not None]
        if errors:
            lines.append(f"{name}: {len(errors)} rows, MAPE {sum(errors) / len(errors):.1%}, "
                         f"median {sorted(errors)[len(errors) // 2]:.1%}")
    return lines


def _fits(report: Report) -> list[str]:
    fits = report.fits
    lines = [f"fits: {fits.ran_and_fits} ran and fit, {len(fits.ran_but_refused)} ran but were predicted not to, "
             f"{len(fits.failed_but_fits)} failed but were predicted to fit, {fits.failed_and_refused} failed as "
             f"predicted; precision {_percent(fits.precision)}, recall {_percent(fits.recall)}"]
    lines += [f"  failed but fits: {one}" for one in fits.failed_but_fits[:SHOWN_FITS]]
    more = len(fits.ran_but_refused) - SHOWN_FITS
    lines += [f"  ran but refused: {one}" for one in fits.ran_but_refused[:SHOWN_FITS]]
    return lines + ([f"  … and {more} more"] if more > 0 else [])


def _percent(value: float | None) -> str:
    return _figure(value, "{:.1%}")


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
