"""The planner's transfers: volumes of the papers, links from the ranks' real places, α–β costs."""
import itertools

import pytest

from jobs.spec.counts import num_params
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import MESH_ORDER, ParallelDims
from orchestrator.planner.communication import (INTER_NODE_EFFICIENCY, INTRA_NODE_EFFICIENCY, Group, axis_group,
                                                collective_s, gather_passes, stage_transfers)
from tests.helpers.planning import SMALL, h100, layout_of, training

SEVEN_B = ModelSpec(name="7b", vocab_size=32000, dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_dim=11008)

# recompute, sequence parallel → bytes per layer and microbatch on the wire of one rank, in units of b·s·h·(t−1)/t
# at 16 bits. Megatron's 16; recomputing adds its 8, less the FFN's last reduction, which torch does not repeat.
TP_WIRE = [("none", True, 16), ("none", False, 16), ("full", True, 22), ("selective", True, 22), ("full", False, 20)]

# op, ranks in a node, passes of the ring
RINGS = [("all_reduce", 8, 2), ("all_gather", 8, 1), ("reduce_scatter", 4, 1)]

# pp, m, reshard_after_forward, stage → gathers of a unit in forwards, in backwards
GATHERS = [
    (1, 1, True, 0, (1, 1)),
    (1, 4, True, 0, (4, 4)),
    (1, 4, False, 0, (1, 0)),
    (2, 4, True, 0, (2, 3)),
    (2, 4, True, 1, (1, 4)),
    (4, 4, True, 0, (4, 1)),
]


def transfers(model, *, seq_len=2048, stage=0, cluster=None, **layout):
    spec = training(global_batch_size=64, seq_len=seq_len, param_dtype="bfloat16")
    return stage_transfers(model, layout_of(model, **layout), training=spec, cluster=cluster or h100(4), stage=stage)


@pytest.mark.parametrize("recompute,sequence_parallel,units", TP_WIRE)
def test_tp_moves_megatrons_bytes(recompute, sequence_parallel, units):
    t, m, b = 8, 3, 4
    found = transfers(SEVEN_B, dims={"tp": t}, microbatch_size=b, num_microbatches=m, recompute=recompute,
                      sequence_parallel=sequence_parallel)
    wire = sum(one.wire_bytes for one in found if one.what == "attention and ffn")
    assert wire == pytest.approx(units * b * 2048 * 4096 * (t - 1) / t * 32 * m)


def test_teaching_figures_of_a_7b_model():
    """32 layers, 4096, sequence 2048, microbatch 4, bf16: 4.30 GB of TP payload forward, 0.067 GB over a boundary."""
    tp = transfers(SEVEN_B, dims={"tp": 8}, microbatch_size=4, sequence_parallel=False)
    both = sum(one.payload_bytes * one.times for one in tp if one.what == "attention and ffn")
    assert both / 2 == pytest.approx(4.30e9, rel=2e-3)
    pp = transfers(SEVEN_B, dims={"pp": 2}, microbatch_size=4)
    assert [one.payload_bytes for one in pp if one.axis == "pp"] == [pytest.approx(0.067e9, rel=3e-3)]


def test_fsdp_gathers_twice_and_scatters_float32_gradients_once():
    found = transfers(SEVEN_B, dims={"dp_shard": 8}, microbatch_size=4)
    params = num_params(SEVEN_B)
    gathered = sum(one.payload_bytes * one.times for one in found if one.op == "all_gather")
    scattered = sum(one.payload_bytes * one.times for one in found if one.op == "reduce_scatter")
    root = SEVEN_B.vocab_size * SEVEN_B.dim + SEVEN_B.dim  # norm and output stay gathered through the backward
    assert gathered == pytest.approx(2 * (2 * params - root))
    assert scattered == pytest.approx(4 * params)


def test_hsdp_reduces_the_shard_over_the_replicas():
    found = transfers(SEVEN_B, dims={"dp_shard": 8, "dp_replicate": 4}, microbatch_size=4)
    reduced = sum(one.payload_bytes * one.times for one in found if one.axis == "dp_replicate")
    assert reduced == pytest.approx(4 * num_params(SEVEN_B) / 8, rel=1e-6)


@pytest.mark.parametrize("pp,m,reshard,stage,expected", GATHERS)
def test_gathers_per_step(pp, m, reshard, stage, expected):
    layout = layout_of(SMALL, dims={"pp": pp}, num_microbatches=m, zero_stage=3 if reshard else 2)
    assert gather_passes(layout, stage=stage) == expected


def test_a_degree_of_one_moves_nothing():
    assert transfers(SMALL, seq_len=128) == ()


def test_every_group_is_counted_where_its_ranks_are():
    """axis_group against the nodes that node-major ranks really fall on, for every shape of 16 ranks."""
    checked = 0
    for shape in itertools.product((1, 2, 4, 8, 16), repeat=4):
        dims = ParallelDims(**dict(zip(("dp_replicate", "pp", "dp_shard", "tp"), shape)))
        if dims.world_size != 16:
            continue
        for axis, per_node in itertools.product(MESH_ORDER, (1, 2, 4, 8, 16)):
            coordinates = [dims.coordinate(rank) for rank in range(16)]
            first = [rank for rank in range(16)
                     if all(coordinates[rank][other] == 0 for other in MESH_ORDER if other != axis)]
            nodes = [rank // per_node for rank in first]
            group = axis_group(dims, axis, gpus_per_node=per_node)
            assert (group.ranks, group.nodes, group.per_node) == \
                (len(first), len(set(nodes)), max(nodes.count(n) for n in nodes)), (dims, axis, per_node)
            checked += 1
    assert checked > 500


@pytest.mark.parametrize("op,ranks,passes", RINGS)
def test_ring_inside_a_node(op, ranks, passes):
    cluster, payload = h100(1), 1e9
    group = Group(ranks=ranks, nodes=1, per_node=ranks)
    ring = passes * ((ranks - 1) * 3.5e-6 + (ranks - 1) / ranks * payload / (450e9 * INTRA_NODE_EFFICIENCY))
    assert collective_s(op, payload, group, cluster=cluster) == pytest.approx(ring)


def test_groups_share_all_network_ports_of_their_nodes():
    """Eight ranks on each of two nodes leave through eight ports; one rank on each of two nodes through one."""
    cluster, payload = h100(2, inter_node_latency_us=0.0, intra_node_latency_us=0.0), 1e9
    one = collective_s("all_gather", payload, Group(ranks=2, nodes=2, per_node=1), cluster=cluster)
    assert one == pytest.approx(0.5 * payload / (50e9 * INTER_NODE_EFFICIENCY))
    eight = collective_s("all_gather", payload, Group(ranks=16, nodes=2, per_node=8), cluster=cluster)
    inside = 15 / 16 * payload / (450e9 * INTRA_NODE_EFFICIENCY)
    assert eight == pytest.approx(max(one / 8, inside))
