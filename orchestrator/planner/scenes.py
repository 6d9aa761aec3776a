"""The backward passes during one of which a pipeline rank may need most: what it holds when they begin.

Called by memory, for every candidate. Orders and peaks are those of schedules; bytes are not known here.
"""
import functools
from collections.abc import Iterator
from typing import NamedTuple

from jobs.spec.parallel import V_SCHEDULES, ZERO_BUBBLE_SCHEDULES, Layout, Schedule
from orchestrator.planner.peaks import Counts, peaks
from orchestrator.planner.schedules import Action, num_warmup, order, stages_of


class Scene(NamedTuple):
    """A backward pass through one stage. Counts are by stage of the rank."""

    at: int  # which of the rank's stages
    held: Counts  # microbatches whose activations are there, this pass's among them
    waits: Counts  # of these the others that wait with their outputs' gradients for the second half of a backward
    begun: tuple[bool, ...]  # stages that a backward has gone through before: their gradients exist
    is_split: bool = False  # it is the second half of a backward
    is_last: bool = False  # of its stage in this step


def scenes(layout: Layout, rank: int) -> tuple[Scene, ...]:
    """Of pipeline rank `rank`, with the last pass of each stage; the first holds most."""
    if layout.dims.pp == 1:
        return (Scene(0, (1,), (0,), (layout.num_microbatches > 1,), is_last=True),)
    return _scenes(layout.schedule, rank=rank, pp=layout.dims.pp, virtual_stages=layout.virtual_stages,
                   num_microbatches=layout.num_microbatches,
                   split=layout.schedule in ZERO_BUBBLE_SCHEDULES and layout.recompute == "none")


@functools.lru_cache(maxsize=4096)
def _scenes(schedule: Schedule, *, rank: int, pp: int, virtual_stages: int, num_microbatches: int,
            split: bool) -> tuple[Scene, ...]:
    options = {"rank": rank, "pp": pp, "virtual_stages": virtual_stages, "num_microbatches": num_microbatches}
    if _is_steady(schedule, **options):
        every, none = (True,) * virtual_stages, (0,) * virtual_stages
        most = tuple(Scene(at, held, waits, every, split)
                     for held, waits in peaks(schedule, split=split, **options) for at in range(virtual_stages)
                     if held[at])
        return most + tuple(Scene(at, none[:at] + (1,) + none[at + 1:], none, every, split, True)
                            for at in range(virtual_stages))
    stages = stages_of(schedule, rank=rank, pp=pp, virtual_stages=virtual_stages)
    ends, kinds = (0, virtual_stages - 1), {}
    for scene in _walked(order(schedule, **options), stages, split=split, num_microbatches=num_microbatches):
        kinds.setdefault((scene.at if scene.at in ends else None, scene.is_last), []).append(scene)
    # while gradients grow stage by stage, what is held shrinks: the one, the other, or where both together are most
    worst = {max(alike, key=size) for alike in kinds.values() for size in (
        lambda one: (_size(one), sum(one.begun)), lambda one: (sum(one.begun), _size(one)),
        lambda one: _size(one) / (num_microbatches * virtual_stages) + sum(one.begun) / virtual_stages)}
    return tuple(sorted(worst, key=_size, reverse=True))


def _size(scene: Scene) -> int:
    return sum(scene.held) + sum(scene.waits)


def _is_steady(schedule: Schedule, *, rank: int, pp: int, virtual_stages: int, num_microbatches: int) -> bool:
    """Whether as many are held as ever when all stages have gradients already. With fewer microbatches the order is
    walked through."""
    if schedule == "gpipe":
        return False
    if schedule in V_SCHEDULES:
        return num_microbatches >= 3 * pp
    ahead = num_warmup(rank, pp, virtual_stages, num_microbatches, split=schedule in ZERO_BUBBLE_SCHEDULES) + 1
    per_round = num_microbatches // max(1, num_microbatches // pp)
    return virtual_stages * num_microbatches - ahead >= virtual_stages * per_round


def _walked(actions: list[Action], stages: Counts, *, split: bool, num_microbatches: int) -> Iterator[Scene]:
    place = {stage: i for i, stage in enumerate(stages)}
    held, waits, done = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    for action in actions:
        at = place[action.stage]
        if action.kind == "F":
            held[at] += 1
        elif action.kind == "I" and split:
            waits[at] += 1
        elif action.kind != "W" or split:
            halved = action.kind == "W"
            waits[at] -= halved
            yield Scene(at, tuple(held), tuple(waits), tuple(passes > 0 for passes in done), halved,
                        done[at] == num_microbatches - 1)
            held[at], done[at] = held[at] - 1, done[at] + 1
