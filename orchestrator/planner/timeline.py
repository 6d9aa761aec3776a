"""When every pipeline rank computes what: the schedule's order with the durations of its stages.

Called by the cost model (how long a step takes, how much of it is bubble) and by the page, which draws it. Any
schedule, uneven stages, messages that take time. It knows durations, not where they come from.
"""
import functools
from dataclasses import dataclass
from typing import Literal

from jobs.spec.parallel import ZERO_BUBBLE_SCHEDULES, Schedule
from orchestrator.planner.schedules import Action, order, rank_of, stages_of

# Microbatches after which a step only repeats its steady state: rounds of the pipeline, and at least so many.
EXACT_ROUNDS, EXACT_MICROBATCHES = 3, 60


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

    def waiting_s(self, rank: int) -> float:
        """Bubbles between a rank's first and last computation: what remains of them where one step's fill may overlap
        the drain of the step before (zero bubble, arXiv:2401.10241)."""
        work = [span for span in self.ranks[rank] if span.kind != "bubble"]
        return work[-1].end_s - work[0].start_s - self.busy_s(rank)


def timeline(schedule: Schedule, *, stages: tuple[StageTimes, ...], virtual_stages: int,
             num_microbatches: int) -> Timeline:
    """Evaluate a schedule. `stages` has pp · virtual_stages entries in model order; the rank of a stage is that of
    schedules.rank_of. Each computation starts when its rank is free and its input has arrived."""
    pp = len(stages) // virtual_stages
    orders = [order(schedule, rank=rank, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches)
              for rank in range(pp)]
    spans = _run(orders, schedule=schedule, stages=stages, pp=pp, m=num_microbatches)
    total_s = max(one[-1].end_s for one in spans)
    return Timeline(ranks=tuple(tuple(_with_bubbles(one, total_s=total_s)) for one in spans), total_s=total_s)


def pipeline_s(schedule: Schedule, *, stages: tuple[StageTimes, ...], virtual_stages: int,
               num_microbatches: int) -> float:
    """Timeline.total_s, without the spans. Of very many microbatches two shorter steps are run and the difference, a
    whole number of rounds of the steady state, is continued."""
    pp = len(stages) // virtual_stages
    if len(stages) == 1:
        return num_microbatches * stages[0].work_s
    rounds = max(EXACT_ROUNDS, -(-EXACT_MICROBATCHES // pp))
    few = rounds * pp + num_microbatches % pp

    def run(m: int) -> float:
        return _finish_s(_flat_orders(schedule, pp, virtual_stages, m), schedule=schedule, stages=stages, pp=pp, m=m)

    if num_microbatches <= few + pp:
        return run(num_microbatches)
    short, longer = run(few), run(few + pp)
    continued = longer + (longer - short) / pp * (num_microbatches - few - pp)
    return max(continued, lower_bound_s(schedule, stages=stages, virtual_stages=virtual_stages,
                                        num_microbatches=num_microbatches))


def lower_bound_s(schedule: Schedule, *, stages: tuple[StageTimes, ...], virtual_stages: int,
                  num_microbatches: int) -> float:
    """Never above pipeline_s, and equal to it for even stages under gpipe, 1f1b and interleaved_1f1b without messages:
    a rank cannot begin before the first microbatch has come down to it, has its own work to do, and what it did last
    has to run back to the first stage."""
    pp = len(stages) // virtual_stages
    split = schedule in ZERO_BUBBLE_SCHEDULES
    bound, fill_s, drain_s = 0.0, 0.0, 0.0
    for rank in range(pp):
        own = [stages[s] for s in stages_of(schedule, rank=rank, pp=pp, virtual_stages=virtual_stages)]
        work_s = num_microbatches * sum(one.work_s for one in own)
        weights_s = num_microbatches * sum(one.weights_s for one in own) if split else 0.0
        bound = max(bound, fill_s + work_s, fill_s + work_s - weights_s + drain_s)
        first = stages[rank]
        fill_s += first.forward_s + first.send_s
        drain_s += first.backward_s - (first.weights_s if split else 0.0) + first.send_s
    return bound


def _run(orders: list[list[Action]], *, schedule: Schedule, stages: tuple[StageTimes, ...], pp: int,
         m: int) -> list[list[Span]]:
    """Walk all ranks, each as far as its inputs allow, until every order is done. Raises RuntimeError if ranks wait
    for each other, which no legal order does."""
    last = len(stages) - 1
    ranks = [rank_of(schedule, stage=stage, pp=pp) for stage in range(last + 1)]
    forward_end: list[list[float | None]] = [[None] * m for _ in stages]
    backward_end: list[list[float | None]] = [[None] * m for _ in stages]
    spans: list[list[Span]] = [[] for _ in range(pp)]
    position, clock = [0] * pp, [0.0] * pp

    def arrival(action: Action) -> float | None:
        """When what the action needs from elsewhere is there; None: not known yet."""
        stage, i = action.stage, action.microbatch
        if action.kind == "W":
            return 0.0
        forward = action.kind == "F"
        if stage == (0 if forward else last):
            return 0.0 if forward else forward_end[stage][i]
        source = stage - 1 if forward else stage + 1
        end = (forward_end if forward else backward_end)[source][i]
        if end is None or ranks[source] == ranks[stage]:
            return end
        return end + stages[min(source, stage)].send_s

    def record(rank: int, action: Action, start_s: float, done_s: float) -> None:
        end_s = start_s + _duration(action, stages[action.stage])
        kind = "B" if action.kind == "I" else action.kind
        spans[rank].append(Span(kind, action.microbatch, action.stage, start_s, end_s))
        if action.kind == "F":
            forward_end[action.stage][action.microbatch] = done_s
        elif action.kind != "W":
            backward_end[action.stage][action.microbatch] = done_s

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(orders):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                group = actions[position[rank]:position[rank] + 2] if action.with_next else [action]
                arrivals = [arrival(one) for one in group]
                if None in arrivals:
                    break
                start_s = max(clock[rank], *arrivals)
                done_s = start_s + sum(_duration(one, stages[one.stage]) for one in group)
                for one in group:
                    record(rank, one, start_s, done_s)
                    start_s += _duration(one, stages[one.stage])
                clock[rank], position[rank], moved = done_s, position[rank] + len(group), True
    if any(position[rank] < len(actions) for rank, actions in enumerate(orders)):
        raise RuntimeError(f"the {schedule} schedule of {m} microbatches on {pp} ranks waits for itself")
    return spans


@functools.lru_cache(maxsize=512)
def _flat_orders(schedule: Schedule, pp: int, virtual_stages: int, m: int) -> tuple[tuple[tuple, ...], ...]:
    """Orders for _finish_s: (kind, stage, microbatch, runs together with the next) of every action of every rank."""
    return tuple(tuple((action.kind, action.stage, action.microbatch, action.with_next) for action in
                       order(schedule, rank=rank, pp=pp, virtual_stages=virtual_stages, num_microbatches=m))
                 for rank in range(pp))


def _finish_s(orders: tuple[tuple[tuple, ...], ...], *, schedule: Schedule, stages: tuple[StageTimes, ...], pp: int,
              m: int) -> float:
    """The end of _run, for the search: the same walk over plain lists. A test holds the two together."""
    last = len(stages) - 1
    ranks = [rank_of(schedule, stage=stage, pp=pp) for stage in range(last + 1)]
    # message from a stage to the next, and to the one before: nothing where both are on one rank
    down = [0.0 if s < last and ranks[s] == ranks[s + 1] else one.send_s for s, one in enumerate(stages)]
    duration = {"F": [one.forward_s for one in stages], "B": [one.backward_s for one in stages],
                "I": [one.backward_s - one.weights_s for one in stages], "W": [one.weights_s for one in stages]}
    forward_end: list[list[float]] = [[-1.0] * m for _ in stages]
    backward_end: list[list[float]] = [[-1.0] * m for _ in stages]
    position, clock, waiting = [0] * pp, [0.0] * pp, list(range(pp))
    while waiting:
        progressed = False
        for rank in waiting:
            actions, at, now = orders[rank], position[rank], clock[rank]
            while at < len(actions):
                kind, stage, i, with_next = actions[at]
                if kind == "W":
                    now += duration["W"][stage]
                    at += 1
                    continue
                if kind == "F":
                    ready = 0.0 if stage == 0 else forward_end[stage - 1][i]
                    lag = 0.0 if stage == 0 else down[stage - 1]
                else:
                    ready = (forward_end[last] if stage == last else backward_end[stage + 1])[i]
                    lag = 0.0 if stage == last else down[stage]
                if ready < 0:
                    break
                start = max(now, ready + lag)
                if with_next:
                    _, other, j, _ = actions[at + 1]
                    ready = (forward_end[last] if other == last else backward_end[other + 1])[j]
                    if ready < 0:
                        break
                    start = max(start, ready + (0.0 if other == last else down[other]))
                    now = start + duration["F"][stage] + duration["B"][other]
                    forward_end[stage][i] = backward_end[other][j] = now
                    at += 2
                    continue
                now = start + duration[kind][stage]
                (forward_end if kind == "F" else backward_end)[stage][i] = now
                at += 1
            progressed |= at != position[rank]
            position[rank], clock[rank] = at, now
        waiting = [rank for rank in waiting if position[rank] < len(orders[rank])]
        if waiting and not progressed:
            raise RuntimeError(f"the {schedule} schedule of {m} microbatches on {pp} ranks waits for itself")
    return max(clock)


def _duration(action: Action, times: StageTimes) -> float:
    if action.kind == "F":
        return times.forward_s
    if action.kind == "B":
        return times.backward_s
    return times.weights_s if action.kind == "W" else times.backward_s - times.weights_s


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
