"""The ledger: every second of the wall time belongs to exactly one part, and to the right one."""
import random
from dataclasses import replace

import pytest

from jobs.spec.events import AgentLost, AttemptStarted, CheckpointCommitted, Decision, Diagnosis, RunEnded, RunStarted
from jobs.spec.reports import RankError, RankExit, StepReport, ValidationReport
from orchestrator.monitoring.goodput import PARTS, goodput, kept_steps
from orchestrator.monitoring.history import Submission
from tests.helpers.histories import LAYOUT, NODES, T0, step_report, two_attempts


def started(t, job_id="1"):
    return RunStarted(t=t, run="r", job_id=job_id, term=1, host="node-0", wandb_id="w", max_restarts=3)


def attempt(t, n, resume=None):
    return AttemptStarted(t=t, attempt=n, nodes=NODES, world_size=8, resume_step=resume, layout=LAYOUT)


def step(t, n, number, stall=0.0):
    return step_report(attempt=n, step=number, t=t, step_time_s=1.0 + stall, checkpoint_s=stall, loss=1.0)


def saved(t, n, number, save_s=0.5):
    return CheckpointCommitted(t=t, attempt=n, step=number, data_cursor=number, size_bytes=1, save_s=save_s)


def validated(t, n, number, seconds=1.0):
    return ValidationReport(attempt=n, rank=4, step=number, t=t, loss=1.0, tokens=1, validation_s=seconds)


def killed(t, n, code=None):
    return RankExit(attempt=n, rank=3, local_rank=3, node="node-0", pid=9, t=t, exit_code=code,
                    signal=9 if code is None else None)


def diagnosis(t, n, kind="crash"):
    return Diagnosis(t=t, attempt=n, kind=kind, summary="")


def decision(t, n, act="restart", resume=None):
    return Decision(t=t, attempt=n, act=act, reason="", resume_step=resume)


def ended(t, state="completed"):
    return RunEnded(t=t, state=state, reason="", final_step=None)


START = [started(0.0), attempt(1.0, 1)]
TWO_STEPS = [*START, step(4.0, 1, 1), step(5.0, 1, 2)]  # start-up lasts to 3.0

# name → (history, submissions, now, the parts that are not zero)
LEDGERS = {
    "nothing yet": ([], [], None, {}),
    "waiting in the queue": ([], [(0.0, "1")], None, {}),
    "waiting, seen later": ([], [(0.0, "1")], 7.0, {"queue_s": 7}),
    "queue, then start-up": (START, [(-5.0, "1")], 2.0, {"queue_s": 5, "startup_s": 2}),
    "running: the step in progress is other": (TWO_STEPS, [], 5.5, {"startup_s": 3, "productive_s": 2, "other_s": .5}),
    "checkpoint stall inside the next step": (
        [*TWO_STEPS, saved(5.4, 1, 2), step(6.5, 1, 3, stall=0.5)], [], None,
        {"startup_s": 3, "productive_s": 3, "checkpoint_stall_s": 0.5}),
    "checkpoint stall between steps": (
        [*TWO_STEPS, saved(5.4, 1, 2), step(6.5, 1, 3)], [], None,
        {"startup_s": 3, "productive_s": 3, "checkpoint_stall_s": 0.5}),
    "validation between steps": (
        [*TWO_STEPS, validated(6.2, 1, 2), step(7.5, 1, 3)], [], None,
        {"startup_s": 3, "productive_s": 3, "validation_s": 1, "other_s": 0.5}),
    "validation, and then a checkpoint inside the next step": (
        [*TWO_STEPS, validated(6.0, 1, 2), saved(6.4, 1, 2), step(7.5, 1, 3, stall=0.5)], [], None,
        {"startup_s": 3, "productive_s": 3, "validation_s": 1, "checkpoint_stall_s": 0.5}),
    "validation and checkpoint of the last step": (
        [*TWO_STEPS, validated(6.0, 1, 2), saved(6.5, 1, 2), ended(7.0)], [], None,
        {"startup_s": 3, "productive_s": 2, "validation_s": 1, "checkpoint_stall_s": 0.5, "other_s": 0.5}),
    "validation of a step that is lost is lost, and so is one that a crash interrupts": (
        [*TWO_STEPS, validated(6.0, 1, 2), killed(6.5, 1), diagnosis(6.5, 1), decision(6.5, 1), attempt(7.0, 2),
         step(9.0, 2, 1), step(10.0, 2, 2), validated(11.0, 2, 2), ended(11.0)], [], None,
        {"startup_s": 3, "lost_work_s": 3.5, "restart_s": 1.5, "productive_s": 2, "validation_s": 1}),
    "final checkpoint, then shutdown": (
        [*TWO_STEPS, saved(5.5, 1, 2), killed(5.7, 1, code=0), diagnosis(6, 1, "completed"), ended(6.0)], [], 99.0,
        {"startup_s": 3, "productive_s": 2, "checkpoint_stall_s": 0.5, "other_s": 0.5}),
    "crash: both steps lost, partial step lost, echoes after the diagnosis are restart": (
        [*TWO_STEPS, killed(5.3, 1), killed(5.6, 1), diagnosis(7.0, 1), decision(7.0, 1), killed(7.1, 1),
         attempt(8.0, 2), step(10.0, 2, 1), step(11.0, 2, 2), ended(11.0)], [], None,
        {"startup_s": 3, "lost_work_s": 2.3, "detection_s": 1.7, "restart_s": 2, "productive_s": 2}),
    "crash after a checkpoint keeps its step": (
        [*TWO_STEPS, saved(5.0, 1, 1), killed(5.0, 1), diagnosis(6.0, 1), decision(6.0, 1, resume=1),
         attempt(6.0, 2, resume=1), step(8.0, 2, 2), ended(8.0)], [], None,
        {"startup_s": 3, "lost_work_s": 1, "detection_s": 1, "restart_s": 1, "productive_s": 2}),
    "hang: all time since the last step is detection": (
        [*TWO_STEPS, diagnosis(65.0, 1, "hang"), decision(65.0, 1)], [], 66.0,
        {"startup_s": 3, "lost_work_s": 2, "detection_s": 60, "restart_s": 1}),
    "lost agent: when its node died is unknown": (
        [*TWO_STEPS, AgentLost(t=20.0, node="node-1", reason="silent"), diagnosis(21.0, 1, "node_failure")], [], None,
        {"startup_s": 3, "productive_s": 2, "detection_s": 16}),
    "crash before the first step": (
        [*START, RankError(attempt=1, rank=0, step=0, t=2.0, type="E", message="", traceback=""), diagnosis(3.0, 1),
         decision(3.0, 1), attempt(4.0, 2), step(6.0, 2, 1)], [], None,
        {"startup_s": 3, "detection_s": 1, "restart_s": 1, "productive_s": 1}),
    "failed run keeps only what is committed": (
        [*TWO_STEPS, saved(5.0, 1, 1), killed(5.0, 1), diagnosis(6.0, 1, "user_error"), decision(6.0, 1, "stop"),
         ended(7.0, "failed")], [], None,
        {"startup_s": 3, "productive_s": 1, "lost_work_s": 1, "detection_s": 1, "other_s": 1}),
    "stopped, resumed a day later: the pause is other, the queue is queue": (
        [*TWO_STEPS, saved(5.0, 1, 2), diagnosis(6.0, 1, "stopped"), ended(6.0, "stopped"), started(106.0, "2"),
         attempt(107.0, 2, resume=2), step(109.0, 2, 3), ended(109.0)], [(-1.0, "1"), (86.0, "2")], None,
        {"queue_s": 21, "startup_s": 3, "productive_s": 3, "checkpoint_stall_s": .5, "other_s": 80.5, "restart_s": 2}),
    "supervisor died with its job: detection until the next submission": (
        [*TWO_STEPS, started(50.0, "2"), attempt(51.0, 2), step(53.0, 2, 1)], [(0.0, "1"), (40.0, "2")], None,
        {"startup_s": 3, "lost_work_s": 2, "detection_s": 35, "queue_s": 10, "restart_s": 2, "productive_s": 1}),
    "a resume waits in the queue": (
        [*TWO_STEPS, saved(5.0, 1, 2), ended(5.0, "stopped")], [(0.0, "1"), (25.0, "2")], 65.0,
        {"startup_s": 3, "productive_s": 2, "other_s": 20, "queue_s": 40}),
    "a submission that was withdrawn counts as queue": (
        TWO_STEPS, [(-30.0, "withdrawn"), (-10.0, "1")], None, {"queue_s": 30, "startup_s": 3, "productive_s": 2}),
    "a new supervisor finds the ranks training on": (
        [*TWO_STEPS, started(9.0), step(6.0, 1, 3), step(7.0, 1, 4), step(8.0, 1, 5), ended(10.0)], [], None,
        {"startup_s": 3, "productive_s": 5, "other_s": 2}),
}


@pytest.mark.parametrize("events, submissions, now, expected", LEDGERS.values(), ids=LEDGERS)
def test_each_second_goes_to_its_part(events, submissions, now, expected):
    handed_in = [Submission(t=t, job_id=job_id) for t, job_id in submissions]
    ledger = goodput(events, submissions=handed_in, now=now)
    parts = {part: getattr(ledger, part) for part in PARTS if getattr(ledger, part)}
    assert parts == pytest.approx(expected)
    assert ledger.wall_s == pytest.approx(sum(expected.values()))


def test_two_attempts_divide_as_they_were_made():
    events = two_attempts(step_s=0.5, crash_step=26, interval=10, steps=40)
    ledger = goodput(events, submissions=[Submission(t=T0 - 20, job_id="4711")])
    steps = [event for event in events if isinstance(event, StepReport)]
    lost = sum(s.step_time_s for s in steps if s.attempt == 1 and s.step > 20)
    assert ledger.productive_s == pytest.approx(sum(s.step_time_s for s in steps) - lost, abs=1e-4)
    assert ledger.lost_work_s == pytest.approx(lost + 0.3, abs=1e-4)
    assert (ledger.queue_s, ledger.startup_s) == (20.0, pytest.approx(3.0, abs=1e-4))
    assert ledger.detection_s == pytest.approx(1.25, abs=1e-4)
    assert ledger.restart_s == pytest.approx(0.05 + 2.0 + 1.5, abs=1e-4)
    assert ledger.checkpoint_stall_s == pytest.approx(4 * 0.25, abs=1e-4)
    assert ledger.goodput == pytest.approx(ledger.productive_s / ledger.wall_s)
    assert (ledger.steps_productive, ledger.steps_lost) == (40, 6)


@pytest.mark.parametrize("seed", range(200))
def test_parts_sum_to_the_wall_time_of_any_history(seed):
    """Random order, skewed clocks, missing events: what no supervisor would write must still add up."""
    rng = random.Random(seed)
    makers = [lambda t: started(t, str(rng.randint(1, 3))),
              lambda t: attempt(t, rng.randint(1, 4), rng.choice([None, 3])),
              lambda t: step(t, rng.randint(1, 4), rng.randint(1, 9), stall=rng.choice([0.0, 0.7])),
              lambda t: validated(t, rng.randint(1, 4), rng.randint(1, 9), rng.choice([0.0, 0.9])),
              lambda t: saved(t, 1, rng.randint(1, 9)), lambda t: killed(t, 1, rng.choice([None, 0, 1])),
              lambda t: diagnosis(t, 1, rng.choice(["crash", "hang", "completed", "stopped"])),
              lambda t: decision(t, 1, rng.choice(["restart", "stop", "finish"])),
              lambda t: AgentLost(t=t, node="node-0", reason=""),
              lambda t: ended(t, rng.choice(["completed", "failed", "stopped"]))]
    events, t = [started(T0)], T0
    for _ in range(rng.randint(1, 60)):
        t += rng.choice([0.0, 0.001, 1.0, 3.7])
        events.append(rng.choice(makers)(t + rng.uniform(-2.0, 2.0)))
    submissions = [Submission(t=T0 + rng.uniform(-9, 60), job_id=str(n)) for n in range(1, rng.randint(1, 4))]
    ledger = goodput(events, submissions=submissions, now=rng.choice([None, t + 5.0]))
    assert sum(round(getattr(ledger, part) * 1e6) for part in PARTS) == round(ledger.wall_s * 1e6)
    assert all(getattr(ledger, part) >= 0 for part in PARTS)
    assert ledger.goodput is None or 0 <= ledger.goodput <= 1


def test_goodput_is_unknown_not_zero_without_steps():
    assert goodput(START, now=50.0).goodput is None
    assert goodput(TWO_STEPS).goodput == pytest.approx(2 / 5)


def test_now_does_not_lengthen_a_run_that_has_ended():
    events = two_attempts()
    assert goodput(events, now=events[-1].t + 1000) == goodput(events)
    assert goodput(events[:-1], now=events[-1].t + 1000).wall_s == pytest.approx(events[-1].t + 1000 - T0)


# later events → last kept step per attempt
KEPT = {
    "one attempt": ([], {1: None}),
    "restart from a checkpoint": ([decision(5.0, 1, resume=10), attempt(6.0, 2, 10)], {1: 10, 2: None}),
    "restart decided, not started": ([decision(5.0, 1, resume=10)], {1: 10}),
    "restart from nothing": ([attempt(6.0, 2)], {1: 0, 2: None}),
    "a later attempt goes further back": ([attempt(6.0, 2, 10), attempt(7.0, 3, 5)], {1: 5, 2: 5, 3: None}),
    "a later attempt does not go so far back": ([attempt(6.0, 2, 5), attempt(7.0, 3, 10)], {1: 5, 2: 10, 3: None}),
    "completed": ([ended(9.0)], {1: None}),
    "failed without a checkpoint": ([ended(9.0, "failed")], {1: 0}),
    "stopped after a checkpoint": ([saved(8.0, 1, 7), ended(9.0, "stopped")], {1: 7}),
}


@pytest.mark.parametrize("later, expected", KEPT.values(), ids=KEPT)
def test_kept_steps(later, expected):
    assert kept_steps([*START, *later]) == expected


def test_clock_skew_of_a_rank_cannot_make_time():
    late = [replace(event, t=event.t + 30.0) if isinstance(event, StepReport) else event for event in TWO_STEPS]
    ledger = goodput([*late, ended(6.0)])
    assert ledger.wall_s == pytest.approx(35.0)
    assert sum(getattr(ledger, part) for part in PARTS) == pytest.approx(35.0)
