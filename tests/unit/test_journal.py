"""The journal: what a new supervisor learns from the lines of its predecessors."""
import multiprocessing
from pathlib import Path

import pytest

from jobs.spec.events import AttemptStarted, CheckpointCommitted, CheckpointSkipped, Decision, RunStarted
from orchestrator.monitoring.history import read_history
from orchestrator.supervision.journal import Journal, JournalError

STARTED = RunStarted(t=1.0, run="r", job_id="7", term=1, host="h", wandb_id="abc", max_restarts=3)
ATTEMPT = AttemptStarted(t=2.0, attempt=1, nodes=("n1",), world_size=1, resume_step=None, layout="")


def skipped(step: int) -> CheckpointSkipped:
    return CheckpointSkipped(t=3.0, step=step, reason="torn")


def committed(step: int) -> CheckpointCommitted:
    return CheckpointCommitted(t=3.0, attempt=1, step=step, data_cursor=step, size_bytes=1, save_s=0.1)


def written(path: Path, *events) -> Journal:
    journal = Journal(path)
    for event in events:
        journal.write(event)
    return journal


def test_a_successor_knows_term_attempt_and_wandb_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written(path, STARTED, ATTEMPT, Decision(t=3.0, attempt=1, act="restart", reason="")).close()
    successor = Journal(path)
    assert (successor.term, successor.last_attempt, successor.wandb_id, len(successor.decisions)) == (1, 1, "abc", 1)


def test_a_torn_last_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written(path, STARTED).close()
    with path.open("ab") as out:
        out.write(b'{"event": "attempt_st')
    written(path, ATTEMPT).close()
    assert read_history(path)[0] == [STARTED, ATTEMPT]


@pytest.mark.parametrize("events, refused", [([skipped(10)], {10}), ([skipped(10), committed(10)], set()),
                                             ([committed(10), skipped(10), skipped(20)], {10, 20})])
def test_a_refused_step_is_usable_again_once_written_again(tmp_path: Path, events: list, refused: set) -> None:
    path = tmp_path / "events.jsonl"
    written(path, STARTED, *events).close()
    assert Journal(path).refused_steps == refused


def _try_to_open(path: Path, answer) -> None:
    try:
        Journal(path)
        answer.put("opened")
    except JournalError as error:
        answer.put(str(error))


def test_two_supervisors_never_write_one_history(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = written(path, STARTED)
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    second = context.Process(target=_try_to_open, args=(path, answer))
    second.start()
    assert "another supervisor" in answer.get(timeout=60)
    second.join()
    first.close()
