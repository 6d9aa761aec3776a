"""Over random models, clusters and wishes: a legal plan that satisfies every rule, or an explained refusal. Never a
traceback, never a layout that does not fit, never a sample or a layer lost."""
import os

import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings, strategies as st  # noqa: E402

from jobs.spec.model import MlaSpec, ModelSpec, MoeSpec  # noqa: E402
from jobs.spec.parallel import V_SCHEDULES, VIRTUAL_STAGES, ZERO_BUBBLE_SCHEDULES  # noqa: E402
from jobs.spec.training import TrainingSpec  # noqa: E402
from orchestrator.cluster import ClusterSpec, SwitchSpec  # noqa: E402
from orchestrator.request import CHOICES, ParallelRequest  # noqa: E402
from orchestrator.planner import PlanError, plan, plan_from_dict, plan_json  # noqa: E402
from orchestrator.planner.question import Question  # noqa: E402
from orchestrator.planner.uneven import split_weighted  # noqa: E402

EXAMPLES = int(os.environ.get("ORC_EXAMPLES", "60"))
SETTINGS = settings(max_examples=EXAMPLES, deadline=None, derandomize=True,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])

COUNTS = st.one_of(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24]), st.integers(1, 40))
SIZES = st.one_of(st.sampled_from([32, 64, 96, 128, 250, 256, 1000, 4096]), st.integers(1, 9000))
ABSURD = st.sampled_from([0, -1, -8, 10**6, 10**12, 2**63])
DEGREE = st.one_of(st.just("auto"), st.just("auto"), st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(1, 40),
                   st.lists(st.sampled_from([1, 2, 4, 5, 8]), min_size=1, max_size=3, unique=True))


@st.composite
def models(draw, sizes=SIZES, counts=COUNTS):
    moe = draw(st.none() | st.builds(MoeSpec, num_experts=counts, top_k=st.integers(1, 4), ffn_dim=sizes,
                                     num_shared_experts=st.integers(0, 2), first_layer=st.integers(0, 3)))
    mla = draw(st.none() | st.none() | st.builds(MlaSpec, kv_lora_rank=st.just(32), q_lora_rank=st.none() | st.just(48),
                                                 qk_nope_head_dim=st.just(32), qk_rope_head_dim=st.just(16),
                                                 v_head_dim=st.just(32)))
    heads = draw(counts)
    return ModelSpec(name="m", vocab_size=draw(sizes), dim=draw(sizes), num_layers=draw(counts), num_heads=heads,
                     num_kv_heads=draw(st.sampled_from([1, heads]) | counts), ffn_dim=draw(sizes),
                     head_dim=draw(st.none() | st.sampled_from([32, 64, 31])), moe=moe, mla=mla,
                     ffn=draw(st.sampled_from(["swiglu", "gelu", "geglu"])), tie_embeddings=draw(st.booleans()),
                     sliding_window=draw(st.none() | st.just(64)), global_every=2)


@st.composite
def clusters(draw, counts=st.integers(1, 5)):
    gpus = draw(st.sampled_from([1, 2, 3, 4, 8]))
    return ClusterSpec(name="c", kind="local", num_nodes=draw(counts), gpus_per_node=gpus,
                       gpu=draw(st.sampled_from(["cpu", "h100", "a100-40gb", "gb200"])),
                       memory_gib=draw(st.none() | st.sampled_from([0.001, 0.05, 1.0, 1000.0])),
                       nvlink_domain=draw(st.none() | st.just(gpus * 2)),
                       switches=draw(st.just([]) | st.just([SwitchSpec(nodes=2, oversubscription=4.0)])))


@st.composite
def requests(draw):
    names = draw(st.sets(st.sampled_from(["dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "microbatch_size",
                                          "num_microbatches", "virtual_stages", "layers_per_unit"]), max_size=3))
    fixed = {name: draw(DEGREE) for name in names}
    for name in draw(st.sets(st.sampled_from(sorted(CHOICES)), max_size=2)):
        fixed[name] = draw(st.sampled_from(CHOICES[name]))
    return ParallelRequest(**fixed, uneven_batch=draw(st.booleans()))


def plan_or_refusal(model, cluster, training, request, *, trainable=False):
    question = Question(model=model, training=training, cluster=cluster, request=request, num_nodes=cluster.num_nodes,
                        allow_tp_across_nodes=False, trainable=trainable)
    try:
        return plan(question, headroom=0.1)
    except PlanError as refused:
        assert refused.problems and all(p.where and p.message for p in refused.problems)
        return None


def assert_legal(plan, model, cluster, training, request) -> None:
    layout, dims = plan.layout, plan.layout.dims
    assert dims.world_size % cluster.gpus_per_node == 0
    assert 0 < dims.world_size <= cluster.num_nodes * cluster.gpus_per_node
    assert sum(layout.layers_per_stage) == model.num_layers and min(layout.layers_per_stage) >= 1
    assert len(layout.layers_per_stage) == dims.pp * layout.virtual_stages
    assert layout.slots >= training.global_batch_size
    assert request.uneven_batch or layout.slots == training.global_batch_size
    assert dims.dp <= training.global_batch_size
    assert model.num_heads % dims.tp == model.vocab_size % dims.tp == 0
    assert model.mla is not None or model.num_kv_heads % dims.tp == 0
    assert cluster.domain_gpus % dims.tp == 0
    assert dims.cp == 1 or training.seq_len % (2 * dims.cp) == 0
    assert dims.tp == 1 or not layout.sequence_parallel or training.seq_len % dims.tp == 0
    if dims.ep > 1:
        assert model.moe.num_experts % dims.ep == (dims.dp_shard * dims.cp * dims.tp) % dims.ep == 0
        assert dims.ep % (dims.cp * dims.tp) == 0
    if dims.pp > 1:
        least, most = VIRTUAL_STAGES[layout.schedule]
        assert layout.virtual_stages >= least and (most is None or layout.virtual_stages <= most)
        assert layout.schedule not in ("1f1b", "interleaved_1f1b") or layout.num_microbatches >= dims.pp
        assert layout.schedule not in ZERO_BUBBLE_SCHEDULES or dims.fsdp == 1 or layout.zero_stage < 3
        assert layout.schedule not in V_SCHEDULES or layout.virtual_stages == 2
    assert 0 < plan.predicted.memory_gib <= plan.predicted.memory_limit_gib * (1 + 1e-9)
    assert 0 < plan.predicted.mfu <= 1.0 + 1e-9 and plan.predicted.step_time_s > 0
    for name in request.fixed():
        value = getattr(dims, name) if hasattr(dims, name) else getattr(layout, name)
        assert value in request.options(name), (name, value)


@SETTINGS
@given(models(), clusters(), st.integers(1, 30), st.sampled_from([8, 64, 96, 128, 250, 2048]), requests())
def test_a_plan_is_legal_or_the_refusal_is_explained(model, cluster, batch, seq_len, request):
    training = TrainingSpec(steps=1, seq_len=seq_len, global_batch_size=batch,
                            param_dtype="float32" if cluster.gpu == "cpu" else "bfloat16")
    plan = plan_or_refusal(model, cluster, training, request)
    if plan is not None:
        assert_legal(plan, model, cluster, training, request)
        assert plan_from_dict(plan_json(plan)) == plan


@SETTINGS
@given(models(sizes=SIZES | ABSURD, counts=COUNTS | ABSURD), clusters(counts=st.integers(1, 4) | ABSURD),
       st.integers(1, 16) | ABSURD, st.sampled_from([8, 128]) | ABSURD)
def test_absurd_sizes_are_refused_without_a_traceback(model, cluster, batch, seq_len):
    plan_or_refusal(model, cluster, TrainingSpec(steps=1, seq_len=seq_len, global_batch_size=batch), ParallelRequest())


# field of the request, value → what is wrong with it
NONSENSE = st.sampled_from([None, "", "all", 1.5, True, [], ["auto"], [1, "x"], {"a": 1}, -3, 0])


@SETTINGS
@given(st.sampled_from(["tp", "pp", "dp_shard", "schedule", "recompute", "zero_stage", "layers_per_stage", "mesh_order",
                        "num_nodes", "uneven_batch", "sequence_parallel"]), NONSENSE)
def test_wishes_that_make_no_sense_are_refused_without_a_traceback(name, value):
    model = ModelSpec(name="m", vocab_size=256, dim=64, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=128)
    cluster = ClusterSpec(name="c", kind="local", num_nodes=1, gpus_per_node=4, gpu="cpu")
    plan_or_refusal(model, cluster, TrainingSpec(steps=1, seq_len=64, global_batch_size=8),
                    ParallelRequest(**{name: value}))


@SETTINGS
@given(st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.5]), min_size=1, max_size=9), st.data())
def test_no_split_of_layers_has_a_lighter_heaviest_stage(weights, data):
    stages = data.draw(st.integers(1, len(weights)))
    first, last = data.draw(st.sampled_from([0.0, 0.7, 4.0])), data.draw(st.sampled_from([0.0, 0.7, 4.0]))

    def heaviest(split):
        loads, start = [], 0
        for stage, layers in enumerate(split):
            extra = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
            loads.append(sum(weights[start:start + layers]) + extra)
            start += layers
        return max(loads)

    def splits(layers, parts):
        if parts == 1:
            yield (layers,)
            return
        for head in range(1, layers - parts + 2):
            yield from ((head, *rest) for rest in splits(layers - head, parts - 1))

    found = split_weighted(tuple(weights), num_stages=stages, first=first, last=last)
    assert sum(found) == len(weights) and len(found) == stages and min(found) >= 1
    assert heaviest(found) <= min(map(heaviest, splits(len(weights), stages))) * (1 + 1e-6)
