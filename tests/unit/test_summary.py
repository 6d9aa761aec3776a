"""The published JSON of `orc status` and `orc report`."""
import json
from pathlib import Path
from statistics import median

import pytest

from jobs.spec.events import AttemptStarted, RunEnded
from jobs.spec.reports import StepReport
from jobs.spec.rundir import RunDir
from orchestrator.monitoring.history import Submission
from orchestrator.monitoring.summary import summarize, summary_json
from tests.helpers.histories import T0, step_report, two_attempts

RUN = RunDir(Path("/runs/demo"))
EVENTS = two_attempts()
SECOND = next(event for event in EVENTS if isinstance(event, AttemptStarted) and event.attempt == 2)
TO_CRASH = EVENTS[:EVENTS.index(SECOND)]
END = EVENTS[-1].t

# events, what the scheduler says of the job (None: not asked) → state
STATES = {
    "completed": (EVENTS, None, "completed"),
    "completed, the job is about to go": (EVENTS, "running", "completed"),
    "completed, asked the scheduler": (EVENTS, "completed", "completed"),
    "failed": ([*TO_CRASH, RunEnded(t=END, state="failed", reason="", final_step=26)], "failed", "failed"),
    "stopped": ([*TO_CRASH, RunEnded(t=END, state="stopped", reason="", final_step=26)], "cancelled", "stopped"),
    "running": (TO_CRASH, "running", "running"),
    "running, not asked": (TO_CRASH, None, "running"),
    "resumed": ([*EVENTS, EVENTS[0]], "running", "running"),
    "resume waits in the queue": (EVENTS, "pending", "pending"),
    "not started": ([], "pending", "pending"),
    "not started, not asked": ([], None, "pending"),
    "started, nothing written yet": ([], "running", "running"),
    "supervisor gone with the job": (TO_CRASH, "failed", "unknown"),
    "job completed but the supervisor wrote no end": (TO_CRASH, "completed", "unknown"),
    "scheduler gives no answer": (TO_CRASH, "unknown", "unknown"),
    "node failure": (TO_CRASH, "node_failure", "unknown"),
}


@pytest.mark.parametrize("events, job_state, state", STATES.values(), ids=STATES)
def test_state(events, job_state, state):
    assert summarize(events, run_dir=RUN, job_state=job_state).state == state


def test_json_has_exactly_the_published_keys():
    data = json.loads(summary_json(summarize(EVENTS, run_dir=RUN, submissions=[Submission(t=T0 - 5, job_id="4711")])))
    assert set(data) == {"state", "final_step", "final_loss", "losses", "validation_losses", "attempts", "tokens_per_s",
                         "mfu", "goodput", "wandb"}
    assert data["wandb"] == {"id": "demo-3f9c2a1b", "dir": "/runs/demo/wandb"}
    assert list(data["losses"]) == [str(step) for step in range(1, 41)]
    assert (data["final_step"], data["final_loss"]) == (40, data["losses"]["40"])
    first, second = data["attempts"]
    assert set(first) == {"n", "start", "end", "diagnosis", "suspects", "decision", "first_step", "last_step"}
    assert first["start"] < first["end"] < second["start"] < second["end"]
    del first["start"], first["end"], second["start"], second["end"]
    assert first == {"n": 1, "diagnosis": "crash", "suspects": ["rank 3 on node-0"], "decision": "restart",
                     "first_step": 1, "last_step": 26}
    assert second == {"n": 2, "diagnosis": "completed", "suspects": [], "decision": "finish", "first_step": 21,
                      "last_step": 40}
    assert 0 < data["goodput"]["goodput"] < 1
    assert data["goodput"]["queue_s"] == 5.0


def test_last_attempt_that_computed_a_step_wins():
    events = [step_report(attempt=1, step=1, t=T0, loss=3.0), step_report(attempt=1, step=2, t=T0, loss=2.0),
              step_report(attempt=2, step=1, t=T0, loss=2.5)]
    assert summarize(events, run_dir=RUN).losses == {1: 2.5, 2: 2.0}


def test_validations_are_by_step_and_change_no_rate():
    plain, found = (summarize(two_attempts(validating=n), run_dir=RUN) for n in (None, 8))
    assert plain.validation_losses == {} and list(found.validation_losses) == [8, 16, 24, 32, 40]
    assert (found.tokens_per_s, found.mfu, found.losses) == (plain.tokens_per_s, plain.mfu, plain.losses)
    assert found.goodput.productive_s == pytest.approx(plain.goodput.productive_s, abs=1e-4)
    assert found.goodput.validation_s == pytest.approx(5 * 0.4, abs=1e-4)  # step 24 was lost, and validated again


def test_final_step_is_of_the_newest_attempt():
    summary = summarize(TO_CRASH, run_dir=RUN)
    assert (summary.final_step, summary.final_loss) == (26, summary.losses[26])
    summary = summarize([*TO_CRASH, SECOND], run_dir=RUN)
    assert (summary.final_step, summary.final_loss) == (20, summary.losses[20])


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_json_is_strict_where_the_loss_is_not(loss):
    events = [step_report(attempt=1, step=1, t=T0, loss=loss)]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads(summary_json(summarize(events, run_dir=RUN)), parse_constant=refuse)
    assert data["losses"] == {"1": None}
    assert data["final_loss"] is None


def test_rates_are_medians_over_the_steps_that_were_kept():
    steps = [event for event in EVENTS if isinstance(event, StepReport)]
    kept = [s for s in steps if not (s.attempt == 1 and s.step > 20)]
    summary = summarize(EVENTS, run_dir=RUN)
    assert summary.tokens_per_s == median(s.tokens_per_s for s in kept)
    assert summary.mfu == median(s.mfu for s in kept)


@pytest.mark.parametrize("job_state, wall_s", [("running", 1000.0), ("node_failure", TO_CRASH[-1].t - T0)])
def test_wall_time_of_a_dead_run_does_not_grow(job_state, wall_s):
    summary = summarize(TO_CRASH, run_dir=RUN, job_state=job_state, now=T0 + 1000)
    assert summary.goodput.wall_s == pytest.approx(wall_s, abs=0.5)


def test_empty_history_is_nothing_known_and_no_error():
    data = json.loads(summary_json(summarize([], run_dir=RUN)))
    assert data["attempts"] == [] and data["losses"] == {}
    assert [data[key] for key in ("final_step", "final_loss", "tokens_per_s", "mfu")] == [None] * 4
    assert data["wandb"]["id"] is None and data["goodput"]["goodput"] is None


def test_attempt_without_an_end_has_none():
    summary = summarize(EVENTS[:20], run_dir=RUN)
    assert [(a.n, a.end, a.diagnosis, a.decision) for a in summary.attempts] == [(1, None, None, None)]
