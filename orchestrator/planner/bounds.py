"""Times that no layout of a part of the space can beat: what lets the search leave the part closed.

Called by the search. Bounds are put together from the cost model's own figures, of which they take fewer: compute
and the communication of tp, cp and ep, one layer at a time; the pipeline of these alone; reductions and gathers of
data parallelism behind the compute that may hide them. `price` can only add to them.
"""
import functools
import math
from typing import NamedTuple

from jobs.spec.parallel import ZERO_BUBBLE_SCHEDULES, Layout, ParallelDims
from jobs.spec.training import DTYPE_BYTES
from orchestrator.planner import constants
from orchestrator.planner.chip import chip_of, optimizer_s
from orchestrator.planner.compute import layer_times, shape_of
from orchestrator.planner.links import collective_s, placed_group, send_recv_s
from orchestrator.planner.question import Question
from orchestrator.planner.software import OURS
from orchestrator.planner.parts import Pass, Shape, Variant
from orchestrator.planner.stages import stage_cost
from orchestrator.planner.timeline import StageTimes, lower_bound_s
from orchestrator.planner.weights import (dense_weights, ends_params, layer_kinds, layer_weights, like_layers,
                                          stages_like)

ROUNDING = 1 - 1e-9  # bounds add the same figures as prices, in another order
# Rank r waits for r stages of as many as there are: on the mean half of them, less where the split is uneven.
MEAN_WAIT = 0.4
EDGE_SHARE = 0.99  # of a unit's collective: that of a unit's weights alone is a little less than its share of all


class Sharding(NamedTuple):
    """How data parallelism treats the weights."""

    dims: ParallelDims
    zero_stage: int
    reduce_every_microbatch: bool
    layers_per_unit: int


class Rest(NamedTuple):
    """What data parallelism does on the mean pipeline rank."""

    scatter_s: float  # all gradients once, over shards
    sum_s: float  # all gradients once, over replicas
    gather_s: float  # all weights once
    scatter_edge_s: float  # one collective of each, which has nothing to hide behind
    sum_edge_s: float
    gather_edge_s: float
    scatter_layer_s: float  # the same of a unit of one layer, which every virtual stage has at least
    sum_layer_s: float
    gather_layer_s: float
    update_s: float  # optimizer, and the host between steps
    # the share of the weights that stays gathered from a forward to the backward that begins behind it: the last unit,
    # and the output projection
    kept: float


class Bounds:
    """Of one question."""

    def __init__(self, question: Question) -> None:
        self.question, self.model = question, question.model
        self._chip = chip_of(question.cluster, training=question.training, software=OURS)
        self._element = DTYPE_BYTES[question.training.param_dtype]
        kinds = layer_kinds(self.model, 0, self.model.num_layers)
        self._kind_of = {(self.model.is_moe(layer), self.model.window(layer)): layer for layer, _ in kinds}
        self._counts = kinds
        self._kind_s = functools.cache(self._kind_seconds)
        self.stage_s = functools.cache(self._stage_s)
        self._compute_s = functools.cache(self._compute_seconds)
        self._covers = functools.cache(self._cover_seconds)
        self._split_stages = functools.cache(self._stages_of)
        self._weights = functools.cache(lambda tp: dense_weights(self.model, tp=tp))
        self.rest = functools.cache(self._rest)
        self._least_rest = functools.cache(self._least_of)

    # -------------------------------------------------------------- time
    def compute_s(self, shape: Shape, one: Pass) -> float:
        """Of the step: every microbatch passes every layer, and the busiest of pp ranks has at least its share."""
        return shape.num_microbatches * self._compute_s(one) / shape.pp * ROUNDING

    def passed_s(self, shape: Shape, one: Pass) -> float:
        """As compute_s, with what the ranks of a cp × tp group tell each other, and at least one way through."""
        forward_s, backward_s, weights_s, _ = self._covers(one)
        through_s = forward_s + backward_s
        return ROUNDING * max(shape.num_microbatches * through_s / shape.pp, through_s - weights_s)

    def rough_s(self, shape: Shape, variant: Variant, one: Pass) -> float:
        """Of the step, at a glance: the mean rank's work with the mean rank's wait for the first microbatch, or one
        microbatch's way through all stages."""
        split = variant.schedule in ZERO_BUBBLE_SCHEDULES
        forward_s, backward_s, weights_s, ends_s = self._covers(one._replace(splits_backward=split and one.tp > 1))
        through_s = forward_s + backward_s
        waits_s = (forward_s if split else through_s) - ends_s
        fill_s = MEAN_WAIT * max(0.0, waits_s) * (shape.pp - 1) / (shape.pp * variant.virtual_stages)
        path_s = through_s - (weights_s if split else 0.0)
        return ROUNDING * max(variant.num_microbatches * through_s / shape.pp + fill_s, path_s)

    def closed_s(self, shape: Shape, variant: Variant, one: Pass) -> float:
        """Of the step, in closed form: the pipeline filled and drained once."""
        stages = self.stages(shape, variant, one)
        return ROUNDING * lower_bound_s(variant.schedule, stages=stages, virtual_stages=variant.virtual_stages,
                                        num_microbatches=variant.num_microbatches)

    def data_parallel_s(self, sharding: Sharding, variant: Variant, one: Pass) -> float:
        """What reductions, gathers and the optimizer add at least on the mean rank: of the step, beyond its
        pipeline."""
        rest = self.rest(sharding.dims, sharding.layers_per_unit)
        return self._added_s(rest, sharding.dims.pp, sharding.zero_stage, sharding.reduce_every_microbatch, variant,
                             one)

    def least_rest_s(self, every: tuple[ParallelDims, ...], shardings: tuple[tuple[int, int, bool], ...],
                     variant: Variant, one: Pass) -> float:
        """As data_parallel_s, of any of these ways to shard, all with the same degrees but dp_shard."""
        rest = self._least_rest(every, tuple(sorted({unit for _, unit, _ in shardings})))
        return min((self._added_s(rest, every[0].pp, zero, each, variant, one)
                    for zero, each in {(zero, each) for zero, _, each in shardings}), default=math.inf)

    def _added_s(self, rest: Rest, pp: int, zero_stage: int, each: bool, variant: Variant, one: Pass) -> float:
        m, stages = variant.num_microbatches, variant.virtual_stages
        scatters = m if each else 1
        sums = scatters if zero_stage == 3 else 1
        if self.question.cluster.device == "cpu":  # nothing hides
            passes = (2 - rest.kept) * m if zero_stage == 3 and pp == 1 else 1
            return ROUNDING * (scatters * rest.scatter_s + sums * rest.sum_s + passes * rest.gather_s + rest.update_s)
        forward_s, backward_s = (seconds / pp for seconds in self._covers(one)[:2])
        scatter_edge_s = max(rest.scatter_edge_s, stages * rest.scatter_layer_s)
        sum_edge_s = max(rest.sum_edge_s, stages * rest.sum_layer_s)
        gather_edge_s = max(rest.gather_edge_s, stages * rest.gather_layer_s)
        if each:  # sums hide behind the last microbatch's backward
            found = (scatters * _beyond(rest.scatter_s, backward_s, scatter_edge_s)
                     + _beyond(sums * rest.sum_s, backward_s, sum_edge_s))
        else:
            found = _beyond(rest.scatter_s + rest.sum_s, backward_s, max(scatter_edge_s, sum_edge_s))
        if zero_stage == 3 and pp == 1:
            found += m * (_beyond(rest.gather_s, forward_s, gather_edge_s)
                          + _beyond((1 - rest.kept) * rest.gather_s, backward_s, gather_edge_s))
        else:
            gather_s = _beyond(rest.gather_s, forward_s, gather_edge_s)
            if zero_stage == 3:  # of m forwards and m backwards all gather but those behind a backward: m + 1
                gather_s = max(gather_s, (m + 1) * _beyond((1 - rest.kept) * rest.gather_s, max(forward_s, backward_s)))
            found += gather_s
        return ROUNDING * (found + rest.update_s)

    def _least_of(self, every: tuple[ParallelDims, ...], units: tuple[int, ...]) -> Rest:
        """Of each figure the best."""
        *seconds, kept = zip(*(self.rest(dims, unit) for dims in every for unit in units))
        return Rest(*map(min, seconds), max(kept))

    def stages(self, shape: Shape, variant: Variant, one: Pass) -> tuple[StageTimes, ...]:
        split = one.tp > 1 and variant.schedule in ZERO_BUBBLE_SCHEDULES
        return self._split_stages(one._replace(splits_backward=split), shape.pp, variant.layers_per_stage)

    def _stages_of(self, one: Pass, pp: int, layers_per_stage: tuple[int, ...]) -> tuple[StageTimes, ...]:
        send_s, last, found = self._send_s(pp, one), len(layers_per_stage) - 1, {}
        like = stages_like(self.model, layers_per_stage)
        for stage in dict.fromkeys(like):
            start = sum(layers_per_stage[:stage])
            layers = like_layers(self.model, start, start + layers_per_stage[stage])
            found[stage] = self.stage_s(one, layers, stage == 0, stage == last, send_s)
        return tuple([found[stage] for stage in like])

    def _stage_s(self, one: Pass, layers: tuple[tuple, ...], first: bool, last: bool, send_s: float) -> StageTimes:
        parts = [(count, self.layer_s(one, self._kind_of[moe, window])) for moe, window, count in layers]
        parts += [(1, self.layer_s(one, end)) for end, here in ((-1, first), (-2, last)) if here]
        forward_s, backward_s, weights_s = (sum(n * part[i] for n, part in parts) for i in range(3))
        return StageTimes(forward_s=forward_s, backward_s=backward_s, weights_s=weights_s, send_s=send_s)

    def layer_s(self, one: Pass, layer: int) -> tuple[float, float, float]:
        """Forward, backward and its part for the weights, of one layer, the first of its kind; −1 is the first end of
        the model, −2 the last."""
        if layer < 0:  # nor is it ever computed again, or split along with keys and values
            one = one._replace(ep=1, recompute="none", cp_method="ring")
        elif not self.model.is_moe(layer):  # ep is nothing to it
            one = one._replace(ep=1)
        return self._kind_s(one, layer)

    def _kind_seconds(self, one: Pass, layer: int) -> tuple[float, float, float]:
        """As the middle of three stages, of which only that one is looked at."""
        layers = self.model.num_layers
        split, stage = {-1: ((0, layers, 0), 0), -2: ((0, layers, 0), 2)}.get(
            layer, ((layer, 1, layers - 1 - layer), 1))
        dims = ParallelDims(tp=one.tp, cp=one.cp, ep=one.ep, dp_shard=max(1, one.ep // (one.cp * one.tp)), pp=3)
        layout = self._layout(one, dims, split)
        cost = stage_cost(self.model, layout, training=self.question.training, cluster=self.question.cluster,
                          stage=stage, shape=shape_of(layout, seq_len=self.question.training.seq_len), chip=self._chip,
                          software=OURS, inner=True)
        return (cost.forward_s + cost.exposed_forward_s, cost.backward_s + cost.exposed_backward_s, cost.weights_s)

    def _layout(self, one: Pass, dims: ParallelDims, split: tuple[int, ...]) -> Layout:
        return Layout(dims=dims, microbatch_size=one.microbatch_size, num_microbatches=1, layers_per_stage=split,
                      schedule="interleaved_zero_bubble" if one.splits_backward else "1f1b",
                      recompute=one.recompute, zero_stage=2, sequence_parallel=one.sequence_parallel,
                      cp_method=one.cp_method)

    def _compute_seconds(self, one: Pass) -> float:
        """Of all layers, one microbatch, communication left out."""
        dims = ParallelDims(tp=one.tp, cp=one.cp, ep=one.ep)
        shape = shape_of(self._layout(one, dims, (self.model.num_layers,)), seq_len=self.question.training.seq_len)
        times = [(count, layer_times(self.model, layer, shape=shape, chip=self._chip, software=OURS))
                 for layer, count in self._counts]
        return sum(count * (each.forward_s + each.backward_s) for count, each in times)

    def _cover_seconds(self, one: Pass) -> tuple[float, float, float, float]:
        """Of one microbatch through the whole model: forward, backward, its part for the weights; and both for the
        ends alone, which no other stage shares."""
        layers = [(count, self.layer_s(one, layer)) for layer, count in self._counts]
        ends = [(1, self.layer_s(one, end)) for end in (-1, -2)]
        forward_s, backward_s, weights_s = (sum(n * part[i] for n, part in (*layers, *ends)) for i in range(3))
        return forward_s, backward_s, weights_s, sum(part[0] + part[1] for _, part in ends)

    def _send_s(self, pp: int, one: Pass) -> float:
        """One message over the nearest boundary that there is: stages on neighbouring cp × tp groups of ranks."""
        if pp == 1:
            return 0.0
        dims = ParallelDims(tp=one.tp, cp=one.cp, pp=pp, order=("dp_replicate", "dp_shard", "pp", "cp", "tp"))
        payload = self._element * one.microbatch_size * (self.question.training.seq_len // one.cp) * self.model.dim
        payload /= one.tp if one.sequence_parallel else 1
        return send_recv_s(payload, placed_group(dims, "pp", cluster=self.question.cluster),
                           cluster=self.question.cluster)

    # -------------------------------------------------------------- data parallelism
    def _rest(self, dims: ParallelDims, layers_per_unit: int) -> Rest:
        cluster = self.question.cluster
        weights = self._weights(dims.tp) / dims.pp
        units = max(1.0, self.model.num_layers / dims.pp / layers_per_unit)
        shards, replicas = (placed_group(dims, axis, cluster=cluster) for axis in ("fsdp", "dp_replicate"))
        reduced = DTYPE_BYTES[self.question.training.reduce_dtype] * weights / units
        scatter_s = collective_s("reduce_scatter", reduced, shards, cluster=cluster)
        sum_s = collective_s("all_reduce", reduced / dims.fsdp, replicas, cluster=cluster)
        gather_s = collective_s("all_gather", self._element * weights / units, shards, cluster=cluster)
        edge = EDGE_SHARE * min(1.0, self._lightest_unit(dims.tp) * layers_per_unit / (weights / units))
        heaviest = max(layer_weights(self.model, layer, dims=ParallelDims(tp=dims.tp)).dense
                       for layer, _ in self._counts)
        last = ends_params(self.model, tp=dims.tp, first=False, last=True) + layers_per_unit * heaviest
        update_s = optimizer_s(self._weights(dims.tp) / (dims.pp * dims.fsdp), chip=self._chip)
        edges = [edge * seconds for seconds in (scatter_s, sum_s, gather_s)]
        return Rest(*(units * seconds for seconds in (scatter_s, sum_s, gather_s)), *edges,
                    *(seconds / layers_per_unit for seconds in edges),
                    update_s + constants.STEP_OVERHEAD_S[self._chip.device], min(1.0, last / weights))

    def _lightest_unit(self, tp: int) -> int:
        """Dense weights of the lightest layer on one tp rank."""
        dims = ParallelDims(tp=tp)
        return min(layer_weights(self.model, layer, dims=dims).dense for layer, _ in self._counts)


def _beyond(told_s: float, cover_s: float, edge_s: float = 0.0) -> float:
    """What communication costs behind compute: the part that sticks out, at least the edge, and what the rest slows."""
    hidden_s = min(told_s, cover_s, max(0.0, told_s - edge_s))
    return told_s - hidden_s + (constants.OVERLAP_SLOWDOWN - 1) * hidden_s
