"""Candidates as points: memory against step time, the Pareto front, and why each one lost.

Called by the page. A small space is shown whole. Of a large one, which the search never prices whole, the points
are the plan, what the plan lists as its rivals, and a sample of all combinations of degrees.
"""
import itertools
import random
from typing import Any

from jobs.spec.parallel import Layout
from orchestrator.planner.cost import Priced
from orchestrator.planner.page.asked import Asked
from orchestrator.planner.page.families import family_of
from orchestrator.planner.plan import Plan
from orchestrator.planner.question import divisors
from orchestrator.planner.space import every_layout

MAX_POINTS = 400  # each costs about 200 bytes of the page and some milliseconds to price
BEST = 80  # of them the fastest, one per combination of degrees
DRAWS = 4  # many draws are illegal
FEW = 24  # layouts with the same degrees, of which one is drawn


def priced_points(plan: Plan, asked: Asked, *, sample: bool) -> list[Priced]:
    """Layouts worth a point, with their prices: the plan, its rivals, and with `sample` all others or a sample of them."""
    known = dict.fromkeys([plan.layout, *(loser.layout for loser in plan.rejected)])
    if not sample:
        return [asked.price(layout) for layout in known]
    every = list(itertools.islice(every_layout(asked.question), MAX_POINTS + 1))
    if len(every) <= MAX_POINTS:
        return [asked.price(layout) for layout in known | dict.fromkeys(every)]
    best = _best(asked, count=BEST)
    drawn = known | dict.fromkeys(_sample(asked, count=MAX_POINTS - len(best)))
    return best + [asked.price(layout) for layout in drawn if layout not in {one.layout for one in best}]


def _best(asked: Asked, *, count: int) -> list[Priced]:
    """The fastest that fit, one per combination of degrees."""
    search, found = asked.search(), {}
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
    choices = {"tp": divisors(asked.question.cluster.gpus_per_node), "pp": divisors(world), "cp": divisors(world), "ep": ep,
               "microbatch_size": [1, 2, 4, 8], "recompute": ["none", "selective", "full"]}
    choices |= {name: list(asked_for) for name in choices if (asked_for := request.options(name))}
    choices["cp"] = choices["cp"][:6]  # longer rings are hardly ever legal
    choices["pp"] = [pp for pp in choices["pp"] if pp <= asked.question.model.num_layers]
    found: dict[Layout, None] = {}
    for _ in range(DRAWS * count):
        wishes = {name: draw.choice(values) for name, values in choices.items()}
        few = list(itertools.islice(every_layout(asked.wishing(**wishes, num_nodes=asked.question.num_nodes).question), FEW))
        if few:
            found[draw.choice(few)] = None
        if len(found) == count:
            break
    return list(found)


def scatter_data(plan: Plan, priced: list[Priced]) -> dict[str, Any]:
    """Points in order of step time; `front` are indices into them, of those that fit; so is `winner`."""
    ranked = sorted(priced, key=_rank)
    front = {id(one) for one in pareto_front([one for one in ranked if one.fits])}
    return {"points": [_point(one, plan) for one in ranked], "limit_gib": plan.predicted.memory_limit_gib,
            "front": [i for i, one in enumerate(ranked) if id(one) in front],
            "winner": next((i for i, one in enumerate(ranked) if one.layout == plan.layout), None)}


def pareto_front(ranked: list[Priced]) -> list[Priced]:
    """Of layouts in order of step time, those that no faster one undercuts in memory."""
    front: list[Priced] = []
    for one in ranked:
        if not front or one.predicted.memory_gib < front[-1].predicted.memory_gib:
            front.append(one)
    return front


def why_it_lost(one: Priced, plan: Plan) -> str:
    """One line; the planner's own words are kept for the few that the plan lists."""
    mine, best = one.predicted, plan.predicted
    if one.layout == plan.layout:
        return "the plan"
    if not one.fits:
        return f"does not fit: {mine.memory_gib - mine.memory_limit_gib:.3g} GiB above the limit on stage {mine.memory_stage}"
    slower = mine.step_time_s / best.step_time_s - 1
    if abs(slower) < 5e-4:
        return "as fast, but needs more memory"
    if slower < 0:
        return f"{-slower:.1%} faster, but not what the request asks for"
    parts = {"compute": (mine.compute_s, best.compute_s), "pipeline bubble": (mine.bubble_s, best.bubble_s),
             "exposed communication": (mine.exposed_communication_s, best.exposed_communication_s),
             "optimizer": (mine.optimizer_s, best.optimizer_s)}
    name = max(parts, key=lambda part: parts[part][0] - parts[part][1])
    return f"{slower:.1%} slower, most of it {name}"


def _rank(one: Priced) -> tuple[float, float]:
    return one.predicted.step_time_s, one.predicted.memory_gib


def _point(one: Priced, plan: Plan) -> list[Any]:
    """[memory GiB, step s, MFU, fits, family, layout, why]"""
    mine, layout = one.predicted, one.layout
    pipeline = f" {layout.schedule}" if layout.dims.pp > 1 else ""
    pipeline += f"×{layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    return [_round(mine.memory_gib), _round(mine.step_time_s), _round(mine.mfu), int(one.fits), family_of(layout),
            f"{layout}{pipeline}, recompute {layout.recompute}", why_it_lost(one, plan)]


def _round(value: float) -> float:
    return float(f"{value:.4g}")
