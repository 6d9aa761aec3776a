"""What a plan would be otherwise: each axis left out or forced, any layout beside the winner, two plans side by side.

Called by `orc plan` for what it prints below the winner, and by `--explain` and `--diff`. Every answer is another
search of the same question with one thing changed.
"""
import dataclasses
from dataclasses import dataclass
from typing import Any

from jobs.spec import support
from jobs.spec.load import Problem, SpecError, suggest
from jobs.spec.parallel import Layout
from orchestrator.config import CHOICES, COUNTS, ParallelRequest
from orchestrator.planner.cost import Priced
from orchestrator.planner.plan import AxisEffect, Plan, Rejected
from orchestrator.planner.question import Question, divisors
from orchestrator.planner.reasons import EQUAL, against_request, gib, grown_parts, ms, reject, too_big_by
from orchestrator.planner.refusals import question_problems
from orchestrator.planner.search import Search

AXES = ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """One layout beside the winner."""

    asked: str
    # the best of what was asked for; None: there is none, even were the rules of placement lifted
    layout: Layout | None
    priced: Priced | None
    reasons: tuple[str, ...]  # every reason it lost; the rules it breaks first


# ------------------------------------------------------------------ every axis, without and with it
def axis_effects(question: Question, winner: Priced, *, headroom: float) -> tuple[AxisEffect, ...]:
    """For each axis the best layout without it, if the winner has it, or with it. Schedules and FSDP units are those
    of the winner, or the plainest."""
    convention = winner.predicted.mfu_convention
    narrowed = _narrowed(question, winner.layout)
    found = []
    for axis in AXES:
        if axis == "ep" and question.model.moe is None:
            continue
        value = getattr(winner.layout.dims, axis)
        others = [1] if value > 1 else divisors(question.world_size)[1:]
        if others:
            found.append(_effect(axis, value, others, narrowed, winner, wishes=question.request, headroom=headroom,
                                 convention=convention))
    crossing = _crossing(narrowed, winner, headroom=headroom, convention=convention)
    return tuple(found) + ((crossing,) if crossing else ())


def _narrowed(question: Question, layout: Layout) -> Question:
    request = ParallelRequest(uneven_batch=question.request.uneven_batch, layers_per_unit=layout.layers_per_unit,
                              schedule=sorted({layout.schedule, "1f1b"}),
                              virtual_stages=sorted({1, layout.virtual_stages}),
                              reduce_every_microbatch=sorted({False, layout.reduce_every_microbatch}),
                              mesh_order=question.request.mesh_order, num_nodes=question.num_nodes)
    return dataclasses.replace(question, request=request)


def _effect(axis: str, value: int, others: list[int], question: Question, winner: Priced, *, wishes: ParallelRequest,
            headroom: float, convention: Any) -> AxisEffect:
    asked = dataclasses.replace(question, request=dataclasses.replace(question.request, **{axis: others}))
    best = _first(asked, headroom=headroom, convention=convention)
    what = f"without {axis}" if value > 1 else f"with {axis}"
    if isinstance(best, str):
        return AxisEffect(axis=axis, value=value, what=what, other=None, change=None, note=best)
    change = _change(best, winner)
    other = reject(best, winner) if change > -EQUAL else against_request(best, winner, request=wishes)
    return AxisEffect(axis=axis, value=value, what=what, other=other, change=change, note="")


def _crossing(question: Question, winner: Priced, *, headroom: float, convention: Any) -> AxisEffect | None:
    """What tp over the edge of the NVLink domain would cost: the smallest such tp that divides the model."""
    wide = dataclasses.replace(question, allow_tp_across_nodes=True)
    domain = question.cluster.domain_gpus
    for tp in divisors(question.world_size):
        if tp <= domain or domain % tp == 0:
            continue
        asked = dataclasses.replace(wide, request=dataclasses.replace(question.request, tp=tp))
        best = _first(asked, headroom=headroom, convention=convention)
        if not isinstance(best, str):
            return AxisEffect(axis="tp", value=winner.layout.dims.tp, what=f"tp={tp} crosses nodes",
                              other=reject(best, winner), change=_change(best, winner), note="")
    return None


def _first(question: Question, *, headroom: float, convention: Any) -> Priced | str:
    """The best layout, or why there is none."""
    problems = question_problems(question)
    if problems:
        return problems[0].message
    search = Search(question, headroom=headroom, convention=convention)
    best = next(search.ranked(), None)
    if best is not None:
        return best
    smallest = search.smallest()
    if smallest is None:
        broken = [problem.message for problem in search.space.ledger.examples.values()]
        return broken[0] if broken else "nothing is legal"
    return f"nothing fits: {smallest.layout} is {too_big_by(smallest)}"


def _change(one: Priced, winner: Priced) -> float:
    return one.predicted.step_time_s / winner.predicted.step_time_s - 1


# ------------------------------------------------------------------ any layout
def parse_wishes(text: str) -> dict[str, Any]:
    """"tp=16,pp=2" → the fields of a request. Raises SpecError naming every unknown or unreadable one."""
    wishes, problems = {}, []
    known = (*COUNTS, *CHOICES)
    for item in filter(None, (part.strip() for part in text.replace(" ", ",").split(","))):
        name, equals, value = item.partition("=")
        if not equals or name not in known:
            problems.append(Problem(where="--explain", value=item, message=f"is not key=value, e.g. tp=16,pp=2; "
                                                                           f"{suggest(name, known)}"))
            continue
        parsed = _parse(name, value)
        if parsed is None:
            problems.append(Problem(where="--explain", value=item, message="cannot be read; give " + (
                "a whole number" if name in COUNTS else f"one of {', '.join(map(str, CHOICES[name]))}")))
        else:
            wishes[name] = parsed
    if not wishes and not problems:
        problems.append(Problem(where="--explain", value=text, message="asks for nothing; try e.g. tp=16,pp=2"))
    if problems:
        raise SpecError(problems)
    return wishes


def _parse(name: str, value: str) -> Any:
    if name in COUNTS:
        return int(value) if value.isdigit() else None
    return next((one for one in CHOICES[name] if str(one).lower() == value.lower()), None)


def explain(question: Question, wishes: dict[str, Any], *, asked: str, winner: Priced, headroom: float) -> Explained:
    """The best layout with these wishes, and every reason it is not the winner. What placement forbids is priced all
    the same, so that the rule comes with its figure."""
    request = dataclasses.replace(ParallelRequest(uneven_batch=question.request.uneven_batch), **wishes)
    wished = dataclasses.replace(question, request=request)
    broken = [str(problem) for problem in question_problems(wished)]
    lifted = dataclasses.replace(wished, allow_tp_across_nodes=True)
    remaining = question_problems(lifted)
    if remaining:
        return Explained(asked=asked, layout=None, priced=None, reasons=tuple(broken or map(str, remaining)))
    search = Search(lifted, headroom=headroom, convention=winner.predicted.mfu_convention)
    best = next(search.ranked(), None) or search.smallest()
    if best is None:
        broken += [str(problem) for problem in search.space.ledger.examples.values()]
        return Explained(asked=asked, layout=None, priced=None, reasons=tuple(broken or ("no degrees multiply to the "
                                                                                          "ranks as asked",)))
    return Explained(asked=asked, layout=best.layout, priced=best,
                     reasons=tuple(broken) + tuple(reasons(best, winner)))


def reasons(one: Priced, winner: Priced) -> list[str]:
    """All of them: memory, then each part of the step that grew, then what the trainer does not run."""
    found = [] if one.fits else [too_big_by(one)]
    change = _change(one, winner)
    if abs(change) < EQUAL and one.layout == winner.layout:
        return [*found, "it is the winner"]
    slower = f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}"
    found.append(f"step {ms(one.predicted.step_time_s)} against {ms(winner.predicted.step_time_s)}: {slower}")
    for name, grown in sorted(grown_parts(one, winner), key=lambda part: -abs(part[1])):
        if abs(grown) > EQUAL * winner.predicted.step_time_s:
            found.append(f"{name} {'+' if grown > 0 else '−'}{ms(abs(grown))}")
    if one.fits:
        found.append(f"memory {gib(one.predicted.memory_gib)} against {gib(winner.predicted.memory_gib)}")
    return found + [str(problem) for problem in support.layout_problems(one.layout)]


# ------------------------------------------------------------------ two plans
def diff(a: Plan, b: Plan) -> list[tuple[str, Any, Any]]:
    """(field, in a, in b) of everything that differs: the job, the layout, the prediction."""
    found = []
    for part, before, after in (("job", _flat(a.job), _flat(b.job)), ("layout", a.layout.flat(), b.layout.flat()),
                                ("predicted", _flat(a.predicted), _flat(b.predicted))):
        found += [(f"{part}.{name}", before.get(name), after.get(name)) for name in dict.fromkeys((*before, *after))
                  if before.get(name) != after.get(name)]
    return found


def _flat(part: Any) -> dict[str, Any]:
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}


def as_rejected(explained: Explained) -> Rejected | None:
    """For machines: the layout with its reasons in one line."""
    if explained.priced is None:
        return None
    one = explained.priced
    return Rejected(layout=one.layout, fits=one.fits, step_time_s=one.predicted.step_time_s,
                    memory_gib=one.predicted.memory_gib, reason="; ".join(explained.reasons))
