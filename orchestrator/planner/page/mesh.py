"""Which GPU is which mesh coordinate, and what each axis spans: the data behind the page's grid.

The grid itself is computed in the browser from strides, so a cluster of 2,048 nodes costs a few bytes.
"""
from typing import Any

from jobs.spec.parallel import Layout
from orchestrator.cluster import ClusterSpec
from orchestrator.planner.links import Group, extent, placed_group

# What one looks for first: stages, then groups inside the node, then shares of the batch
FIRST_SHOWN = ("pp", "tp", "cp", "dp_replicate", "dp_shard", "ep")
MEANS = {
    "dp_replicate": "replicas: each holds all states and computes other sequences",
    "dp_shard": "shards of parameters, gradients and optimizer, each computes other sequences",
    "cp": "parts of every sequence",
    "tp": "slices of every matmul",
    "pp": "pipeline stages: consecutive layers",
    "ep": "shares of the experts",
}


def mesh_data(layout: Layout, *, cluster: ClusterSpec, num_nodes: int) -> dict[str, Any]:
    """Strides, degrees and, per axis in use, its groups as the links see them."""
    dims = layout.dims
    axes = [_axis(layout, axis, cluster=cluster) for axis in (*dims.order, "ep") if getattr(dims, axis) > 1]
    used = [axis["axis"] for axis in axes]
    return {"num_nodes": num_nodes, "gpus_per_node": cluster.gpus_per_node, "world_size": dims.world_size,
            "axes": axes, "first": next((axis for axis in FIRST_SHOWN if axis in used), None)}


def _axis(layout: Layout, axis: str, *, cluster: ClusterSpec) -> dict[str, Any]:
    dims = layout.dims
    group = placed_group(dims, axis, cluster=cluster)
    return {"axis": axis, "degree": group.ranks, "stride": extent(dims, axis)[1], "means": MEANS[axis],
            "groups": dims.world_size // group.ranks, "where": _where(group, cluster)}


def _where(group: Group, cluster: ClusterSpec) -> str:
    if group.link == "intra_node":
        return f"inside one node: {cluster.link_gb_s:g} GB/s per GPU"
    if group.link == "nvlink_domain":
        return f"inside one NVLink domain: {cluster.link_gb_s:g} GB/s per GPU"
    island = "nodes" if cluster.domain_gpus == cluster.gpus_per_node else "NVLink domains"
    beside = f", {group.per_node} GPUs on each" if group.per_node > 1 else ""
    rate = f"network, {cluster.inter_node_gb_s:g} GB/s per GPU"
    rate += f", {group.narrowing:g}× oversubscribed" if group.narrowing > 1 else ""
    return f"over {group.nodes:,} {island}{beside}: {rate}"
