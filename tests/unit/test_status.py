"""What a person reads: the status, the report, and the progress line on a terminal and in a log file."""
import io
import subprocess
import sys
from pathlib import Path
from dataclasses import replace

import pytest
from rich.console import Console

from jobs.spec.events import AgentLost, AttemptStarted, CheckpointSkipped, Diagnosis
from jobs.spec.reports import RankError
from jobs.spec.rundir import MANIFEST, RunDir
from orchestrator.monitoring.progress import Progress, progress_line
from orchestrator.monitoring.report import render_report, write_report
from orchestrator.monitoring.status import render_status
from orchestrator.monitoring.summary import summarize
from tests.helpers.histories import T0, two_attempts

EVENTS = two_attempts()
CRASHED = next(i for i, event in enumerate(EVENTS) if isinstance(event, Diagnosis))


def text_of(renderable, *, width=100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return out.getvalue()


def status_of(events, tmp_path, *, width=100, **more) -> str:
    run_dir = RunDir(tmp_path / "demo")
    return text_of(render_status(summarize(events, run_dir=run_dir, **more), events, run_dir=run_dir), width=width)


# what is true of the run → how the status says it
SAID = ["demo  completed", "step 40  loss 2.1434", "4,083 tokens/s", "MFU 20.9% (causal)", "crash", "rank 3 on node-0",
        "restart from step 20", "1–26", "21–40", "node-1", "11.0/64.0 GiB", "2 × 50.0 GiB", "61 °C, ?",
        "newest step 40", "6 steps lost", "productive 20.4 s", "run demo-3f9c2a1b", "job 4711"]


@pytest.mark.parametrize("said", SAID)
def test_status_says(said, tmp_path):
    assert said in status_of(EVENTS, tmp_path)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_the_terminal_but_commands_to_copy(tmp_path, width):
    lines = status_of(EVENTS, tmp_path, width=width).splitlines()
    assert [line for line in lines if len(line.rstrip()) > width and "wandb" not in line.lower()] == []


def test_status_of_a_run_without_gpus_shows_no_gpu_columns(tmp_path):
    assert "GPU utilization" in status_of(EVENTS, tmp_path)
    assert "GPU utilization" not in status_of(two_attempts(gpus=0), tmp_path)


def test_status_of_a_run_that_has_not_started(tmp_path):
    said = status_of([], tmp_path, job_state="pending")
    assert "demo  pending" in said and "none committed yet" in said and "not started" in said


def test_status_without_a_history_says_what_the_disk_says(tmp_path):
    folder = RunDir(tmp_path / "demo").checkpoint(20)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    said = status_of([], tmp_path, job_state="unknown")
    assert "on disk: 20; the history does not tell of them" in said and "W&B          unknown" in said


def test_status_says_unknown_and_what_to_do_when_the_supervisor_is_gone(tmp_path):
    said = status_of(EVENTS[:CRASHED], tmp_path, job_state="node_failure")
    assert "demo  unknown" in said and "orc resume" in said
    assert "running" not in said


def test_status_names_checkpoints_that_were_skipped(tmp_path):
    events = [*EVENTS, CheckpointSkipped(t=T0, step=30, reason="rank-00002.bin: checksum differs")]
    assert "step 30 skipped: rank-00002.bin: checksum differs" in status_of(events, tmp_path)


def errors_of(*ranks: int, traceback: str) -> list[RankError]:
    return [RankError(attempt=1, rank=rank, step=26, t=T0 + 10 - rank, type="ValueError", message="m",
                      traceback=traceback.format(rank=rank)) for rank in ranks]


def report_of(errors: list[RankError], tmp_path: Path) -> str:
    events = [*EVENTS[:CRASHED], *errors, *EVENTS[CRASHED:]]
    run_dir = RunDir(tmp_path / "demo")
    summary = summarize(events, run_dir=run_dir)
    pictures = write_report(summary, events, run_dir=run_dir)
    said = text_of(render_report(summary, events, run_dir=run_dir, pictures=pictures), width=160)
    assert all(str(picture) in said and picture.stat().st_size > 5000 for picture in pictures)
    assert [picture.parent for picture in pictures] == [run_dir.report] * 3
    return said


def test_a_root_without_exception_is_told_with_its_evidence_and_not_with_the_echoes_tracebacks(tmp_path):
    said = report_of(errors_of(2, 5, traceback="Traceback of rank {rank}"), tmp_path)
    assert "attempt 1: crash" in said and "· rank 3 exited with signal 9" in said
    assert "Traceback of rank" not in said


def test_an_exception_is_told_with_the_root_ranks_traceback_alone(tmp_path):
    said = report_of(errors_of(2, 3, traceback="Traceback of rank {rank}\nValueError: [brackets] stay"), tmp_path)
    assert "Traceback of rank 3" in said and "Traceback of rank 2" not in said
    assert "[brackets] stay" in said and "rank-00003.log" in said


def test_long_traceback_keeps_the_root_and_what_ended_the_rank(tmp_path):
    frames = "\n".join(f"  frame {n}" for n in range(50))
    said = report_of(errors_of(3, traceback=(
        f"Traceback:\n{frames}\nOSError: the root\n\nThe above exception was the direct cause of the "
        f"following exception:\n\nTraceback:\n{frames}\nRuntimeError: the end\n")), tmp_path)
    assert "OSError: the root" in said and "RuntimeError: the end" in said
    assert said.count("frame 49") == 2 and "frame 3 " not in said


def test_looking_at_a_run_loads_neither_matplotlib_nor_wandb():
    code = ("import sys, orchestrator.monitoring.status, orchestrator.monitoring.progress\n"
            "sys.exit(' '.join({'matplotlib', 'wandb', 'torch'} & set(sys.modules)) or None)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_last_validation_is_told_by_status_and_progress(tmp_path):
    events = two_attempts(validating=8)
    assert "validation after step 40  loss 2.0850  8,192 tokens in 0.4 s" in status_of(events, tmp_path)
    assert "validation after" not in status_of(EVENTS, tmp_path)
    told = [line.partition("validation ")[2] for line in shown(events, terminal=False).splitlines()
            if " validation " in line]
    assert told[0] == "after step 8  loss 2.4250"
    assert [int(line.split()[2]) for line in told] == [8, 16, 24, 24, 32, 40]


def test_progress_line_is_the_newest_step():
    assert progress_line([]) == "waiting for the first attempt"
    assert progress_line(EVENTS, steps=40) == "step 40/40  loss 2.1434  4,329 tokens/s  MFU 22.2%  attempt 2"
    start = next(i for i, event in enumerate(EVENTS) if isinstance(event, AttemptStarted) and event.attempt == 2)
    assert progress_line(EVENTS[:start + 1]).startswith("attempt 2  starting 8 ranks on 2 nodes from step 20")


def shown(events, *, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=terminal, color_system=None)
    with Progress(steps=40, console=console) as progress:
        for event in events:
            progress.show(event)
    return out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_attempts_diagnoses_and_decisions_are_told_as_they_come(terminal):
    said = shown(EVENTS, terminal=terminal)
    story = ("attempt 1  starting", "fault injected: sigkill on rank 3", "crash  rank 3", "restart from step 20",
             "attempt 2  starting", "completed  all steps")
    places = [said.index(words) for words in story]
    assert places == sorted(places)


def test_progress_in_a_log_file_is_plain_lines_now_and_then():
    lines = shown(EVENTS, terminal=False).splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert "\x1b" not in "".join(lines)
    assert 3 <= len(steps) <= 10  # 46 steps in 25 s, one line in 5 s, and the last
    assert steps[-1].startswith("step 40/40")


def test_words_of_others_are_not_read_as_markup():
    event = AgentLost(t=T0, node="node-1", reason="[Errno 104] [/bold] reset")
    assert "[Errno 104] [/bold] reset" in shown([event], terminal=False)


def test_a_loss_that_is_no_number_is_shown_as_such():
    step = next(event for event in EVENTS if type(event).__name__ == "StepReport")
    assert "loss nan" in progress_line([replace(step, loss=float("nan"))])
