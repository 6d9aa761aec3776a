"""Best first: the fastest layouts that fit, out of all of them, while only the promising ones are opened.

Called by the planner's entry, by explanations and by the page. Parts of the space wait in one queue, ordered by a time
that nothing in them can beat: shapes by their compute, variants in closed form and then by the ways that other
pipelines took, layouts by their own costs. What comes out as a price is therefore the best of all that is left. Parts
that cannot fit are dropped.
"""
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jobs.spec.model import AttentionConvention
from jobs.spec.parallel import ZERO_BUBBLE_SCHEDULES, Layout, ParallelDims
from orchestrator.planner.bounds import ROUNDING, Bounds, Sharding
from orchestrator.planner.choices import UNITS
from orchestrator.planner.cost import Priced, StepCosts, heaviest, price, step_costs
from orchestrator.planner.footprint import Footprint
from orchestrator.planner.parts import Pass, Shape, Variant
from orchestrator.planner.pipeline_rules import zero_problems
from orchestrator.planner.plan import GIB
from orchestrator.planner.question import Question
from orchestrator.planner.space import Space
from orchestrator.planner.waiting import Costed, Effort, Group, Part, Queue, Timed, uncollected
from orchestrator.planner.ways import Ways

MOST_DROPPED = 64  # remembered, to show what was too big
BUFFERS_BYTES = 2**28  # more than a group of ranks less saves of communication buffers


class Search:
    """One question, with everything that is computed once and used often."""

    def __init__(self, question: Question, *, headroom: float, convention: AttentionConvention,
                 ways: Ways | None = None) -> None:
        """`ways` of an earlier search spare this one their pipelines: they hold for any question."""
        self.question = question
        self.space = Space(question)
        self.bounds, self.footprint = Bounds(question), Footprint(question)
        self.effort = Effort()
        self.headroom = headroom
        self.limit_bytes = question.cluster.gpu_memory_gib * (1 - headroom) * GIB
        self.ways = ways or Ways()
        self._convention: AttentionConvention = convention
        self._dropped: list[Layout] = []  # too big, most promising first
        self._rests: dict[tuple, float] = {}  # of everything that it depends on
        self._held: dict[tuple, float] = {}  # likewise
        self._too_few: dict[tuple, int] = {}  # ranks to shard over
        self._shapes = tuple(self.space.shapes())
        self.effort.shapes = len(self._shapes)

    def price(self, layout: Layout) -> Priced:
        return price(self.question.model, layout, training=self.question.training, cluster=self.question.cluster,
                     headroom=self.headroom, convention=self._convention)

    def heaviest_bytes(self, layout: Layout, *, enough_bytes: float = math.inf) -> float:
        """Memory of the rank that needs most, or of the first that needs more than enough."""
        return heaviest(self.question.model, layout, training=self.question.training, cluster=self.question.cluster,
                        enough_bytes=enough_bytes).total_bytes

    def costs(self, layout: Layout) -> StepCosts:
        return step_costs(self.question.model, layout, training=self.question.training, cluster=self.question.cluster)

    def again(self, question: Question) -> "Search":
        """The same of another question."""
        return Search(question, headroom=self.headroom, convention=self._convention, ways=self.ways)

    # -------------------------------------------------------------- what is fastest
    def ranked(self, *, wanted: Callable[[Layout], bool] = lambda layout: True,
               possible: Callable[[Shape], bool] = lambda shape: True) -> Iterator[Priced]:
        """Layouts that fit and are wanted, fastest first; of equally fast ones the smaller. `wanted` is asked again
        of everything that has not come out yet; shapes that are not `possible` hold nothing that is wanted."""
        queue = Queue()
        for shape in self._shapes:
            if possible(shape):
                for one in self.space.passes(shape):
                    if self.footprint.least_bytes(shape, one) <= self.limit_bytes:
                        queue.push(self.bounds.compute_s(shape, one), Part(shape, one))
        while queue.entries:
            bound_s, item = queue.pop()
            if isinstance(item, Part):
                if possible(item.shape):
                    self._open(item, queue)
            elif isinstance(item, Layout):
                if wanted(item):
                    self._cost(item, bound_s, queue)
            elif wanted(item.layout):
                if isinstance(item, Timed):
                    yield self.price(item.layout)
                else:
                    self._time(item, bound_s, queue)

    @uncollected
    def best(self, count: int, *, key: Callable[[Layout], Any] = lambda layout: layout.dims,
             groups: Sequence[Group] = ()) -> tuple[list[Priced], dict[str, Priced]]:
        """The `count` fastest that fit and differ in `key`; and the fastest of each group that has any, by name."""
        found: list[Priced] = []
        firsts: dict[str, Priced] = {}
        seen, open_groups = set(), list(groups)

        def wanted(layout: Layout) -> bool:
            return ((len(found) < count and key(layout) not in seen)
                    or any(group.holds(layout) for group in open_groups))

        def possible(shape: Shape) -> bool:
            return len(found) < count or any(group.may(shape) for group in open_groups)

        for one in self.ranked(wanted=wanted, possible=possible):
            if len(found) < count and key(one.layout) not in seen:
                found.append(one)
                seen.add(key(one.layout))
            firsts |= {group.name: one for group in open_groups if group.holds(one.layout)}
            open_groups[:] = [group for group in open_groups if group.name not in firsts]
            if len(found) == count and not open_groups:
                break
        return found, firsts

    def _open(self, part: Part, queue: Queue) -> None:
        shape, one, variant = part.shape, part.one, part.variant
        if variant is None and part.bounded == "rough":
            queue.push(self.bounds.passed_s(shape, one), part._replace(bounded="closed"))
        elif variant is None:
            self._open_shape(part, queue)
        elif part.bounded == "rough":
            self.effort.closed += 1
            rest_s = self._least_rest(shape, one, variant)
            queue.push(self.bounds.closed_s(shape, variant, one) + rest_s, Part(shape, one, variant, "closed", rest_s))
        elif part.bounded == "closed":
            if self._held_bytes(self._lightest(part)) is not None:
                queue.push(self._pipeline_s(part) + part.rest_s, part._replace(bounded="way"))
        else:
            self._open_variant(part, queue)

    def _open_shape(self, part: Part, queue: Queue) -> None:
        for variant in self.space.variants(part.shape, part.one.recompute):
            self.effort.variants += 1
            if self.footprint.held_bytes(part.shape, variant, part.one) <= self.limit_bytes:
                queue.push(self.bounds.rough_s(part.shape, variant, part.one), Part(part.shape, part.one, variant))

    def _least_rest(self, shape: Shape, one: Pass, variant: Variant) -> float:
        """What data parallelism adds at least, whatever the way to shard."""
        key = (shape, one, variant.num_microbatches, variant.virtual_stages, variant.schedule in ZERO_BUBBLE_SCHEDULES,
               min(max(UNITS), max(variant.layers_per_stage)))
        if key not in self._rests:
            every = self.space.dims(shape)
            shardings = tuple({sharding: None for dims in every for sharding in self.space.shardings(dims, variant)})
            self._rests[key] = self.bounds.least_rest_s(every, shardings, variant, one)
        return self._rests[key]

    def _pipeline_s(self, part: Part) -> float:
        """What its pipeline takes at least, data parallelism left out."""
        shape, variant = part.shape, part.variant
        stages = self.bounds.stages(shape, variant, part.one)
        least_s = self.ways.least_s(variant.schedule, stages=stages, virtual_stages=variant.virtual_stages,
                                    num_microbatches=variant.num_microbatches)
        return ROUNDING * max(least_s, self.bounds.closed_s(shape, variant, part.one))

    def _open_variant(self, part: Part, queue: Queue) -> None:
        pipeline_s = self._pipeline_s(part)
        for layout in self.space.layouts(part.shape, part.variant, part.one):
            sharding = Sharding(layout.dims, layout.zero_stage, layout.reduce_every_microbatch, layout.layers_per_unit)
            queue.push(pipeline_s + self.bounds.data_parallel_s(sharding, part.variant, part.one), layout)

    def _cost(self, layout: Layout, bound_s: float, queue: Queue) -> None:
        held_bytes = self._held_bytes(layout)
        if held_bytes is not None:
            self.effort.priced += 1
            costs = self.costs(layout)
            item = Costed(layout, costs.times(), costs.tail_s + costs.update_s, held_bytes)
            queue.push(max(bound_s, self._least_s(item)), item)

    def _least_s(self, item: Costed) -> float:
        layout = item.layout
        return ROUNDING * (item.rest_s + self.ways.least_s(
            layout.schedule, stages=item.stages, virtual_stages=layout.virtual_stages,
            num_microbatches=layout.num_microbatches))

    def _time(self, item: Costed, bound_s: float, queue: Queue) -> None:
        """Runs the pipeline, unless what was learned since puts the layout behind others anyway."""
        layout, least_s = item.layout, self._least_s(item)
        if least_s > bound_s:
            queue.push(least_s, item)
            return
        self.effort.timelines += 1
        pipeline_s = self.ways.run(layout.schedule, stages=item.stages, virtual_stages=layout.virtual_stages,
                                   num_microbatches=layout.num_microbatches)
        queue.push(item.rest_s + pipeline_s, Timed(layout), rank=item.held_bytes)

    # -------------------------------------------------------------- what fits
    def _held_bytes(self, layout: Layout) -> float | None:
        """What its heaviest rank needs, None if that is too much. Which links groups cross is nothing to it; and what
        is much too big stays so when it is sharded over fewer ranks."""
        dims = layout.dims
        alike = (dims.dp, dims.cp, dims.tp, dims.pp, dims.ep, layout.microbatch_size, layout.num_microbatches,
                 layout.layers_per_stage, layout.schedule, layout.recompute, layout.zero_stage, layout.layers_per_unit,
                 layout.sequence_parallel, layout.reduce_every_microbatch, layout.cp_method)
        if dims.dp_shard <= self._too_few.get(alike, 0):
            return None
        key = (*alike, dims.dp_shard)
        if key not in self._held:
            self._held[key] = self.heaviest_bytes(layout, enough_bytes=self.limit_bytes + BUFFERS_BYTES)
            if self._held[key] > self.limit_bytes + BUFFERS_BYTES:
                self._too_few[alike] = dims.dp_shard
            if self._held[key] > self.limit_bytes and len(self._dropped) < MOST_DROPPED:
                self._dropped.append(layout)
        return self._held[key] if self._held[key] <= self.limit_bytes else None

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
            parts.append((self.footprint.least_bytes(shape, one), len(parts), shape, one))
        lightest, found = math.inf, None
        for least, _, shape, one in sorted(parts):
            if least >= lightest:
                break
            for variant in self.space.variants(shape, one.recompute):
                if self.footprint.held_bytes(shape, variant, one) >= lightest:
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


def _lightness(layout: Layout) -> tuple:
    """Less is lighter: sharded wider and further, in smaller units, reduced at once."""
    return (-layout.dims.dp_shard, -layout.zero_stage, layout.layers_per_unit, not layout.sequence_parallel,
            not layout.reduce_every_microbatch)
