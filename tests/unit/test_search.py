"""The search against pricing everything: on small spaces the optimum is never lost, and every layout is counted
once."""
import dataclasses
import itertools

import pytest

from jobs.spec.model import MoeSpec
from orchestrator.request import ParallelRequest
from orchestrator.planner.bounds import Sharding
from orchestrator.planner.choices import node_counts
from orchestrator.planner.question import Question
from orchestrator.planner.search import Search
from orchestrator.planner.timeline import pipeline_s
from orchestrator.planner.space import every_layout
from tests.helpers.planning import LLAMA3_8B, SMALL, cpu, h100, step_s, training

TEN = dataclasses.replace(LLAMA3_8B, num_layers=10)
EXPERTS = dataclasses.replace(SMALL, num_layers=6, moe=MoeSpec(num_experts=4, top_k=2, ffn_dim=256, first_layer=1))
SIX_EXPERTS = dataclasses.replace(LLAMA3_8B, num_layers=6, moe=MoeSpec(num_experts=8, top_k=2, ffn_dim=14336,
                                                                       first_layer=1))

# name → model, cluster, global batch, sequence, fixed
SPACES = {
    "dense on cpu": (SMALL, cpu(1), 8, 128, {}),
    "uneven batch": (SMALL, cpu(1), 5, 128, {}),
    "pipelines": (SMALL, cpu(1), 6, 128, {"tp": 1, "cp": 1}),
    "tight memory": (SMALL, cpu(1, memory_gib=0.03), 8, 128, {}),
    "experts": (EXPERTS, cpu(1), 6, 64, {"cp": 1}),
    "three nodes": (SMALL, cpu(3, 2), 7, 128, {"recompute": "none", "layers_per_unit": 1}),
    "gpus": (TEN, h100(1), 4, 4096, {"layers_per_unit": 1, "reduce_every_microbatch": False}),
    "slow network": (TEN, h100(2, inter_node_gb_s=5.0), 12, 2048, {"tp": 2, "pp": [2, 4], "recompute": "full", "cp": 1,
                                                                           "layers_per_unit": 1, "zero_stage": [1, 2]}),
    "experts on gpus": (SIX_EXPERTS, h100(1), 8, 2048, {"pp": 2, "recompute": "none", "layers_per_unit": 1, "cp": 1}),
    "little memory": (TEN, h100(1, memory_gib=24.0), 4, 4096, {"layers_per_unit": 1, "recompute": "full"}),
}
# larger ones, priced whole: minutes
LARGE = {
    "two nodes": (TEN, h100(2), 8, 4096, {"layers_per_unit": 1}),
    "experts on two nodes": (SIX_EXPERTS, h100(2), 8, 2048, {"layers_per_unit": 1, "recompute": ["none", "full"]}),
    "all of cpu": (SMALL, cpu(2), 12, 128, {}),
}


def search_of(case) -> Search:
    model, cluster, batch, seq_len, fixed = case
    spec = training(global_batch_size=batch, seq_len=seq_len,
                    param_dtype="bfloat16" if cluster.device == "cuda" else "float32")
    question = Question(model=model, training=spec, cluster=cluster, request=ParallelRequest(**fixed),
                        num_nodes=cluster.num_nodes, allow_tp_across_nodes=False)
    return Search(question, headroom=0.1, convention="causal")


def assert_nothing_is_lost(case) -> None:
    search = search_of(case)
    layouts = list(every_layout(search.question))
    assert len(set(layouts)) == len(layouts) == search.space.count() > 0
    held = [search.heaviest_bytes(layout) for layout in layouts]
    best = min((step_s(search, layout) for layout, bytes in zip(layouts, held) if bytes <= search.limit_bytes),
               default=None)
    found = next(search.ranked(), None)
    assert (found is None) == (best is None)
    if best is not None:
        assert found.predicted.step_time_s == pytest.approx(best, rel=1e-9)
        assert found.layout in set(layouts)
    assert search.heaviest_bytes(search.smallest().layout) <= min(held) * 1.2


@pytest.mark.parametrize("name", SPACES)
def test_no_layout_is_faster_than_the_one_found(name):
    assert_nothing_is_lost(SPACES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_no_layout_of_a_larger_space_is_faster_than_the_one_found(name):
    assert_nothing_is_lost(LARGE[name])


@pytest.mark.parametrize("name", ["dense on cpu", "gpus", "experts on gpus"])
def test_no_bound_is_above_the_price(name):
    search = search_of(SPACES[name])
    space, bounds, checked = search.space, search.bounds, 0
    for shape in space.shapes():
        for one in space.passes(shape):
            for variant in space.variants(shape, one.recompute):
                for layout in itertools.islice(space.layouts(shape, variant, one), 0, None, 7):
                    stages = bounds.stages(shape, variant, one)
                    pipeline = pipeline_s(variant.schedule, stages=stages, virtual_stages=variant.virtual_stages,
                                          num_microbatches=variant.num_microbatches)
                    sharding = Sharding(layout.dims, layout.zero_stage, layout.reduce_every_microbatch,
                                        layout.layers_per_unit)
                    rest = bounds.data_parallel_s(sharding, variant, one)
                    ladder = [bounds.compute_s(shape, one), bounds.passed_s(shape, one),
                              bounds.rough_s(shape, variant, one), bounds.closed_s(shape, variant, one),
                              pipeline + rest, step_s(search, layout)]
                    assert ladder[-1] >= max(ladder[:-1]) * (1 - 1e-9), (layout, ladder)
                    held = max(search.footprint.least_bytes(shape, one),
                               search.footprint.held_bytes(shape, variant, one))
                    assert held <= search.heaviest_bytes(layout) * (1 + 1e-9), layout
                    checked += 1
    assert checked > 100


def test_what_comes_out_is_in_order_and_wanted():
    search = search_of(SPACES["dense on cpu"])
    seen: set[int] = set()
    times = []
    for one in search.ranked(wanted=lambda layout: layout.dims.tp not in seen):
        seen.add(one.layout.dims.tp)
        times.append(one.predicted.step_time_s)
    assert seen == {1, 2, 4} and times == sorted(times)


def test_a_large_space_is_opened_only_where_it_is_promising():
    search = search_of((LLAMA3_8B, h100(16), 512, 8192, {}))
    next(search.ranked())
    assert search.space.count() > 8e5 and search.effort.priced < 200


@pytest.mark.parametrize("nodes,counts", [(1, (1,)), (8, (8,)), (13, (13, 12, 8)), (100, (100, 96, 64))])
def test_nodes_used_are_all_or_what_pipelines_come_in(nodes, counts):
    assert node_counts(search_of((SMALL, cpu(nodes), 8, 128, {})).question) == counts


def test_fewer_nodes_are_used_where_that_is_faster():
    """Five nodes cannot share eight sequences: four do, and nobody waits for the fifth."""
    chosen = next(search_of((SMALL, cpu(5, 2), 8, 128, {"tp": 1, "cp": 1, "pp": 1})).ranked())
    assert chosen.layout.dims.world_size == 8
