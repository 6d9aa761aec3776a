"""plan: the fastest legal layout that fits, honest reasons, refusals with their remedy."""
import dataclasses
import io
import itertools
import json
from pathlib import Path

import pytest
from rich.console import Console

from jobs.spec import support
from jobs.spec.load import SpecError, to_dict
from jobs.spec.model import ModelSpec, MoeSpec
from jobs.spec.parallel import MESH_ORDER, Layout, ParallelDims
from orchestrator.load import load
from orchestrator.planner import PlanError, layout_from_flat, plan_from_dict, plan_json
from orchestrator.planner.cost import price
from orchestrator.planner.show import show_plan
from orchestrator.planner.uneven import stage_splits
from tests.helpers.planning import (GOLDEN, GOLDEN_PLANS, LLAMA3_8B, LLAMA3_70B, LLAMA3_405B, SMALL, cpu, flatten,
                                    golden_plan, h100, layout_of, plan_for, training)

RUNS = Path(__file__).parents[2] / "configs" / "runs"
SIX_HEADS = dataclasses.replace(SMALL, dim=192, num_heads=6, num_kv_heads=6)
EXPERTS = dataclasses.replace(SMALL, name="experts", moe=MoeSpec(num_experts=8, top_k=2, ffn_dim=256))
ODD = ModelSpec(name="odd", vocab_size=250, dim=96, num_layers=3, num_heads=6, num_kv_heads=3, ffn_dim=250)

# What leaves degrees and microbatch alone: small enough to write down a second time.
PLAIN = {"cp": 1, "ep": 1, "schedule": "1f1b", "zero_stage": 3, "layers_per_unit": 1, "reduce_every_microbatch": False,
         "uneven_batch": False, "mesh_order": list(MESH_ORDER), "recompute": "none", "cp_method": "ring"}

# small spaces searched exhaustively: model, cluster, global batch, fixed
SPACES = [
    (SMALL, cpu(2), 16, {}),
    (SMALL, cpu(2), 16, {"tp": 2, "pp": 2}),
    (SMALL, cpu(3), 24, {}),
    (SMALL, cpu(2), 12, {"recompute": "full"}),
    (ODD, cpu(3, 2), 12, {"sequence_parallel": False}),
    (SMALL, cpu(2, memory_gib=0.06), 16, {}),  # only some layouts fit
    (LLAMA3_8B, h100(1), 16, {"recompute": "selective"}),
]

# What is impossible: model, cluster, global batch, fixed → what the message must say
IMPOSSIBLE = {
    "heads": (SIX_HEADS, cpu(2), 16, {"tp": 4},
              ["parallel.tp: 4 does not divide model.num_heads=6", "try 1, 2"]),
    "kv heads": (SMALL, cpu(1, 8), 16, {"tp": 8},
                 ["parallel.tp: 8 does not divide model.num_kv_heads=4", "try 1, 2, 4"]),
    "head groups": (dataclasses.replace(SMALL, num_kv_heads=3), cpu(1), 16, {},
                    ["model.num_kv_heads: 3 does not divide model.num_heads=8", "try 1, 2, 4, 8"]),
    "head size": (dataclasses.replace(SMALL, dim=250), cpu(1), 16, {},
                  ["model.num_heads: 8 does not divide model.dim=250"]),
    "odd head size": (dataclasses.replace(SMALL, head_dim=31), cpu(1), 16, {}, ["model.head_dim: 31 is odd"]),
    "vocabulary": (ODD, cpu(1, 3), 16, {"tp": 3}, ["does not divide model.vocab_size=250", "model.ffn_dim=250"]),
    "layers": (SMALL, cpu(2), 16, {"pp": 8}, ["parallel.pp: 8 is above model.num_layers=4", "at most 4"]),
    "batch below dp": (SMALL, cpu(2), 4, {"tp": 1, "pp": 1, "cp": 1},
                       ["training.global_batch_size: 4 is below dp × microbatch_size = 8 × 1 = 8", "try 8, or dp=4"]),
    "batch not a multiple": (SMALL, cpu(2), 12, {"dp_shard": 8, "dp_replicate": 1, "uneven_batch": False},
                             ["12 is not a multiple of dp × microbatch_size = 8 × 1 = 8", "try 8 or 16, or dp=6"]),
    "microbatch": (SMALL, cpu(2), 16, {"dp_shard": 2, "dp_replicate": 1, "microbatch_size": 3, "uneven_batch": False},
                   ["16 is not a multiple of dp × microbatch_size = 2 × 3 = 6", "try 12 or 18"]),
    "few microbatches": (SMALL, cpu(2), 4, {"pp": 4, "tp": 1, "cp": 1, "microbatch_size": 2, "schedule": "1f1b"},
                         ["parallel.pp: 4 needs at least 4 microbatches for 1f1b", "leaves 1; try pp=1"]),
    "world": (SMALL, cpu(2), 16, {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "pp": 4},
              ["dp_replicate=1 × dp_shard=2 × cp=1 × tp=2 × pp=4 = 16 ranks", "2 nodes × 4 GPUs = 8 ranks"]),
    "world, not all fixed": (SMALL, cpu(2), 15, {"dp_shard": 3},
                             ["parallel: dp_shard=3 does not divide", "try dp_shard=1, 2, 4, 8"]),
    "idle nodes": (SMALL, cpu(2), 16, {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "pp": 1},
                   ["= 4 ranks, but the cluster has 2 nodes × 4 GPUs = 8 ranks", "parallel.num_nodes=1"]),
    "more nodes than there are": (SMALL, cpu(2), 16, {"num_nodes": 3}, ["parallel.num_nodes: 3 is more than the 2"]),
    "cp": (SMALL, cpu(2), 16, {"cp": 4, "seq_len": 100},
           ["parallel.cp: 4 needs training.seq_len=100 to be a multiple of 2·cp = 8", "seq_len=104"]),
    "ep": (SMALL, cpu(2), 16, {"ep": 2}, ["parallel.ep: 2 needs a mixture of experts, and small has none"]),
    "no choice left": (SMALL, cpu(2), 16, {"tp": []}, ["parallel.tp: [] leaves no choice"]),
    "of the wrong kind": (SMALL, cpu(2), 16, {"tp": "two", "recompute": "some", "zero_stage": 4},
                          ["parallel.tp: 'two' is not a whole number", "parallel.recompute: 'some' is not one of none",
                           "parallel.zero_stage: 4 is not one of 1, 2, 3"]),
    "zero": (SMALL, cpu(2), 16, {"tp": 0}, ["parallel.tp: 0 must be at least 1"]),
    "microbatch of zero": (SMALL, cpu(2), 16, {"microbatch_size": 0},
                           ["parallel.microbatch_size: 0 must be at least 1"]),
    "several at once": (SIX_HEADS, cpu(2), 16, {"tp": 4, "pp": 20, "ep": 2},
                        ["parallel.tp: 4", "parallel.pp: 20", "parallel.ep: 2", "does not divide 2 nodes × 4 GPUs"]),
    "sequence": (SMALL, cpu(1), 16, {"tp": 4, "seq_len": 126, "sequence_parallel": True},
                 ["does not divide training.seq_len=126 under sequence parallelism"]),
    "sequence parallelism of experts": (
        EXPERTS, cpu(2), 16, {"tp": 2, "sequence_parallel": False},
        ["parallel.tp: 2 needs sequence_parallel=true with a mixture of experts", "try 1"]),
    "sequence parallelism of experts over a sequence": (
        EXPERTS, cpu(1), 16, {"tp": 4, "seq_len": 126}, ["does not divide training.seq_len=126 under sequence"]),
}

# model, nodes, global batch, seconds of one busy core that the search may take (tests/benchmarks/planner.py measures)
SEARCHES = [(LLAMA3_8B, 16, 256), (LLAMA3_405B, 2048, 2048)]
PRICED_OF = 2000  # legal layouts per one that may be opened; how long that takes is tests.benchmarks.planner's


def legal(model, cluster, batch, fixed, *, seq_len=128):
    """Every legal layout, found by trying everything: the rules written down a second time."""
    world = cluster.num_nodes * cluster.gpus_per_node
    sequence_parallel = fixed.get("sequence_parallel", True)
    for dp_replicate, dp_shard, tp, pp in itertools.product(range(1, world + 1), repeat=4):
        if dp_replicate * dp_shard * tp * pp != world or cluster.gpus_per_node % tp or pp > model.num_layers:
            continue
        sizes = [model.num_heads, model.num_kv_heads, model.vocab_size, model.ffn_dim]
        if any(size % tp for size in sizes) or (sequence_parallel and seq_len % tp):
            continue
        if any(fixed.get(axis, value) != value for axis, value in (("tp", tp), ("pp", pp))):
            continue
        recompute = fixed.get("recompute", "none")
        splits = stage_splits(model, num_stages=pp, seq_len=seq_len, recompute=recompute)
        for size, split in itertools.product(range(1, batch + 1), splits):
            rows = dp_replicate * dp_shard * size
            if batch % rows == 0 and batch // rows >= pp:
                yield Layout(dims=ParallelDims(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, pp=pp),
                             microbatch_size=size, num_microbatches=batch // rows, layers_per_stage=split,
                             sequence_parallel=sequence_parallel, recompute=recompute)


@pytest.mark.parametrize("model,cluster,batch,fixed", SPACES, ids=range(len(SPACES)))
def test_the_winner_is_the_fastest_of_all_that_fit(model, cluster, batch, fixed):
    spec = training(global_batch_size=batch, param_dtype="bfloat16" if cluster.device == "cuda" else "float32")
    chosen = plan_for(model, cluster, spec, **PLAIN | {"num_nodes": cluster.num_nodes} | fixed)
    priced = [price(model, layout, training=spec, cluster=cluster, headroom=0.1, convention="causal")
              for layout in legal(model, cluster, batch, fixed)]
    best = min((one for one in priced if one.fits), key=lambda one: one.predicted.step_time_s)
    assert chosen.predicted.step_time_s == best.predicted.step_time_s
    assert chosen.layout in [one.layout for one in priced]
    assert chosen.candidates == len(priced)


def test_some_layouts_do_not_fit_and_are_named():
    chosen = plan_for(SMALL, cpu(2, memory_gib=0.06), training(global_batch_size=16))
    too_big = [loser for loser in chosen.rejected if not loser.fits]
    assert chosen.predicted.memory_gib <= 0.06 * 0.9 and too_big
    assert all(loser.memory_gib > 0.06 * 0.9 and "too big by" in loser.reason for loser in too_big)


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_the_impossible_is_refused_with_value_and_remedy(case):
    model, cluster, batch, fixed, messages = IMPOSSIBLE[case]
    fixed = dict(fixed)
    spec = training(global_batch_size=batch, seq_len=fixed.pop("seq_len", 128))
    with pytest.raises(PlanError) as refused:
        plan_for(model, cluster, spec, **fixed)
    for message in messages:
        assert message in str(refused.value)


def test_tp_across_nodes_is_refused_with_what_it_would_cost():
    cluster, spec = cpu(2, inter_node_gb_s=0.1, inter_node_latency_us=5000.0), training(global_batch_size=16)
    wide = dataclasses.replace(SMALL, num_kv_heads=8)
    with pytest.raises(PlanError) as refused:
        plan_for(wide, cluster, spec, tp=8)
    assert "parallel.tp: 8 crosses nodes of cluster.gpus_per_node=4" in str(refused.value)
    crossing = plan_for(wide, cluster, spec, tp=8, allow_tp_across_nodes=True)
    inside = plan_for(wide, cluster, spec)
    slower = crossing.predicted.step_time_s / inside.predicted.step_time_s - 1
    assert slower > 0.1 and f"{slower:+.0%} against" in str(refused.value)


def test_what_does_not_fit_says_what_would():
    with pytest.raises(PlanError) as refused:
        plan_for(LLAMA3_70B, h100(1), training(global_batch_size=16, seq_len=8192, param_dtype="bfloat16"))
    message = str(refused.value)
    assert "legal layouts fits the 72.0 GiB of h100" in message and "the smallest, " in message
    assert "cluster.num_nodes=" in message and "a GPU of at least" in message


@pytest.mark.parametrize("pp,m", [(2, 4), (4, 4), (4, 12)])
def test_bubble_of_even_stages_is_the_1f1b_formula(pp, m):
    """(p−1)/(m+p−1), where the ends weigh nothing and messages take no time."""
    model = ModelSpec(name="even", vocab_size=8, dim=4096, num_layers=8, num_heads=32, num_kv_heads=32, ffn_dim=16384)
    cluster = cpu(1, pp, intra_node_latency_us=0.0, intra_node_gb_s=1e9)
    layout = layout_of(model, dims={"pp": pp}, num_microbatches=m)
    spec = training(global_batch_size=m, seq_len=512)
    predicted = price(model, layout, training=spec, cluster=cluster, headroom=0.0, convention="full").predicted
    assert predicted.bubble_fraction == pytest.approx((pp - 1) / (m + pp - 1), rel=1e-3)


@pytest.mark.parametrize("recompute,ratio", [("none", 1.0), ("selective", 1.0), ("full", 4 / 3)])
def test_hfu_exceeds_mfu_by_the_recomputed_forward(recompute, ratio):
    model = dataclasses.replace(LLAMA3_8B, vocab_size=8)  # the output projection is not recomputed
    layout = layout_of(model, dims={"dp_shard": 8}, recompute=recompute)
    spec = training(global_batch_size=8, seq_len=8192, param_dtype="bfloat16")
    predicted = price(model, layout, training=spec, cluster=h100(1), headroom=0.0, convention="full").predicted
    assert predicted.hfu / predicted.mfu == pytest.approx(ratio, rel=1e-3)


def test_a_step_is_the_sum_of_its_parts():
    predicted = plan_for(SMALL, cpu(2), training(global_batch_size=16), tp=2, pp=2, dp_shard=2).predicted
    parts = (predicted.compute_s + predicted.exposed_communication_s + predicted.bubble_s + predicted.optimizer_s)
    assert parts == pytest.approx(predicted.step_time_s)
    assert predicted.tokens_per_s * predicted.step_time_s == pytest.approx(16 * 128)
    assert predicted.tokens_per_s == pytest.approx(8 * predicted.tokens_per_s_per_gpu)


def test_exposed_communication_is_never_more_than_all_of_it():
    spec = training(global_batch_size=512, seq_len=8192, param_dtype="bfloat16")
    for fixed in ({}, {"pp": 8}, {"dp_replicate": 8}):
        for transfer in plan_for(LLAMA3_8B, h100(16), spec, recompute="full", **fixed).communication:
            assert 0 <= transfer.exposed_s <= transfer.seconds * (1 + 1e-12)


def test_fixed_degrees_are_kept_and_their_price_is_named():
    spec = training(global_batch_size=16)
    chosen, free = plan_for(SMALL, cpu(2), spec, tp=2, pp=2, dp_shard=2), plan_for(SMALL, cpu(2), spec)
    dims = chosen.layout.dims
    assert (dims.tp, dims.pp, dims.dp_shard, dims.dp_replicate) == (2, 2, 2, 1)
    ruled_out = [loser for loser in chosen.rejected if "faster, but the request fixes" in loser.reason]
    assert free.layout.dims in [loser.layout.dims for loser in ruled_out]
    assert all(loser.step_time_s < chosen.predicted.step_time_s for loser in ruled_out)


def test_losers_are_slower_or_too_big_and_say_so():
    chosen = plan_for(SMALL, cpu(2), training(global_batch_size=16))
    assert chosen.rejected
    for loser in chosen.rejected:
        assert loser.reason and loser.layout != chosen.layout
        assert not loser.fits or loser.step_time_s >= chosen.predicted.step_time_s


def test_planning_is_pure_but_for_the_clock():
    spec = training(global_batch_size=16)
    ticks = itertools.count()
    timed = plan_for(SMALL, cpu(2), spec, clock=lambda: float(next(ticks)))
    assert timed.search_s == 1.0
    assert dataclasses.replace(timed, search_s=0.0) == plan_for(SMALL, cpu(2), spec)


def test_published_json_has_the_promised_form_and_reads_back():
    chosen = plan_for(SMALL, cpu(2), training(global_batch_size=16), tp=2, pp=2)
    data = json.loads(json.dumps(plan_json(chosen)))
    assert {"dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "microbatch_size", "num_microbatches", "schedule",
            "recompute"} <= data["layout"].keys()
    assert {"step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "mfu_convention", "memory_gib"} <= \
        data["predicted"].keys()
    assert isinstance(data["candidates"], int) and isinstance(data["search_s"], float)
    assert {"layout", "reason"} <= data["rejected"][0].keys()
    assert plan_from_dict(data) == chosen
    assert layout_from_flat(data["layout"]) == chosen.layout


def test_a_layout_with_an_unknown_key_is_refused():
    with pytest.raises(SpecError, match="tensor_parallel: unknown key"):
        layout_from_flat(layout_of(SMALL).flat() | {"tensor_parallel": 2})


@pytest.mark.parametrize("model,nodes,batch", SEARCHES, ids=lambda v: getattr(v, "name", v))
def test_large_searches_open_a_few_of_very_many_layouts(model, nodes, batch):
    spec = training(global_batch_size=batch, seq_len=8192, param_dtype="bfloat16")
    chosen = plan_for(model, h100(nodes), spec, recompute="full")
    assert chosen.predicted.memory_gib <= chosen.predicted.memory_limit_gib
    assert chosen.candidates > 100_000 and chosen.priced < chosen.candidates / PRICED_OF


@pytest.mark.parametrize("name", GOLDEN_PLANS)
def test_plans_change_only_on_purpose(name):
    """Against the recorded plan; `python -m tests.helpers.planning` records anew."""
    recorded = json.loads((GOLDEN / f"plan_{name}.json").read_text())
    assert flatten(plan_json(golden_plan(name))) == flatten(recorded)


# Experts make the space ten times as large: more than ten seconds on a busy core.
@pytest.mark.parametrize("run", [pytest.param(run, id=run.stem, marks=[pytest.mark.slow] * ("deepseek" in run.stem))
                                 for run in sorted(RUNS.glob("*.yaml")) if isinstance(load(run).model, ModelSpec)])
def test_every_run_that_comes_with_orc_can_be_planned_and_shown(run):
    config = load(run)
    chosen = plan_for(config.model, config.cluster, config.training, headroom=config.memory.headroom,
                      **to_dict(config.parallel))
    screen = io.StringIO()
    show_plan(chosen, Console(file=screen, width=100))
    shown = screen.getvalue()
    assert "…" not in shown.split(" × illegal by ")[0], "a column is cut off at 100 columns"
    for word in ("layout", "step", "memory", "communication", "best rejected", chosen.rejected[0].reason.split()[0]):
        assert word in shown


def test_the_demo_shows_three_dimensions():
    config = load(RUNS / "demo.yaml")
    chosen = plan_for(config.model, config.cluster, config.training, **to_dict(config.parallel))
    dims = chosen.layout.dims
    assert (dims.dp_replicate, dims.dp_shard, dims.tp, dims.pp) == (1, 2, 2, 2)


# what this trainer cannot run: wishes → what the refusal of a run must say
UNTRAINED = {
    "shards outside replicas": (
        {"mesh_order": ["pp", "dp_shard", "dp_replicate", "cp", "tp"], "dp_shard": 2, "dp_replicate": 2},
        "has dp_shard outside dp_replicate"),
}


@pytest.mark.parametrize("case", UNTRAINED)
def test_a_run_is_refused_what_the_trainer_does_not_run_while_a_plan_shows_it(case):
    wishes, message = UNTRAINED[case]
    spec = training(global_batch_size=16)
    shown = plan_for(SMALL, cpu(2), spec, **wishes)
    assert any(message in reason for reason in shown.untrained)
    with pytest.raises(PlanError) as refused:
        plan_for(SMALL, cpu(2), spec, trainable=True, **wishes)
    assert message in str(refused.value)


def test_a_run_is_planned_only_with_what_the_trainer_runs():
    chosen = plan_for(SMALL, cpu(2), training(global_batch_size=16), trainable=True)
    assert chosen.untrained == () and not support.layout_problems(chosen.layout)


