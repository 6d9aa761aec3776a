"""What each axis is worth: the best layout without it, or with it, beside the winner.

Called by the planner's entry. Each answer is the fastest of a group of layouts, all found in one search. Why a group
has none, and what tensor parallelism would cost across nodes, are questions of their own.
"""
import dataclasses
from collections.abc import Callable

from jobs.spec.parallel import Layout
from orchestrator.request import ParallelRequest
from orchestrator.planner.cost import Priced
from orchestrator.planner.parts import Shape
from orchestrator.planner.plan import AxisEffect
from orchestrator.planner.question import Question, divisors
from orchestrator.planner.reasons import EQUAL, against_request, reject, too_big_by
from orchestrator.planner.refusals import question_problems
from orchestrator.planner.rules import ep_group_problems
from orchestrator.planner.search import Search
from orchestrator.planner.waiting import Group

AXES = ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate")


def axis_groups(question: Question) -> tuple[Group, ...]:
    """Per axis the layouts without it and those with it."""
    return tuple(Group(name=f"{axis}={'all' if many else 1}", may=_may(axis, many), holds=_holds(axis, many))
                 for axis in _axes(question) for many in (False, True))


def _axes(question: Question) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if axis != "ep" or question.model.moe is not None)


def _holds(axis: str, many: bool) -> Callable[[Layout], bool]:
    return lambda layout: (getattr(layout.dims, axis) > 1) == many


def _may(axis: str, many: bool) -> Callable[[Shape], bool]:
    if axis == "dp_shard" and not many:  # experts are then carved out of cp × tp alone
        return lambda shape: not ep_group_problems(shape.ep, dp_shard=1, cp=shape.cp, tp=shape.tp)
    if axis.startswith("dp_"):
        return lambda shape: shape.dp > 1 or not many
    return lambda shape: (getattr(shape, axis) > 1) == many


def axis_effects(search: Search, firsts: dict[str, Priced], winner: Priced, *,
                 wishes: ParallelRequest) -> tuple[AxisEffect, ...]:
    """`firsts`: the fastest of each of axis_groups, found by `search`, which knows no wishes. `winner` is the fastest
    under `wishes`."""
    found = []
    for axis in _axes(search.question):
        value = getattr(winner.layout.dims, axis)
        others = [1] if value > 1 else divisors(search.question.world_size)[1:]
        if not others:
            continue
        best = firsts.get(f"{axis}={1 if value > 1 else 'all'}") or _none(axis, others, search)
        what = f"without {axis}" if value > 1 else f"with {axis}"
        if isinstance(best, str):
            found.append(AxisEffect(axis=axis, value=value, what=what, other=None, change=None, note=best))
            continue
        change = _change(best, winner)
        other = reject(best, winner) if change > -EQUAL else against_request(best, winner, request=wishes)
        found.append(AxisEffect(axis=axis, value=value, what=what, other=other, change=change, note=""))
    crossing = _crossing(search, winner)
    return tuple(found) + ((crossing,) if crossing else ())


def _crossing(search: Search, winner: Priced) -> AxisEffect | None:
    """What tp over the edge of the NVLink domain would cost: the smallest such tp that divides the model."""
    question = search.question
    domain = question.cluster.domain_gpus
    for tp in divisors(question.world_size):
        if tp <= domain or domain % tp == 0:
            continue
        wide = _asking(question, tp=tp, allow_tp_across_nodes=True)
        best = None if question_problems(wide) else next(search.again(wide).ranked(), None)
        if best is not None:
            return AxisEffect(axis="tp", value=winner.layout.dims.tp, what=f"tp={tp} crosses nodes",
                              other=reject(best, winner), change=_change(best, winner), note="")
    return None


def _none(axis: str, degrees: list[int], search: Search) -> str:
    """Why no layout has one of these degrees."""
    asked = _asking(search.question, **{axis: degrees})
    if problems := question_problems(asked):
        return problems[0].message
    narrow = search.again(asked)
    smallest = narrow.smallest()
    if smallest is None:
        broken = [problem.message for problem in narrow.space.ledger.examples.values()]
        return broken[0] if broken else "nothing is legal"
    return f"nothing fits: {smallest.layout} is {too_big_by(smallest)}"


def _asking(question: Question, *, allow_tp_across_nodes: bool = False, **wishes: object) -> Question:
    return dataclasses.replace(question, request=dataclasses.replace(question.request, **wishes),
                               allow_tp_across_nodes=allow_tp_across_nodes or question.allow_tp_across_nodes)


def _change(one: Priced, winner: Priced) -> float:
    return one.predicted.step_time_s / winner.predicted.step_time_s - 1
