"""Candidates as points: memory against step time, the Pareto front, and why each one lost.

Called by the page. A small space is shown whole. Of a large one, which the search never prices whole, the points
are the plan, what the plan lists as its rivals, and a sample of all combinations of degrees.
"""
import itertools
import random
from typing import Any

from jobs.spec.parallel import Layout, ParallelDims
from orchestrator.planner.cost import Priced
from orchestrator.planner.page.asked import Asked, described
from orchestrator.planner.page.families import family_of
from orchestrator.planner.plan import Plan
from orchestrator.planner.question import divisors
from orchestrator.planner.reasons import EQUAL, reason
from orchestrator.planner.space import every_layout

MAX_POINTS = 400  # each costs about 200 bytes of the page and some milliseconds to price
BEST = 80  # of them the fastest, one per combination of degrees
SCHEDULES = ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
DRAWS = 6  # many draws are illegal
TOO_BIG, FITS, RULED_OUT = range(3)  # states of a point
FEW = 24  # layouts with the same degrees, of which one is drawn


def priced_points(plan: Plan, asked: Asked, *, sample: bool) -> list[Priced]:
    """Layouts worth a point, with their prices: the plan, its rivals, with `sample` all others or a sample of them."""
    known = dict.fromkeys([plan.layout, *(loser.layout for loser in plan.rejected)])
    if not sample:
        return [asked.price(layout) for layout in known]
    every = list(itertools.islice(every_layout(asked.question), MAX_POINTS + 1))
    if len(every) <= MAX_POINTS:
        return [asked.price(layout) for layout in known | dict.fromkeys(every)]
    best = _best(asked.in_detail_like(plan.layout), count=BEST)  # details multiply, and hardly move a point
    drawn = known | dict.fromkeys(_sample(asked, count=MAX_POINTS - len(best)))
    return best + [asked.price(layout) for layout in drawn if layout not in {one.layout for one in best}]


def _best(asked: Asked, *, count: int) -> list[Priced]:
    """The fastest that fit, one per combination of degrees."""
    search = asked.search()
    found: dict[ParallelDims, Priced] = {}
    if not isinstance(search, str):
        for one in search.ranked(wanted=lambda layout: layout.dims not in found):
            found[one.layout.dims] = one
            if len(found) == count:
                break
    return list(found.values())


def _sample(asked: Asked, *, count: int) -> list[Layout]:
    """Layouts drawn at random, always the same ones: first the degrees, then one layout that has them."""
    draw = random.Random(0)
    request, world = asked.question.request, asked.question.world_size
    ep = divisors(asked.question.model.moe.num_experts) if asked.question.model.moe else [1]
    choices = {"tp": divisors(asked.question.cluster.gpus_per_node), "pp": divisors(world), "cp": divisors(world),
               "ep": ep, "microbatch_size": [1, 2, 4, 8], "recompute": ["none", "selective", "full"],
               "schedule": SCHEDULES, "zero_stage": [1, 2, 3]}
    choices |= {name: list(asked_for) for name in choices if (asked_for := request.options(name))}
    choices["cp"] = choices["cp"][:6]  # longer rings are hardly ever legal
    choices["pp"] = [pp for pp in choices["pp"] if pp <= asked.question.model.num_layers]
    found: dict[Layout, None] = {}
    for _ in range(DRAWS * count):
        wishes = {name: draw.choice(values) for name, values in choices.items()}
        drawn = asked.wishing(**wishes, num_nodes=asked.question.num_nodes).question
        few = list(itertools.islice(every_layout(drawn), FEW))
        if few:
            found[draw.choice(few)] = None
        if len(found) == count:
            break
    return list(found)


def scatter_data(plan: Plan, priced: list[Priced]) -> dict[str, Any]:
    """Points in order of step time; `front` are indices into them, of those that fit; so is `winner`."""
    ranked = sorted(priced, key=_rank)
    winner = next(one for one in priced if one.layout == plan.layout)
    points = [_point(one, winner, plan) for one in ranked]
    front = {id(one) for one in pareto_front([one for one, point in zip(ranked, points) if point[3] == FITS])}
    return {"points": points, "limit_gib": plan.predicted.memory_limit_gib,
            "front": [i for i, one in enumerate(ranked) if id(one) in front], "winner": ranked.index(winner)}


def pareto_front(ranked: list[Priced]) -> list[Priced]:
    """Of layouts in order of step time, those that no faster one undercuts in memory."""
    front: list[Priced] = []
    for one in ranked:
        if not front or one.predicted.memory_gib < front[-1].predicted.memory_gib:
            front.append(one)
    return front


def why_it_lost(one: Priced, winner: Priced, plan: Plan) -> str:
    """In the planner's words."""
    if one.layout == plan.layout:
        return "the plan"
    said = next((loser.reason for loser in plan.rejected if loser.layout == one.layout), None)
    return said or reason(one, winner)


def _rank(one: Priced) -> tuple[float, float]:
    return one.predicted.step_time_s, one.predicted.memory_gib


def _point(one: Priced, winner: Priced, plan: Plan) -> list[Any]:
    """[memory GiB, step s, MFU, state, family, layout, why]"""
    mine = one.predicted
    state = FITS if one.fits else TOO_BIG
    if one.fits and mine.step_time_s < winner.predicted.step_time_s * (1 - EQUAL):
        state = RULED_OUT  # the plan is the fastest of what was asked for
    return [_round(mine.memory_gib), _round(mine.step_time_s), _round(mine.mfu), state, family_of(one.layout),
            described(one.layout, beside=plan.layout), why_it_lost(one, winner, plan)]


def _round(value: float) -> float:
    return float(f"{value:.4g}")
