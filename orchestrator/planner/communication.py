"""The collectives of one optimizer step, per axis: operation, bytes, times, link, seconds.

Called by the cost model with one stage of one layout. The formulas are those of the tables that open
the modules of jobs.parallel. Time is α–β: a latency per hop and bytes over the bandwidth of the link
that the axis crosses when ranks are numbered node-major. What compute hides is decided in cost, not here.
"""
import math
from dataclasses import dataclass

from jobs.spec.model import ModelSpec, embedding_params
from jobs.spec.parallel import Layout, ParallelDims
from jobs.spec.training import DTYPE_BYTES, TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.planner.memory import block_params, ends_params, in_flight
from orchestrator.planner.plan import Link, Transfer

# Bus bandwidth of large collectives over the link's published rate: 8×A100 235/300, 8×H200 368/450
# (ring all-reduce, planner reference B.5); InfiniBand 0.9 as in Calculon (arXiv:2206.05802).
INTRA_NODE_EFFICIENCY = 0.80
INTER_NODE_EFFICIENCY = 0.90


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks that one axis connects, as the links see them."""

    ranks: int
    nodes: int  # that the group touches
    per_node: int  # ranks of the group on each node

    @property
    def link(self) -> Link:
        return "intra_node" if self.nodes == 1 else "inter_node"


def axis_group(dims: ParallelDims, axis: str, *, gpus_per_node: int) -> Group:
    """Group of `axis` under node-major ranks: neighbours are as far apart as the inner axes are large."""
    degree = getattr(dims, axis)
    stride = math.prod(getattr(dims, inner) for inner in dims.order[dims.order.index(axis) + 1:])
    span = stride * degree
    if span <= gpus_per_node and gpus_per_node % span == 0:
        return Group(ranks=degree, nodes=1, per_node=degree)
    per_node = max(1, math.gcd(gpus_per_node, span) // stride)
    return Group(ranks=degree, nodes=-(-degree // per_node), per_node=per_node)


def collective_s(op: str, payload_bytes: float, group: Group, *, cluster: ClusterSpec) -> float:
    """Seconds of one collective. Within a node a ring; across nodes the node-local ring and the network
    work at the same time on all of the group's network ports, and hops grow with log₂ of the nodes (tree
    and parallel-aggregated trees replace the flat ring of NCCL there)."""
    if group.ranks == 1:
        return 0.0
    passes = 2 if op == "all_reduce" else 1
    hops_s = (group.per_node - 1) * cluster.intra_node_latency_us * 1e-6
    share = (group.ranks - 1) / group.ranks
    bytes_s = share * payload_bytes / (cluster.link_gb_s * 1e9 * INTRA_NODE_EFFICIENCY) if group.per_node > 1 else 0.0
    if group.nodes > 1:
        hops_s += min(group.nodes - 1, 2 * math.ceil(math.log2(group.nodes))) * cluster.inter_node_latency_us * 1e-6
        network = cluster.inter_node_gb_s * 1e9 * INTER_NODE_EFFICIENCY * group.per_node
        bytes_s = max(bytes_s, (group.nodes - 1) / group.nodes * payload_bytes / network)
    return passes * (hops_s + bytes_s)


def send_recv_s(payload_bytes: float, group: Group, *, cluster: ClusterSpec) -> float:
    """Seconds of one message between neighbours of a pipeline."""
    if group.nodes > 1:
        rate, latency = cluster.inter_node_gb_s * INTER_NODE_EFFICIENCY, cluster.inter_node_latency_us
    else:
        rate, latency = cluster.link_gb_s * INTRA_NODE_EFFICIENCY, cluster.intra_node_latency_us
    return latency * 1e-6 + payload_bytes / (rate * 1e9)


def stage_transfers(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec,
                    stage: int) -> tuple[Transfer, ...]:
    """Everything a rank of `stage` sends in one step; `exposed_s` is left at the full time."""
    book = _Book(layout=layout, cluster=cluster)
    _tensor_parallel(book, model, training=training, stage=stage)
    _pipeline(book, model, training=training, stage=stage)
    _data_parallel(book, model, training=training, stage=stage)
    return tuple(book.transfers)


class _Book:
    """Collects the transfers of one stage."""

    def __init__(self, *, layout: Layout, cluster: ClusterSpec) -> None:
        self.layout, self.cluster = layout, cluster
        self.transfers: list[Transfer] = []

    def add(self, axis: str, op: str, what: str, *, payload_bytes: float, times: int) -> None:
        group = axis_group(self.layout.dims, axis, gpus_per_node=self.cluster.gpus_per_node)
        if group.ranks == 1 or times == 0:
            return
        if op == "send_recv":
            once = send_recv_s(payload_bytes, group, cluster=self.cluster)
        else:
            once = collective_s(op, payload_bytes, group, cluster=self.cluster)
        self.transfers.append(Transfer(axis=axis, op=op, what=what, ranks=group.ranks, payload_bytes=int(payload_bytes),
                                       times=times, link=group.link, seconds=once * times, exposed_s=once * times))


def hidden_bytes(model: ModelSpec, layout: Layout, *, training: TrainingSpec) -> float:
    """One microbatch's hidden state [batch, seq/cp, dim], whole."""
    element = DTYPE_BYTES[training.param_dtype]
    return element * layout.microbatch_size * (training.seq_len // layout.dims.cp) * model.dim


def _tensor_parallel(book: _Book, model: ModelSpec, *, training: TrainingSpec, stage: int) -> None:
    """Megatron's f and g around attention and FFN. With sequence parallelism each all-reduce becomes an
    all-gather and a reduce-scatter of the same bytes, forward and backward. Recomputing a layer, in full or
    selectively, repeats its forward's collectives but for the last: once the FFN's output projection has its
    input again, torch stops."""
    layout, dims = book.layout, book.layout.dims
    layer_passes = layout.layers_per_stage[stage] * layout.num_microbatches
    payload = hidden_bytes(model, layout, training=training)
    entered, left = (2, 1) if layout.recompute != "none" else (0, 0)  # again, per layer: attention and FFN
    ends = (int(stage == 0) + int(stage == dims.pp - 1)) * layout.num_microbatches  # embedding; output projection
    again = {"all_gather": entered, "reduce_scatter": left, "all_reduce": left}
    for op in ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("all_reduce",):
        book.add("tp", op, "attention and ffn", payload_bytes=payload, times=layer_passes * (4 + again[op]))
        book.add("tp", op, "embedding and output", payload_bytes=payload, times=ends)
    if stage == dims.pp - 1:
        tokens = layout.microbatch_size * training.seq_len // dims.cp
        book.add("tp", "all_reduce", "loss: maximum", payload_bytes=4 * tokens, times=layout.num_microbatches)
        book.add("tp", "all_reduce", "loss: sum, target", payload_bytes=8 * tokens, times=layout.num_microbatches)
    if layout.sequence_parallel:
        norms = 2 * layout.layers_per_stage[stage] + int(stage == dims.pp - 1)
        book.add("tp", "all_reduce", "norm gradients", payload_bytes=4 * norms * model.dim / dims.dp_shard, times=1)


def _pipeline(book: _Book, model: ModelSpec, *, training: TrainingSpec, stage: int) -> None:
    """Hidden states forward and their gradients backward over each boundary; a tp rank sends its own part
    of the sequence under sequence parallelism, else the whole."""
    layout, dims = book.layout, book.layout.dims
    payload = hidden_bytes(model, layout, training=training)
    payload /= dims.tp if layout.sequence_parallel else 1
    last = dims.pp - 1
    book.add("pp", "send_recv", "hidden states", payload_bytes=payload, times=layout.num_microbatches * (stage < last))
    book.add("pp", "send_recv", "their gradients", payload_bytes=payload, times=layout.num_microbatches * (stage > 0))
    if model.tie_embeddings and stage in (0, last):
        book.add("pp", "send_recv", "tied embedding: gradient", times=1,
                 payload_bytes=4 * embedding_params(model) / (dims.tp * dims.dp_shard))


def gather_passes(layout: Layout, *, stage: int) -> tuple[int, int]:
    """In how many forwards and backwards of a step FSDP has to gather a unit of `stage`.

    Without resharding in the first forward only. With it in every one of both; under a pipeline torch keeps
    units gathered from one microbatch's backward to the next forward, so only warm-up forwards gather, and
    of the backwards those that follow a forward."""
    m, pp = layout.num_microbatches, layout.dims.pp
    if not layout.reshard_after_forward:
        return 1, 0
    if pp == 1:
        return m, m
    warmup = in_flight(layout, stage)
    return warmup, m - warmup + 1


def _data_parallel(book: _Book, model: ModelSpec, *, training: TrainingSpec, stage: int) -> None:
    """FSDP2 over dp_shard: gather parameters, scatter gradients once per step; HSDP: then all-reduce the
    shard of the gradient over dp_replicate. Units: every layer, the embedding, norm with output."""
    layout, dims = book.layout, book.layout.dims
    element, reduced = DTYPE_BYTES[training.param_dtype], DTYPE_BYTES[training.reduce_dtype]
    layers = layout.layers_per_stage[stage]
    passes = sum(gather_passes(layout, stage=stage))
    last = stage == dims.pp - 1
    root_passes = layout.num_microbatches if dims.pp == 1 and layout.reshard_after_forward else 1
    root = ends_params(model, tp=dims.tp, first=False, last=last)
    embedding = ends_params(model, tp=dims.tp, first=stage == 0, last=last) - root
    for what, params, units, gathers in (("layers", block_params(model, tp=dims.tp), layers, passes),
                                         ("embedding", embedding, 1, passes),
                                         ("norm and output", root, 1, root_passes)):
        if params == 0:
            continue
        book.add("dp_shard", "all_gather", f"{what}: weights", payload_bytes=element * params,
                 times=units * gathers)
        book.add("dp_shard", "reduce_scatter", f"{what}: gradients", payload_bytes=reduced * params, times=units)
        book.add("dp_replicate", "all_reduce", f"{what}: gradients", payload_bytes=reduced * params / dims.dp_shard,
                 times=units)
