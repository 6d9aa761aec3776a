"""What a layout of an own model costs: bytes and seconds from what was measured of it, on the links and at the rates
that our own models are priced with.

Called by planner.own for every candidate. Where a ModelSpec has formulas, an own model has counts (jobs.spec.own_model):
matmuls run at the chip's sustained rate whatever their shapes, everything else moves its bytes. So small matmuls are
priced too fast; what is not known is said by the plan, not guessed.
"""
import math
from dataclasses import dataclass

from jobs.spec.own_model import Measured, OwnModel, OwnProfile, Piece
from jobs.spec.parallel import ZERO_BUBBLE_SCHEDULES, Layout
from jobs.spec.training import DTYPE_BYTES, TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.planner import constants
from orchestrator.planner.compute import Chip, chip_of, optimizer_s
from orchestrator.planner.cost import Priced
from orchestrator.planner.links import collective_s, placed_group, send_recv_s
from orchestrator.planner.memory import ADAM_BYTES, GATHERED_UNITS, MASTER_BYTES
from orchestrator.planner.plan import Op, Phase, Prediction, StageMemory, Transfer
from orchestrator.planner.schedules import peak_held
from orchestrator.planner.sharding import gather_passes
from orchestrator.planner.software import OURS
from orchestrator.planner.timeline import StageTimes, pipeline_s


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnQuestion:
    """An own model, measured, and what it is to be trained on."""

    model: OwnModel
    profile: OwnProfile
    training: TrainingSpec
    cluster: ClusterSpec
    headroom: float

    def measured(self, layout: Layout) -> Measured:
        split = layout.sequence_parallel and layout.dims.tp > 1
        return next(m for m in self.profile.measured if (m.tp, m.sequence_parallel) == (layout.dims.tp, split))


def stage_pieces(measured: Measured, layout: Layout, stage: int) -> tuple[Piece, ...]:
    """What a stage computes, in order."""
    blocks = tuple(measured.blocks[i] for i in layout.layers(stage))
    before = (measured.before,) if stage == 0 else ()
    return before + blocks + ((measured.behind,) if stage == layout.num_stages - 1 else ())


# ------------------------------------------------------------------ memory
def stage_memory(question: OwnQuestion, layout: Layout, rank: int) -> StageMemory:
    """Peak bytes of a rank of pipeline rank `rank`; the rules are those of jobs.parallel, as in planner.memory."""
    dims, training = layout.dims, question.training
    measured, element = question.measured(layout), DTYPE_BYTES[training.param_dtype]
    stages = layout.stages(rank)
    held = peak_held(layout.schedule if dims.pp > 1 else "1f1b", rank=rank, pp=dims.pp,
                     virtual_stages=layout.virtual_stages, num_microbatches=layout.num_microbatches)
    pieces = [stage_pieces(measured, layout, stage) for stage in stages]
    whole = sum(piece.params for of_stage in pieces for piece in of_stage)
    shard = -(-whole // dims.fsdp)
    reduced = DTYPE_BYTES[training.reduce_dtype] * whole
    replicated = layout.zero_stage == 1 or dims.fsdp == 1
    accumulates = layout.num_microbatches > 1 and not layout.reduce_every_microbatch
    gradients = max(MASTER_BYTES * shard, reduced) if replicated or accumulates else MASTER_BYTES * shard
    kept = sum(n * _kept(measured, layout, stage) for n, stage in zip(held, stages))
    blocks = [measured.blocks[i] for stage in stages for i in layout.layers(stage)]
    again = max((block.saved for block in blocks), default=0.0) if layout.recompute != "none" else 0.0
    sequences = element * layout.microbatch_size
    last = layout.num_stages - 1 in stages
    vocab = question.model.vocab_size // (dims.tp if question.profile.splits_logits else 1)
    return StageMemory(
        stage=rank, layers=sum(layout.layers_per_stage[stage] for stage in stages), in_flight=max(held),
        parameters_bytes=MASTER_BYTES * shard, gradients_bytes=gradients, optimizer_bytes=ADAM_BYTES * shard,
        gathered_bytes=_gathered_bytes(pieces, layout, whole=whole, shard=shard, element=element, replicated=replicated),
        activations_bytes=int(sequences * (kept + again)),
        logits_bytes=12 * training.seq_len * layout.microbatch_size * vocab if last else 0)


def _kept(measured: Measured, layout: Layout, stage: int) -> float:
    """Elements of one sequence that a stage keeps for its backward; the ends are never recomputed."""
    ends = measured.before.saved * (stage == 0) + measured.behind.saved * (stage == layout.num_stages - 1)
    boundary = 2 * measured.hidden if layout.num_stages > 1 else 0  # received and sent on
    blocks = [measured.blocks[i] for i in layout.layers(stage)]
    if layout.recompute == "none":
        return ends + boundary + sum(block.saved for block in blocks)
    least = measured.hidden if layout.recompute == "full" else math.inf
    return ends + boundary + sum(min(block.saved, block.kept, least) for block in blocks)


def _gathered_bytes(pieces: list[tuple[Piece, ...]], layout: Layout, *, whole: int, shard: int, element: int,
                    replicated: bool) -> int:
    if replicated:
        return element * whole if element < MASTER_BYTES else element * (whole - shard)
    if not layout.reshard_after_forward or layout.dims.pp > 1 or layout.schedule in ZERO_BUBBLE_SCHEDULES:
        return element * whole
    largest = layout.layers_per_unit * max(piece.params for of_stage in pieces for piece in of_stage)
    return element * min(whole, GATHERED_UNITS * largest + pieces[0][0].params + pieces[-1][-1].params)


# ------------------------------------------------------------------ time
def price(question: OwnQuestion, layout: Layout) -> Priced:
    """Predicted cost of a step."""
    training, cluster, dims = question.training, question.cluster, layout.dims
    measured, chip = question.measured(layout), chip_of(cluster, training=training, software=OURS)
    m, pp = layout.num_microbatches, dims.pp
    costs = [_Stage(question, layout, stage, measured=measured, chip=chip) for stage in range(layout.num_stages)]
    ranks = [[costs[s] for s in layout.stages(rank)] for rank in range(pp)]
    times = {sends: pipeline_s(layout.schedule, stages=tuple(c.times(sends=sends) for c in costs),
                               virtual_stages=layout.virtual_stages, num_microbatches=m) for sends in (True, False)}
    work = [m * sum(c.work_s for c in rank) for rank in ranks]
    busiest = max(range(pp), key=work.__getitem__)
    tail_s = max(sum(c.tail_s for c in rank) for rank in ranks)
    memory = max((stage_memory(question, layout, rank) for rank in range(pp)), key=lambda one: one.total_bytes)
    held = max(sum(p.params for s in layout.stages(rank) for p in stage_pieces(measured, layout, s))
               for rank in range(pp)) / dims.fsdp
    update_s = optimizer_s(held, chip=chip) + constants.STEP_OVERHEAD_S[chip.device]
    step_s = times[True] + tail_s + update_s
    per_gpu = training.global_batch_size * training.seq_len / step_s / dims.world_size
    flops, peak = question.profile.flops_per_token, cluster.peak(training.param_dtype) * 1e12
    again = sum(c.again_flops for c in costs) * dims.tp / training.seq_len
    compute_s = m * sum(c.compute_s for c in ranks[busiest])
    bubble_s = times[False] - work[busiest]
    predicted = Prediction(
        step_time_s=step_s, tokens_per_s=per_gpu * dims.world_size, tokens_per_s_per_gpu=per_gpu,
        tflops_per_gpu=per_gpu * flops / 1e12, mfu=per_gpu * flops / peak, mfu_convention="full",
        hfu=per_gpu * (flops + again) / peak, compute_s=compute_s,
        exposed_communication_s=step_s - compute_s - bubble_s - update_s, bubble_s=bubble_s, optimizer_s=update_s,
        bubble_fraction=bubble_s / times[True], memory_gib=memory.total_gib, memory_stage=memory.stage,
        memory_limit_gib=cluster.gpu_memory_gib * (1 - question.headroom))
    return Priced(layout=layout, predicted=predicted,
                  transfers=tuple(t for cost in ranks[busiest] for t in cost.transfers))


class _Stage:
    """Seconds of one stage for one microbatch, and what it sends."""

    def __init__(self, question: OwnQuestion, layout: Layout, stage: int, *, measured: Measured, chip: Chip) -> None:
        self.question, self.layout, self.stage, self.measured = question, layout, stage, measured
        pieces = stage_pieces(measured, layout, stage)
        sequences = layout.microbatch_size
        matmul = sequences * sum(p.flops for p in pieces) / chip.matmul_flops
        stream = sequences * chip.element * sum(p.moved for p in pieces) / chip.memory_bytes_s
        launches = sum(p.kernels for p in pieces) * constants.LAUNCH_S[chip.device]
        self.forward_s = max(matmul + stream, launches) if chip.device == "cuda" else matmul + stream + launches
        back = 2 * matmul + constants.BACKWARD_TRAFFIC * stream
        back = max(back, 2 * launches) if chip.device == "cuda" else back + 2 * launches
        blocks = [measured.blocks[i] for i in layout.layers(stage)]
        self.again_flops = sum(p.flops for p in blocks) if layout.recompute == "full" else 0.0
        share = sum(p.flops + p.moved for p in blocks) / max(1.0, sum(p.flops + p.moved for p in pieces))
        again = {"none": 0.0, "selective": share * stream, "full": share * self.forward_s}[layout.recompute]
        self.backward_s, self.weights_s = back + again, matmul
        self.transfers: list[Transfer] = []
        self.exposed_s = {"forward": 0.0, "backward": 0.0, "step": 0.0}  # step: once; the others per microbatch
        self._tensor_parallel(pieces)
        self._data_parallel(sum(p.params for p in pieces))
        self.send_s = self._sends()

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def work_s(self) -> float:
        return self.compute_s + self.exposed_s["forward"] + self.exposed_s["backward"]

    @property
    def tail_s(self) -> float:
        return self.exposed_s["step"]

    def times(self, *, sends: bool) -> StageTimes:
        return StageTimes(forward_s=self.forward_s + self.exposed_s["forward"], weights_s=self.weights_s,
                          backward_s=self.backward_s + self.exposed_s["backward"], send_s=self.send_s if sends else 0.0)

    def _tensor_parallel(self, pieces: tuple[Piece, ...]) -> None:
        """Nothing is hidden: the next operation needs the result. See jobs.own.split for what is sent when."""
        m, sp = self.layout.num_microbatches, self.layout.sequence_parallel
        repeats = 2 if self.layout.recompute == "full" else 1
        for what, size, count, op in (("entering", sum(p.entered for p in pieces), sum(p.entries for p in pieces),
                                       "all_gather"),
                                      ("leaving", sum(p.left for p in pieces), sum(p.exits for p in pieces),
                                       "reduce_scatter")):
            if not count:
                continue
            passes = {"entering": (0, 1), "leaving": (1, repeats - 1)}[what] if not sp else (1, repeats)
            payload = self._bytes(size) / count
            for phase, times in zip(("forward", "backward"), passes):
                self._add("tp", "all_reduce" if not sp else op, what, payload, times=times * count * m, phase=phase)

    def _data_parallel(self, params: int) -> None:
        """By unit, but priced together: gathers hide behind the compute of their pass, reductions behind the last
        microbatch's backward; on CPU nothing hides."""
        layout, dims, training = self.layout, self.layout.dims, self.question.training
        element, reduced = DTYPE_BYTES[training.param_dtype], DTYPE_BYTES[training.reduce_dtype]
        units = max(1, math.ceil(layout.layers_per_stage[self.stage] / layout.layers_per_unit))
        if layout.zero_stage == 1:
            self._add("dp_shard", "all_gather", "weights", element * params / units, times=units, hidden_s=self.forward_s)
        else:
            passes = gather_passes(layout, stage=self.stage)
            for phase, times, cover in zip(("forward", "backward"), passes, (self.forward_s, self.backward_s)):
                self._add("dp_shard", "all_gather", "weights", element * params / units, times=units * times, phase=phase,
                          hidden_s=times * cover)
        often = layout.num_microbatches if layout.reduce_every_microbatch and layout.zero_stage > 1 else 1
        phase = "backward" if often > 1 else "step"
        self._add("dp_shard", "reduce_scatter", "gradients", reduced * params / units, times=units * often, phase=phase,
                  hidden_s=often * self.backward_s)
        self._add("dp_replicate", "all_reduce", "gradients", reduced * params / dims.fsdp / units, times=units * often,
                  phase=phase, hidden_s=often * self.backward_s)

    def _sends(self) -> float:
        layout = self.layout
        if layout.num_stages == 1 or self.stage == layout.num_stages - 1:
            return 0.0
        payload = self._bytes(self.measured.hidden)
        for phase in ("forward", "backward"):
            self._add("pp", "send_recv", "hidden states", payload, times=layout.num_microbatches, phase=phase)
        return self.transfers[-1].seconds / layout.num_microbatches

    def _bytes(self, elements: float) -> float:
        return elements * self.layout.microbatch_size * DTYPE_BYTES[self.question.training.param_dtype]

    def _add(self, axis: str, op: Op, what: str, payload: float, *, times: int, phase: Phase = "step",
             hidden_s: float = 0.0) -> None:
        """One kind of collective; `hidden_s`: seconds of compute that it may hide behind, on GPUs."""
        cluster = self.question.cluster
        group = placed_group(self.layout.dims, axis, cluster=cluster)
        if times == 0 or group.ranks == 1:
            return
        once = send_recv_s(payload, group, cluster=cluster) if op == "send_recv" else \
            collective_s(op, payload, group, cluster=cluster)
        seconds = once * times
        exposed = max(once, seconds - hidden_s) if hidden_s and cluster.device == "cuda" else seconds
        self.transfers.append(Transfer(axis=axis, op=op, what=what, ranks=group.ranks, payload_bytes=int(payload),
                                       times=times, link=group.link, seconds=seconds, exposed_s=exposed, phase=phase))
        if axis != "pp":  # what waits for messages is the timeline's to say
            self.exposed_s[phase] += exposed / (self.layout.num_microbatches if phase != "step" else 1)
