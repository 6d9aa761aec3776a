"""Best first: the fastest layouts that fit, out of all of them, while only the promising ones are opened.

Called by the planner's entry and by explanations. Parts of the space wait in one queue, ordered by a time that nothing
in them can beat: shapes by their compute, variants in closed form and then by their timeline, layouts by what data
parallelism adds. What comes out as a price is therefore the best of all that is left. Parts that cannot fit are
dropped.
"""
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from jobs.spec.model import AttentionConvention
from jobs.spec.parallel import ZERO_BUBBLE_SCHEDULES, Layout, ParallelDims
from orchestrator.planner.bounds import Bounds, Sharding
from orchestrator.planner.cost import Priced, heaviest, price
from orchestrator.planner.parts import Pass, Shape, Variant
from orchestrator.planner.plan import GIB
from orchestrator.planner.question import Question
from orchestrator.planner.rules import zero_problems
from orchestrator.planner.space import UNITS, Space

MOST_DROPPED = 64  # remembered, to show what was too big


@dataclass(slots=True)
class Effort:
    """What a search did."""

    shapes: int = 0
    variants: int = 0  # bounded at a glance
    closed: int = 0  # of these, in closed form
    timelines: int = 0  # of variants
    priced: int = 0  # layouts


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the space, as far as it is decided."""

    shape: Shape
    one: Pass
    variant: Variant | None = None
    bounded: Literal["rough", "closed", "timeline"] = "rough"  # how closely it was looked at
    rest_s: float = 0.0  # what data parallelism adds at least


class Search:
    """One question, with everything that is computed once and used often."""

    def __init__(self, question: Question, *, headroom: float, convention: AttentionConvention) -> None:
        self.question = question
        self.space = Space(question)
        self.bounds = Bounds(question)
        self.effort = Effort()
        self.headroom = headroom
        self.limit_bytes = question.cluster.gpu_memory_gib * (1 - headroom) * GIB
        self._convention: AttentionConvention = convention
        self._dropped: list[Layout] = []  # too big, most promising first
        self._rests: dict[tuple, float] = {}  # of everything that it depends on
        self._shapes = tuple(self.space.shapes())
        self.effort.shapes = len(self._shapes)

    def price(self, layout: Layout, *, in_parts: bool = True) -> Priced:
        self.effort.priced += not in_parts
        return price(self.question.model, layout, training=self.question.training, cluster=self.question.cluster,
                     headroom=self.headroom, convention=self._convention, in_parts=in_parts)

    def heaviest_bytes(self, layout: Layout) -> float:
        """Memory of the rank that needs most."""
        return heaviest(self.question.model, layout, training=self.question.training,
                        cluster=self.question.cluster).total_bytes

    def again(self, question: Question) -> "Search":
        """The same of another question."""
        return Search(question, headroom=self.headroom, convention=self._convention)

    # -------------------------------------------------------------- what is fastest
    def ranked(self, *, wanted: Callable[[Layout], bool] = lambda layout: True) -> Iterator[Priced]:
        """Layouts that fit and are wanted, fastest first; of equally fast ones the smaller. `wanted` is asked again
        of everything that has not come out yet."""
        queue = _Queue()
        for shape in self._shapes:
            for one in self.space.passes(shape):
                if self.bounds.least_bytes(shape, one) <= self.limit_bytes:
                    queue.push(self.bounds.compute_s(shape, one), Part(shape, one))
        while queue.entries:
            bound_s, item = queue.pop()
            if isinstance(item, Priced):
                if wanted(item.layout):
                    yield self.price(item.layout)
            elif isinstance(item, Layout):
                if wanted(item) and self._fits(item):
                    priced = self.price(item, in_parts=False)
                    queue.push(priced.predicted.step_time_s, priced, rank=priced.predicted.memory_gib)
            elif item.variant is None and item.bounded == "rough":
                queue.push(self.bounds.passed_s(item.shape, item.one), replace(item, bounded="closed"))
            elif item.variant is None:
                self._open_shape(item, queue)
            elif item.bounded == "timeline":
                self._open_variant(item, queue)
            else:
                self._look_closer(item, queue)

    def _open_shape(self, part: Part, queue: "_Queue") -> None:
        for variant in self.space.variants(part.shape, part.one.recompute):
            self.effort.variants += 1
            if self.bounds.held_bytes(part.shape, variant, part.one) <= self.limit_bytes:
                queue.push(self.bounds.rough_s(part.shape, variant, part.one), Part(part.shape, part.one, variant))

    def _look_closer(self, part: Part, queue: "_Queue") -> None:
        shape, one, variant = part.shape, part.one, part.variant
        if part.bounded == "rough":
            self.effort.closed += 1
            rest_s = self._least_rest(shape, one, variant)
            queue.push(self.bounds.closed_s(shape, variant, one) + rest_s, Part(shape, one, variant, "closed", rest_s))
        elif self._fits(self._lightest(part)):
            self.effort.timelines += 1
            queue.push(self.bounds.pipeline_s(shape, variant, one) + part.rest_s, replace(part, bounded="timeline"))

    def _least_rest(self, shape: Shape, one: Pass, variant: Variant) -> float:
        """What data parallelism adds at least, whatever the way to shard."""
        key = (shape, one, variant.num_microbatches, variant.schedule in ZERO_BUBBLE_SCHEDULES,
               min(max(UNITS), max(variant.layers_per_stage)))
        if key not in self._rests:
            self._rests[key] = min((self.bounds.data_parallel_s(Sharding(dims, zero, each, unit), variant, one)
                                    for dims in self.space.dims(shape)
                                    for zero, unit, each in self.space.shardings(dims, variant)), default=math.inf)
        return self._rests[key]

    def _open_variant(self, part: Part, queue: "_Queue") -> None:
        pipeline_s = self.bounds.pipeline_s(part.shape, part.variant, part.one)
        for layout in self.space.layouts(part.shape, part.variant, part.one):
            sharding = Sharding(layout.dims, layout.zero_stage, layout.reduce_every_microbatch, layout.layers_per_unit)
            queue.push(pipeline_s + self.bounds.data_parallel_s(sharding, part.variant, part.one), layout)

    # -------------------------------------------------------------- what fits
    def _fits(self, layout: Layout) -> bool:
        fits = self.heaviest_bytes(layout) <= self.limit_bytes
        if not fits and len(self._dropped) < MOST_DROPPED:
            self._dropped.append(layout)
        return fits

    def _lightest(self, part: Part) -> Layout:
        """Everything sharded that can be, and reduced at once: no layout of the variant needs less memory."""
        shape, variant = part.shape, part.variant
        zero = 2 if zero_problems(variant.schedule, 3, shape.pp) else 3
        dims = ParallelDims(dp_shard=shape.dp, cp=shape.cp, tp=shape.tp, pp=shape.pp, ep=shape.ep)
        return self.space.layout(shape, variant, part.one, dims=dims, zero_stage=zero, layers_per_unit=1,
                                 reduce_every_microbatch=variant.num_microbatches > 1 and dims.fsdp > 1)

    def smallest(self) -> Priced | None:
        """The layout that needs least memory, of those that recompute as much as the request allows; None if nothing is
        legal. Shapes come in the order of what they need at least, until none that is left can need less."""
        parts = []
        for shape in self._shapes:
            one = max(self.space.passes(shape), key=lambda p: ("none", "selective", "full").index(p.recompute))
            parts.append((self.bounds.least_bytes(shape, one), len(parts), shape, one))
        lightest, found = math.inf, None
        for least, _, shape, one in sorted(parts):
            if least >= lightest:
                break
            for variant in self.space.variants(shape, one.recompute):
                if self.bounds.held_bytes(shape, variant, one) >= lightest:
                    continue
                layout = min(self.space.layouts(shape, variant, one), key=_lightness, default=None)
                held = math.inf if layout is None else self.heaviest_bytes(layout)
                if held < lightest:
                    lightest, found = held, layout
        return None if found is None else self.price(found)

    def too_big(self, count: int) -> list[Priced]:
        """Fast layouts that do not fit, met on the way to those that do."""
        seen: dict[object, Priced] = {}
        for layout in self._dropped:
            if len(seen) == count:
                break
            seen.setdefault(str(layout), self.price(layout))
        return [one for one in seen.values() if not one.fits]


class _Queue:
    """Smallest time first; of equal ones the smaller rank, then what came first."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, float, int, Part | Layout | Priced]] = []
        self._ticket = itertools.count()

    def push(self, bound_s: float, item: Part | Layout | Priced, *, rank: float = 0.0) -> None:
        heapq.heappush(self.entries, (bound_s, rank, next(self._ticket), item))

    def pop(self) -> tuple[float, Part | Layout | Priced]:
        bound_s, _, _, item = heapq.heappop(self.entries)
        return bound_s, item


def _lightness(layout: Layout) -> tuple:
    """Less is lighter: sharded wider and further, in smaller units, reduced at once."""
    return (-layout.dims.dp_shard, -layout.zero_stage, layout.layers_per_unit, not layout.sequence_parallel,
            not layout.reduce_every_microbatch)
