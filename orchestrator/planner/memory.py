"""Bytes of one rank of every pipeline rank: states, gathered FSDP units, activations, logits, buffers.

Called by the search for every candidate, so it is plain arithmetic. By default it describes our own trainer
(FSDP2 with float32 master weights, flash attention); Software describes others. It knows nothing of time.

Sources: ZeRO (arXiv:1910.02054) for states; what microbatches hold is in held.
"""
import math
from collections.abc import Iterator
from operator import mul

from jobs.spec.job import Device
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout
from jobs.spec.training import DTYPE_BYTES, TrainingSpec
from orchestrator.planner.backward import MASTER_BYTES, Bytes, Kept, Moment, Pass
from orchestrator.planner.held import held, logits_held
from orchestrator.planner.links import expert_shards
from orchestrator.planner.plan import StageMemory
from orchestrator.planner.scenes import scenes
from orchestrator.planner.sharded import Sharded
from orchestrator.planner.software import OURS, Software
from orchestrator.planner.units import way_of
from orchestrator.planner.weights import Weights, rank_weights
from orchestrator.planner.whole import Whole

ADAM_BYTES = 8  # float32 first and second moment
COLLECTIVE_BUFFERS_BYTES = 2 * 2**20  # of NCCL, per channel pair and group of ranks
CHANNELS = 16


def in_flight(layout: Layout, rank: int) -> int:
    """Microbatches that pipeline rank `rank` holds at its peak, of the stage that holds most of them."""
    return max(scenes(layout, rank)[0].held)


def stage_memory(model: ModelSpec, layout: Layout, *, training: TrainingSpec, stage: int, device: Device,
                 software: Software = OURS, enough_bytes: float = math.inf) -> StageMemory:
    """Peak bytes of a rank of pipeline rank `stage`, all of its virtual stages together; or of the first moment found
    at which it needs more than `enough_bytes`."""
    shards = _Shards(rank_weights(model, layout, stage), layout)
    parameters, gradients = _states(layout, training=training, shards=shards, software=software)
    moments = _moments(model, layout, training=training, rank=stage, device=device, software=software, shards=shards)
    optimizer = _optimizer_bytes(layout, shards=shards, training=training, software=software)
    most, peak, enough = -1.0, Moment(0.0, 0.0, 0.0, 0.0), enough_bytes - parameters - gradients - optimizer
    for moment in moments:
        if (needs := moment[0] + moment[1] + moment[2] + moment[3]) > most:
            most, peak = needs, moment
            if most > enough:
                break
    return StageMemory(
        pp_rank=stage,
        layers=sum(layout.layers_per_stage[s] for s in layout.stages(stage)),
        in_flight=in_flight(layout, stage),
        parameters_bytes=parameters,
        gradients_bytes=int(gradients + peak.gradients),
        optimizer_bytes=optimizer,
        gathered_bytes=int(peak.gathered),
        activations_bytes=int(peak.activations),
        logits_bytes=int(peak.logits),
        communication_bytes=_buffers_bytes(model, layout, training=training, device=device),
    )


def _moments(model: ModelSpec, layout: Layout, *, training: TrainingSpec, rank: int, device: Device,
             software: Software, shards: "_Shards") -> Iterator[Moment]:
    """At one of which the rank needs most."""
    of = held(model, layout, training=training, rank=rank, device=device, software=software)
    logits = logits_held(model, layout, training=training, software=software)
    stages = layout.stages(rank)
    ways = [way_of(model, layout, stage) for stage in stages]
    keeper = _keeper(model, layout, training=training, shards=shards, software=software)
    last = len(ways) - 1 if layout.num_stages - 1 in stages else None
    complete = layout.shards_gradients or layout.num_microbatches == 1
    # torch leaves every unit whole from one microbatch's backward to the next one's forward
    keeps, follows = layout.dims.pp > 1, layout.virtual_stages > 1 or layout.schedule == "gpipe"
    found = []
    for scene in scenes(layout, rank):
        activations = sum(map(mul, scene.held, of.each)) + sum(map(mul, scene.waits, of.waiting))
        others = 0 if last is None else logits.kept * (scene.held[last] - (scene.at == last))
        found.append((activations, others, scene))
    found.sort(key=lambda one: one[0], reverse=True)
    met = {}  # kind of pass → the most of other microbatches' logits in one that holds no less of activations
    for activations, others, scene in found:
        at, way, own = scene.at, ways[scene.at], scene.at == last
        kind = (way.root, way.total, of.each[at], of.waiting[at], own, scene.begun, scene.begun[at], scene.is_split,
                keeper.replaces and scene.is_last)
        if met.get(kind, -1) >= others:
            continue
        met[kind] = others
        yield from keeper.moments(Pass(
            way=way, activations=activations, own=of.each[at], again=of.again, waiting=of.waiting[at],
            logits=others + own * (logits.kept + logits.most), logits_behind=others + own * logits.behind,
            logits_left=others, gradients=sum(keeper.sums.of(way.total) for way, has in zip(ways, scene.begun) if has),
            gathered=sum(keeper.elsewhere(way, begun=has) for i, (way, has) in enumerate(zip(ways, scene.begun))
                         if i != at),
            is_split=scene.is_split, begun=scene.begun[at], reduces=complete or scene.is_last,
            stays=keeps and follows and scene.begun[at], keeps=keeps))


def _keeper(model: ModelSpec, layout: Layout, *, training: TrainingSpec, shards: "_Shards",
            software: Software) -> Kept | Whole | Sharded:
    """How weights and gradients are kept."""
    if software.keeps_half_weights and layout.zero_stage < 3:
        return Kept()
    element, reduced = DTYPE_BYTES[training.param_dtype], DTYPE_BYTES[training.reduce_dtype]
    rows = Bytes(*(MASTER_BYTES / ranks for _, ranks in shards.groups))
    each, apart, replicas = layout.shards_gradients, layout.dims.ep * layout.dims.tp > 1, layout.dims.dp_replicate > 1
    if software.keeps_half_weights:  # ZeRO-3 with this rank's rows of gradients counted elsewhere
        return Sharded(element=element, reduced=reduced, rows=Bytes(0, 0), each=True, apart=apart, alone=False,
                       replicas=False)
    if layout.shards_weights:
        return Sharded(element=element, reduced=reduced, rows=rows, each=each, apart=apart,
                       alone=rows.experts == MASTER_BYTES, replicas=replicas)
    weights = element * shards.whole
    if element == MASTER_BYTES:  # masters are rows of the whole weights themselves
        weights -= element * shards.shard
    return Whole(element=element, reduced=reduced, rows=rows, weights=weights, each=each, apart=apart,
                 once=layout.num_microbatches == 1, waits=replicas,
                 in_place=shards.shard == shards.whole and element == MASTER_BYTES and not replicas)


class _Shards:
    """The weights of a rank, and what is left of them on each rank that shares them."""

    def __init__(self, weights: Weights, layout: Layout) -> None:
        self.groups = (weights.dense, layout.dims.fsdp), (weights.experts, expert_shards(layout.dims))
        self.whole = weights.total
        self.shard = sum(-(-held // ranks) for held, ranks in self.groups)


def _states(layout: Layout, *, training: TrainingSpec, shards: _Shards, software: Software) -> tuple[int, int]:
    """Bytes of parameters and of gradients that live through the whole step."""
    if not software.keeps_half_weights:
        return MASTER_BYTES * shards.shard, 0
    element = DTYPE_BYTES[training.param_dtype]
    if layout.zero_stage == 3:
        return element * shards.shard, software.gradient_bytes * shards.shard
    gradients = shards.shard if layout.zero_stage == 2 else shards.whole
    return element * shards.whole, software.gradient_bytes * gradients


def _optimizer_bytes(layout: Layout, *, shards: _Shards, training: TrainingSpec, software: Software) -> int:
    if not software.keeps_half_weights:
        return ADAM_BYTES * shards.shard
    masters = MASTER_BYTES if DTYPE_BYTES[training.param_dtype] < 4 else 0
    return (ADAM_BYTES + masters) * (shards.shard if layout.dims.dp_shard > 1 else shards.whole)


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
