"""A run in depth, `orc report`: the status, each attempt's story with its evidence, the loss along the run, pictures.

Called by the CLI. Renders a RunSummary and the history behind it.
"""
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jobs.spec.events import Decision, Diagnosis, Event
from jobs.spec.reports import RankError
from jobs.spec.rundir import RunDir
from orchestrator.monitoring.history import all_of
from orchestrator.monitoring.status import render_status, spaced
from orchestrator.monitoring.summary import RunSummary
from orchestrator.monitoring.wording import KIND_STYLE

TRACEBACK_LINES = 7  # of each exception of a chain


def render_report(summary: RunSummary, events: Sequence[Event], *, run_dir: RunDir,
                  pictures: Sequence[Path]) -> RenderableType:
    """The status, then each attempt's story with its evidence, the loss along the run, and where the pictures lie."""
    parts: list[RenderableType] = [render_status(summary, events, run_dir=run_dir)]
    parts += [_story(diagnosis, events, run_dir=run_dir) for diagnosis in all_of(events, Diagnosis)
              if diagnosis.kind != "completed"]
    if summary.losses:
        parts.append(_curve(summary))
    lines = [Text.assemble(("pictures     ", "bold"), str(picture)) for picture in pictures[:1]]
    lines += [Text(f"             {picture}") for picture in pictures[1:]]
    return Group(*spaced([*parts, Group(*lines)]))


def write_report(summary: RunSummary, events: Sequence[Event], *, run_dir: RunDir) -> list[Path]:
    """The pictures of `orc report`, into RunDir.report; returns their paths."""
    from orchestrator.monitoring.plots import write_plots  # loads matplotlib: a second that `orc status` need not wait

    return write_plots(events, ledger=summary.goodput, title=run_dir.path.name, folder=run_dir.report)


def _story(diagnosis: Diagnosis, events: Sequence[Event], *, run_dir: RunDir) -> Panel:
    lines = [Text(diagnosis.summary, style="bold")]
    if diagnosis.suspects:
        lines.append(Text(f"suspects: {', '.join(diagnosis.suspects)}"))
    if diagnosis.step is not None:
        lines.append(Text(f"last completed step: {diagnosis.step}"))
    told = [error for error in all_of(events, RankError)
            if (error.attempt, error.rank) == (diagnosis.attempt, diagnosis.rank)]
    if told:  # the whole traceback of the root; those of other ranks are its echoes
        log = run_dir.rank_log(diagnosis.attempt, diagnosis.rank)
        lines += [Text(f"traceback of rank {diagnosis.rank}; whole in {log}:"),
                  Text(_shortened(told[0].traceback), style="dim")]
    else:
        lines += [Text(f"· {line}") for line in diagnosis.evidence]
    for decision in all_of(events, Decision):
        if decision.attempt == diagnosis.attempt:
            lines.append(Text.assemble((f"→ {decision.act}  ", "bold"), decision.reason))
    return Panel(Group(*lines), title=f"attempt {diagnosis.attempt}: {diagnosis.kind}", title_align="left",
                 box=box.ROUNDED, border_style=KIND_STYLE.get(diagnosis.kind, "red"))


def _shortened(traceback: str) -> str:
    """The last lines of each exception of a chain: the first is the root, the last is what ended the rank."""
    blocks = traceback.rstrip().split("\n\n")
    shown = []
    for block in blocks:
        lines = [line for line in block.splitlines() if line.strip(" ^~")]  # markers point at what is cut off
        shown.append("\n".join([*(["  …"] if len(lines) > TRACEBACK_LINES else []), *lines[-TRACEBACK_LINES:]]))
    return "\n\n".join(shown)


def _curve(summary: RunSummary) -> Table:
    """The loss at about twelve steps, evenly spaced, first and last included."""
    steps = sorted(summary.losses)
    places = sorted({round(i * (len(steps) - 1) / 11) for i in range(12)})
    table = Table(box=None, padding=(0, 2, 0, 0), title="loss along the run", title_justify="left", show_header=False)
    table.add_row("step", *(str(steps[place]) for place in places), style="dim")
    table.add_row("loss", *(f"{summary.losses[steps[place]]:.3f}" for place in places))
    return table
