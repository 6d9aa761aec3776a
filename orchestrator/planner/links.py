"""Which link a group of ranks crosses, and how long a collective takes there.

Called by the list of transfers, and by placement for its own check of tensor parallelism. Ranks are numbered
node-major; time is α–β: a latency per hop, and bytes over the bandwidth of the slowest link on the way.
"""
import functools
import math
from dataclasses import dataclass

from jobs.spec.parallel import ParallelDims
from orchestrator.cluster import ClusterSpec, SwitchSpec
from orchestrator.planner import constants
from orchestrator.planner.plan import Link, Op

# How often the data of a ring passes: an all-reduce is a reduce-scatter and an all-gather.
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks that one axis connects, as the links see them."""

    ranks: int
    nodes: int  # islands of the fast link that the group touches
    per_node: int  # ranks of the group on each of them
    link: Link = "intra_node"
    narrowing: float = 1.0  # oversubscription of the switches that the group crosses


def axis_group(dims: ParallelDims, axis: str, *, gpus_per_node: int) -> Group:
    """Group of `axis` on nodes of `gpus_per_node`: neighbours are as far apart as the inner axes are large.
    `fsdp` is dp_shard with cp; `ep` the innermost ranks of dp_shard × cp × tp, `edp` those with the same experts."""
    degree, stride = extent(dims, axis)
    span = stride * degree
    if span <= gpus_per_node and gpus_per_node % span == 0:
        return Group(ranks=degree, nodes=1, per_node=degree)
    per_node = max(1, math.gcd(gpus_per_node, span) // stride)
    return Group(ranks=degree, nodes=-(-degree // per_node), per_node=per_node, link="inter_node")


def placed_group(dims: ParallelDims, axis: str, *, cluster: ClusterSpec) -> Group:
    """axis_group on this cluster: an island is an NVLink domain, which may span nodes, and switches may narrow."""
    return _placed(dims, axis, gpus_per_node=cluster.gpus_per_node, domain_gpus=cluster.domain_gpus,
                   switches=tuple(cluster.switches))


@functools.lru_cache(maxsize=65536)  # asked for every stage of many layouts
def _placed(dims: ParallelDims, axis: str, *, gpus_per_node: int, domain_gpus: int,
            switches: tuple[SwitchSpec, ...]) -> Group:
    degree, stride = extent(dims, axis)
    island = _island(stride * degree, per_node=gpus_per_node, domain=domain_gpus)
    group = axis_group(dims, axis, gpus_per_node=island)
    nodes = -(-stride * degree // gpus_per_node)
    if group.nodes == 1:
        link = "intra_node" if nodes <= 1 else "nvlink_domain"
        return Group(ranks=degree, nodes=1, per_node=group.per_node, link=link)
    narrowing = math.prod(switch.oversubscription for switch in switches if nodes > switch.nodes)
    link = "spine" if any(nodes > switch.nodes for switch in switches) else "inter_node"
    return Group(ranks=degree, nodes=group.nodes, per_node=group.per_node, link=link, narrowing=narrowing)


def _island(span: int, *, per_node: int, domain: int) -> int:
    """GPUs of an NVLink domain that a job can use where its groups span `span` ranks: of a rack of 72 a group of 64
    takes 64 and leaves the other nodes alone."""
    if domain == per_node:
        return domain
    whole = range(domain - domain % per_node, 0, -per_node)
    return next((size for size in whole if size % span == 0 or span % size == 0), per_node)


def extent(dims: ParallelDims, axis: str) -> tuple[int, int]:
    """(ranks, distance of neighbours) of an axis, or of a derived group."""
    def stride(name: str) -> int:
        return math.prod(getattr(dims, inner) for inner in dims.order[dims.order.index(name) + 1:])

    if axis == "fsdp":
        return dims.fsdp, min(stride("dp_shard") if dims.dp_shard > 1 else stride("cp"),
                              stride("cp") if dims.cp > 1 else stride("dp_shard"))
    if axis in ("ep", "edp"):
        inner = min(stride(name) for name in ("dp_shard", "cp", "tp"))
        if axis == "ep":
            return dims.ep, inner
        return expert_shards(dims), inner * dims.ep
    return getattr(dims, axis), stride(axis)


def expert_shards(dims: ParallelDims) -> int:
    """Ranks that hold the same experts: what ep leaves of dp_shard × cp × tp. Experts are never split over tp."""
    return max(1, dims.dp_shard * dims.cp * dims.tp // dims.ep)


def collective_s(op: Op, payload_bytes: float, group: Group, *, cluster: ClusterSpec,
                 ports: float | None = None, messages: int = 1) -> float:
    """Seconds of one collective, sent as `messages` one after another. Within an island a ring. Across islands NCCL's
    rings pass through every rank and through all of the group's network ports at once, so each port carries its share
    of what a rank receives: as measured on 2 × 8 GPUs (MEASURED in tests/unit/test_communication.py), a gather of 16
    ranks is as slow as the network, not as half of it. Trees take hops that grow with log₂ of the islands: for
    all-reduce (between two islands each half of the data crosses once), and for the others where a group has one rank
    on each island. An all-to-all leaves through each rank's own port. A group keeps at most `ports` ports of an island
    busy, however many ranks it has there."""
    if group.ranks == 1:
        return 0.0
    island_s, network_s = cluster.intra_node_latency_us * 1e-6, cluster.inter_node_latency_us * 1e-6
    hops_s = (group.per_node - 1) * island_s
    share = (group.ranks - 1) / group.ranks
    bytes_s = 0.0
    if group.per_node > 1:
        local = share if op != "all_to_all" else (group.per_node - 1) / group.ranks
        bytes_s = local * payload_bytes / (cluster.link_gb_s * 1e9 * constants.INTRA_NODE_EFFICIENCY)
    if group.nodes > 1:
        ring = op in ("all_gather", "reduce_scatter") and group.per_node > 1
        hops_s = (group.ranks - group.nodes) * island_s if ring else hops_s
        hops_s += (group.nodes - 1 if ring else min(group.nodes - 1, 2 * math.ceil(math.log2(group.nodes)))) * network_s
        leaves = op == "all_to_all" or (op == "all_reduce" and group.nodes == 2)
        used = 1 if op == "all_to_all" else min(group.per_node, ports or group.per_node)
        across = (group.nodes - 1) / group.nodes if leaves else share
        bytes_s = max(bytes_s, across * payload_bytes / (_network_bytes_s(group, cluster=cluster) * used))
    return PASSES[op] * (messages * hops_s + bytes_s)


def send_recv_s(payload_bytes: float, group: Group, *, cluster: ClusterSpec) -> float:
    """Seconds of one message between neighbours of a ring or of a pipeline."""
    if group.nodes > 1:
        return cluster.inter_node_latency_us * 1e-6 + payload_bytes / _network_bytes_s(group, cluster=cluster)
    rate = cluster.link_gb_s * 1e9 * constants.SEND_EFFICIENCY
    return cluster.intra_node_latency_us * 1e-6 + payload_bytes / rate


def _network_bytes_s(group: Group, *, cluster: ClusterSpec) -> float:
    """Of one port."""
    return cluster.inter_node_gb_s * 1e9 * constants.INTER_NODE_EFFICIENCY / group.narrowing
