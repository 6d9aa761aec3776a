"""What waits in a search's queue, the groups that it is asked about, and the count of what it did.

Used by the search alone, but for Group, which axes and the page make. Data, and an order.
"""
import functools
import gc
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jobs.spec.parallel import Layout
from orchestrator.planner.parts import Pass, Shape, Variant
from orchestrator.planner.timeline import StageTimes


@dataclass(slots=True)
class Effort:
    """What a search did."""

    shapes: int = 0
    variants: int = 0  # bounded at a glance
    closed: int = 0  # of these, in closed form
    priced: int = 0  # layouts, but for their pipeline
    timelines: int = 0  # pipelines run


class Part(NamedTuple):
    """A part of the space, as far as it is decided."""

    shape: Shape
    one: Pass
    variant: Variant | None = None
    bounded: Literal["rough", "closed", "way"] = "rough"  # how closely it was looked at
    rest_s: float = 0.0  # what data parallelism adds at least


class Costed(NamedTuple):
    """A layout that fits, with all of its costs but its pipeline's."""

    layout: Layout
    stages: tuple[StageTimes, ...]
    rest_s: float  # of the step, beyond its pipeline
    held_bytes: float


class Timed(NamedTuple):
    """A layout whose step time is known."""

    layout: Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Layouts of which the fastest is asked for."""

    name: str
    holds: Callable[[Layout], bool]
    may: Callable[[Shape], bool]  # whether a shape can have any of them


def uncollected(function: Callable) -> Callable:
    """Run without looking for cycles of objects: among the tuples of a search, none of which is in one, looking takes a
    tenth of its time."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        looked = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if looked:
                gc.enable()

    return run


class Queue:
    """Smallest time first; of equal ones the smaller rank, then what came first."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, float, int, Part | Layout | Costed | Timed]] = []
        self._ticket = itertools.count()

    def push(self, bound_s: float, item: Part | Layout | Costed | Timed, *, rank: float = 0.0) -> None:
        heapq.heappush(self.entries, (bound_s, rank, next(self._ticket), item))

    def pop(self) -> tuple[float, Part | Layout | Costed | Timed]:
        bound_s, _, _, item = heapq.heappop(self.entries)
        return bound_s, item
