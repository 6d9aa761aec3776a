"""How many microbatches a pipeline rank holds when it needs most memory, for every schedule: in closed form where that
is known, else by walking the order.

Read by memory, and by the search's bounds. What a microbatch holds is said elsewhere.
"""
import functools

from jobs.spec.parallel import V_SCHEDULES, Schedule
from orchestrator.planner.schedules import Action, num_warmup, order, stages_of

Counts = tuple[int, ...]  # of microbatches, per stage of stages_of


def peak_held(schedule: Schedule, *, rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> Counts:
    """Microbatches whose activations a rank holds at its peak. The peak is that of the sum over its stages; a backward
    that is split holds them until its weights are done."""
    return peaks(schedule, rank=rank, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches)[0][0]


@functools.lru_cache(maxsize=4096)
def peaks(schedule: Schedule, *, rank: int, pp: int, virtual_stages: int, num_microbatches: int,
          split: bool = True) -> tuple[tuple[Counts, Counts], ...]:
    """Moments at one of which a rank needs most: microbatches held; and of those the ones that wait with their outputs'
    gradients for the second half of a backward, beside the one that is at work. First the moment when most are held.
    `split`: the schedules that cut backwards in two do so."""
    m, none_wait = num_microbatches, (0,) * virtual_stages
    if schedule == "gpipe":
        return ((m,) * virtual_stages, none_wait),
    if schedule in V_SCHEDULES and m >= 2 * pp:
        most = (2 * pp - rank - (schedule == "zbv"), rank + 1), none_wait
        # zbv drains with first halves alone, until the last rank has none left
        return (most, ((pp, rank), (rank, rank))) if schedule == "zbv" and split else (most,)
    if schedule == "zbv":  # too few to fill it
        return _peaks_of(order(schedule, rank=rank, pp=pp, virtual_stages=2, num_microbatches=m),
                         stages_of(schedule, rank=rank, pp=pp, virtual_stages=2), split=split)
    # all forwards up to the first backward; of a split one up to the first whose weights are done, `rank` later
    zero_bubble = schedule == "interleaved_zero_bubble"
    waiting = rank if zero_bubble and split else 0
    ahead = min(virtual_stages * m, num_warmup(rank, pp, virtual_stages, m, split=zero_bubble) + 1 + waiting)
    per_round = m // max(1, m // pp)
    rounds, rest = divmod(ahead, per_round * virtual_stages)
    held = tuple(rounds * per_round + min(max(rest - chunk * per_round, 0), per_round)
                 for chunk in range(virtual_stages))
    return (held, (*none_wait[1:], min(waiting, m - 1))),


def _peaks_of(actions: list[Action], stages: Counts, *, split: bool) -> tuple[tuple[Counts, Counts], ...]:
    """When most are held, and when most are held and wait together."""
    held, waiting = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    found = [((), ())] * 2
    for action in actions:
        held[action.stage] += action.kind == "F"
        waiting[action.stage] -= split and action.kind == "W"
        now = tuple(held.values()), tuple(waiting.values())
        if action.kind != "I":  # behind it comes another that says more
            found = [max(best, now, key=size) for best, size in zip(found, (_held, _held_and_waiting))]
        held[action.stage] -= action.kind in ("B", "W" if split else "I")
        waiting[action.stage] += split and action.kind == "I"
    return tuple(found)


def _held(moment: tuple[Counts, Counts]) -> int:
    return sum(moment[0])


def _held_and_waiting(moment: tuple[Counts, Counts]) -> int:
    return sum(moment[0]) + sum(moment[1])
