"""Why one layout is slower than another, or too big: in words, from the parts of both prices.

Called for every loser that is shown. Knows prices, not how they were come by.
"""
from jobs.spec.parallel import AXES
from orchestrator.request import ParallelRequest
from orchestrator.planner.cost import Priced
from orchestrator.planner.plan import Prediction, Rejected
from orchestrator.planner.words import seconds

EQUAL = 5e-4  # times closer than this are called equal
SLOWED = "compute slowed by hidden communication"


def reject(one: Priced, winner: Priced) -> Rejected:
    """The loser with its main reason."""
    return _rejected(one, reason(one, winner))


def against_request(one: Priced, winner: Priced, *, request: ParallelRequest) -> Rejected:
    """A faster layout that the request rules out."""
    faster = 1 - one.predicted.step_time_s / winner.predicted.step_time_s
    against = [f"{name}={worded(asked)}" for name, asked in request.fixed().items()
               if _has(one, name) not in (request.options(name) or ()) and _has(one, name) != _tuple(asked)]
    return _rejected(one, f"{faster:.1%} faster, but the request fixes {', '.join(against)}")


def reason(loser: Priced, winner: Priced) -> str:
    """The main one."""
    mine, best = loser.predicted, winner.predicted
    if not loser.fits:
        return too_big_by(loser)
    slower = mine.step_time_s / best.step_time_s - 1
    if abs(slower) < EQUAL:
        return f"as fast within {EQUAL:.2%}, in {gib(mine.memory_gib)} instead of {gib(best.memory_gib)}"
    parts = grown_parts(loser, winner)
    (name, grown), (other, shrunk) = max(parts, key=lambda part: part[1]), min(parts, key=lambda part: part[1])
    # what grew is more than what was lost by much: say where the rest came back
    back = f", {other} −{seconds(-shrunk)}" if grown > 2 * (mine.step_time_s - best.step_time_s) else ""
    return f"{slower:.1%} slower: {name} +{seconds(grown)}{back}"


def grown_parts(loser: Priced, winner: Priced) -> list[tuple[str, float]]:
    """What each part of the step takes more of, in seconds; less is negative."""
    before = cost_parts(winner)
    return [(name, value - before.get(name, 0.0)) for name, value in cost_parts(loser).items()]


def cost_parts(priced: Priced) -> dict[str, float]:
    """Seconds of a step by what they are spent on."""
    predicted: Prediction = priced.predicted
    parts = {"compute": predicted.compute_s, "pipeline bubble": predicted.bubble_s,
             "optimizer": predicted.optimizer_s}
    for transfer in priced.transfers:
        name = f"exposed {transfer.axis} communication"
        parts[name] = parts.get(name, 0.0) + transfer.exposed_s
    told_s = sum(transfer.exposed_s for transfer in priced.transfers)
    parts[SLOWED] = max(0.0, predicted.exposed_communication_s - told_s)
    return parts


def too_big_by(one: Priced) -> str:
    mine = one.predicted
    return (f"too big by {gib(mine.memory_gib - mine.memory_limit_gib)} on pipeline rank {mine.memory_pp_rank}: "
            f"{gib(mine.memory_limit_gib)} are allowed")


def worded(value: object) -> str:
    """A wish as a user writes it."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def gib(value: float) -> str:
    return f"{value:.1f} GiB" if value >= 0.1 else f"{value * 1024:.1f} MiB"


def _rejected(one: Priced, why: str) -> Rejected:
    return Rejected(layout=one.layout, fits=one.fits, step_time_s=one.predicted.step_time_s,
                    memory_gib=one.predicted.memory_gib, reason=why)


def _has(one: Priced, name: str) -> object:
    layout = one.layout
    if name in AXES:
        return getattr(layout.dims, name)
    if name == "mesh_order":
        return layout.dims.order
    return layout.dims.world_size if name == "num_nodes" else getattr(layout, name)


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
