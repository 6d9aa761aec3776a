"""Seconds of one optimizer step of one layout: the pipeline's timeline of its stages, reductions, optimizer.

Called by the search: `step_costs` for layouts that may win, `price` for those that are shown. Knows what stages,
schedules and memory say; it never sees why a layout was proposed.
"""
import dataclasses
import functools
import itertools
import math
import operator
from collections import Counter
from dataclasses import dataclass

from jobs.spec.counts import (attention_flops_per_token, embedding_params, matmul_params,
                              model_flops_per_token)
from jobs.spec.model import AttentionConvention, ModelSpec
from jobs.spec.parallel import V_SCHEDULES, Layout, Schedule
from jobs.spec.training import TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.planner import constants
from orchestrator.planner.communication import gather_passes
from orchestrator.planner.chip import Chip, chip_of, optimizer_s
from orchestrator.planner.compute import Shape, shape_of
from orchestrator.planner.links import expert_shards
from orchestrator.planner.memory import stage_memory
from orchestrator.planner.peaks import peaks
from orchestrator.planner.plan import Prediction, StageMemory, Transfer
from orchestrator.planner.schedules import stages_of
from orchestrator.planner.software import OURS, Software
from orchestrator.planner.stages import StageCost, stage_cost
from orchestrator.planner.timeline import StageTimes, Timeline, pipeline_s, timeline
from orchestrator.planner.weights import like_layers, rank_weights, stages_like


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A layout and what it costs."""

    layout: Layout
    predicted: Prediction
    transfers: tuple[Transfer, ...]  # of the busiest pipeline rank
    memory: StageMemory  # of the heaviest

    @property
    def fits(self) -> bool:
        return self.predicted.memory_gib <= self.predicted.memory_limit_gib


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Of one step, before its pipeline is run."""

    stages: tuple[StageCost, ...]
    tail_s: float  # reductions behind the last backward
    update_s: float

    def times(self, *, sends: bool = True) -> tuple[StageTimes, ...]:
        known: dict[int, StageTimes] = {}  # most stages share their cost
        for one in self.stages:
            if id(one) not in known:
                known[id(one)] = one.times(sends=sends)
        return tuple(known[id(one)] for one in self.stages)


def price(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec, headroom: float,
          convention: AttentionConvention, software: Software = OURS) -> Priced:
    """Predict one layout. Step time = the pipeline's timeline + reductions that nothing hides + the optimizer."""
    m, pp = layout.num_microbatches, layout.dims.pp
    costs = step_costs(model, layout, training=training, cluster=cluster, software=software)
    ranks = [[costs.stages[s] for s in layout.stages(rank)] for rank in range(pp)]
    work = [m * sum(one.compute_s + one.exposed_s for one in rank) for rank in ranks]
    busiest = max(range(pp), key=work.__getitem__)
    whole_s = _pipeline_s(layout, costs.times())
    apart = any(one.send_s for one in costs.stages)
    unhindered_s = _pipeline_s(layout, costs.times(sends=False)) if apart else whole_s
    bubble_s = max(0.0, unhindered_s - work[busiest])  # without a pipeline the two differ by rounding
    step_s = whole_s + costs.tail_s + costs.update_s
    memory = heaviest(model, layout, training=training, cluster=cluster, software=software)
    per_gpu = training.global_batch_size * training.seq_len / step_s / layout.dims.world_size
    flops = model_flops_per_token(model, seq_len=training.seq_len, convention=convention)
    executed = flops + recomputed_flops(model, layout, seq_len=training.seq_len, convention=convention,
                                        software=software)
    peak = cluster.peak(training.param_dtype) * 1e12
    predicted = Prediction(
        step_time_s=step_s,
        tokens_per_s=per_gpu * layout.dims.world_size,
        tokens_per_s_per_gpu=per_gpu,
        tflops_per_gpu=per_gpu * flops / 1e12,
        mfu=per_gpu * flops / peak,
        mfu_convention=convention,
        hfu=per_gpu * executed / peak,
        compute_s=m * sum(one.compute_s for one in ranks[busiest]),
        exposed_communication_s=(m * sum(one.exposed_s for one in ranks[busiest]) + whole_s - unhindered_s
                                 + costs.tail_s),
        bubble_s=bubble_s,
        optimizer_s=costs.update_s,
        bubble_fraction=bubble_s / whole_s,
        memory_gib=memory.total_gib,
        memory_pp_rank=memory.pp_rank,
        memory_limit_gib=cluster.gpu_memory_gib * (1 - headroom),
    )
    return Priced(layout=layout, predicted=predicted, transfers=_waiting(ranks[busiest], whole_s - unhindered_s),
                  memory=memory)


def step_costs(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec,
               software: Software = OURS) -> StepCosts:
    """What the step of one layout is put together from."""
    chip = chip_of(cluster, training=training, software=software)
    stages = _stage_costs(model, layout, training=training, cluster=cluster, chip=chip, software=software)
    tail_s = max(sum(stages[s].tail_s for s in layout.stages(rank)) for rank in range(layout.dims.pp))
    return StepCosts(stages=tuple(stages), tail_s=tail_s, update_s=_update_s(model, layout, chip=chip))


def heaviest(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec,
             software: Software = OURS, enough_bytes: float = math.inf) -> StageMemory:
    """Memory of the pipeline rank that needs most, or of the first that needs more than `enough_bytes`."""
    found = None
    for rank in _telling_ranks(model, layout):
        one = stage_memory(model, layout, training=training, stage=rank, device=cluster.device, software=software,
                           enough_bytes=enough_bytes)
        if found is None or one.total_bytes > found.total_bytes:
            found = one
        if found.total_bytes > enough_bytes:
            break
    return found


def step_timeline(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec,
                  software: Software = OURS) -> Timeline:
    """What every pipeline rank does when, for one step up to the reductions and the optimizer."""
    costs = step_costs(model, layout, training=training, cluster=cluster, software=software)
    return timeline(layout.schedule, stages=costs.times(), virtual_stages=layout.virtual_stages,
                    num_microbatches=layout.num_microbatches)


def _pipeline_s(layout: Layout, times: tuple[StageTimes, ...]) -> float:
    return pipeline_s(layout.schedule, stages=times, virtual_stages=layout.virtual_stages,
                      num_microbatches=layout.num_microbatches)


def _waiting(rank: list[StageCost], waited_s: float) -> tuple[Transfer, ...]:
    """The transfers of a pipeline rank; what the pipeline waits for messages is shared among them."""
    found = [transfer for stage in rank for transfer in stage.transfers]
    messages_s = sum(t.seconds for t in found if t.axis == "pp" and t.phase != "step")
    share = min(1.0, waited_s / messages_s) if messages_s else 0.0
    return tuple(dataclasses.replace(t, exposed_s=share * t.seconds) if t.axis == "pp" and t.phase != "step" else t
                 for t in found)


def _telling_ranks(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Pipeline ranks one of which is the heaviest."""
    return _telling(model, layout.schedule, layout.dims.pp, layout.virtual_stages, layout.num_microbatches,
                    layout.layers_per_stage, split=layout.recompute == "none")


@functools.lru_cache(maxsize=16384)
def _telling(model: ModelSpec, schedule: Schedule, pp: int, virtual_stages: int, num_microbatches: int,
             layers_per_stage: tuple[int, ...], split: bool) -> tuple[int, ...]:
    """Those that no other rank outdoes in everything that takes memory: ends of the model, layers of each kind,
    gradients at the peak, microbatches held, and waiting, of a stage and of each kind of layer. Of equal ranks the
    first."""
    if pp == 1:
        return (0,)
    starts = [0, *itertools.accumulate(layers_per_stage)]
    takes: dict[tuple[int, ...], int] = {}
    for rank in range(pp):
        stages = stages_of(schedule, rank=rank, pp=pp, virtual_stages=virtual_stages)
        moments = peaks(schedule, rank=rank, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches,
                        split=split)
        layers: Counter = Counter()
        for i, stage in enumerate(stages):
            for moe, window, number in like_layers(model, starts[stage], starts[stage + 1]):
                layers["layers", moe, window] += number
                for moment, (held, waiting) in enumerate(moments):
                    layers[moment, moe, window] += number * held[i]
                    layers[moment, moe, window, "waiting"] += number * waiting[i]
        names = ["layers", *range(len(moments))]
        kinds = [layers[what, moe, window, *rest] for moe, window, _ in like_layers(model, 0, model.num_layers)
                 for what in names for rest in ((), ("waiting",))]
        begun = any(held < num_microbatches for held in moments[0][0])  # a backward, at the peak: gradients are there
        takes.setdefault((rank == 0, len(layers_per_stage) - 1 in stages, begun, sum(moments[0][0]), *kinds), rank)
    found: list[tuple[int, ...]] = []
    for one in sorted(takes, reverse=True):
        if not any(all(map(operator.ge, other, one)) for other in found):
            found.append(one)
    return tuple(sorted(takes[one] for one in found))


def _stage_costs(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec, chip: Chip,
                 software: Software) -> list[StageCost]:
    """Cost of every stage; equal ones are computed once."""
    shape: Shape = shape_of(layout, seq_len=training.seq_len)
    known: dict[int, StageCost] = {}
    pp, stages = layout.dims.pp, range(layout.num_stages)
    like = stages_like(model, layout.layers_per_stage)
    apart: list = []  # what else may tell stages from one another
    if layout.schedule in V_SCHEDULES:  # the turn of a V sends nothing
        apart.append([stage if stage in (pp - 1, pp) else None for stage in stages])
    if layout.reshard_after_forward and pp > 1:  # stages gather at different times
        apart.append([gather_passes(layout, stage=stage) for stage in stages])
    if apart:
        firsts: dict[tuple, int] = {}
        like = tuple(firsts.setdefault(kind, stage) for stage, kind in enumerate(zip(like, *apart)))
    for stage in dict.fromkeys(like):
        known[stage] = stage_cost(model, layout, training=training, cluster=cluster, stage=stage, shape=shape,
                                  chip=chip, software=software)
    return [known[stage] for stage in like]


def _update_s(model: ModelSpec, layout: Layout, *, chip: Chip) -> float:
    """Optimizer of the rank with most parameters, and the host's work between steps."""
    dims = layout.dims
    held = []
    for rank in _telling_ranks(model, layout):
        weights = rank_weights(model, layout, rank)
        held.append(weights.dense / dims.fsdp + weights.experts / expert_shards(dims))
    return optimizer_s(max(held), chip=chip) + constants.STEP_OVERHEAD_S[chip.device]


def recomputed_flops(model: ModelSpec, layout: Layout, *, seq_len: int, convention: AttentionConvention,
                     software: Software = OURS) -> float:
    """FLOPs per token of matmuls that are computed a second time: under selective recompute none, but the attention's
    where it repeats attention."""
    attention = attention_flops_per_token(model, seq_len=seq_len, convention=convention) / 3
    if layout.recompute == "full":
        return 2 * (matmul_params(model) - embedding_params(model)) + attention
    repeats = layout.recompute == "selective" and software.selective.startswith("attention")
    return attention if repeats and not software.flash_attention else 0.0
