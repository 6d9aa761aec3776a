"""Families: layouts sorted by the strongest means of parallelism they use. One word and one colour over the whole page.

Called by the sections that compare layouts. Each layout has exactly one family, so the best of the families
is the best of all.
"""
from dataclasses import dataclass
from typing import Any

from jobs.spec.parallel import Layout
from orchestrator.planner.parts import Shape
from orchestrator.planner.waiting import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    name: str
    means: str
    colour: str  # a variable of the page's style sheet


FAMILIES = (
    Family(name="DP alone", means="every GPU holds the whole model (ZeRO-0: dp_replicate only)", colour="var(--c1)"),
    Family(name="ZeRO", means="data parallel, states sharded over dp_shard", colour="var(--c2)"),
    Family(name="TP", means="matmuls split over tp, on top of data parallelism", colour="var(--c3)"),
    Family(name="PP", means="layers split into pipeline stages, with or without tp", colour="var(--c4)"),
    Family(name="CP", means="sequences split over cp, with or without tp and pp", colour="var(--c5)"),
)


def family_of(layout: Layout) -> int:
    """Index into FAMILIES."""
    dims = layout.dims
    if dims.cp > 1:
        return 4
    if dims.pp > 1:
        return 3
    if dims.tp > 1:
        return 2
    return 1 if dims.dp_shard > 1 else 0


def groups() -> tuple[Group, ...]:
    """Each family's layouts, for one search of all."""
    return tuple(Group(name=family.name, holds=lambda layout, own=i: family_of(layout) == own,
                       may=lambda shape, own=i: own in _families_of(shape)) for i, family in enumerate(FAMILIES))


def _families_of(shape: Shape) -> tuple[int, ...]:
    if shape.cp > 1:
        return (4,)
    if shape.pp > 1:
        return (3,)
    return (2,) if shape.tp > 1 else (0, 1)


def wishes_of(family: int, *, degrees: list[int]) -> dict[str, Any]:
    """Fields of ParallelRequest that leave exactly the layouts of this family; `degrees`: all above 1."""
    alone = {"cp": 1, "pp": 1, "tp": 1}
    return ({**alone, "dp_shard": 1}, {**alone, "dp_shard": degrees}, {**alone, "tp": degrees},
            {"cp": 1, "pp": degrees}, {"cp": degrees})[family]
