"""The collectives of one optimizer step, per axis: operation, bytes, times, link, seconds.

Called by the cost model with one stage of one layout. The formulas are those of the tables that open
the modules of jobs.parallel; a test counts a real step against them. Which link a group crosses and how long that
takes is in links; what compute hides is decided in cost.
"""
import functools
from collections.abc import Iterable

from jobs.spec.counts import embedding_params
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout, Schedule
from jobs.spec.training import DTYPE_BYTES, TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.planner import constants
from orchestrator.planner.links import Group, axis_group, collective_s, placed_group, send_recv_s
from orchestrator.planner.plan import Op, Phase, Transfer
from orchestrator.planner.schedules import order
from orchestrator.planner.software import OURS, Software
from orchestrator.planner.weights import expert_weights, ends_params, layer_kinds, block_params

__all__ = ["INTER_NODE_EFFICIENCY", "INTRA_NODE_EFFICIENCY", "Group", "axis_group", "collective_s", "gather_passes",
           "hidden_bytes", "moved_bytes", "stage_transfers"]

INTRA_NODE_EFFICIENCY = constants.INTRA_NODE_EFFICIENCY
INTER_NODE_EFFICIENCY = constants.INTER_NODE_EFFICIENCY


def moved_bytes(transfers: Iterable[Transfer], *, axis: str, phase: Phase | None = None) -> float:
    """Bytes per step of the tensors that `axis` communicates. With phase="forward" this is the convention
    `payload_forward` of textbooks: each all-reduce once, the backward not counted."""
    return sum(one.moved_bytes for one in transfers if one.axis == axis and phase in (None, one.phase))


def stage_transfers(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec,
                    stage: int, software: Software = OURS) -> tuple[Transfer, ...]:
    """Everything a rank sends in one step for `stage`; `exposed_s` is left at the full time."""
    book = _Book(model, layout, training=training, cluster=cluster, stage=stage, software=software)
    _tensor_parallel(book)
    _context_parallel(book)
    _experts(book)
    _pipeline(book)
    _data_parallel(book)
    return tuple(book.transfers)


class _Book:
    """Collects the transfers of one stage, and holds what all of them are computed from."""

    def __init__(self, model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec, stage: int,
                 software: Software) -> None:
        self.model, self.layout, self.training, self.cluster = model, layout, training, cluster
        self.dims, self.software, self.stage = layout.dims, software, stage
        self.first, self.last = stage == 0, stage == layout.num_stages - 1
        self.layers = layout.layers_per_stage[stage]
        start = sum(layout.layers_per_stage[:stage])
        self.kinds = layer_kinds(model, start, start + self.layers)
        self.m = layout.num_microbatches
        self.element = DTYPE_BYTES[training.param_dtype]
        self.reduced = DTYPE_BYTES[training.reduce_dtype]
        self.tokens = training.seq_len // layout.dims.cp * layout.microbatch_size
        self.transfers: list[Transfer] = []
        self.groups: dict[str, Group] = {}  # by axis: looked up once

    @property
    def moe_layers(self) -> int:
        return sum(count for layer, count in self.kinds if self.model.is_moe(layer))

    def group(self, name: str) -> Group:
        if name not in self.groups:
            self.groups[name] = placed_group(self.dims, name, cluster=self.cluster)
        return self.groups[name]

    def add(self, axis: str, op: Op, what: str, *, payload_bytes: float, times: float, phase: Phase = "step",
            group: str | None = None) -> None:
        if times == 0:
            return
        placed = self.group(group or axis)
        if placed.ranks == 1:
            return
        if op == "send_recv":
            once = send_recv_s(payload_bytes, placed, cluster=self.cluster)
        else:
            once = collective_s(op, payload_bytes, placed, cluster=self.cluster, ports=self.software.ports)
        self.transfers.append(Transfer(axis=axis, op=op, what=what, ranks=placed.ranks, payload_bytes=int(payload_bytes),
                                       times=int(times), link=placed.link, seconds=once * times, exposed_s=once * times,
                                       phase=phase))


def hidden_bytes(model: ModelSpec, layout: Layout, *, training: TrainingSpec) -> float:
    """One microbatch's hidden state [batch, seq/cp, dim], whole."""
    element = DTYPE_BYTES[training.param_dtype]
    return element * layout.microbatch_size * (training.seq_len // layout.dims.cp) * model.dim


def _tensor_parallel(book: _Book) -> None:
    """Megatron's f and g around attention and FFN. With sequence parallelism each all-reduce becomes an
    all-gather and a reduce-scatter of the same bytes, forward and backward. Recomputing a layer, in full or
    selectively, repeats its forward's collectives but for the last: once the FFN's output projection has its
    input again, torch stops. Whole experts see the tokens of their rank's sequence shard: nothing to gather."""
    layout, m = book.layout, book.m
    payload = hidden_bytes(book.model, layout, training=book.training)
    # blocks between an f and a g: attention and FFN of every layer, but whole experts without a shared one
    shared = book.model.moe is not None and book.model.moe.num_shared_experts > 0
    silent = book.moe_layers if layout.sequence_parallel and book.dims.ep % book.dims.tp == 0 and not shared else 0
    blocks = (2 * book.layers - silent) * m
    repeats = layout.recompute == "full" or (layout.recompute == "selective" and book.software.selective_keeps_matmuls)
    again = {"all_gather": blocks, "reduce_scatter": blocks / 2, "all_reduce": blocks / 2} if repeats else {}
    for op in ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("all_reduce",):
        book.add("tp", op, "attention and ffn", payload_bytes=payload, times=blocks, phase="forward")
        book.add("tp", op, "attention and ffn", payload_bytes=payload, times=blocks + int(again.get(op, 0)),
                 phase="backward")
        for what, here in (("embedding", book.first), ("output", book.last)):
            # without sequence parallelism one direction is free: the embedding's backward, the output's forward
            forward = layout.sequence_parallel and (op == "reduce_scatter") == (what == "embedding")
            if op == "all_reduce":
                forward = what == "embedding"
            book.add("tp", op, what, payload_bytes=payload, times=m * here, phase="forward" if forward else "backward")
    if book.last:
        book.add("tp", "all_reduce", "loss: maximum", payload_bytes=4 * book.tokens, times=m, phase="forward")
        book.add("tp", "all_reduce", "loss: sum, target", payload_bytes=8 * book.tokens, times=m, phase="forward")
    if layout.sequence_parallel:
        norms = 2 * book.layers + int(book.last)
        book.add("tp", "all_reduce", "norm gradients", payload_bytes=4 * norms * book.model.dim / book.dims.fsdp,
                 times=1)


def _context_parallel(book: _Book) -> None:
    """Keys and values of every layer reach all ranks: round a ring in cp − 1 hops, with their gradients on the way
    back; or by an all-gather, whose backward is a reduce-scatter."""
    model, dims = book.model, book.dims
    width = model.num_kv_heads * model.head_size * 2
    if model.mla is not None:  # they are expanded from the latent before they travel
        width = model.num_heads * (model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim + model.mla.v_head_dim)
    elements = book.tokens * width / dims.tp
    block, gradients = book.element * elements, 4 * elements  # gradients are summed in float32
    layers = book.layers * book.m
    again = layers if book.layout.recompute != "none" else 0
    if book.layout.cp_method == "ring":
        book.add("cp", "send_recv", "keys and values", payload_bytes=block, times=layers * (dims.cp - 1),
                 phase="forward")
        # the keys and values once more, and their gradients, which come home with one hop more
        book.add("cp", "send_recv", "keys and values", payload_bytes=block, times=(layers + again) * (dims.cp - 1),
                 phase="backward")
        book.add("cp", "send_recv", "their gradients", payload_bytes=gradients, phase="backward",
                 times=layers * dims.cp if dims.cp > 1 else 0)
    else:
        book.add("cp", "all_gather", "keys and values", payload_bytes=block * dims.cp, times=layers, phase="forward")
        book.add("cp", "all_gather", "keys and values", payload_bytes=block * dims.cp, times=layers + again,
                 phase="backward")
        book.add("cp", "reduce_scatter", "their gradients", payload_bytes=gradients * dims.cp, times=layers,
                 phase="backward")


def _experts(book: _Book) -> None:
    """Tokens go to the ranks of their experts and come back, forward and backward."""
    model, layout = book.model, book.layout
    if model.moe is None:
        return
    split = book.dims.tp if layout.sequence_parallel else 1
    payload = book.element * book.tokens / split * model.moe.top_k * model.dim
    times = 2 * book.moe_layers * book.m
    book.add("ep", "all_to_all", "tokens to experts and back", payload_bytes=payload, times=times, phase="forward")
    again = times / 2 if layout.recompute == "full" else 0
    book.add("ep", "all_to_all", "tokens to experts and back", payload_bytes=payload, times=times + again,
             phase="backward")


def _pipeline(book: _Book) -> None:
    """Hidden states forward and their gradients backward over each boundary; a tp rank sends its own part
    of the sequence under sequence parallelism, else the whole. The turn of a V stays on one rank."""
    layout, dims, model = book.layout, book.dims, book.model
    payload = hidden_bytes(model, layout, training=book.training)
    payload /= dims.tp if layout.sequence_parallel else 1
    home = _rank(layout, book.stage)
    onward = not book.last and _rank(layout, book.stage + 1) != home
    back = not book.first and _rank(layout, book.stage - 1) != home
    book.add("pp", "send_recv", "hidden states", payload_bytes=payload, times=book.m * onward, phase="forward")
    book.add("pp", "send_recv", "their gradients", payload_bytes=payload, times=book.m * back, phase="backward")
    if model.tie_embeddings and (book.first or book.last) and _rank(layout, 0) != _rank(layout, layout.num_stages - 1):
        book.add("pp", "send_recv", "tied embedding: gradient", times=1,
                 payload_bytes=4 * embedding_params(model) / (dims.tp * dims.fsdp))


def _rank(layout: Layout, stage: int) -> int:
    return next(rank for rank in range(layout.dims.pp) if stage in layout.stages(rank))


def gather_passes(layout: Layout, *, stage: int) -> tuple[int, int]:
    """In how many forwards and backwards of a step FSDP has to gather a unit of `stage`.

    Without resharding in the first forward only. With it in every one of both; under a pipeline torch keeps
    units gathered from one microbatch's backward to the next forward, so only forwards that do not follow a backward
    gather, and of the backwards those that follow a forward."""
    m, pp = layout.num_microbatches, layout.dims.pp
    if not layout.reshard_after_forward:
        return 1, 0
    if layout.num_stages == 1:
        return m, m
    return _pipelined_gathers(layout.schedule, stage=stage, pp=pp, virtual_stages=layout.virtual_stages,
                              num_microbatches=m)


@functools.lru_cache(maxsize=4096)
def _pipelined_gathers(schedule: Schedule, *, stage: int, pp: int, virtual_stages: int,
                       num_microbatches: int) -> tuple[int, int]:
    m = num_microbatches
    if schedule == "gpipe":
        return m, 1
    if schedule == "1f1b":
        warmup = min(m, pp - stage)
        return warmup, m - warmup + 1
    few = (2 * virtual_stages + 2) * pp
    run = m if m <= few else few + m % pp
    rank = min(stage, 2 * pp - 1 - stage) if schedule in ("zbv", "dualpipev") else stage % pp
    forwards = backwards = 0
    gathered = False
    for action in order(schedule, rank=rank, pp=pp, virtual_stages=virtual_stages, num_microbatches=run):
        if action.stage != stage or action.kind == "W":
            continue
        if action.kind == "F":
            forwards += not gathered
            gathered = False
        else:
            backwards += not gathered
            gathered = True
    return forwards, backwards + m - run


def _data_parallel(book: _Book) -> None:
    """Over fsdp = dp_shard·cp gather parameters and scatter gradients; over dp_replicate then all-reduce the shard of
    the gradient (HSDP). Units: layers_per_unit layers, the embedding, norm with output. ZeRO-1 gathers after the
    update instead. Experts are shared by fewer ranks, edp, and have their own."""
    model, dims, layers = book.model, book.dims, book.layers
    root = ends_params(model, tp=dims.tp, first=False, last=book.last)
    embedding = ends_params(model, tp=dims.tp, first=book.first, last=book.last) - root
    per_unit = min(book.layout.layers_per_unit, layers) or 1
    for layer, count in book.kinds:
        units = -(-count // per_unit)
        dense = block_params(model, tp=dims.tp, layer=layer) * count / units
        kept = 1 if book.last and layer == book.kinds[-1][0] else 0  # the model's last unit of layers stays gathered
        what = "layers" if len(book.kinds) == 1 else "expert layers" if model.is_moe(layer) else "dense layers"
        _unit(book, what, dense, units=units, kept=kept)
        _unit(book, "experts", expert_weights(model, layer, dims=dims) * count / units, units=units, kept=kept,
              group="edp")
    _unit(book, "embedding", embedding, units=1, kept=0)
    _unit(book, "norm and output", root, units=1, kept=1)


def _unit(book: _Book, what: str, params: float, *, units: int, kept: int, group: str = "fsdp") -> None:
    """The collectives of `units` like units of `params` weights, `kept` of which stay gathered through a forward and
    the backward that begins behind it."""
    if params == 0:
        return
    layout, ranks = book.layout, max(1, book.group(group).ranks)
    gather = {"payload_bytes": book.element * params, "group": group}
    if layout.zero_stage == 1:
        book.add("dp_shard", "all_gather", f"{what}: weights", times=units, **gather)
    else:
        forwards, backwards = gather_passes(layout, stage=book.stage)
        alone = forwards if layout.num_stages == 1 else 1  # forwards in which a kept unit is gathered
        book.add("dp_shard", "all_gather", f"{what}: weights", phase="forward",
                 times=(units - kept) * forwards + kept * alone, **gather)
        book.add("dp_shard", "all_gather", f"{what}: weights", phase="backward", times=(units - kept) * backwards,
                 **gather)
    often = book.m if layout.reduce_every_microbatch and layout.zero_stage > 1 else 1
    book.add("dp_shard", "reduce_scatter", f"{what}: gradients", payload_bytes=book.reduced * params, group=group,
             times=units * often, phase="backward" if often > 1 else "step")
    book.add("dp_replicate", "all_reduce", f"{what}: gradients", payload_bytes=book.reduced * params / ranks,
             times=units * often)
