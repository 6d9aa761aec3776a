"""decide: the ladder's rungs of this version, and a budget that progress renews."""
import pytest

from jobs.spec.events import Decision, Diagnosis
from orchestrator.config import PolicySpec
from orchestrator.supervision.decide import decide

POLICY = PolicySpec(max_restarts=3, backoff_s=1.0, backoff_max_s=3.0)


def diagnosis(kind: str) -> Diagnosis:
    return Diagnosis(t=0.0, attempt=5, kind=kind, summary="why", step=12)


def restarts(*steps: int | None) -> tuple[Decision, ...]:
    return tuple(Decision(t=0.0, attempt=n, act="restart", reason="", resume_step=s) for n, s in enumerate(steps, 1))


# name, kind, earlier restarts' resume steps, newest checkpoint, act, delay
CASES = [
    ("done", "completed", (), 60, "finish", 0.0),
    ("first crash restarts at once", "crash", (), 10, "restart", 0.0),
    ("a crash before any checkpoint", "crash", (), None, "restart", 0.0),
    ("the second waits", "crash", (10,), 10, "restart", 1.0),
    ("the third waits longer", "crash", (10, 10), 10, "restart", 2.0),
    ("the budget ends a crash loop", "crash", (10, 10, 10), 10, "stop", 0.0),
    ("and one that never got anywhere", "crash", (None, None, None), None, "stop", 0.0),
    ("progress renews the budget", "crash", (10, 10, 10), 20, "restart", 0.0),
    ("only restarts since the progress count", "crash", (10, 10, 20), 20, "restart", 1.0),
    ("a lost node restarts", "node_failure", (), 10, "restart", 0.0),
    ("a corrupt checkpoint restarts from another", "corruption", (), 10, "restart", 0.0),
    ("the user's error does not", "user_error", (), 10, "stop", 0.0),
    ("a lost loss does not either", "divergence", (), 10, "stop", 0.0),
    ("a stop is obeyed", "stopped", (), 10, "stop", 0.0),
    ("the time limit too", "time_limit", (), 10, "stop", 0.0),
]


@pytest.mark.parametrize("kind, earlier, newest, act, delay", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_decision(kind: str, earlier: tuple, newest: int | None, act: str, delay: float) -> None:
    made = decide(diagnosis(kind), history=restarts(*earlier), newest_step=newest, policy=POLICY, t=1.0)
    assert (made.act, made.delay_s) == (act, delay)
    assert made.resume_step == (None if act == "finish" else newest)


def test_the_wait_is_capped() -> None:
    policy = PolicySpec(max_restarts=20, backoff_s=1.0, backoff_max_s=3.0)
    assert decide(diagnosis("crash"), history=restarts(*[10] * 9), newest_step=10, policy=policy, t=1.0).delay_s == 3.0


def test_a_resume_by_hand_renews_the_budget() -> None:
    stopped = Decision(t=0.0, attempt=4, act="stop", reason="", resume_step=10)
    history = (*restarts(10, 10, 10), stopped)
    assert decide(diagnosis("crash"), history=history, newest_step=10, policy=POLICY, t=1.0).act == "restart"
