"""When silence is a hang: the rules of the crew, without processes; and what is concluded from it."""
from pathlib import Path

import pytest

from jobs.spec.control import Heartbeat, RankState
from jobs.spec.rundir import RunDir
from orchestrator.config import PolicySpec
from orchestrator.supervision.crew import Crew
from orchestrator.supervision.diagnose import diagnose
from orchestrator.supervision.observe import Health, observe

NOW = 1000.0


def state(rank: int, *, step: int = 0, told: float = 0.0, wrote: float = 0.0, phase: str = "data") -> RankState:
    """`told`, `wrote`: seconds ago; 0: never."""
    t, written = (NOW - told if told else 0.0), (NOW - wrote if wrote else 0.0)
    return RankState(rank=rank, pid=10 + rank, step=step, phase=phase, t=t, active_t=max(t, written))


# ranks by node → policy → the rank furthest behind and the silence in seconds; None: no hang
CASES = {
    "one rank still reports": ({"a": [state(0, step=3, told=200)], "b": [state(1, step=3, told=5)]}, {}, None),
    "all have stopped": ({"a": [state(0, step=3, told=120)], "b": [state(1, step=2, told=150)]}, {}, (1, 120)),
    "of one step the one that stopped first": (
        {"a": [state(0, step=3, told=120), state(1, step=3, told=180)]}, {}, (1, 120)),
    "output is a sign of life": ({"a": [state(0, step=3, told=500, wrote=5)]}, {}, None),
    "nothing was ever heard": ({"a": [state(0)]}, {"silence_s": 50.0}, None),
    "output alone proves nothing": ({"a": [state(0, wrote=5000)]}, {}, None),
    "unless it is said to": ({"a": [state(0, wrote=60)]}, {"silence_s": 50.0}, (0, 60)),
    "only one rank reports": ({"a": [state(0, step=4, told=120), state(1)]}, {}, (0, 120)),
    "a rank that has ended is not waited for": ({"a": [state(1, step=3, told=10)], "b": []}, {}, None),
    "another attempt's": ({"a": [state(0, step=3, told=300)]}, {"attempt": 2}, None),
}


def crew_of(ranks: dict, policy: dict) -> Crew:
    policy = dict(policy)
    attempt = policy.pop("attempt", 1)
    crew = Crew(channel=None, launcher=None, policy=PolicySpec(**{"hang_s": 100.0} | policy),
                run_dir=RunDir(Path("/nowhere")), term=1)
    crew.attempt = attempt
    crew.beats = {node: Heartbeat(node=node, t=NOW, attempt=1, ranks=tuple(states)) for node, states in ranks.items()}
    return crew


@pytest.mark.parametrize("ranks, policy, expected", CASES.values(), ids=CASES)
def test_silence_is_a_hang_where_it_means_something(ranks: dict, policy: dict, expected: tuple | None) -> None:
    silent = crew_of(ranks, policy).silent()
    assert (None if silent is None else (silent.rank, silent.silent_s)) == expected


@pytest.mark.parametrize("phase, said", [("data", "data of step 4"), ("validation", "validation after step 3"),
                                         ("checkpoint", "checkpoint after step 3")])
def test_what_a_silent_rank_said_last_is_told(phase: str, said: str) -> None:
    silent = crew_of({"a": [state(0, step=3, told=120, phase=phase)]}, {}).silent()
    assert silent.ranks == (f"rank 0 on a: in {said} for 120 s",)


def test_clocks_of_nodes_are_not_compared() -> None:
    crew = crew_of({"a": [state(0, step=3, told=5)], "b": [state(1, step=3, told=5)]}, {})
    late = crew.beats["b"]
    crew.beats["b"] = Heartbeat(node="b", t=late.t + 9000, attempt=1, ranks=(
        RankState(rank=1, pid=11, step=3, phase="data", t=NOW + 8995, active_t=NOW + 8995),))
    assert crew.silent() is None


def test_a_hang_fails_the_attempt_and_names_who_is_furthest_behind() -> None:
    silent = crew_of({"a": [state(0, step=3, told=120)], "b": [state(1, step=2, told=150)]}, {}).silent()
    health = observe(Health(attempt=1, world_size=2, nodes=("a", "b")), silent)
    found = diagnose(health, history=(), user_error_repeats=2, t=NOW)
    assert health.failed and not health.completed
    assert (found.kind, found.rank, found.node) == ("hang", 1, "b")
    assert "rank 1 on b: in data of step 3" in found.summary
    assert found.evidence[0].startswith("rank 1 on b") and found.evidence[1].startswith("rank 0 on a")
