"""Seconds of one optimizer step of one layout: the pipeline's timeline of its stages, reductions, optimizer.

Called by the search: `bound` for every legal layout, `price` for those that may win. Knows what stages, schedules
and memory say; it never sees why a layout was proposed.
"""
import dataclasses
from dataclasses import dataclass

from jobs.spec.counts import (attention_flops_per_token, embedding_params, matmul_params,
                              model_flops_per_token)
from jobs.spec.model import AttentionConvention, ModelSpec
from jobs.spec.parallel import Layout
from jobs.spec.training import TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.planner import constants
from orchestrator.planner.communication import gather_passes
from orchestrator.planner.compute import Chip, Shape, chip_of, optimizer_s, shape_of
from orchestrator.planner.links import expert_shards
from orchestrator.planner.memory import stage_memory
from orchestrator.planner.plan import Prediction, StageMemory, Transfer
from orchestrator.planner.software import OURS, Software
from orchestrator.planner.stages import StageCost, compute_times, stage_cost
from orchestrator.planner.timeline import StageTimes, Timeline, lower_bound_s, pipeline_s, timeline
from orchestrator.planner.weights import rank_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A layout and what it costs."""

    layout: Layout
    predicted: Prediction
    transfers: tuple[Transfer, ...]  # of the busiest pipeline rank

    @property
    def fits(self) -> bool:
        return self.predicted.memory_gib <= self.predicted.memory_limit_gib


def price(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec, headroom: float,
          convention: AttentionConvention, software: Software = OURS, in_parts: bool = True) -> Priced:
    """Predict one layout. Step time = the pipeline's timeline + reductions that nothing hides + the optimizer.
    `in_parts=False` leaves waiting for messages in the bubble: half the work, the same step time."""
    m, pp = layout.num_microbatches, layout.dims.pp
    chip = chip_of(cluster, training=training, software=software)
    stages = _stage_costs(model, layout, training=training, cluster=cluster, chip=chip, software=software)
    ranks = [[stages[s] for s in layout.stages(rank)] for rank in range(pp)]
    work = [m * sum(one.compute_s + one.exposed_s for one in rank) for rank in ranks]
    busiest = max(range(pp), key=work.__getitem__)
    whole_s = _pipeline_s(layout, stages, sends=True)
    apart = in_parts and any(one.send_s for one in stages)
    unhindered_s = _pipeline_s(layout, stages, sends=False) if apart else whole_s
    tail_s = max(sum(one.tail_s for one in rank) for rank in ranks)
    update_s = _update_s(model, layout, chip=chip)
    step_s = whole_s + tail_s + update_s
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
        exposed_communication_s=m * sum(one.exposed_s for one in ranks[busiest]) + whole_s - unhindered_s + tail_s,
        bubble_s=unhindered_s - work[busiest],
        optimizer_s=update_s,
        bubble_fraction=(unhindered_s - work[busiest]) / whole_s,
        memory_gib=memory.total_gib,
        memory_stage=memory.stage,
        memory_limit_gib=cluster.gpu_memory_gib * (1 - headroom),
    )
    return Priced(layout=layout, predicted=predicted, transfers=_waiting(ranks[busiest], whole_s - unhindered_s))


def bound(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec,
          software: Software = OURS) -> float:
    """Seconds that the step cannot beat: compute, filled and drained once, and the optimizer. Never above
    price(…).predicted.step_time_s; some tens of microseconds once the shapes of its layers are known."""
    chip = chip_of(cluster, training=training, software=software)
    shape = shape_of(layout, seq_len=training.seq_len)
    known: dict[tuple, StageTimes] = {}
    times = []
    for stage, layers in enumerate(layout.layers_per_stage):
        key = (layers, stage == 0, stage == layout.num_stages - 1, model.moe is None or stage)
        if key not in known:
            one = compute_times(model, layout, stage=stage, shape=shape, chip=chip, software=software)
            known[key] = StageTimes(forward_s=one.forward_s, backward_s=one.backward_s, weights_s=one.weights_s)
        times.append(known[key])
    pipeline = lower_bound_s(layout.schedule, stages=tuple(times), virtual_stages=layout.virtual_stages,
                             num_microbatches=layout.num_microbatches)
    return pipeline + _update_s(model, layout, chip=chip)


def heaviest(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec,
             software: Software = OURS) -> StageMemory:
    """Memory of the pipeline rank that needs most."""
    return max((stage_memory(model, layout, training=training, stage=rank, device=cluster.device, software=software)
                for rank in _telling_ranks(model, layout)), key=lambda one: one.total_bytes)


def step_timeline(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec,
                  software: Software = OURS) -> Timeline:
    """What every pipeline rank does when, for one step up to the reductions and the optimizer."""
    chip = chip_of(cluster, training=training, software=software)
    stages = _stage_costs(model, layout, training=training, cluster=cluster, chip=chip, software=software)
    return timeline(layout.schedule, stages=tuple(one.times() for one in stages),
                    virtual_stages=layout.virtual_stages, num_microbatches=layout.num_microbatches)


def _pipeline_s(layout: Layout, stages: list[StageCost], *, sends: bool) -> float:
    return pipeline_s(layout.schedule, stages=tuple(one.times(sends=sends) for one in stages),
                      virtual_stages=layout.virtual_stages, num_microbatches=layout.num_microbatches)


def _waiting(rank: list[StageCost], waited_s: float) -> tuple[Transfer, ...]:
    """The transfers of a pipeline rank; what the pipeline waits for messages is shared among them."""
    found = [transfer for stage in rank for transfer in stage.transfers]
    messages_s = sum(t.seconds for t in found if t.axis == "pp" and t.phase != "step")
    share = min(1.0, waited_s / messages_s) if messages_s else 0.0
    return tuple(_exposed(t, share * t.seconds) if t.axis == "pp" and t.phase != "step" else t for t in found)


def _exposed(transfer: Transfer, exposed_s: float) -> Transfer:
    return dataclasses.replace(transfer, exposed_s=exposed_s)


def _telling_ranks(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Pipeline ranks one of which is the heaviest: both ends, and the earliest with the most layers (activations in
    flight fall from rank to rank). Layers that differ make every rank worth a look."""
    pp = layout.dims.pp
    if model.moe is not None:
        return tuple(range(pp))
    layers = [sum(layout.layers_per_stage[s] for s in layout.stages(rank)) for rank in range(pp)]
    return tuple(sorted({0, layers.index(max(layers)), pp - 1}))


def _stage_costs(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec, chip: Chip,
                 software: Software) -> list[StageCost]:
    """Cost of every stage; equal ones are computed once."""
    shape: Shape = shape_of(layout, seq_len=training.seq_len)
    last = layout.num_stages - 1
    known: dict[tuple, StageCost] = {}
    costs = []
    for stage, layers in enumerate(layout.layers_per_stage):
        turn = layout.dims.pp > 1 and any({stage, stage + 1} <= set(layout.stages(rank)) for rank in
                                          range(layout.dims.pp))
        kind = (layers, stage == 0, stage == last, gather_passes(layout, stage=stage), turn,
                model.moe is None or stage)
        if kind not in known:
            known[kind] = stage_cost(model, layout, training=training, cluster=cluster, stage=stage, shape=shape,
                                     chip=chip, software=software)
        costs.append(known[kind])
    return costs


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
    """FLOPs per token of matmuls that are computed a second time: none under selective recompute that keeps them, the
    attention's under one that repeats attention."""
    attention = attention_flops_per_token(model, seq_len=seq_len, convention=convention) / 3
    if layout.recompute == "full":
        return 2 * (matmul_params(model) - embedding_params(model)) + attention
    repeats = layout.recompute == "selective" and not software.selective_keeps_matmuls
    return attention if repeats and not software.flash_attention else 0.0
