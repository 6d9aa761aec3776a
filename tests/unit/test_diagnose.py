"""diagnose: the earliest root over all ranks, echoes set aside; the same bug twice is the user's."""
import dataclasses

import pytest

from jobs.spec.events import AgentLost, Diagnosis
from jobs.spec.reports import RankError, RankExit
from orchestrator.supervision.diagnose import diagnose
from orchestrator.supervision.observe import Health, observe


def error(rank: int, t: float, type: str, message: str = "", step: int = 7) -> RankError:
    return RankError(attempt=1, rank=rank, step=step, t=t, type=type, message=message,
                     traceback=f"…\n{type}: {message}")


def end(rank: int, t: float, *, code: int | None = None, signal: int | None = None, log: str = "") -> RankExit:
    return RankExit(attempt=1, rank=rank, local_rank=rank % 4, node=f"node-{rank // 4}", pid=100 + rank, t=t,
                    exit_code=code, signal=signal, log_tail=log)


def lost(node: str, t: float, last_heard: float | None = None) -> AgentLost:
    return AgentLost(t=t, node=node, reason="it closed the connection", last_heard=last_heard)


ECHO = "Connection closed by peer [127.0.0.1]:3456"
TRACEBACK = ("step 3\nTraceback (most recent call last):\n  File \"t.py\", line 3, in <module>\n    f()\n"
             "my.pkg.BadData: row 7\n")
CHAINED = (TRACEBACK + "\nThe above exception was the direct cause of the following exception:\n\n"
           "Traceback (most recent call last):\n  File \"s.py\", line 1\nRuntimeError: \n      stage 0 failed\n")
HANDLED = TRACEBACK.replace("BadData", "Ignored") + "step 4\n" + TRACEBACK

# name, events in the order they arrive, kind, what the summary holds, suspects
CASES = [
    ("a kill beats its echoes", [error(5, 10.0, "RuntimeError", ECHO), end(5, 10.1, code=1), end(3, 10.05, signal=9)],
     "crash", "rank 3 on node-0 was killed by SIGKILL", ("rank 3 on node-0",)),
    ("an earlier echo does not win", [error(5, 9.0, "RuntimeError", ECHO), end(5, 9.1, code=1),
                                      end(3, 10.0, signal=11)],
     "crash", "SIGSEGV", ("rank 3 on node-0",)),
    ("the earliest of two roots", [error(6, 11.0, "ValueError", "b"), end(6, 11.1, code=1),
                                   error(2, 10.0, "KeyError", "a"), end(2, 10.1, code=1)],
     "crash", "rank 2 on node-0 raised KeyError: a", ("rank 2 on node-0", "rank 6 on node-1")),
    ("only echoes", [error(1, 10.0, "DistNetworkError", "timed out after 600 s"), end(1, 10.1, code=1)],
     "crash", "rank 1 on node-0 raised DistNetworkError", ("rank 1 on node-0",)),
    ("exit code without a word", [end(7, 10.0, code=17)], "crash", "rank 7 on node-1 ended with exit code 17",
     ("rank 7 on node-1",)),
    ("traceback in the log of a command", [end(2, 10.0, code=1, log=TRACEBACK)], "crash",
     "rank 2 on node-0 raised BadData: row 7", ("rank 2 on node-0",)),
    ("the bottom of a chain of exceptions", [end(2, 10.0, code=1, log=CHAINED)], "crash",
     "rank 2 on node-0 raised BadData: row 7", ("rank 2 on node-0",)),
    ("the last of unrelated tracebacks", [end(2, 10.0, code=1, log=HANDLED)], "crash",
     "rank 2 on node-0 raised BadData: row 7", ("rank 2 on node-0",)),
    ("lost agent", [lost("node-1", 15.0, 10.0), error(0, 11.0, "RuntimeError", ECHO), end(0, 11.1, code=1)],
     "node_failure", "the agent of node-1 is lost", ("node-1",)),
    ("a lost agent is dated from its last sign", [lost("node-1", 15.0, 10.0), error(0, 11.0, "TypeError", "x"),
                                                  end(0, 11.1, code=1)],
     "node_failure", "node-1", ("node-1", "rank 0 on node-0")),
    ("corrupt checkpoint", [error(0, 1.0, "CheckpointCorrupt", "step 10: shard-3.bin"), end(0, 1.1, code=1)],
     "corruption", "CheckpointCorrupt: step 10", ("rank 0 on node-0",)),
]


def fold(events: list) -> Health:
    health = Health(attempt=1, world_size=8, nodes=("node-0", "node-1"))
    for event in events:
        health = observe(health, event)
    return health


@pytest.mark.parametrize("events, kind, summary, suspects", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_earliest_root_is_found(events: list, kind: str, summary: str, suspects: tuple) -> None:
    found = diagnose(fold(events), history=(), user_error_repeats=2, t=99.0)
    assert (found.kind, found.suspects) == (kind, suspects)
    assert summary in found.summary


def again(earlier: Diagnosis, rank: int, message: str, *, repeats: int = 2) -> Diagnosis:
    events = [error(rank, 10.0, "ValueError", message), end(rank, 10.1, code=1)]
    return diagnose(fold(events), history=(earlier,), user_error_repeats=repeats, t=99.0)


def first() -> Diagnosis:
    return diagnose(fold([error(3, 10.0, "ValueError", "row 17 is bad"), end(3, 10.1, code=1)]), history=(),
                    user_error_repeats=2, t=99.0)


def test_the_same_exception_at_the_same_step_is_the_users_error_whichever_rank_and_number() -> None:
    assert first().kind == "crash"
    assert again(first(), 5, "row 99 is bad").kind == "user_error"


def test_another_exception_is_no_user_error() -> None:
    assert again(first(), 3, "something else").kind == "crash"


def test_the_limit_of_repeats_is_the_policys() -> None:
    assert again(first(), 3, "row 17 is bad", repeats=3).kind == "crash"


def test_progress_in_between_is_no_repeat() -> None:
    earlier = Diagnosis(t=0.0, attempt=1, kind="crash", summary="", step=3, fingerprint=first().fingerprint)
    assert again(earlier, 3, "row 17 is bad").kind == "crash"


def test_an_attempt_that_fails_in_its_first_step_has_reached_what_it_resumed_from() -> None:
    health = Health(attempt=2, world_size=8, nodes=("node-0",), resume_step=12, exits=(), errors=())
    events = [error(3, 10.0, "ValueError", "row 17 is bad"), end(3, 10.1, code=1)]
    for event in events:
        health = observe(health, dataclasses.replace(event, attempt=2))
    earlier = Diagnosis(t=0.0, attempt=1, kind="crash", summary="", step=12, fingerprint=first().fingerprint)
    assert diagnose(health, history=(earlier,), user_error_repeats=2, t=99.0).kind == "user_error"


def test_a_repeated_kill_is_never_the_users_error() -> None:
    killed = fold([end(3, 10.0, signal=9)])
    one = diagnose(killed, history=(), user_error_repeats=2, t=1.0)
    assert diagnose(killed, history=(one, one, one), user_error_repeats=2, t=1.0).kind == "crash"


def test_nothing_wrong_is_nothing_to_diagnose() -> None:
    with pytest.raises(ValueError, match="nothing to diagnose"):
        diagnose(fold([end(0, 1.0, code=0)]), history=(), user_error_repeats=2, t=1.0)


def test_events_of_another_attempt_change_nothing() -> None:
    health = Health(attempt=2, world_size=8, nodes=("node-0",))
    assert observe(health, end(0, 1.0, signal=9)) is health


def test_completion_needs_every_rank() -> None:
    events = [end(rank, 1.0, code=0) for rank in range(7)]
    assert not fold(events).completed
    assert fold([*events, end(7, 1.0, code=0)]).completed
    assert not fold([*events, end(7, 1.0, code=1)]).completed
