"""The search against pricing everything, on spaces drawn at random: the winner, the next best and the best of every
group are never lost, whatever the model, the links, the batch and the stages."""
import os

import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, assume, given, settings, strategies as st  # noqa: E402

from jobs.spec.model import ModelSpec, MoeSpec  # noqa: E402
from orchestrator.cluster import SwitchSpec  # noqa: E402
from orchestrator.request import ParallelRequest  # noqa: E402
from orchestrator.planner.axes import axis_groups  # noqa: E402
from orchestrator.planner.page.families import groups as family_groups  # noqa: E402
from orchestrator.planner.question import Question  # noqa: E402
from orchestrator.planner.search import Search  # noqa: E402
from orchestrator.planner.space import every_layout  # noqa: E402
from tests.helpers.planning import cpu, h100, step_s, training  # noqa: E402

EXAMPLES = int(os.environ.get("ORC_EXAMPLES", "60"))
MOST = 4000  # layouts: some seconds to price
SETTINGS = settings(max_examples=max(1, EXAMPLES // 4), deadline=None, derandomize=True,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much,
                                           HealthCheck.data_too_large])
BEST = 6
# what keeps a space small enough to be priced whole: each leaves other dimensions of it open
NARROWED = [
    {"layers_per_unit": 1, "recompute": "none", "cp_method": "ring"},
    {"pp": [1, 2], "recompute": ["none", "full"], "layers_per_unit": 2, "reduce_every_microbatch": False},
    {"pp": [2, 4], "schedule": ["zbv", "interleaved_zero_bubble", "dualpipev"], "recompute": "selective", "cp": 1},
    {"pp": 4, "zero_stage": [1, 3], "cp": 1, "layers_per_unit": 1, "recompute": "none"},
    {"schedule": ["1f1b", "interleaved_1f1b"], "microbatch_size": 1, "layers_per_unit": [1, 4], "zero_stage": 3},
]


@st.composite
def questions(draw):
    heads = draw(st.sampled_from([4, 8, 12]))
    moe = draw(st.none() | st.builds(MoeSpec, num_experts=st.sampled_from([4, 8]), top_k=st.integers(1, 2),
                                     ffn_dim=st.sampled_from([256, 1024]), first_layer=st.integers(0, 2),
                                     num_shared_experts=st.integers(0, 1)))
    model = ModelSpec(name="m", vocab_size=draw(st.sampled_from([256, 32768])), dim=64 * heads,
                      num_layers=draw(st.integers(2, 9)), num_heads=heads,
                      num_kv_heads=draw(st.sampled_from([4, heads])), ffn_dim=draw(st.sampled_from([1024, 4096])),
                      moe=moe, sliding_window=draw(st.none() | st.just(64)), global_every=2)
    nodes = draw(st.integers(1, 3))
    links = {"inter_node_gb_s": draw(st.sampled_from([1.0, 50.0])),
             "switches": draw(st.just([]) | st.just([SwitchSpec(nodes=1, oversubscription=8.0)]))}
    if draw(st.booleans()):
        cluster = cpu(nodes, draw(st.sampled_from([2, 4])), memory_gib=draw(st.none() | st.just(0.05)), **links)
    else:
        cluster = h100(nodes, memory_gib=draw(st.none() | st.sampled_from([0.8, 2.0])), **links)
    spec = training(global_batch_size=draw(st.integers(4, 24)), seq_len=draw(st.sampled_from([64, 512])),
                    param_dtype="float32" if cluster.device == "cpu" else "bfloat16")
    request = ParallelRequest(**draw(st.sampled_from(NARROWED)), uneven_batch=draw(st.booleans()))
    return Question(model=model, training=spec, cluster=cluster, request=request, num_nodes=nodes,
                    allow_tp_across_nodes=False)


def degrees(layout):
    return layout.flat()["dp_replicate"], layout.dims.dp_shard, layout.dims.cp, layout.dims.tp, layout.dims.pp, \
        layout.dims.ep


@SETTINGS
@given(questions())
def test_nothing_is_lost_of_any_space(question):
    search = Search(question, headroom=0.1, convention="causal")
    assume(0 < search.space.count() <= MOST)
    layouts = list(every_layout(question))
    assert len(set(layouts)) == len(layouts) == search.space.count()
    priced = sorted((step_s(search, one), i) for i, one in enumerate(layouts)
                    if search.heaviest_bytes(one) <= search.limit_bytes)
    groups = (*axis_groups(question), *family_groups())
    best, firsts = search.best(BEST, key=degrees, groups=groups)

    of_degrees: dict[tuple, float] = {}
    for seconds, i in priced:
        of_degrees.setdefault(degrees(layouts[i]), seconds)
    assert [one.predicted.step_time_s for one in best] == pytest.approx(list(of_degrees.values())[:BEST], rel=1e-9)
    assert all(one.fits for one in best)
    for group in groups:
        expected = next((seconds for seconds, i in priced if group.holds(layouts[i])), None)
        found = firsts.get(group.name)
        assert (found is None) == (expected is None), group.name
        if found is not None:
            assert found.predicted.step_time_s == pytest.approx(expected, rel=1e-9) and group.holds(found.layout)


@SETTINGS
@given(questions())
def test_what_one_search_learned_changes_no_other_answer(question):
    """Ways are bounds for any durations: a search that inherits them finds the same."""
    first = Search(question, headroom=0.1, convention="causal")
    assume(0 < first.space.count() <= MOST)
    alone = next(first.ranked(), None)
    inherited = next(first.again(question).ranked(), None)
    assert (alone and alone.layout) == (inherited and inherited.layout)
