"""What a trainer of the user's own does not say is unknown, everywhere: never zero, never a failure."""
import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from jobs.spec.events import AttemptStarted, Decision, Event, RunEnded, RunStarted
from jobs.spec.reports import CheckpointSaved, StepReport, ValidationReport
from jobs.spec.rundir import RunDir
from orchestrator.monitoring.goodput import goodput, kept_steps
from orchestrator.monitoring.plots import write_plots
from orchestrator.monitoring.progress import progress_line
from orchestrator.monitoring.report import render_report
from orchestrator.monitoring.status import render_status
from orchestrator.monitoring.summary import summarize
from orchestrator.monitoring.wandb_rows import Rows
from orchestrator.supervision.observe import Health, observe


def started(attempt: int, *, t: float, resume_step: int | None = None) -> AttemptStarted:
    return AttemptStarted(t=t, attempt=attempt, nodes=("a",), world_size=2, resume_step=resume_step, layout="command")


def step(number: int, *, attempt: int, t: float, **known) -> StepReport:
    return StepReport(attempt=attempt, rank=0, step=number, t=t, **known)


def saved(number: int, *, attempt: int, t: float) -> CheckpointSaved:
    return CheckpointSaved(attempt=attempt, rank=0, step=number, t=t)


def restart(attempt: int, *, t: float, resume_step: int | None = None) -> Decision:
    return Decision(t=t, attempt=attempt, act="restart", reason="", resume_step=resume_step)


END = {"final_step": 6, "reason": ""}
# history → per attempt, the last step that was kept
KEPT: dict[str, tuple[list[Event], dict[int, int | None]]] = {
    "goes on where it says nothing": (
        [started(1, t=0), step(1, attempt=1, t=1), step(5, attempt=1, t=5), restart(1, t=6),
         started(2, t=7)], {1: None, 2: None}),
    "goes on at its next step": (
        [started(1, t=0), step(5, attempt=1, t=5), restart(1, t=6), started(2, t=7),
         step(4, attempt=2, t=8)], {1: 3, 2: None}),
    "goes on at its checkpoint": (
        [started(1, t=0), saved(2, attempt=1, t=2), step(3, attempt=1, t=3), restart(1, t=4, resume_step=2),
         started(2, t=5, resume_step=2)], {1: 2, 2: None}),
    "failed without a word of checkpoints": (
        [started(1, t=0), step(3, attempt=1, t=3), RunEnded(t=4, state="failed", **END)], {1: None}),
    "failed behind a checkpoint": (
        [started(1, t=0), saved(2, attempt=1, t=2), step(3, attempt=1, t=3),
         RunEnded(t=4, state="failed", **END)], {1: 2}),
}


@pytest.mark.parametrize("events, expected", KEPT.values(), ids=KEPT)
def test_what_is_kept_is_what_the_trainer_goes_on_from(events: list[Event], expected: dict) -> None:
    assert kept_steps(events) == expected


BARE: list[Event] = [
    RunStarted(t=0, run="own", job_id="1", term=1, host="h", wandb_id=None, max_restarts=5), started(1, t=1),
    step(1, attempt=1, t=2), step(2, attempt=1, t=3, step_time_s=1.0, loss=0.5),
    ValidationReport(attempt=1, rank=0, step=2, t=3.25, loss=0.75), saved(2, attempt=1, t=3.5),
    RunEnded(t=4, state="completed", final_step=2, reason="done")]


def test_every_reader_takes_a_step_of_which_nothing_is_known(tmp_path: Path) -> None:
    summary = summarize(BARE, run_dir=RunDir(tmp_path))
    assert (summary.losses, summary.mfu, summary.tokens_per_s) == ({2: 0.5}, None, None)
    assert progress_line(BARE[:3]) == "step 1  attempt 1"
    assert progress_line(BARE[:4]) == "step 2  loss 0.5000  attempt 1"
    out = Console(file=io.StringIO(), width=120)
    out.print(render_status(summary, BARE, run_dir=RunDir(tmp_path)))
    pictures = write_plots(BARE, ledger=summary.goodput, title="own", folder=tmp_path)
    out.print(render_report(summary, BARE, run_dir=RunDir(tmp_path), pictures=pictures))
    text = out.file.getvalue()
    assert "validation after step 2  loss 0.7500" in text.splitlines()
    assert "its trainer's own; the newest holds step 2" in text and "nan" not in text and "None" not in text
    assert {picture.name for picture in pictures} == {"loss.png", "throughput.png", "goodput.png"}


def test_a_step_without_a_duration_takes_no_productive_time() -> None:
    ledger = goodput(BARE)
    assert (ledger.productive_s, ledger.steps_productive, ledger.wall_s) == (1.0, 2, 4.0)
    assert ledger.validation_s == 0.0  # nor does such a validation


def test_a_row_holds_only_what_is_known() -> None:
    rows = Rows()
    bare = rows.row(step(1, attempt=1, t=1.0))
    told = rows.row(step(2, attempt=1, t=2.0, loss=0.5, tokens=8, step_time_s=1.0))
    assert {name for name in bare if name.startswith(("train/", "tokens"))} == {"train/step"}
    assert (told["train/loss"], told["tokens"], told["by_tokens/loss"]) == (0.5, 8, 0.5) and "train/mfu" not in told


def test_an_unknown_loss_is_no_divergence() -> None:
    health = Health(attempt=1, world_size=1, nodes=("a",))
    assert not observe(health, step(1, attempt=1, t=1.0)).failed
    assert observe(health, step(1, attempt=1, t=1.0, loss=math.nan)).diverged
