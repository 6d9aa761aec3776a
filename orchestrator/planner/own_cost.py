"""What a layout of an own model costs: bytes and seconds from what was measured of it, on the links and at the rates
that our own models are priced with.

Called by planner.own for every candidate. Where a ModelSpec has formulas, an own model has counts
(jobs.spec.own_model): matmuls run at the chip's sustained rate whatever their shapes, everything else moves its bytes.
So small matmuls are priced too fast; what is not known is said by the plan, not guessed.
"""
from collections import Counter

from jobs.spec.own_model import Measured, Piece
from jobs.spec.parallel import Layout
from jobs.spec.training import DTYPE_BYTES
from orchestrator.planner import constants
from orchestrator.planner.chip import Chip, chip_of, optimizer_s
from orchestrator.planner.cost import Priced
from orchestrator.planner.links import collective_s, placed_group, send_recv_s
from orchestrator.planner.own_memory import OwnQuestion, stage_memory, stage_pieces
from orchestrator.planner.plan import Op, Phase, Prediction, Transfer
from orchestrator.planner.sharding import gather_passes
from orchestrator.planner.software import OURS
from orchestrator.planner.timeline import StageTimes, pipeline_s


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
    bubble_s = max(0.0, times[False] - work[busiest])
    predicted = Prediction(
        step_time_s=step_s, tokens_per_s=per_gpu * dims.world_size, tokens_per_s_per_gpu=per_gpu,
        tflops_per_gpu=per_gpu * flops / 1e12, mfu=per_gpu * flops / peak, mfu_convention="full",
        hfu=per_gpu * (flops + again) / peak, compute_s=compute_s,
        exposed_communication_s=step_s - compute_s - bubble_s - update_s, bubble_s=bubble_s, optimizer_s=update_s,
        bubble_fraction=bubble_s / times[True], memory_gib=memory.total_gib, memory_pp_rank=memory.pp_rank,
        memory_limit_gib=cluster.gpu_memory_gib * (1 - question.headroom))
    return Priced(layout=layout, predicted=predicted, memory=memory,
                  transfers=tuple(t for cost in ranks[busiest] for t in cost.transfers))


def stage_transfers(question: OwnQuestion, layout: Layout, stage: int) -> tuple[Transfer, ...]:
    """What one rank of a stage sends in a step."""
    chip = chip_of(question.cluster, training=question.training, software=OURS)
    return tuple(_Stage(question, layout, stage, measured=question.measured(layout), chip=chip).transfers)


class _Stage:
    """Seconds of one stage for one microbatch, and what it sends."""

    def __init__(self, question: OwnQuestion, layout: Layout, stage: int, *, measured: Measured, chip: Chip) -> None:
        self.question, self.layout, self.stage, self.measured = question, layout, stage, measured
        pieces = stage_pieces(measured, layout, stage)
        self._before = pieces[0].params
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
        self._data_parallel()
        self._once_over_tp(pieces)
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
        """Nothing is hidden: the next operation needs the result. See jobs.own.split for what is sent when. A block
        that is recomputed sends again, all but what leaves it last: behind that nothing is kept."""
        m, sp = self.layout.num_microbatches, self.layout.sequence_parallel
        repeated = self.layout.layers(self.stage) if self.layout.recompute != "none" else ()
        again = [self.measured.blocks[i] for i in repeated]
        entered, left = (sum(p.entries for p in pieces), sum(p.entered for p in pieces)), \
            (sum(p.exits for p in pieces), sum(p.left for p in pieces))
        re_entered = sum(p.entries for p in again), sum(p.entered for p in again)
        re_left = sum(p.exits - 1 for p in again if p.exits), \
            sum(p.left * (p.exits - 1) / p.exits for p in again if p.exits)
        sent = [("leaving", "all_reduce", "forward", left), ("entering", "all_reduce", "backward", entered),
                ("leaving", "all_reduce", "backward", re_left)]
        if sp:
            sent = [("entering", "all_gather", "forward", entered), ("leaving", "reduce_scatter", "forward", left),
                    ("leaving", "all_gather", "backward", left), ("entering", "reduce_scatter", "backward", entered),
                    ("entering", "all_gather", "backward", re_entered),
                    ("leaving", "reduce_scatter", "backward", re_left)]
        for what, op, phase, (count, elements) in sent:
            if count:
                self._add("tp", op, what, self._bytes(elements) / count, times=count * m, phase=phase)

    def _units(self) -> list[tuple[int, int, bool]]:
        """(parameters, how many like it, stays gathered through forward and backward), as jobs.own cuts them."""
        layout, measured = self.layout, self.measured
        blocks = [measured.blocks[i].params for i in layout.layers(self.stage)]
        groups = [sum(blocks[i:i + layout.layers_per_unit]) for i in range(0, len(blocks), layout.layers_per_unit)]
        first, last = self.stage == 0, self.stage == layout.num_stages - 1
        before, root = self._before * first, measured.behind.params * last
        if self.question.profile.no_pp:
            before, root = 0, before + root
        kept = [(groups.pop(), 1, True)] if last and groups else []
        return [(before, 1, False), *((p, n, False) for p, n in Counter(groups).items()), *kept, (root, 1, True)]

    def _data_parallel(self) -> None:
        """Gathers hide behind the compute of their pass, reductions behind the last microbatch's backward; on CPU
        nothing hides. What is sent is planner.sharding's."""
        layout, training = self.layout, self.question.training
        element, reduced = DTYPE_BYTES[training.param_dtype], DTYPE_BYTES[training.reduce_dtype]
        forwards, backwards = gather_passes(layout, stage=self.stage)
        often = layout.num_microbatches if layout.shards_gradients else 1
        reduction = {"phase": "backward" if often > 1 else "step", "hidden_s": often * self.backward_s}
        units = [unit for unit in self._units() if unit[0]]
        share = 1 / max(1, sum(n for _, n, _ in units))  # of the compute that one unit may hide behind
        for params, n, kept in units:
            there = share * n
            if layout.zero_stage < 3:
                self._add("dp_shard", "all_gather", "weights", element * params, times=n,
                          hidden_s=there * self.forward_s)
            else:
                alone = forwards if layout.num_stages == 1 else 1  # forwards in which a kept unit is gathered
                self._add("dp_shard", "all_gather", "weights", element * params, phase="forward",
                          times=n * (alone if kept else forwards), hidden_s=there * forwards * self.forward_s)
                self._add("dp_shard", "all_gather", "weights", element * params, times=0 if kept else n * backwards,
                          phase="backward", hidden_s=there * backwards * self.backward_s)
            hides = reduction | {"hidden_s": there * reduction["hidden_s"]}
            self._add("dp_shard", "reduce_scatter", "gradients", reduced * params, times=n * often, **hides)
            self._add("dp_replicate", "all_reduce", "gradients", reduced * params / layout.dims.fsdp,
                      times=n * (often if layout.zero_stage == 3 else 1), **hides)

    def _once_over_tp(self, pieces: tuple[Piece, ...]) -> None:
        """The loss of split logits, and the gradients of what every tp rank holds whole."""
        tokens, m = self.question.training.seq_len * self.layout.microbatch_size, self.layout.num_microbatches
        if self.question.profile.splits_logits and self.stage == self.layout.num_stages - 1:
            for size in (4, 8):
                self._add("tp", "all_reduce", "loss", size * tokens, times=m, phase="forward")
        summed = 4 * sum(p.summed for p in pieces) / self.layout.dims.fsdp
        self._add("tp", "all_reduce", "gradients of what is not split", summed, times=int(summed > 0))

    def _sends(self) -> float:
        """Hidden states onward, their gradients back, where the neighbour is on another rank. Seconds of a message."""
        layout, last = self.layout, self.layout.num_stages - 1
        rank_of = {stage: rank for rank in range(layout.dims.pp) for stage in layout.stages(rank)}
        for phase, other in (("forward", self.stage + 1), ("backward", self.stage - 1)):
            if 0 <= other <= last and rank_of[other] != rank_of[self.stage]:
                self._add("pp", "send_recv", "hidden states", self._bytes(self.measured.hidden),
                          times=layout.num_microbatches, phase=phase)
        message_s = max((t.seconds / t.times for t in self.transfers if t.axis == "pp"), default=0.0)
        if self.stage in (0, last) and rank_of[0] != rank_of[last]:
            self._add("pp", "send_recv", "tied weights: gradient", 4 * self.measured.tied / self.layout.dims.fsdp,
                      times=int(self.measured.tied > 0))
        return message_s

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
        if axis != "pp" or phase == "step":  # what waits for hidden states is the timeline's to say
            self.exposed_s[phase] += exposed / (self.layout.num_microbatches if phase != "step" else 1)
