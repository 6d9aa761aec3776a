"""The order in which each pipeline rank computes its microbatches, for every schedule.

Read by the timeline (when does what run) and by peaks (how many microbatches are held). The orders are those of
torch.distributed.pipelining, which runs them; durations are not known here.

Sources: GPipe (arXiv:1811.06965), 1F1B and interleaving (arXiv:2104.04473), zero bubble and ZBV (arXiv:2401.10241),
DualPipeV (DeepSeek-V3, arXiv:2412.19437).
"""
import functools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from jobs.spec.parallel import V_SCHEDULES, Schedule

# F forward; B whole backward; I backward of the inputs alone, whose W, of the weights, follows later
Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One computation of one microbatch on one stage. A tuple, because searches make hundreds of thousands."""

    kind: Kind
    stage: int
    microbatch: int
    # DualPipe runs a forward and a backward together: neither has a result before both are done
    with_next: bool = False


def stages_of(schedule: Schedule, *, rank: int, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """Stages that one pipeline rank holds, in forward order."""
    if schedule in V_SCHEDULES:
        return rank, 2 * pp - 1 - rank
    return tuple(rank + chunk * pp for chunk in range(virtual_stages))


def rank_of(schedule: Schedule, *, stage: int, pp: int) -> int:
    """The pipeline rank that holds a stage."""
    if schedule in V_SCHEDULES:
        return min(stage, 2 * pp - 1 - stage)
    return stage % pp


@functools.lru_cache(maxsize=2048)  # for the timeline and for what is held
def order(schedule: Schedule, *, rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> Sequence[Action]:
    """What `rank` computes, in order."""
    if schedule == "zbv":
        actions = _zbv(rank, pp, max(num_microbatches, 2 * pp - 1))
        return [a for a in actions if a.microbatch < num_microbatches]
    if schedule == "dualpipev":
        return list(_dualpipev(rank, pp, num_microbatches))
    if schedule == "gpipe":
        stages = stages_of(schedule, rank=rank, pp=pp, virtual_stages=virtual_stages)
        return ([Action("F", stage, i) for stage in stages for i in range(num_microbatches)]
                + [Action("B", stage, i) for stage in reversed(stages) for i in range(num_microbatches)])
    return _one_forward_one_backward(rank, pp, virtual_stages, num_microbatches,
                                     split=schedule == "interleaved_zero_bubble")


def _one_forward_one_backward(rank: int, pp: int, chunks: int, m: int, *, split: bool) -> list[Action]:
    """1F1B, with several stages per rank interleaved, with the weights' backward split off.

    Warm-up forwards, then a forward and a backward in turn, then the backwards left. A rank runs a round of
    microbatches through one chunk, then through the next. Split, weights lag `rank` backwards behind, which keeps
    as many microbatches alive as 1F1B does (ZB-H1).
    """
    per_round = m // max(1, m // pp)
    total = chunks * m
    warmup = min(total, num_warmup(rank, pp, chunks, m, split=split))

    def nth(index: int, *, backward: bool) -> tuple[int, int]:
        chunk = index // per_round % chunks
        microbatch = index // (per_round * chunks) * per_round + index % per_round
        return rank + (chunks - 1 - chunk if backward else chunk) * pp, microbatch

    def backwards(index: int) -> Iterator[Action]:
        stage, microbatch = nth(index, backward=True)
        yield Action("I" if split else "B", stage, microbatch)
        if split and index >= rank:
            yield Action("W", *nth(index - rank, backward=True))

    actions = [Action("F", *nth(i, backward=False)) for i in range(warmup)]
    for i in range(total):
        if warmup + i < total:
            actions.append(Action("F", *nth(warmup + i, backward=False)))
        actions += backwards(i)
    if split:
        actions += [Action("W", *nth(i, backward=True)) for i in range(max(0, total - rank), total)]
    return actions


def num_warmup(rank: int, pp: int, chunks: int, m: int, *, split: bool) -> int:
    """Forwards before the first that a backward follows. Interleaved 1F1B needs two more per hop from the last rank,
    the others one."""
    per_round = m // max(1, m // pp)
    return (chunks - 1) * per_round + (2 if chunks > 1 and not split else 1) * (pp - 1 - rank)


class _Counter:
    """Appends actions, each on the next microbatch of its stage."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done: dict[tuple[str, int], int] = {}
        self.owed: list[tuple[int, int]] = []  # weights whose inputs' backward is done

    def add(self, kind: Kind, stage: int, *, with_next: bool = False) -> None:
        key = ("F" if kind == "F" else "I", stage)
        microbatch = self.done.get(key, 0)
        self.done[key] = microbatch + 1
        self.actions.append(Action(kind, stage, microbatch, with_next))
        if kind == "I":
            self.owed.append((stage, microbatch))

    def weights(self, stage: int | None = None) -> None:
        """The oldest owed backward of weights, of `stage` or of any."""
        found = next((owed for owed in self.owed if stage in (None, owed[0])), None)
        if found is not None:
            self.owed.remove(found)
            self.actions.append(Action("W", *found))

    def together(self, forward: int, backward: int) -> None:
        self.add("F", forward, with_next=True)
        self.add("B", backward)


def _zbv(rank: int, pp: int, m: int) -> list[Action]:
    """A rank's two stages are the ends of a V, so that the first ranks need not wait for the last."""
    first, second = rank, 2 * pp - 1 - rank
    c = _Counter()

    def whole(stage: int) -> None:
        c.add("I", stage)
        c.weights(stage)

    for _ in range(2 * (pp - rank) - 1):
        c.add("F", first)
    for _ in range(rank):
        c.add("F", second)
        c.add("F", first)
    for _ in range(pp - rank):
        c.add("F", second)
        whole(second)
    while c.done.get(("F", second), 0) < c.done.get(("F", first), 0) or c.done.get(("F", first), 0) < m:
        if c.done.get(("F", first), 0) < m:
            c.add("F", first)
        whole(first)
        c.add("F", second)
        whole(second)
    for _ in range(rank):
        c.add("I", first)
        c.add("I", second)
    for _ in range(pp - rank):
        c.add("I", first)
        c.weights(first)
    for stage in (second, first):
        while any(owed[0] == stage for owed in c.owed):
            c.weights(stage)
    return c.actions


def _dualpipev(rank: int, pp: int, m: int) -> list[Action]:
    """As ZBV's V, but in the steady state a forward of one end runs together with a backward of the other.
    Needs at least as many microbatches as stages."""
    first, second = rank, 2 * pp - 1 - rank
    later = pp - rank - 1  # ranks behind this one
    c = _Counter()
    for _ in range(2 * later):
        c.add("F", first)
    for _ in range(rank + 1):
        c.add("F", first)
        c.add("F", second)
    for _ in range(later):
        c.add("I", second)
        c.weights()
        c.add("F", second)
    for i in range(m - 2 * pp + rank + 1):
        if i == 0 and later == 0:  # apart: together they would only lengthen the first backward's wait
            c.add("F", first)
            c.add("B", second)
        else:
            c.together(first, second)
        c.together(second, first)
    for _ in range(later):
        c.add("B", second)
        c.together(second, first)
    half = (rank + 1) // 2
    for i in range(rank + 1):  # from the middle on, weights are put off into the drain
        c.add("I" if i > half or (i == half and rank % 2 == 1) else "B", second)
        c.add("I" if i >= half else "B", first)
    for _ in range(later):
        c.weights()
        c.add("I", first)
    while c.owed:
        c.weights()
    return c.actions
