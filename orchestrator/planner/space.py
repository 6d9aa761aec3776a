"""The space of layouts, from coarse to fine: shape → variant → layout. Every legal layout comes out exactly once.

Called by the search, which bounds the coarse parts before it opens them, and by tests, which open everything.
What is worth trying is said by choices.py, legality by rules.py and pipeline_rules.py; memory and time are not known
here.
"""
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from jobs.spec.parallel import CpMethod, Layout, ParallelDims, Recompute, Schedule
from orchestrator.request import CHOICES
from orchestrator.planner import choices, pipeline_rules, rules
from orchestrator.planner.communication import axis_group
from orchestrator.planner.parts import Ledger, Pass, Shape, Variant
from orchestrator.planner.question import WORLD_AXES, Question, divisors
from orchestrator.planner.uneven import stage_splits


class Space:
    """All legal layouts of one question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.ledger = Ledger()
        self.orders = choices.orders(question)
        self._schedules = functools.cache(self._schedules_of)
        self._splits = functools.cache(self._splits_of)
        self._dims = functools.cache(self._dims_of)
        self._shardings = functools.cache(self._shardings_of)
        self._sequence_splits = functools.cache(
            lambda tp, cp: choices.sequence_splits(question, tp=tp, cp=cp))
        self._variants = functools.cache(self._variants_of)
        self._variants_times_shardings = functools.cache(self._count_variants)
        self._options = {name: choices.options(question, name) for name in CHOICES}

    # -------------------------------------------------------------- shapes
    def shapes(self) -> Iterator[Shape]:
        """Degrees whose product is the ranks of a number of nodes, with every microbatch size worth trying."""
        for nodes in choices.node_counts(self.question):
            yield from self._shapes_on(nodes * self.question.cluster.gpus_per_node)

    def _shapes_on(self, world: int) -> Iterator[Shape]:
        question, refuse = self.question, self.ledger.refuse
        for tp in choices.degrees(question, "tp", most=world):
            if refuse("tp", rules.tp_problems(tp, question)):
                continue
            for cp in choices.cps(question, tp=tp, world=world):
                if refuse("cp", rules.cp_problems(cp, tp, question)):
                    continue
                for pp in choices.degrees(question, "pp", most=world // (tp * cp)):
                    if refuse("pp", pipeline_rules.pp_problems(pp, question)):
                        continue
                    dp = world // (tp * cp * pp)
                    if not self._dp_possible(dp):
                        continue  # not of this world: the request asks for something else
                    if refuse("global_batch_size", rules.batch_problems(dp, 1, question)):
                        continue
                    for ep in self._eps(dp, cp, tp):
                        yield from self._batchings(world, tp, cp, pp, ep, dp)

    def _dp_possible(self, dp: int) -> bool:
        shards, replicas = self.question.request.options("dp_shard"), self.question.request.options("dp_replicate")
        return any(shards is None or dp // replicate in shards
                   for replicate in (replicas or divisors(dp)) if dp % replicate == 0)

    def _eps(self, dp: int, cp: int, tp: int) -> Iterator[int]:
        if self.question.model.moe is None and self.question.request.options("ep") is None:
            yield 1
            return
        for ep in choices.degrees(self.question, "ep", most=dp * cp * tp):
            if not (self.ledger.refuse("ep", rules.ep_problems(ep, self.question))
                    or self.ledger.refuse("ep", rules.ep_group_problems(ep, dp_shard=dp, cp=cp, tp=tp))):
                yield ep

    def _batchings(self, world: int, tp: int, cp: int, pp: int, ep: int, dp: int) -> Iterator[Shape]:
        batch = self.question.training.global_batch_size
        for size in choices.microbatch_sizes(self.question, dp=dp, cp=cp):
            if not self.ledger.refuse("microbatch_size", rules.batch_problems(dp, size, self.question)):
                yield Shape(world, tp, cp, pp, ep, dp, size, -(-batch // (dp * size)))

    # -------------------------------------------------------------- variants
    def variants(self, shape: Shape, recompute: Recompute) -> tuple[Variant, ...]:
        """Schedules, stages and splits that the shape can run."""
        return self._variants(shape.pp, shape.num_microbatches, shape.dp, shape.microbatch_size, recompute)

    def _variants_of(self, pp: int, least: int, dp: int, microbatch_size: int,
                     recompute: Recompute) -> tuple[Variant, ...]:
        return tuple(Variant(schedule, virtual_stages, count, split)
                     for schedule, virtual_stages, count in self._schedules(pp, least, dp, microbatch_size)
                     for split in self._splits(pp, virtual_stages, recompute))

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        return self._options["recompute"]

    def _schedules_of(self, pp: int, least: int, dp: int,
                      microbatch_size: int) -> tuple[tuple[Schedule, int, int], ...]:
        """Schedule, virtual stages and number of microbatches that go together."""
        question, found = self.question, []
        names = self._options["schedule"]
        if pp == 1:  # there is nothing to schedule: any name would do
            names = ("1f1b",) if "1f1b" in names else ("gpipe",) if "gpipe" in names else names[:1]
        for schedule in names:
            for virtual_stages in choices.virtual_stages(question, schedule=schedule, pp=pp):
                if self.ledger.refuse("virtual_stages", pipeline_rules.stages_problems(schedule, virtual_stages, pp,
                                                                                       question)):
                    continue
                for count in choices.counts(question, schedule=schedule, pp=pp, least=least):
                    if not (self.ledger.refuse("num_microbatches", rules.count_problems(
                                count, choices.rounded(least, schedule, pp), dp, microbatch_size, question))
                            or self.ledger.refuse(
                                "schedule", pipeline_rules.schedule_problems(schedule, count, pp, dp, question))):
                        found.append((schedule, virtual_stages, count))
        return tuple(found)

    def _splits_of(self, pp: int, virtual_stages: int, recompute: Recompute) -> tuple[tuple[int, ...], ...]:
        question, written = self.question, self.question.request.layers_per_stage
        if written == "auto":
            return stage_splits(question.model, num_stages=pp * virtual_stages, seq_len=question.training.seq_len,
                                recompute=recompute)
        if self.ledger.refuse("layers_per_stage", pipeline_rules.split_problems(tuple(written), pp, virtual_stages,
                                                                                question)):
            return ()
        return (tuple(written),)

    # -------------------------------------------------------------- layouts
    def passes(self, shape: Shape) -> Iterator[Pass]:
        """How one microbatch passes: what is kept of it, and how tp and cp share it."""
        for recompute, split, method in itertools.product(self.recomputes, self._sequence_splits(shape.tp, shape.cp),
                                                          self._methods(shape.cp)):
            yield Pass(shape.tp, shape.cp, shape.ep, shape.microbatch_size, recompute, split, method)

    def layouts(self, shape: Shape, variant: Variant, one: Pass) -> Iterator[Layout]:
        """Everything that is left to choose: how data parallelism shards the weights."""
        for dims in self.dims(shape):
            for zero, unit, each in self.shardings(dims, variant):
                layout = self.layout(shape, variant, one, dims=dims, zero_stage=zero, layers_per_unit=unit,
                                     reduce_every_microbatch=each)
                if not (self.question.trainable and self.ledger.refuse("trainer", self.question.untrained(layout))):
                    yield layout

    @staticmethod
    def layout(shape: Shape, variant: Variant, one: Pass, **rest: Any) -> Layout:
        return Layout(microbatch_size=shape.microbatch_size, num_microbatches=variant.num_microbatches,
                      layers_per_stage=variant.layers_per_stage, schedule=variant.schedule,
                      virtual_stages=variant.virtual_stages, recompute=one.recompute,
                      sequence_parallel=one.sequence_parallel, cp_method=one.cp_method, **rest)

    def count(self) -> int:
        """How many layouts are legal, without opening them one by one."""
        total = 0
        for shape in self.shapes():
            dims = self.dims(shape)
            ways = len(self._sequence_splits(shape.tp, shape.cp)) * len(self._methods(shape.cp))
            for example in (next((d for d in dims if d.fsdp > 1), None), next((d for d in dims if d.fsdp == 1), None)):
                if example is not None:
                    alike = sum((d.fsdp > 1) == (example.fsdp > 1) for d in dims)
                    total += ways * alike * self._variants_times_shardings(
                        example.fsdp > 1, shape.pp, shape.num_microbatches, shape.dp, shape.microbatch_size)
        return total

    def _count_variants(self, sharded: bool, pp: int, least: int, dp: int, microbatch_size: int) -> int:
        return sum(len(self._shardings(sharded, pp, variant.schedule, variant.num_microbatches > 1,
                                       max(variant.layers_per_stage)))
                   for recompute in self.recomputes
                   for variant in self._variants(pp, least, dp, microbatch_size, recompute))

    def several_dims(self) -> bool:
        """Whether degrees are left to choose."""
        shapes = {(shape.dp, shape.tp, shape.cp, shape.pp, shape.ep) for shape in self.shapes()}
        return len(shapes) > 1 or any(len({dims.dp_shard for dims in self._dims(*shape)}) > 1 for shape in shapes)

    def _dims_of(self, dp: int, tp: int, cp: int, pp: int, ep: int) -> tuple[ParallelDims, ...]:
        question, request = self.question, self.question.request
        replicas, shards = request.options("dp_replicate"), request.options("dp_shard")
        found: list[ParallelDims] = []
        for dp_shard in divisors(dp):
            dp_replicate = dp // dp_shard
            if (shards is not None and dp_shard not in shards) or (replicas is not None
                                                                   and dp_replicate not in replicas):
                continue
            if (self.ledger.refuse("dp_shard", rules.shard_problems(dp_shard, tp, question))
                    or rules.ep_group_problems(ep, dp_shard=dp_shard, cp=cp, tp=tp)):
                continue
            seen = set()
            for order in self.orders:
                if ep > 1 and request.mesh_order == "auto" and not choices.experts_together(order):
                    continue
                dims = ParallelDims(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, pp=pp, ep=ep,
                                    order=order)
                links = tuple(axis_group(dims, axis, gpus_per_node=question.cluster.gpus_per_node)
                              for axis in WORLD_AXES)
                if links not in seen:  # an order that crosses the same links costs the same
                    seen.add(links)
                    found.append(dims)
        return tuple(found)

    def dims(self, shape: Shape) -> tuple[ParallelDims, ...]:
        return self._dims(shape.dp, shape.tp, shape.cp, shape.pp, shape.ep)

    def shardings(self, dims: ParallelDims, variant: Variant) -> tuple[tuple[int, int, bool], ...]:
        return self._shardings(dims.fsdp > 1, dims.pp, variant.schedule, variant.num_microbatches > 1,
                               max(variant.layers_per_stage))

    def _shardings_of(self, sharded: bool, pp: int, schedule: Schedule, several: bool,
                      most_layers: int) -> tuple[tuple[int, int, bool], ...]:
        """ZeRO stage, layers per unit, whether gradients are reduced every microbatch. Where a choice makes no
        difference, its first value stands for all."""
        asked_units = self.question.request.options("layers_per_unit")
        zeros = [z for z in self._options["zero_stage"] if not (sharded and self.ledger.refuse(
            "zero_stage", pipeline_rules.zero_problems(schedule, z, pp)))]
        units = asked_units or tuple(u for u in choices.UNITS if u <= most_layers)
        return tuple((zero, unit, each)
                     for zero in (zeros if sharded else zeros[:1])
                     for unit in (units if sharded else units[:1])
                     for each in self._reductions(zero, free=sharded and several and zero > 1))

    def _methods(self, cp: int) -> tuple[CpMethod, ...]:
        return self._options["cp_method"] if cp > 1 else self._options["cp_method"][:1]

    def _reductions(self, zero_stage: int, *, free: bool) -> tuple[bool, ...]:
        options = self._options["reduce_every_microbatch"]
        if free and zero_stage == 2 and 1 in self._options["zero_stage"]:  # reduced once per step it is ZeRO-1
            return tuple(each for each in options if each)
        return options if free else options[:1]

def every_layout(question: Question) -> Iterator[Layout]:
    """All legal layouts, opened to the last detail: for small spaces."""
    space = Space(question)
    for shape in space.shapes():
        for one in space.passes(shape):
            for variant in space.variants(shape, one.recompute):
                yield from space.layouts(shape, variant, one)
