"""The pipeline's timeline: torch's own orders, the papers' bubbles exactly, uneven stages, bound and shortcut."""
import itertools
import random
import types

import pytest

from orchestrator.planner.peaks import peak_held
from orchestrator.planner.schedules import order, rank_of, stages_of
from orchestrator.planner.timeline import (StageTimes, durations_of, lower_bound_s, pipeline_s, pipeline_way, timeline,
                                            way_s)
from orchestrator.planner.ways import Ways

# schedule, stages per rank
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4),
             ("interleaved_zero_bubble", 2), ("zbv", 2), ("dualpipev", 2)]
SHAPES = [(2, 4), (2, 12), (4, 8), (4, 24), (8, 16), (8, 40)]  # ranks, microbatches

# Bubble of a step from p, v and one stage's F, B, W (planner's reference, sources there). Durations are of a whole
# rank's layers, so a stage takes 1/v of them.
BUBBLES = {
    ("gpipe", 1): lambda p, v, f, b, w: (p - 1) * (f + b),
    ("1f1b", 1): lambda p, v, f, b, w: (p - 1) * (f + b),
    ("interleaved_1f1b", 2): lambda p, v, f, b, w: (p - 1) * (f + b) / v,
    ("interleaved_1f1b", 4): lambda p, v, f, b, w: (p - 1) * (f + b) / v,
    ("interleaved_zero_bubble", 1): lambda p, v, f, b, w: (p - 1) * (f + b - 2 * w),  # ZB-H1
    ("interleaved_zero_bubble", 2): lambda p, v, f, b, w: (p - 1) * (f + b - 2 * w) / v,
}
DURATIONS = [(1.0, 2.0, 1.0), (1.0, 2.2, 0.9), (3.0, 7.0, 3.0)]  # F, B, W with W ≤ F and W ≤ B − W

# schedule, stages per rank, ranks, microbatches → microbatches held at the peak by the first rank and by the last
HELD = [
    ("gpipe", 1, 4, 8, (8,), (8,)),
    ("1f1b", 1, 4, 8, (4,), (1,)),
    ("1f1b", 1, 4, 2, (2,), (1,)),
    ("interleaved_1f1b", 2, 4, 8, (7, 4), (4, 1)),  # p·v(1 + (p−1)/(p·v)) = 11 of half the layers
    ("interleaved_zero_bubble", 2, 4, 8, (4, 4), (4, 4)),
    ("zbv", 2, 4, 16, (7, 1), (4, 4)),
    ("dualpipev", 2, 4, 16, (8, 1), (5, 4)),
]


def even(p, v, f, b, w, send=0.0):
    return (StageTimes(forward_s=f / v, backward_s=b / v, weights_s=w / v, send_s=send),) * (p * v)


@pytest.mark.parametrize("schedule,v", BUBBLES)
@pytest.mark.parametrize("p,m", SHAPES)
@pytest.mark.parametrize("f,b,w", DURATIONS)
def test_bubbles_are_the_papers(schedule, v, p, m, f, b, w):
    found = timeline(schedule, stages=even(p, v, f, b, w), virtual_stages=v, num_microbatches=m)
    assert found.total_s - m * (f + b) == pytest.approx(BUBBLES[schedule, v](p, v, f, b, w))


@pytest.mark.parametrize("p,m", [(2, 4), (4, 8), (4, 24), (8, 40)])
def test_zbv_never_waits_once_it_has_begun(p, m):
    """0 bubble where F = B = W; the fill that remains is what the next step's optimizer may overlap."""
    found = timeline("zbv", stages=even(p, 2, 2.0, 4.0, 2.0), virtual_stages=2, num_microbatches=m)
    work = [[span for span in rank if span.kind != "bubble"] for rank in found.ranks]
    waits = [spans[-1].end_s - spans[0].start_s - found.busy_s(rank) for rank, spans in enumerate(work)]
    assert waits == pytest.approx([0.0] * p)


@pytest.mark.parametrize("p,m", [(2, 4), (4, 8), (4, 24), (8, 40)])
def test_dualpipev_has_deepseeks_bubble(p, m):
    """(p/2 − 1)(F&B + B − 3W) of p stages on p/2 ranks, where F = B_in = W and nothing is gained together."""
    f, b, w = 1.0, 2.0, 1.0
    found = timeline("dualpipev", stages=even(p, 1, f, b, w) * 2, virtual_stages=2, num_microbatches=m)
    assert found.total_s - 2 * m * (f + b) == pytest.approx((p - 1) * ((f + b) + b - 3 * w))


@pytest.mark.parametrize("schedule,v,p,m,first,last", HELD)
def test_microbatches_held_at_the_peak(schedule, v, p, m, first, last):
    held = [peak_held(schedule, rank=rank, pp=p, virtual_stages=v, num_microbatches=m) for rank in (0, p - 1)]
    assert held == [first, last]


@pytest.mark.parametrize("schedule,v", SCHEDULES)
@pytest.mark.parametrize("p,m", [(2, 8), (3, 12), (4, 16)])
def test_every_microbatch_is_computed_once_on_every_stage(schedule, v, p, m):
    done = {"F": [], "B": [], "W": []}
    for rank in range(p):
        for action in order(schedule, rank=rank, pp=p, virtual_stages=v, num_microbatches=m):
            assert rank == rank_of(schedule, stage=action.stage, pp=p)
            for kind in {"F": "F", "B": "BW", "I": "B", "W": "W"}[action.kind]:
                done[kind].append((action.stage, action.microbatch))
    for found in done.values():
        assert sorted(found) == list(itertools.product(range(p * v), range(m)))


def torch_orders(name, p, m):
    """What torch.distributed.pipelining itself would run, rank by rank, without no-ops."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    utils = pytest.importorskip("torch.distributed.pipelining._utils")
    cls = {"interleaved_1f1b": schedules.ScheduleInterleaved1F1B, "zbv": schedules.ScheduleZBVZeroBubble,
           "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
           "dualpipev": schedules.ScheduleDualPipeV}[name]
    assert utils.generate_rank_to_stage_mapping  # the mapping that our rank_of repeats
    rounds = max(1, m // p)
    fake = types.SimpleNamespace(pp_group_size=p, n_local_stages=2, num_stages=2 * p, _n_microbatches=m,
                                 number_of_rounds=rounds, microbatches_per_round=m // rounds)
    found = []
    for rank in range(p):
        actions = []
        for action in cls._calculate_single_rank_operations(fake, rank):
            for one in () if action is None else action.sub_actions or (action,):
                kind = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
                actions.append((kind[one.computation_type.name], one.stage_index, one.microbatch_index))
        found.append(actions)
    return found


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize("p,m", [(2, 4), (2, 10), (4, 8), (4, 24)])
def test_orders_are_those_that_torch_runs(name, p, m):
    where = {"pp": p, "virtual_stages": 2, "num_microbatches": m}
    ours = [[(a.kind, a.stage, a.microbatch) for a in order(name, rank=rank, **where)] for rank in range(p)]
    assert ours == torch_orders(name, p, m)


def uneven(rng, stages):
    found = []
    for _ in range(stages):
        forward = rng.uniform(0.5, 1.5) if rng.random() < 0.4 else 1.0
        backward = forward * rng.uniform(1.5, 3.0)
        found.append(StageTimes(forward_s=forward, backward_s=backward, weights_s=backward * rng.uniform(0.2, 0.5),
                                send_s=rng.choice([0.0, 0.05, 0.3])))
    return tuple(found)


@pytest.mark.parametrize("schedule,v", SCHEDULES)
def test_shortcut_and_bound_hold_for_uneven_stages(schedule, v):
    """pipeline_s is the timeline's end, also where it continues a steady state; lower_bound_s is never above it."""
    rng = random.Random(f"{schedule} {v}")
    for p, rounds in itertools.product((2, 3, 4), (2, 5, 40)):
        stages, m = uneven(rng, p * v), p * rounds
        step = {"stages": stages, "virtual_stages": v, "num_microbatches": m}
        exact = timeline(schedule, **step).total_s
        assert pipeline_s(schedule, **step) == pytest.approx(exact, rel=1e-6)
        assert lower_bound_s(schedule, **step) <= exact * (1 + 1e-12)


@pytest.mark.parametrize("schedule,v", SCHEDULES)
def test_the_shortcut_is_within_a_percent_for_many_uneven_stages(schedule, v):
    """Where so many stages differ, a steady state may need longer to settle than the shortcut waits for it."""
    step = {"stages": uneven(random.Random(5), 8 * v), "virtual_stages": v, "num_microbatches": 8 * 12}
    found, bound = pipeline_s(schedule, **step), lower_bound_s(schedule, **step)
    assert found == pytest.approx(timeline(schedule, **step).total_s, rel=0.01) and found >= bound


@pytest.mark.parametrize("schedule,v", [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)])
def test_the_bound_is_exact_for_even_stages(schedule, v):
    stages = even(4, v, 1.0, 2.0, 1.0)
    exact = pipeline_s(schedule, stages=stages, virtual_stages=v, num_microbatches=12)
    assert lower_bound_s(schedule, stages=stages, virtual_stages=v, num_microbatches=12) == pytest.approx(exact)


def test_a_slow_stage_paces_the_pipeline():
    fast, slow = (StageTimes(forward_s=t, backward_s=2 * t, weights_s=t) for t in (1.0, 1.5))
    found = timeline("1f1b", stages=(fast, slow, fast, fast), virtual_stages=1, num_microbatches=8)
    # the slow rank works 8 · 4.5; before it one forward, behind it one backward; and once it waits for the first
    # backward, which comes back at 8.5, when its three forwards ahead are done at 5.5
    assert found.total_s == pytest.approx(8 * 4.5 + (1.0 + 2.0) + (8.5 - 5.5))


def test_messages_delay_1f1b_by_a_round_trip_and_hide_behind_more_microbatches_of_gpipe():
    """In the steady state of 1F1B a rank waits for the way down and back: 2(p−1) messages per p microbatches."""
    p, m, send = 4, 400, 0.01
    quiet, loud = (timeline("1f1b", stages=even(p, 1, 1.0, 2.0, 1.0, s), virtual_stages=1, num_microbatches=m).total_s
                   for s in (0.0, send))
    assert loud - quiet == pytest.approx(m * 2 * (p - 1) / p * send, rel=0.02)
    quiet, loud = (timeline("gpipe", stages=even(p, 1, 1.0, 2.0, 1.0, s), virtual_stages=1, num_microbatches=m).total_s
                   for s in (0.0, send))
    assert loud - quiet == pytest.approx(2 * (p - 1) * send)


def test_the_turn_of_a_v_sends_nothing():
    """Stages p − 1 and p lie on the last rank."""
    assert stages_of("zbv", rank=3, pp=4, virtual_stages=2) == (3, 4)
    one = StageTimes(forward_s=1.0, backward_s=2.0, weights_s=1.0, send_s=0.5)
    found = timeline("zbv", stages=(one, one), virtual_stages=2, num_microbatches=3)
    assert found.bubble_s(0) == pytest.approx(0.0)


@pytest.mark.parametrize("schedule,v", SCHEDULES)
def test_a_rank_does_one_thing_at_a_time_and_its_spans_fill_the_step(schedule, v):
    found = timeline(schedule, stages=uneven(random.Random(7), 3 * v), virtual_stages=v, num_microbatches=9)
    for rank, spans in enumerate(found.ranks):
        assert spans[0].start_s == 0.0 and spans[-1].end_s == pytest.approx(found.total_s)
        assert all(a.end_s == pytest.approx(b.start_s) for a, b in zip(spans, spans[1:]))
        assert found.busy_s(rank) + found.bubble_s(rank) == pytest.approx(found.total_s)


@pytest.mark.parametrize("schedule,v", SCHEDULES)
@pytest.mark.parametrize("p,rounds", [(2, 2), (2, 40), (3, 5), (4, 2), (4, 18)])
def test_the_longest_way_of_one_step_bounds_every_other(schedule, v, p, rounds):
    """Whatever the durations; of the step that it was taken from it is the whole time, or most of it where a steady
    state is continued (40 rounds of 2, 18 of 4)."""
    rng = random.Random(f"{schedule} {v} {p} {rounds}")
    step = {"virtual_stages": v, "num_microbatches": p * rounds}
    for _ in range(6):
        one, other = uneven(rng, p * v), uneven(rng, p * v)
        total_s, way = pipeline_way(schedule, stages=one, **step)
        own_s = way_s(way, durations_of(one))
        assert own_s == pytest.approx(total_s) if rounds <= 5 else 0.9 * total_s <= own_s <= total_s * (1 + 1e-9)
        exact = timeline(schedule, stages=other, **step).total_s
        assert way_s(way, durations_of(other)) <= exact * (1 + 1e-9)
        assert way_s(way, durations_of(other)) >= 0.3 * exact  # it is a way through, and not a part of one


def test_ways_are_handed_on_and_only_lengthen_the_bound():
    rng, ways = random.Random(3), Ways()
    step = {"virtual_stages": 2, "num_microbatches": 12}
    stages = [uneven(rng, 8) for _ in range(8)]
    bounds = []
    for one in stages:
        bounds.append(ways.least_s("zbv", stages=stages[0], **step))
        total_s = ways.run("zbv", stages=one, **step)
        assert ways.least_s("zbv", stages=one, **step) == pytest.approx(total_s)
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in zip(bounds, bounds[1:]))
