"""The planner's transfers: volumes of the papers, links from the ranks' real places, α–β costs."""
import dataclasses
import itertools

import pytest

from jobs.spec.counts import layer_params, num_params
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import MESH_ORDER, ParallelDims
from jobs.spec.model import MoeSpec
from orchestrator.cluster import SwitchSpec
from orchestrator.planner.communication import gather_passes, moved_bytes, stage_transfers
from orchestrator.planner.constants import INTER_NODE_EFFICIENCY, INTRA_NODE_EFFICIENCY
from orchestrator.planner.links import Group, axis_group, collective_s, placed_group
from orchestrator.planner.software import OURS
from tests.helpers.planning import LLAMA3_8B, SMALL, h100, layout_of, training

SEVEN_B = ModelSpec(name="7b", vocab_size=32000, dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_dim=11008)

# recompute, sequence parallel → bytes per layer and microbatch on the wire of one rank, in units of b·s·h·(t−1)/t
# at 16 bits. Megatron's 16; recomputing adds its 8, less the FFN's last reduction, which torch does not repeat.
TP_WIRE = [("none", True, 16), ("none", False, 16), ("full", True, 22), ("selective", True, 16), ("full", False, 20)]

# op, ranks in a node, passes of the ring
RINGS = [("all_reduce", 8, 2), ("all_gather", 8, 1), ("reduce_scatter", 4, 1)]

# pp, m, zero_stage, stage → gathers of a unit in forwards, in backwards
GATHERS = [
    (1, 1, 3, 0, (1, 1)),
    (1, 4, 3, 0, (4, 4)),
    (1, 4, 2, 0, (0, 0)),
    (2, 4, 3, 0, (2, 3)),
    (2, 4, 3, 1, (1, 4)),
    (4, 4, 3, 0, (4, 1)),
]


def transfers(model, *, seq_len=2048, stage=0, cluster=None, software=OURS, **layout):
    spec = training(global_batch_size=64, seq_len=seq_len, param_dtype="bfloat16")
    return stage_transfers(model, layout_of(model, **layout), training=spec, cluster=cluster or h100(4), stage=stage,
                           software=software)


@pytest.mark.parametrize("recompute,sequence_parallel,units", TP_WIRE)
def test_tp_moves_megatrons_bytes(recompute, sequence_parallel, units):
    t, m, b = 8, 3, 4
    found = transfers(SEVEN_B, dims={"tp": t}, microbatch_size=b, num_microbatches=m, recompute=recompute,
                      sequence_parallel=sequence_parallel)
    wire = sum(one.wire_bytes for one in found if one.what == "attention and ffn")
    assert wire == pytest.approx(units * b * 2048 * 4096 * (t - 1) / t * 32 * m)


# 32 layers of 4096 with a vocabulary that makes 7.0 billion parameters
TEACHING = dataclasses.replace(SEVEN_B, vocab_size=64000)
# axis, degrees, phase → GB per step of a microbatch of 4 × 2048 in bf16, as taught
TAUGHT_GB = [
    ("dp_replicate", {"dp_replicate": 8}, None, 28.0),  # float32 gradients, once
    ("tp", {"tp": 8}, "forward", 4.30),  # payload_forward: two all-reduces a layer
    ("pp", {"pp": 2}, "forward", 0.067),  # over one boundary
]


@pytest.mark.parametrize("axis,dims,phase,gb", TAUGHT_GB)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_teaching_figures_of_a_7b_model(axis, dims, phase, gb, sequence_parallel):
    found = [one for one in transfers(TEACHING, dims=dims, microbatch_size=4, sequence_parallel=sequence_parallel)
             if axis != "tp" or one.what == "attention and ffn"]
    assert moved_bytes(found, axis=axis, phase=phase) / 1e9 == pytest.approx(gb, rel=5e-3)


def test_on_the_wire_tp_moves_forward_and_backward():
    """Beside the textbook's payload: a ring sends 2(t−1)/t of it, forward and again backward."""
    t = 8
    found = [one for one in transfers(TEACHING, dims={"tp": t}, microbatch_size=4) if one.what == "attention and ffn"]
    wire = {phase: sum(one.wire_bytes for one in found if one.phase == phase) for phase in ("forward", "backward")}
    ring = 2 * (t - 1) / t * moved_bytes(found, axis="tp", phase="forward")
    assert wire["forward"] == wire["backward"] == pytest.approx(ring)


def test_fsdp_gathers_twice_and_scatters_float32_gradients_once():
    found = transfers(SEVEN_B, dims={"dp_shard": 8}, microbatch_size=4)
    params = num_params(SEVEN_B)
    gathered = sum(one.payload_bytes * one.times for one in found if one.op == "all_gather")
    scattered = sum(one.payload_bytes * one.times for one in found if one.op == "reduce_scatter")
    # the last two units, norm with output and the layer before it, stay gathered through the backward
    kept = SEVEN_B.vocab_size * SEVEN_B.dim + SEVEN_B.dim + layer_params(SEVEN_B)
    assert gathered == pytest.approx(2 * (2 * params - kept))
    assert scattered == pytest.approx(4 * params)


def test_hsdp_reduces_the_shard_over_the_replicas():
    found = transfers(SEVEN_B, dims={"dp_shard": 8, "dp_replicate": 4}, microbatch_size=4)
    reduced = sum(one.payload_bytes * one.times for one in found if one.axis == "dp_replicate")
    assert reduced == pytest.approx(4 * num_params(SEVEN_B) / 8, rel=1e-6)


@pytest.mark.parametrize("pp,m,zero_stage,stage,expected", GATHERS)
def test_gathers_per_step(pp, m, zero_stage, stage, expected):
    layout = layout_of(SMALL, dims={"pp": pp, "dp_shard": 2}, num_microbatches=m, zero_stage=zero_stage)
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


@pytest.mark.parametrize("op,across", [("all_gather", 15 / 16), ("reduce_scatter", 15 / 16), ("all_reduce", 1.0)])
def test_groups_share_all_network_ports_of_their_nodes(op, across):
    """Eight ranks on each of two nodes leave through eight ports; one rank on each of two nodes through one."""
    cluster, payload = h100(2, inter_node_latency_us=0.0, intra_node_latency_us=0.0), 1e9
    one = collective_s(op, payload, Group(ranks=2, nodes=2, per_node=1), cluster=cluster)
    assert one == pytest.approx((2 if op == "all_reduce" else 1) * 0.5 * payload / (50e9 * INTER_NODE_EFFICIENCY))
    eight = collective_s(op, payload, Group(ranks=16, nodes=2, per_node=8), cluster=cluster)
    assert eight == pytest.approx(max(across, (2 if op == "all_reduce" else 1) * 15 / 16 * 400 / 450)
                                  * payload / (8 * 50e9 * INTER_NODE_EFFICIENCY))


# op, ranks on each of 8 nodes → hops inside the nodes and between them: of a ring over all ranks, or of a tree
STEPS = [("all_gather", 8, 56, 7), ("reduce_scatter", 2, 8, 7), ("all_gather", 1, 0, 6), ("reduce_scatter", 1, 0, 6),
         ("all_reduce", 1, 0, 12)]


@pytest.mark.parametrize("op,per_node,inside,between", STEPS)
def test_a_ring_over_nodes_takes_a_step_per_rank_where_nccl_has_no_tree(op, per_node, inside, between):
    cluster = h100(8)
    group = Group(ranks=8 * per_node, nodes=8, per_node=per_node)
    expected = inside * cluster.intra_node_latency_us + between * cluster.inter_node_latency_us
    assert collective_s(op, 0.0, group, cluster=cluster) == pytest.approx(expected * 1e-6)
    twice = collective_s(op, 0.0, group, cluster=cluster, messages=2)
    assert twice == pytest.approx(2 * expected * 1e-6)  # one after another


# (source, GPU, GB/s per port, op, nodes of 8) → MiB of payload: microseconds measured by nccl-tests, out of place
MEASURED = {
    ("maci0/gke-inference-from-scratch, part 1", "h200", 50.0, "all_gather", 2):
        {8: 86.6, 16: 116.1, 32: 179.1, 64: 272.5, 128: 490.1, 256: 873.4, 1024: 3136.1},
    ("dstackai/dstack, examples of GCP clusters: A3 Mega", "h100", 25.0, "all_gather", 2):
        {16: 204.6, 32: 284.0, 64: 447.4, 128: 808.3, 256: 1522.1, 1024: 5532.7},
    ("dstackai/dstack, examples of GCP clusters: A4", "b200", 50.0, "all_reduce", 2):
        {32: 258.5, 64: 369.4, 128: 638.5, 256: 940.3, 1024: 3229.9},
}


@pytest.mark.parametrize("source,gpu,port_gb_s,op,nodes", MEASURED)
def test_collectives_across_nodes_take_what_was_measured(source, gpu, port_gb_s, op, nodes):
    cluster = dataclasses.replace(h100(nodes, inter_node_gb_s=port_gb_s), gpu=gpu)
    group = Group(ranks=8 * nodes, nodes=nodes, per_node=8)
    for mib, microseconds in MEASURED[source, gpu, port_gb_s, op, nodes].items():
        predicted = 1e6 * collective_s(op, mib * 2**20, group, cluster=cluster)
        assert predicted == pytest.approx(microseconds, rel=0.3), mib


def test_parameters_sent_one_by_one_move_the_same_bytes_and_wait_longer():
    found = {}
    for by_tensor in (False, True):
        software = dataclasses.replace(OURS, collectives_by_tensor=by_tensor)
        found[by_tensor] = [t for t in transfers(LLAMA3_8B, seq_len=2048, dims={"dp_shard": 64}, cluster=h100(8),
                                                 software=software) if t.axis == "dp_shard"]
    assert sum(t.payload_bytes * t.times for t in found[False]) == sum(t.payload_bytes * t.times for t in found[True])
    assert sum(t.seconds for t in found[False]) < sum(t.seconds for t in found[True])


def test_scattered_messages_send_a_part_each_and_gather_the_whole():
    """Megatron-LM 2021, section 4.1: without sequence parallelism every tp rank has the whole hidden state."""
    whole, parts = ([t for t in transfers(SEVEN_B, seq_len=2048, dims={"tp": 4, "pp": 2}, stage=1, num_microbatches=3,
                                          sequence_parallel=False, software=software)
                     if t.axis == "pp" or t.what == "messages"]
                    for software in (OURS, dataclasses.replace(OURS, scatters_messages=True)))
    assert [t.op for t in whole] == ["send_recv"]
    sent, gathered = parts
    assert 4 * sent.payload_bytes == whole[0].payload_bytes == gathered.payload_bytes
    assert (gathered.axis, gathered.op, gathered.times) == ("tp", "all_gather", 3)


# cp_method → of one layer and microbatch: (op, phase, payload in 16-bit blocks of one rank's keys and values, times).
# Gradients are summed in float32: twice the bytes.
CP = {
    "ring": {("send_recv", "forward", 1, 3), ("send_recv", "backward", 1, 3), ("send_recv", "backward", 2, 4)},
    "allgather": {("all_gather", "forward", 4, 1), ("all_gather", "backward", 4, 1),
                  ("reduce_scatter", "backward", 8, 1)},
}


@pytest.mark.parametrize("method", CP)
def test_context_parallel_moves_keys_and_values_of_the_kv_heads_alone(method):
    cp, b, s = 4, 2, 4096
    found = transfers(LLAMA3_8B, seq_len=s, dims={"cp": cp}, microbatch_size=b, cp_method=method)
    block = 2 * b * (s // cp) * 2 * LLAMA3_8B.num_kv_heads * LLAMA3_8B.head_size
    counted = {(one.op, one.phase, one.payload_bytes / block, one.times / LLAMA3_8B.num_layers)
               for one in found if one.axis == "cp"}
    assert counted == CP[method]


def test_experts_receive_top_k_copies_forward_and_backward():
    """4·2·b·s·k·h per layer of experts and microbatch, dispatch and combine both ways; the wire carries (e−1)/e."""
    ep, m, b, s = 8, 3, 2, 2048
    model = dataclasses.replace(SEVEN_B, moe=MoeSpec(num_experts=16, top_k=2, ffn_dim=1024, first_layer=2))
    found = [one for one in transfers(model, seq_len=s, dims={"dp_shard": 8, "ep": ep}, microbatch_size=b,
                                      num_microbatches=m) if one.what == "tokens to experts and back"]
    whole = 4 * 2 * b * s * 2 * model.dim * (model.num_layers - 2) * m
    assert sum(one.payload_bytes * one.times for one in found) == whole
    assert sum(one.wire_bytes for one in found) == pytest.approx(whole * (ep - 1) / ep)


def test_experts_are_reduced_over_the_ranks_that_share_them():
    """ep of 8 in dp_shard of 32: each expert is on four ranks, so its gradients are reduced over four."""
    model = dataclasses.replace(SEVEN_B, moe=MoeSpec(num_experts=16, top_k=2, ffn_dim=1024))
    found = transfers(model, dims={"dp_shard": 32, "ep": 8}, microbatch_size=1)
    ranks = {one.what: one.ranks for one in found if one.op == "reduce_scatter"}
    assert ranks["experts: gradients"] == 4 and ranks["layers: gradients"] == 32


# zero_stage, m, reduce_every_microbatch → gathers, reductions over shards and over replicas of a unit per step
ZERO = [(1, 4, False, 1, 1, 1), (2, 4, False, 1, 1, 1), (2, 4, True, 1, 4, 1), (3, 4, False, 8, 1, 1),
        (3, 4, True, 8, 4, 4)]


@pytest.mark.parametrize("zero_stage,m,every,gathers,reductions,sums", ZERO)
def test_zero_stages_gather_and_reduce_as_often_as_they_must(zero_stage, m, every, gathers, reductions, sums):
    found = transfers(SEVEN_B, dims={"dp_shard": 8, "dp_replicate": 2}, num_microbatches=m, zero_stage=zero_stage,
                      reduce_every_microbatch=every)
    times = {op: sum(one.times for one in found if one.op == op and one.what.startswith("embedding"))
             for op in ("all_gather", "reduce_scatter", "all_reduce")}
    assert times == {"all_gather": gathers, "reduce_scatter": reductions, "all_reduce": sums}


def test_larger_units_send_the_same_bytes_in_fewer_messages():
    one, four = ([t for t in transfers(SEVEN_B, dims={"dp_shard": 8}, layers_per_unit=n)
                  if t.what == "layers: gradients"] for n in (1, 4))
    assert [t.times for t in one] == [32] and [t.times for t in four] == [8]
    assert one[0].payload_bytes * 32 == four[0].payload_bytes * 8


def test_both_ends_of_a_v_exchange_no_tied_gradient_and_no_message_at_its_turn():
    tied = dataclasses.replace(SMALL, tie_embeddings=True, num_layers=8)
    layout = dataclasses.replace(layout_of(tied, dims={"pp": 4}, num_microbatches=8), layers_per_stage=(1,) * 8,
                                 schedule="zbv", virtual_stages=2, zero_stage=2)
    spec = training(global_batch_size=8)
    sent = {stage: [one.what for one in stage_transfers(tied, layout, training=spec, cluster=h100(1), stage=stage)
                    if one.axis == "pp"] for stage in (0, 3, 4, 7)}
    assert sent == {0: ["hidden states"], 3: ["hidden states' gradients"], 4: ["hidden states"],
                    7: ["hidden states' gradients"]}


# gpus_per_node, domain, switches, degrees → link of tp, and of dp_shard, and how much the switches narrow it
PLACES = [
    (8, None, [], {"tp": 8, "dp_shard": 4}, "intra_node", "inter_node", 1.0),
    (8, None, [], {"tp": 16, "dp_shard": 2}, "inter_node", "inter_node", 1.0),
    (4, 72, [], {"tp": 8, "dp_shard": 4}, "nvlink_domain", "nvlink_domain", 1.0),
    (4, 72, [], {"tp": 8, "dp_shard": 16}, "nvlink_domain", "inter_node", 1.0),
    (8, None, [SwitchSpec(nodes=2, oversubscription=3.0)], {"tp": 8, "dp_shard": 2}, "intra_node", "inter_node", 1.0),
    (8, None, [SwitchSpec(nodes=2, oversubscription=3.0)], {"tp": 8, "dp_shard": 4}, "intra_node", "spine", 3.0),
    (8, None, [SwitchSpec(nodes=2, oversubscription=3.0), SwitchSpec(nodes=4, oversubscription=2.0)],
     {"tp": 8, "dp_shard": 8}, "intra_node", "spine", 6.0),
]


@pytest.mark.parametrize("per_node,domain,switches,degrees,tp,dp,narrowing", PLACES)
def test_groups_cross_the_links_that_lie_between_their_ranks(per_node, domain, switches, degrees, tp, dp, narrowing):
    cluster = h100(64, nvlink_domain=domain, switches=switches)
    cluster = dataclasses.replace(cluster, gpus_per_node=per_node)
    dims = ParallelDims(**degrees)
    assert placed_group(dims, "tp", cluster=cluster).link == tp
    found = placed_group(dims, "dp_shard", cluster=cluster)
    assert (found.link, found.narrowing) == (dp, narrowing)


def test_a_narrow_spine_slows_what_crosses_it():
    wide, narrow = (h100(8, switches=[SwitchSpec(nodes=2, oversubscription=o)], inter_node_latency_us=0.0,
                         intra_node_latency_us=0.0) for o in (1.0, 4.0))
    dims = ParallelDims(tp=8, dp_shard=8)
    seconds = [collective_s("all_gather", 1e9, placed_group(dims, "dp_shard", cluster=c), cluster=c)
               for c in (wide, narrow)]
    assert seconds[1] == pytest.approx(4 * seconds[0])


def test_an_all_to_all_leaves_through_each_ranks_own_port():
    cluster = h100(2, inter_node_latency_us=0.0, intra_node_latency_us=0.0)
    group = Group(ranks=16, nodes=2, per_node=8, link="inter_node")
    own_port = 0.5e9 / (50e9 * INTER_NODE_EFFICIENCY)
    assert collective_s("all_to_all", 1e9, group, cluster=cluster) == pytest.approx(own_port)


def test_small_messages_cost_what_was_measured():
    """An all-reduce of 1 MiB over 8 H200 takes 46 µs (39.9 GB/s bus bandwidth, 7/4 of the payload)."""
    group = Group(ranks=8, nodes=1, per_node=8)
    measured = 1.75 * 2**20 / 39.9e9
    assert collective_s("all_reduce", 2**20, group, cluster=h100(1)) == pytest.approx(measured, rel=0.25)
