"""A schedule as a list of computations, each behind what it waits for: listed once, run with any durations.

Used by the timeline (when does what end) and by the search. The way that took longest through a schedule once is a
part of every step of that schedule, so it bounds the step from below whatever the durations are, and mostly it is the
longest again: then nothing needs to be run. Orders and durations are known here, not where they come from.
"""
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jobs.spec.parallel import Schedule
from orchestrator.planner.schedules import Action, Kind, order, rank_of

# Durations of stage s have the numbers WIDTH·s + these; behind those of all stages comes a zero.
KINDS = {"F": 0, "B": 1, "I": 2, "W": 3}
SEND = 4
WIDTH = 5

Way = tuple[tuple[int, int], ...]  # how often each duration, by its number, occurs one after another


@dataclass(frozen=True, slots=True)
class Program:
    """Computations in an order in which each stands behind what it waits for; number 0 is the start of the step."""

    before: tuple[int, ...]  # by number: what the rank did before
    needed: tuple[int, ...]  # whose result it needs
    message: tuple[int, ...]  # the duration that this result is on its way
    duration: tuple[int, ...]  # its own
    microbatch: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]  # what each rank computes, in order

    def ends(self, durations: Sequence[float]) -> list[float]:
        """When each computation ends."""
        found = [0.0]
        append = found.append
        steps = zip(self.before, self.needed, self.message, self.duration)
        next(steps)
        for before, needed, message, duration in steps:
            free, ready = found[before], found[needed] + durations[message]
            append((ready if ready > free else free) + durations[duration])
        return found

    def last(self, ends: Sequence[float]) -> int:
        return max((rank[-1] for rank in self.ranks), key=ends.__getitem__)

    def longest(self, ends: Sequence[float], durations: Sequence[float]) -> list[int]:
        """The computations that decided when the step ends, last first."""
        now, way = self.last(ends), []
        while now:
            way.append(now)
            waited = ends[self.needed[now]] + durations[self.message[now]] > ends[self.before[now]]
            now = self.needed[now] if waited else self.before[now]
        return way

    def counted(self, way: Sequence[int], *, start: int = 0, stop: int | None = None) -> Counter:
        """How often each duration occurs on the way, or on this part of it, with the messages that it waited for."""
        found: Counter = Counter()
        for now, source in list(zip(way, [*way[1:], 0]))[start:stop]:
            found[self.duration[now]] += 1
            if source != self.before[now]:
                found[self.message[now]] += 1
        return found

    def repeated(self, way: Sequence[int], *, microbatches: int) -> tuple[int, int] | None:
        """Two positions on the way at which the same is computed, the first `microbatches` later: what lies between
        them happens again and again in a longer step. The pair next to the middle of the step, if there is any."""
        where = {(self.duration[now], self.microbatch[now]): at for at, now in enumerate(way)}
        middle = (max(self.microbatch) - microbatches) / 2
        pairs = [(abs(i - middle), where[kind, i + microbatches], at) for (kind, i), at in where.items()
                 if (kind, i + microbatches) in where]
        return min(pairs)[1:] if pairs else None


@functools.lru_cache(maxsize=64)
def listed(schedule: Schedule, *, pp: int, virtual_stages: int, num_microbatches: int) -> Program:
    """Walk all ranks, each as far as its inputs are listed, until every order is done. Raises RuntimeError if ranks
    wait for each other, which no legal order does."""
    listing = _Listing(schedule, pp=pp, num_stages=pp * virtual_stages, num_microbatches=num_microbatches)
    orders = [order(schedule, rank=rank, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches)
              for rank in range(pp)]
    position, waiting = [0] * pp, list(range(pp))
    while waiting:
        before = list(position)
        for rank in waiting:
            position[rank] = listing.walk(rank, orders[rank], position[rank])
        if position == before:
            raise RuntimeError(f"the {schedule} schedule of {num_microbatches} microbatches on {pp} ranks waits for "
                               "itself")
        # back and forth: forwards come down the ranks, backwards up
        waiting = [rank for rank in reversed(waiting) if position[rank] < len(orders[rank])]
    return Program(*zip(*listing.rows), tuple(map(tuple, listing.ranks)))


class _Listing:
    """Lists computations as their inputs become known."""

    def __init__(self, schedule: Schedule, *, pp: int, num_stages: int, num_microbatches: int) -> None:
        self.none, top = WIDTH * num_stages, num_stages - 1
        homes = [rank_of(schedule, stage=stage, pp=pp) for stage in range(num_stages)]
        # the message from a stage to the next, and back: none where both are on one rank
        self.down = [WIDTH * s + SEND if s < top and homes[s] != homes[s + 1] else self.none for s in range(num_stages)]
        # numbers by microbatch; 0: not listed yet. Forwards and backwards of each stage
        self.forward = [[0] * num_microbatches for _ in range(num_stages)]
        self.backward = [[0] * num_microbatches for _ in range(num_stages)] + [self.forward[top]]
        self.rows = [(0, 0, 0, 0, 0)]  # as the columns of Program
        self.ranks: list[list[int]] = [[] for _ in range(pp)]

    def walk(self, rank: int, actions: list[Action], at: int) -> int:
        """As far as inputs are listed. Returns where it stopped."""
        add, source, forward, backward = self._add, self._source, self.forward, self.backward
        while at < len(actions):
            kind, stage, microbatch, with_next = actions[at]
            needed, message = source(kind, stage, microbatch)
            if needed < 0:
                break
            if with_next:  # both begin when both have their inputs, and have no result before both are done
                second, of, which, _ = actions[at + 1]
                other = source(second, of, which)
                if other[0] < 0:
                    break
                add(rank, needed, message, self.none, microbatch)
                add(rank, *other, WIDTH * stage + KINDS[kind], microbatch)
                number = add(rank, 0, self.none, WIDTH * of + KINDS[second], which)
                forward[stage][microbatch] = backward[of][which] = number
                at += 2
                continue
            number = add(rank, needed, message, WIDTH * stage + KINDS[kind], microbatch)
            if kind == "F":
                forward[stage][microbatch] = number
            elif kind != "W":
                backward[stage][microbatch] = number
            at += 1
        return at

    def _source(self, kind: Kind, stage: int, microbatch: int) -> tuple[int, int]:
        """Whose result a computation needs, −1 if that is not listed yet, and the message that it comes in."""
        if kind == "W" or (kind == "F" and stage == 0):
            return 0, self.none
        if kind == "F":
            return self.forward[stage - 1][microbatch] or -1, self.down[stage - 1]
        return self.backward[stage + 1][microbatch] or -1, self.down[stage]

    def _add(self, rank: int, needed: int, message: int, duration: int, microbatch: int) -> int:
        number, own = len(self.rows), self.ranks[rank]
        self.rows.append((own[-1] if own else 0, needed, message, duration, microbatch))
        own.append(number)
        return number
