"""The live view of `orc run`: one progress line, with attempts, diagnoses and decisions printed above it.

Called by the CLI with events as they arrive. On a terminal it is a bar that stays at the foot; elsewhere (a log
file, a pipe) the same as plain lines, a step now and then. Knows nothing of where events come from.
"""
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn
from rich.text import Text

from jobs.spec.events import (AgentLost, AttemptStarted, CheckpointCommitted, CheckpointSkipped, Decision, Diagnosis,
                              Event, RunEnded)
from jobs.spec.reports import CheckpointSaved, FaultInjected, StepReport, ValidationReport
from orchestrator.monitoring.wording import KIND_STYLE, STATE_STYLE

PLAIN_EVERY_S = 5.0  # between plain step lines, by the events' own clock


def progress_line(events: Sequence[Event], *, steps: int | None = None) -> str:
    """The newest step in one line; without steps, what is being waited for."""
    for event in reversed(events):
        if isinstance(event, StepReport):
            return _step_line(event, steps=steps)
        if isinstance(event, AttemptStarted):
            return f"attempt {event.attempt}  {_starting(event)}"
    return "waiting for the first attempt"


def announcement(event: Event) -> Text | None:
    """What a person should read about an event above the progress line; None for the everyday."""
    clock = time.strftime("%H:%M:%S  ", time.localtime(event.t))
    match event:
        case AttemptStarted():
            return Text.assemble((clock, "dim"), (f"attempt {event.attempt}  ", "bold"), _starting(event))
        case FaultInjected():
            return Text.assemble((clock, "dim"), (f"fault injected: {event.fault} on rank {event.rank} ", "yellow"),
                                 f"before step {event.step}")
        case Diagnosis(kind="completed") | Decision(act="finish"):
            return None  # the run's end, a moment later, says it
        case Diagnosis():
            style = KIND_STYLE.get(event.kind, "bold red")
            return Text.assemble((clock, "dim"), (f"{event.kind}  ", style), event.summary)
        case Decision():
            resume = "" if event.resume_step is None else f" from step {event.resume_step}"
            return Text.assemble((clock, "dim"), (f"{event.act}{resume}  ", "bold"), event.reason)
        case AgentLost():
            return Text.assemble((clock, "dim"), (f"agent of {event.node} lost  ", "red"), event.reason)
        case ValidationReport():
            return Text.assemble((clock, "dim"), f"validation after step {event.step}  loss {event.loss:.4f}")
        case CheckpointSkipped():
            return Text.assemble((clock, "dim"), (f"checkpoint {event.step} skipped  ", "red"), event.reason)
        case RunEnded():
            return Text.assemble((clock, "dim"), (f"{event.state}  ", STATE_STYLE[event.state]), event.reason)
    return None


class Progress:
    """Consumes events and shows them. Use as a context manager.

    `steps` is the run's last step (None: unknown, no bar). `console` tells whether this is a terminal.
    """

    def __init__(self, *, steps: int | None, console: Console) -> None:
        self.steps = steps
        self.console = console
        self.checkpoint: int | None = None  # newest committed
        self.shown_t = float("-inf")  # of the last plain step line
        self.bar: Bar | None = None
        if console.is_terminal:
            columns = [BarColumn(bar_width=24), TextColumn("{task.description}", markup=False)]
            self.bar = Bar(*columns, console=console, refresh_per_second=4)
            self.task = self.bar.add_task("waiting for the first attempt", total=steps)

    def __enter__(self) -> "Progress":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, event: Event) -> None:
        text = announcement(event)
        if text is not None:
            self.console.print(text, soft_wrap=True)
        if isinstance(event, CheckpointCommitted | CheckpointSaved):
            self.checkpoint = event.step
        if isinstance(event, AttemptStarted):
            self._move(event.resume_step or 0, progress_line([event], steps=self.steps))
        elif isinstance(event, StepReport):
            self._step(event)

    def _step(self, event: StepReport) -> None:
        line = _step_line(event, steps=self.steps)
        if self.checkpoint is not None:
            line += f"  checkpoint {self.checkpoint}"
        self._move(event.step, line)
        last = event.step == self.steps
        if self.bar is None and (last or event.t - self.shown_t >= PLAIN_EVERY_S):
            self.shown_t = event.t
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _move(self, step: int, line: str) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=line)


def _step_line(event: StepReport, *, steps: int | None) -> str:
    of = "" if steps is None else f"/{steps}"
    figures = (("loss ", event.loss, ".4f", ""), ("", event.tokens_per_s, ",.0f", " tokens/s"),
               ("MFU ", event.mfu, ".1%", ""))
    known = "".join(f"{name}{value:{form}}{unit}  " for name, value, form, unit in figures if value is not None)
    return f"step {event.step}{of}  {known}attempt {event.attempt}"


def _starting(event: AttemptStarted) -> str:
    where = "from the beginning" if event.resume_step is None else f"from step {event.resume_step}"
    return f"starting {event.world_size} ranks on {len(event.nodes)} nodes {where}  ({event.layout})"
