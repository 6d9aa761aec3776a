"""Strict conversion between dataclasses and JSON data, and lines on the wire."""
import dataclasses
from dataclasses import dataclass
from typing import Literal

import pytest

from jobs.spec.events import Decision, Event
from jobs.spec.load import SpecError, from_dict, to_dict
from jobs.spec.parallel import ParallelDims, split_layers
from jobs.spec.reports import RankExit
from jobs.spec.wire import decode, encode, from_wire, kind_of, to_wire


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    n: int
    f: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    inner: Inner
    choice: Literal["a", "b"] = "a"
    numbers: tuple[int, ...] = ()
    pair: tuple[int, str] | None = None
    by_step: dict[int, str] = dataclasses.field(default_factory=dict)
    maybe: int | None = None


WRONG = [
    ({"inner": {"n": 1}, "extra": 2}, ["extra: unknown key"]),
    ({"inner": {"n": "1"}}, ["inner.n: '1' is not of type int"]),
    ({"inner": {"n": True}}, ["inner.n: True is not of type int"]),
    ({"inner": {"n": 1.0}}, ["inner.n: 1.0 is not of type int"]),
    ({"inner": {}}, ["inner.n: is missing"]),
    ({}, ["inner: is missing"]),
    ({"inner": 3}, ["inner: 3 is not a mapping"]),
    ({"inner": {"n": 1}, "choice": "c"}, ["choice: 'c' is not one of a, b"]),
    ({"inner": {"n": 1}, "numbers": [1, "x"]}, ["numbers[1]: 'x' is not of type int"]),
    ({"inner": {"n": 1}, "pair": [1]}, ["pair: [1] needs exactly 2 items"]),
    ({"inner": {"m": 1}, "choice": 7, "maybe": "x"}, ["inner.m: unknown key", "inner.n: is missing", "choice: 7",
                                                      "maybe: 'x'"]),
]


@pytest.mark.parametrize("data, parts", WRONG)
def test_wrong_data_is_refused_with_every_reason(data: dict, parts: list[str]) -> None:
    with pytest.raises(SpecError) as refused:
        from_dict(Outer, data, origin="here")
    assert len(refused.value.problems) == len(parts)
    for part in parts:
        assert part in str(refused.value)
    assert all(problem.origin == "here" for problem in refused.value.problems)


def test_round_trip_keeps_types() -> None:
    value = Outer(inner=Inner(n=1, f=2.5), choice="b", numbers=(1, 2), pair=(1, "x"), by_step={3: "y"}, maybe=4)
    assert from_dict(Outer, to_dict(value)) == value


def test_an_integer_is_a_float_but_no_float_is_an_integer() -> None:
    assert from_dict(Inner, {"n": 1, "f": 2}).f == 2.0


def test_lines_name_their_class_and_keep_their_own_fields() -> None:
    decision = Decision(t=1.0, attempt=1, act="stop", reason="why")
    assert to_wire(decision)["event"] == "decision" and kind_of(RankExit) == "rank_exit"
    assert decode(encode(decision), Event) == decision


@pytest.mark.parametrize("line", ['{"event": "nonsense"}', '{"t": 1}'])
def test_an_unknown_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="unknown event"):
        decode(line, Event)


def test_wire_data_is_not_changed_by_reading() -> None:
    data = to_wire(Decision(t=1.0, attempt=1, act="stop", reason="why"))
    before = dict(data)
    from_wire(data, Event)
    assert data == before


DIMS = [ParallelDims(), ParallelDims(tp=2, pp=2, dp_shard=2),
        ParallelDims(dp_replicate=2, dp_shard=3, tp=2, pp=4, cp=2)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_coordinate_and_rank_are_inverse(dims: ParallelDims) -> None:
    seen = [dims.coordinate(rank) for rank in range(dims.world_size)]
    assert [dims.rank(**c) for c in seen] == list(range(dims.world_size))
    assert len({tuple(c.values()) for c in seen}) == dims.world_size


def test_tp_is_innermost() -> None:
    assert [ParallelDims(tp=2, pp=2, dp_shard=2).coordinate(r)["tp"] for r in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("layers, pp, expected", [(4, 2, (2, 2)), (5, 2, (3, 2)), (61, 8, (7, 8, 8, 8, 8, 8, 7, 7)),
                                                  (126, 16, None), (3, 3, (1, 1, 1))])
def test_surplus_layers_go_to_the_middle(layers: int, pp: int, expected: tuple | None) -> None:
    split = split_layers(layers, pp)
    assert sum(split) == layers and max(split) - min(split) <= 1
    assert expected is None or split == expected
