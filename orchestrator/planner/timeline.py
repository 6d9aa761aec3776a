"""When every pipeline rank computes what: the schedule's order with the durations of its stages.

Called by the cost model (how long a step takes, how much of it is bubble) and by the page, which draws it. Any
schedule, uneven stages, messages that take time. It knows durations, not where they come from.
"""
import functools
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from jobs.spec.parallel import ZERO_BUBBLE_SCHEDULES, Schedule
from orchestrator.planner.schedules import stages_of
from orchestrator.planner.walk import WIDTH, Program, Way, listed

# Microbatches after which a step only repeats its steady state: rounds of the pipeline, and at least so many.
EXACT_ROUNDS, EXACT_MICROBATCHES = 3, 60
SPANS: tuple[Literal["F", "B", "W"], ...] = ("F", "B", "B", "W")  # by walk's kinds; of a split backward the first part


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one microbatch on one stage."""

    forward_s: float
    backward_s: float  # whole: inputs and weights, recomputation included
    weights_s: float  # the part of backward_s that only the weights' gradients need
    send_s: float = 0.0  # of one message to a neighbouring stage on another rank

    @property
    def work_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Span:
    """What one rank does from start_s to end_s. `microbatch` and `stage` are −1 for a bubble. A backward whose weights
    come later is a B followed by its W."""

    kind: Literal["F", "B", "W", "bubble"]
    microbatch: int
    stage: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    ranks: tuple[tuple[Span, ...], ...]  # one entry per pipeline rank, gaps filled with bubbles
    total_s: float

    def busy_s(self, rank: int) -> float:
        return sum(span.end_s - span.start_s for span in self.ranks[rank] if span.kind != "bubble")

    def bubble_s(self, rank: int) -> float:
        return self.total_s - self.busy_s(rank)



def timeline(schedule: Schedule, *, stages: tuple[StageTimes, ...], virtual_stages: int,
             num_microbatches: int) -> Timeline:
    """Evaluate a schedule. `stages` has pp · virtual_stages entries in model order; the rank of a stage is that of
    schedules.rank_of. Each computation starts when its rank is free and its input has arrived."""
    program = listed(schedule, pp=len(stages) // virtual_stages, virtual_stages=virtual_stages,
                     num_microbatches=num_microbatches)
    durations = durations_of(stages)
    ends = program.ends(durations)
    total_s = ends[program.last(ends)]
    ranks = []
    for rank in program.ranks:
        spans = []
        for number in rank:
            stage, kind = divmod(program.duration[number], WIDTH)
            if stage < len(stages):  # else it only waits
                spans.append(Span(SPANS[kind], program.microbatch[number], stage,
                                  ends[number] - durations[program.duration[number]], ends[number]))
        ranks.append(tuple(_with_bubbles(spans, total_s=total_s)))
    return Timeline(ranks=tuple(ranks), total_s=total_s)


def pipeline_s(schedule: Schedule, *, stages: tuple[StageTimes, ...], virtual_stages: int,
               num_microbatches: int) -> float:
    """Timeline.total_s, without the spans. Of very many microbatches two shorter steps are run and the difference, a
    whole number of rounds of the steady state, is continued."""
    return pipeline_way(schedule, stages=stages, virtual_stages=virtual_stages, num_microbatches=num_microbatches)[0]


def pipeline_way(schedule: Schedule, *, stages: tuple[StageTimes, ...], virtual_stages: int,
                 num_microbatches: int) -> tuple[float, Way]:
    """As pipeline_s, with the way that took longest: `way_s` of it, with any other stages, bounds their pipeline_s
    from below."""
    pp, m = len(stages) // virtual_stages, num_microbatches
    if len(stages) == 1:
        return m * stages[0].work_s, ((0, m), (1, m))
    rounds = max(EXACT_ROUNDS, -(-EXACT_MICROBATCHES // pp))
    few = rounds * pp + m % pp
    durations = durations_of(stages)

    def run(count: int) -> tuple[Program, list[float], float]:
        program = listed(schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=count)
        ends = program.ends(durations)
        return program, ends, ends[program.last(ends)]

    if m <= few + pp:
        program, ends, total_s = run(m)
        return total_s, tuple(program.counted(program.longest(ends, durations)).items())
    short_s = run(few)[2]
    program, ends, longer_s = run(few + pp)
    left = (m - few - pp) // pp  # rounds
    way = program.longest(ends, durations)
    counts = program.counted(way)
    if again := program.repeated(way, microbatches=pp):
        counts += Counter({number: left * count for number, count in
                           program.counted(way, start=again[0], stop=again[1]).items()})
    found = tuple(counts.items())
    bound_s = lower_bound_s(schedule, stages=stages, virtual_stages=virtual_stages, num_microbatches=m)
    return max(longer_s + (longer_s - short_s) * left, way_s(found, durations), bound_s), found


def durations_of(stages: tuple[StageTimes, ...]) -> list[float]:
    """By walk's numbers."""
    found = []
    for one in stages:
        found += (one.forward_s, one.backward_s, one.backward_s - one.weights_s, one.weights_s, one.send_s)
    return [*found, 0.0]


def way_s(way: Way, durations: list[float]) -> float:
    return sum([count * durations[number] for number, count in way])


def lower_bound_s(schedule: Schedule, *, stages: tuple[StageTimes, ...], virtual_stages: int,
                  num_microbatches: int) -> float:
    """Never above pipeline_s, and equal to it for even stages under gpipe, 1f1b and interleaved_1f1b without messages:
    a rank cannot begin before the first microbatch has come down to it, has its own work to do, and what it did last
    has to run back to the first stage."""
    pp = len(stages) // virtual_stages
    split = schedule in ZERO_BUBBLE_SCHEDULES
    work = [num_microbatches * (one.forward_s + one.backward_s) for one in stages]
    later = [num_microbatches * one.weights_s if split else 0.0 for one in stages]
    bound, fill_s, drain_s = 0.0, 0.0, 0.0
    for first, own in zip(stages, _stages_by_rank(schedule, pp, virtual_stages)):
        work_s = sum([work[s] for s in own])
        bound = max(bound, fill_s + work_s, fill_s + work_s - sum([later[s] for s in own]) + drain_s)
        fill_s += first.forward_s + first.send_s
        drain_s += first.backward_s - (first.weights_s if split else 0.0) + first.send_s
    return bound


@functools.lru_cache(maxsize=4096)  # asked for every variant
def _stages_by_rank(schedule: Schedule, pp: int, virtual_stages: int) -> tuple[tuple[int, ...], ...]:
    return tuple(stages_of(schedule, rank=rank, pp=pp, virtual_stages=virtual_stages) for rank in range(pp))


def _with_bubbles(spans: list[Span], *, total_s: float) -> list[Span]:
    filled: list[Span] = []
    now = 0.0
    for span in spans:
        if span.start_s > now:
            filled.append(Span("bubble", -1, -1, now, span.start_s))
        filled.append(span)
        now = span.end_s
    if total_s > now:
        filled.append(Span("bubble", -1, -1, now, total_s))
    return filled
