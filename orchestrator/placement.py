"""place: a layout onto named nodes. Every rank gets its node, GPU and mesh coordinate; the rest are spares.

Called before each attempt, with the nodes of the allocation in topology order and those to avoid. Ranks are
numbered node-major, so the innermost axis (tp) stays inside a node. Knows nothing of models or time.
"""
from dataclasses import dataclass

from jobs.spec.job import RankSlot
from jobs.spec.load import Problem, SpecError
from jobs.spec.parallel import Layout
from orchestrator.cluster import ClusterSpec
from orchestrator.planner.communication import axis_group


class PlacementError(SpecError):
    """The layout cannot be put on these nodes: `problems` says why and what would help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """One rank."""

    rank: int
    node: str
    local_rank: int
    gpu: int | None  # device index on the node; None on CPU
    coordinate: dict[str, int]  # index along each mesh axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Who computes what where, for one attempt."""

    nodes: tuple[str, ...]  # that train, in rank order
    spares: tuple[str, ...]  # healthy nodes of the allocation that wait
    excluded: tuple[str, ...]
    ranks: tuple[RankPlace, ...]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def slots(self, node: str) -> tuple[RankSlot, ...]:
        """The ranks of one node, for its agent; empty for spares."""
        return tuple(RankSlot(rank=r.rank, local_rank=r.local_rank, gpu=r.gpu) for r in self.ranks if r.node == node)


def place(layout: Layout, *, cluster: ClusterSpec, nodes: tuple[str, ...], spares: int, excluded: tuple[str, ...],
          allow_tp_across_nodes: bool) -> Placement:
    """Ranks onto `nodes` (topology order), leaving out `excluded`. Raises PlacementError.

    `spares` nodes beyond those that train must be in the allocation; excluded nodes use them up first, so
    that an attempt after a node's loss starts with fewer spares and the same layout.
    """
    problems = _tp_problems(layout, cluster=cluster) if not allow_tp_across_nodes else []
    usable = tuple(node for node in nodes if node not in excluded)
    needed = -(-layout.dims.world_size // cluster.gpus_per_node)
    problems += _node_problems(layout, cluster=cluster, nodes=nodes, usable=usable, needed=needed, spares=spares)
    if problems:
        raise PlacementError(problems)
    return Placement(
        nodes=usable[:needed],
        spares=usable[needed:],
        excluded=tuple(node for node in nodes if node in excluded),
        ranks=tuple(_rank_place(rank, layout, cluster=cluster, nodes=usable)
                    for rank in range(layout.dims.world_size)),
    )


def place_command(*, cluster: ClusterSpec, nodes: tuple[str, ...], spares: int, excluded: tuple[str, ...]) -> Placement:
    """Ranks of a trainer that lays itself out: every GPU of every node but the spares; no coordinates."""
    usable = tuple(node for node in nodes if node not in excluded)
    training = len(usable) - max(0, spares - (len(nodes) - len(usable)))
    if training < 1:
        raise PlacementError([Problem(where="placement.spares", value=spares,
                                      message=f"leaves none of {len(usable)} usable nodes to train on")])
    per_node = cluster.gpus_per_node
    ranks = tuple(RankPlace(rank=index * per_node + local, node=node, local_rank=local,
                            gpu=None if cluster.device == "cpu" else local, coordinate={})
                  for index, node in enumerate(usable[:training]) for local in range(per_node))
    return Placement(nodes=usable[:training], spares=usable[training:],
                     excluded=tuple(node for node in nodes if node in excluded), ranks=ranks)


def _rank_place(rank: int, layout: Layout, *, cluster: ClusterSpec, nodes: tuple[str, ...]) -> RankPlace:
    node, local_rank = divmod(rank, cluster.gpus_per_node)
    return RankPlace(rank=rank, node=nodes[node], local_rank=local_rank,
                     gpu=None if cluster.device == "cpu" else local_rank, coordinate=layout.dims.coordinate(rank))


def _tp_problems(layout: Layout, *, cluster: ClusterSpec) -> list[Problem]:
    group = axis_group(layout.dims, "tp", gpus_per_node=cluster.gpus_per_node)
    if group.nodes == 1:
        return []
    ratio = cluster.link_gb_s / (cluster.inter_node_gb_s * group.per_node)
    slower = f"about {ratio:.1f}× as slow as inside" if ratio > 1 else "with the latency of the network"
    legal = [d for d in range(1, cluster.gpus_per_node + 1) if cluster.gpus_per_node % d == 0]
    return [Problem(where="layout.tp", value=layout.dims.tp,
                    message=f"puts one tp group on {group.nodes} nodes of {cluster.gpus_per_node} GPUs: "
                    f"{group.per_node} × {cluster.inter_node_gb_s:g} GB/s between nodes against {cluster.link_gb_s:g} "
                    f"GB/s inside, every collective of every layer {slower}; try {', '.join(map(str, legal))}, or "
                    f"placement.allow_tp_across_nodes=true")]


def _node_problems(layout: Layout, *, cluster: ClusterSpec, nodes: tuple[str, ...], usable: tuple[str, ...],
                   needed: int, spares: int) -> list[Problem]:
    world = f"{layout.dims.world_size} ranks on nodes of {cluster.gpus_per_node} need {needed} nodes"
    if len(set(nodes)) != len(nodes):
        return [Problem(where="nodes", value=list(nodes), message="names a node twice; every node may appear once")]
    if len(usable) < needed:
        lost = f" ({len(nodes)} allocated, {len(nodes) - len(usable)} excluded)" if len(usable) < len(nodes) else ""
        return [Problem(where="nodes", value=len(usable), message=f"usable nodes{lost} are too few: {world}; "
                        f"allocate {needed - len(usable)} more, or plan for what is left")]
    if len(nodes) < needed + spares:
        return [Problem(where="placement.spares", value=spares, message=f"spare nodes are not in an allocation of "
                        f"{len(nodes)}: {world}; try spares={len(nodes) - needed} or num_nodes={needed + spares}")]
    return []
