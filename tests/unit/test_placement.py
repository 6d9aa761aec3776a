"""place: ranks onto nodes."""
import json

import pytest

from jobs.spec.load import from_dict, to_dict
from orchestrator.placement import Placement, PlacementError, place, place_command
from tests.helpers.planning import SMALL, cpu, h100, layout_of

NODES = ("a", "b", "c", "d")

# nodes allocated, excluded, spares asked for → nodes that train, that wait
CHOICES = [
    (("a", "b"), (), 0, ("a", "b"), ()),
    (("a", "b", "c"), (), 1, ("a", "b"), ("c",)),
    (("a", "b", "c"), ("a",), 1, ("b", "c"), ()),  # the spare takes over
    (("c", "a", "b"), ("z",), 0, ("c", "a"), ("b",)),  # order is the topology's, not the alphabet's
]

# nodes, excluded, spares → what the message must say
REFUSED = [
    (("a",), (), 0, "need 2 nodes; allocate 1 more"),
    (("a", "b"), ("b",), 0, "(2 allocated, 1 excluded) are too few"),
    (("a", "b"), (), 1, "try spares=0 or num_nodes=3"),
    (("a", "b", "a"), (), 0, "names a node twice"),
]

DEMO = layout_of(SMALL, dims={"dp_shard": 2, "tp": 2, "pp": 2}, num_microbatches=2)


def put(layout=DEMO, *, nodes=("a", "b"), spares=0, excluded=(), cluster=None, allow_tp_across_nodes=False):
    return place(layout, cluster=cluster or cpu(2), nodes=nodes, spares=spares, excluded=excluded,
                 allow_tp_across_nodes=allow_tp_across_nodes)


@pytest.mark.parametrize("nodes,excluded,spares,training,waiting", CHOICES)
def test_nodes_train_in_topology_order_and_the_rest_wait(nodes, excluded, spares, training, waiting):
    placement = put(nodes=nodes, excluded=excluded, spares=spares)
    assert (placement.nodes, placement.spares) == (training, waiting)
    assert [placed.node for placed in placement.ranks] == [training[0]] * 4 + [training[1]] * 4


@pytest.mark.parametrize("nodes,excluded,spares,message", REFUSED)
def test_too_few_nodes_are_refused_with_the_remedy(nodes, excluded, spares, message):
    with pytest.raises(PlacementError) as refused:
        put(nodes=nodes, excluded=excluded, spares=spares)
    assert message in str(refused.value)


def test_every_rank_has_its_coordinate_and_tp_stays_inside_a_node():
    placement = put()
    assert [r.rank for r in placement.ranks] == list(range(8))
    assert all(DEMO.dims.rank(**r.coordinate) == r.rank for r in placement.ranks)
    groups = {}
    for r in placement.ranks:
        key = tuple(v for axis, v in r.coordinate.items() if axis != "tp")
        groups.setdefault(key, set()).add(r.node)
    assert len(groups) == 4 and all(len(nodes) == 1 for nodes in groups.values())


def test_stages_lie_on_different_nodes():
    placement = put()
    assert {(r.coordinate["pp"], r.node) for r in placement.ranks} == {(0, "a"), (1, "b")}


@pytest.mark.parametrize("cluster,gpus", [(cpu(2), [None] * 4), (h100(1), list(range(8)))], ids=["cpu", "cuda"])
def test_ranks_own_a_gpu_only_where_there_are_gpus(cluster, gpus):
    placement = put(nodes=NODES, cluster=cluster)
    assert [slot.gpu for slot in placement.slots("a")] == gpus
    assert [slot.local_rank for slot in placement.slots("a")] == list(range(len(gpus)))


def test_spares_have_no_ranks():
    assert put(nodes=NODES, spares=2).slots("d") == ()


def test_tp_across_nodes_is_refused_with_its_cost_unless_allowed():
    wide = layout_of(SMALL, dims={"tp": 16})
    with pytest.raises(PlacementError) as refused:
        put(wide, cluster=h100(2))
    assert "one tp group on 2 nodes of 8 GPUs" in str(refused.value)
    assert "8 × 50 GB/s between nodes against 450 GB/s inside" in str(refused.value)
    assert "try 1, 2, 4, 8, or placement.allow_tp_across_nodes=true" in str(refused.value)
    assert put(wide, cluster=h100(2), allow_tp_across_nodes=True).nodes == ("a", "b")


def test_survives_json():
    placement = put(nodes=NODES, spares=1, excluded=("b",))
    assert from_dict(Placement, json.loads(json.dumps(to_dict(placement)))) == placement


def test_a_command_gets_every_gpu_of_every_node_but_the_spares():
    placement = place_command(cluster=cpu(3), nodes=("a", "b", "c"), spares=1, excluded=())
    assert (placement.nodes, placement.spares, placement.world_size) == (("a", "b"), ("c",), 8)
    after_loss = place_command(cluster=cpu(3), nodes=("a", "b", "c"), spares=1, excluded=("a",))
    assert (after_loss.nodes, after_loss.spares) == (("b", "c"), ())
    with pytest.raises(PlacementError, match="leaves none"):
        place_command(cluster=cpu(1), nodes=("a",), spares=1, excluded=())
