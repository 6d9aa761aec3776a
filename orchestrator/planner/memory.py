"""Bytes of one rank of every pipeline rank: states, gathered FSDP units, activations, logits, buffers.

Called by the search for every candidate, so it is plain arithmetic. By default it describes our own trainer
(FSDP2 with float32 master weights, flash attention); Software describes others. It knows nothing of time.

Sources: ZeRO (arXiv:1910.02054) for states; what microbatches hold is in held.
"""
import functools

from jobs.spec.job import Device
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import ZERO_BUBBLE_SCHEDULES, Layout, ParallelDims
from jobs.spec.training import DTYPE_BYTES, TrainingSpec
from orchestrator.planner.activations import BlockShape, block_activation_bytes, block_shape
from orchestrator.planner.held import activations_bytes, in_flight, logits_bytes, moments
from orchestrator.planner.links import expert_shards
from orchestrator.planner.plan import StageMemory
from orchestrator.planner.software import OURS, Software
from orchestrator.planner.weights import (Weights, block_params, ends_params, layer_kinds, layer_weights, rank_weights,
                                          stage_weights)

__all__ = ["BlockShape", "block_activation_bytes", "block_params", "block_shape", "ends_params", "in_flight",
           "stage_memory", "stage_params"]

MASTER_BYTES = 4  # float32 weights that the optimizer updates
ADAM_BYTES = 8  # float32 first and second moment
GATHERED_UNITS = 2  # FSDP2 gathers the next unit while the present one computes
COLLECTIVE_BUFFERS_BYTES = 2 * 2**20  # of NCCL, per channel pair and group of ranks
CHANNELS = 16


def stage_params(model: ModelSpec, layout: Layout, stage: int) -> int:
    """Parameters of one stage on one tp rank, before FSDP shards them."""
    return stage_weights(model, layout, stage).total


def stage_memory(model: ModelSpec, layout: Layout, *, training: TrainingSpec, stage: int, device: Device,
                 software: Software = OURS) -> StageMemory:
    """Peak bytes of a rank of pipeline rank `stage`, all of its virtual stages together."""
    weights = rank_weights(model, layout, stage)
    shards = _Shards(weights, layout)
    parameters, gradients = _states(layout, training=training, shards=shards, software=software)
    kept, again = activations_bytes(model, layout, training=training, rank=stage, device=device, software=software)
    last = layout.num_stages - 1 in layout.stages(stage)
    logits = logits_bytes(model, layout, training=training, software=software) if last else 0
    # Logits are gone before the first block of the backward is recomputed and the unit behind it gathered.
    activations, left = kept + max(0, again - logits), max(0, logits - again)
    second = _second_halves_bytes(model, layout, training=training, rank=stage, software=software)
    if not software.keeps_half_weights and all(n == layout.num_microbatches for n in moments(layout, stage)[0][0]):
        # No backward has run at the peak: before there are all gradients, one microbatch's activations are gone.
        # (Trainers that keep half weights keep room for their gradients, too.)
        end = DTYPE_BYTES[training.param_dtype] * _largest_unit(model, layout, stage)[1]
        gradients += 0 if layout.shards_gradients else end  # there it is counted with its message
        gradients = max(0, gradients - (kept + logits) // layout.num_microbatches)
    gathered, ahead = _gathered_bytes(model, layout, training=training, rank=stage, software=software)
    reduction = _reduction_bytes(model, layout, training=training, rank=stage, activations=activations, logits=logits,
                                 ahead=min(ahead, left), software=software)
    return StageMemory(
        pp_rank=stage,
        layers=sum(layout.layers_per_stage[s] for s in layout.stages(stage)),
        in_flight=in_flight(layout, stage),
        parameters_bytes=parameters,
        gradients_bytes=gradients + max(0, second - logits),  # few are there yet when the logits are
        optimizer_bytes=_optimizer_bytes(layout, shards=shards, training=training, software=software),
        gathered_bytes=gathered + max(0, ahead - left) + reduction,
        activations_bytes=activations,
        logits_bytes=logits,
        communication_bytes=_buffers_bytes(model, layout, training=training, device=device),
    )


class _Shards:
    """The weights of a rank, and what is left of them on each rank that shares them."""

    def __init__(self, weights: Weights, layout: Layout) -> None:
        dims = layout.dims
        self.whole = weights.total
        self.shard = -(-weights.dense // dims.fsdp) - (-weights.experts // expert_shards(dims))


def _states(layout: Layout, *, training: TrainingSpec, shards: _Shards, software: Software) -> tuple[int, int]:
    """Bytes of parameters and of gradients that live through the whole step."""
    element = DTYPE_BYTES[training.param_dtype]
    if software.keeps_half_weights:
        if layout.zero_stage == 3:
            return element * shards.shard, software.gradient_bytes * shards.shard
        gradients = shards.shard if layout.zero_stage == 2 else shards.whole
        return element * shards.whole, software.gradient_bytes * gradients
    sharded = MASTER_BYTES * shards.shard
    whole = DTYPE_BYTES[training.reduce_dtype] * shards.whole
    if layout.shards_gradients:
        return sharded, sharded
    if not layout.shards_weights:
        # in the messages that will be reduced: float32 while microbatches are summed
        return sharded, max(sharded, MASTER_BYTES * shards.whole if layout.num_microbatches > 1 else whole)
    # Gradients are reduced with the last microbatch, so until then a rank sums the unsharded gradients of its
    # stage. The shards replace them unit by unit: the larger counts.
    return sharded, max(sharded, whole)


def _second_halves_bytes(model: ModelSpec, layout: Layout, *, training: TrainingSpec, rank: int,
                         software: Software) -> int:
    """Of gradients that the second half of a split backward has added, in param_dtype: all of its stage, before they
    are moved to the sums."""
    split = layout.dims.pp > 1 and layout.schedule in ZERO_BUBBLE_SCHEDULES and layout.recompute == "none"
    if not split or software != OURS:
        return 0
    return DTYPE_BYTES[training.param_dtype] * max(stage_weights(model, layout, stage).total
                                                   for stage in layout.stages(rank))


def _optimizer_bytes(layout: Layout, *, shards: _Shards, training: TrainingSpec, software: Software) -> int:
    if not software.keeps_half_weights:
        return ADAM_BYTES * shards.shard
    masters = MASTER_BYTES if DTYPE_BYTES[training.param_dtype] < 4 else 0
    return (ADAM_BYTES + masters) * (shards.shard if layout.dims.dp_shard > 1 else shards.whole)


def _gathered_bytes(model: ModelSpec, layout: Layout, *, training: TrainingSpec, rank: int,
                    software: Software) -> tuple[int, int]:
    """Unsharded parameters that are alive at the same time, and those of the next unit, gathered ahead."""
    dims = layout.dims
    if _in_place(model, layout, training=training):
        return 0, 0
    if software.keeps_half_weights and layout.zero_stage < 3:
        return 0, 0  # counted as parameters
    element = DTYPE_BYTES[training.param_dtype]
    whole = rank_weights(model, layout, rank).total
    if not layout.shards_weights:
        # 16-bit copies beside the masters; float32 masters are rows of the whole weights themselves
        shard = _Shards(rank_weights(model, layout, rank), layout).shard
        return element * whole if element < MASTER_BYTES else element * (whole - shard), 0
    unit, _ = _largest_unit(model, layout, rank)
    if dims.pp > 1:
        # torch leaves every unit unsharded from one microbatch's backward to the next forward: at the peak the whole
        # stage is gathered
        return element * whole, 0
    ends = ends_params(model, tp=dims.tp, first=True, last=True)  # they are gathered with a unit of layers
    together = min(whole, unit + ends)
    return element * together, element * min(whole - together, (GATHERED_UNITS - 1) * unit)


def _in_place(model: ModelSpec, layout: Layout, *, training: TrainingSpec) -> bool:
    """Nothing is shared or cast: the master weights are used, and their gradients kept, where they are."""
    alone = layout.dims.dp * layout.dims.cp == 1 and (model.moe is None or expert_shards(layout.dims) == 1)
    return alone and training.param_dtype == "float32"


def _reduction_bytes(model: ModelSpec, layout: Layout, *, training: TrainingSpec, rank: int, activations: int,
                     logits: int, ahead: int, software: Software) -> int:
    """The message in which the gradients of one unit are reduced, beside the gradients themselves. Where that happens
    once per step there is one microbatch left by then, and the message counts as far as it needs more than the
    activations did that are gone. `ahead`: of gathered weights what is there only when the logits are gone."""
    if _in_place(model, layout, training=training) or software.keeps_half_weights and layout.zero_stage < 3:
        return 0
    unit, ends = (DTYPE_BYTES[training.reduce_dtype] * weights for weights in _largest_unit(model, layout, rank))
    layers = max(1, sum(layout.layers_per_stage[stage] for stage in layout.stages(rank)))
    one = activations // in_flight(layout, rank)  # of a microbatch

    def gone(units: int) -> int:  # a unit's own activations are gone before it is reduced
        return one * min(layers, units * layout.layers_per_unit) // layers + logits

    if layout.shards_gradients:
        beside = DTYPE_BYTES[training.param_dtype] / DTYPE_BYTES[training.reduce_dtype]  # what messages are made from
        kept = max(ends, unit) if layout.num_microbatches > 1 else 0  # the last is not waited for before the next
        if layout.shards_weights:
            return max(kept, ahead + int((1 + beside) * unit) - gone(1), int((1 + beside) * ends) - one - logits)
        return max(kept, unit - gone(1), 2 * unit - gone(2), unit + int((1 + beside) * ends) - one - logits)
    if not layout.shards_weights and (layout.num_microbatches == 1 or training.reduce_dtype == "float32"):
        return 0  # gradients are summed in the message itself
    return max(0, unit + one - gone(1) - activations, ends - activations - logits)


def _largest_unit(model: ModelSpec, layout: Layout, rank: int) -> tuple[int, int]:
    """Weights that are gathered and reduced together: of layers, and of the larger end of the model held here."""
    layer, end = _largest(model, layout.layers_per_stage, layout.stages(rank), tp=layout.dims.tp, ep=layout.dims.ep)
    longest = max(layout.layers_per_stage[stage] for stage in layout.stages(rank))
    return min(layout.layers_per_unit, longest) * layer, end


@functools.lru_cache(maxsize=16384)  # asked several times for each of many layouts
def _largest(model: ModelSpec, layers_per_stage: tuple[int, ...], stages: tuple[int, ...], *, tp: int,
             ep: int) -> tuple[int, int]:
    """Of the layers and of the ends on these stages."""
    dims, found = ParallelDims(tp=tp, ep=ep), [0]
    for stage in stages:
        start = sum(layers_per_stage[:stage])
        found += [layer_weights(model, layer, dims=dims).total
                  for layer, _ in layer_kinds(model, start, start + layers_per_stage[stage])]
    last = ends_params(model, tp=tp, first=False, last=True) if len(layers_per_stage) - 1 in stages else 0
    first = ends_params(model, tp=tp, first=True, last=False) if 0 in stages else 0
    return max(found), max(first, last)


def _buffers_bytes(model: ModelSpec, layout: Layout, *, training: TrainingSpec, device: Device) -> int:
    """NCCL's channels of every group, one message each way over a pipeline boundary, two blocks of keys and values on
    their way round a cp ring, experts' tokens sent and received. gloo keeps none."""
    if device == "cpu":
        return 0
    dims = layout.dims
    element = DTYPE_BYTES[training.param_dtype]
    tokens = training.seq_len // dims.cp * layout.microbatch_size
    split = dims.tp if layout.sequence_parallel else 1
    groups = sum(degree > 1 for degree in (dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp, dims.pp, dims.ep))
    found = groups * CHANNELS * COLLECTIVE_BUFFERS_BYTES
    if dims.pp > 1:
        found += 2 * element * tokens * model.dim // split
    if dims.cp > 1:
        blocks = 2 if layout.cp_method == "ring" else dims.cp
        found += blocks * 2 * element * tokens * model.num_kv_heads * model.head_size // dims.tp
    if dims.ep > 1 and model.moe is not None:
        found += 2 * element * tokens * model.moe.top_k * model.dim // split
    return found
