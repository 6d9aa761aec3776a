"""What a plan would be otherwise: any layout beside the winner, two plans side by side.

Called by `orc plan` for `--explain` and `--diff`. A layout that was asked for is the best of a search of the same
question with these wishes.
"""
import dataclasses
from dataclasses import dataclass
from typing import Any

from jobs.spec import support
from jobs.spec.load import Problem, SpecError, suggest
from orchestrator.request import CHOICES, COUNTS, ParallelRequest
from orchestrator.planner.cost import Priced
from orchestrator.planner.plan import Plan
from orchestrator.planner.question import Question
from orchestrator.planner.reasons import EQUAL, gib, grown_parts, too_big_by
from orchestrator.planner.refusals import question_problems
from orchestrator.planner.search import Search
from orchestrator.planner.words import seconds

LONGEST_COUNT = 12  # digits of any degree or size that is worth a word


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """One layout beside the winner."""

    asked: str
    priced: Priced | None  # the best of what was asked for; None: there is none, even with rules of placement lifted
    reasons: tuple[str, ...]  # every reason it lost; the rules it breaks first


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
        if name in wishes:
            problems.append(Problem(where="--explain", value=item, message=f"asks a second time for {name}; give one "
                                    "value"))
        elif parsed is None:
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
        return int(value) if value.isdecimal() and len(value) <= LONGEST_COUNT else None
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
        return Explained(asked=asked, priced=None, reasons=tuple(broken or map(str, remaining)))
    search = Search(lifted, headroom=headroom, convention=winner.predicted.mfu_convention)
    best = next(search.ranked(), None) or search.smallest()
    if best is None:
        broken += [str(problem) for problem in search.space.ledger.examples.values()]
        return Explained(asked=asked, priced=None,
                         reasons=tuple(broken or ["no degrees multiply to the ranks as asked"]))
    return Explained(asked=asked, priced=best, reasons=(*broken, *reasons(best, winner)))


def reasons(one: Priced, winner: Priced) -> list[str]:
    """All of them: memory, then each part of the step that grew, then what the trainer does not run."""
    found = [] if one.fits else [too_big_by(one)]
    change = one.predicted.step_time_s / winner.predicted.step_time_s - 1
    if abs(change) < EQUAL and one.layout == winner.layout:
        return [*found, "it is the winner"]
    slower = f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}"
    found.append(f"step {seconds(one.predicted.step_time_s)} against {seconds(winner.predicted.step_time_s)}: {slower}")
    for name, grown in sorted(grown_parts(one, winner), key=lambda part: -abs(part[1])):
        if abs(grown) > EQUAL * winner.predicted.step_time_s:
            found.append(f"{name} {'+' if grown > 0 else '−'}{seconds(abs(grown))}")
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
