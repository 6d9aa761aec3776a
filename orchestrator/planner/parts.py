"""The parts of the space of layouts, from coarse to fine, and the ledger of what was refused on the way.

Made by the enumeration, read by bounds and search. Data only, tuples because they are looked up by the million: what
is legal is the rules' to say.
"""
from typing import NamedTuple

from jobs.spec.load import Problem
from jobs.spec.parallel import CpMethod, Recompute, Schedule
from orchestrator.planner.plan import Refusal


class Shape(NamedTuple):
    """The degrees that decide how much a rank computes, and in which portions."""

    world_size: int
    tp: int
    cp: int
    pp: int
    ep: int
    dp: int
    microbatch_size: int
    num_microbatches: int  # the least that hold the batch


class Variant(NamedTuple):
    """How pipeline ranks share the layers and order their work."""

    schedule: Schedule
    virtual_stages: int
    num_microbatches: int
    layers_per_stage: tuple[int, ...]


class Pass(NamedTuple):
    """How one microbatch passes one cp × tp group of ranks."""

    tp: int
    cp: int
    ep: int
    microbatch_size: int
    recompute: Recompute
    sequence_parallel: bool
    cp_method: CpMethod
    splits_backward: bool = False  # as the zero-bubble schedules do


class Ledger:
    """Counts what each rule refused and keeps its first problem."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, Problem] = {}

    def refuse(self, rule: str, problems: list[Problem]) -> bool:
        if problems:
            self.counts[rule] = self.counts.get(rule, 0) + 1
            self.examples.setdefault(rule, problems[0])
        return bool(problems)

    def refusals(self) -> tuple[Refusal, ...]:
        return tuple(Refusal(rule=rule, count=count, example=str(self.examples[rule]))
                     for rule, count in sorted(self.counts.items(), key=lambda item: -item[1]))
