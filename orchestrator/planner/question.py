"""What the planner is asked: model, training, cluster and wishes, as every rule and every search sees them.

Made by the planner's entry, read by rules, enumeration and explanations. Data only.
"""
import math
from dataclasses import dataclass

from jobs.spec import support
from jobs.spec.load import Problem
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout
from jobs.spec.training import TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.config import RunConfig
from orchestrator.request import ParallelRequest

WORLD_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")  # their degrees multiply to the ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """All that a rule may look at."""

    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    request: ParallelRequest
    num_nodes: int  # that may train: spares are not among them
    allow_tp_across_nodes: bool
    trainable: bool = False  # only what this version's trainer runs

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.cluster.gpus_per_node

    def untrained(self, layout: Layout) -> list[Problem]:
        """Why this version's trainer does not run the layout; empty if it does."""
        found = support.layout_problems(layout)
        if self.training.compile:
            found += support.compile_problems(layout)
        return found


def question_of(config: RunConfig, *, trainable: bool) -> Question:
    """Of a run that has a model and a training. Spares do not train."""
    return Question(model=config.model, training=config.training, cluster=config.cluster, request=config.parallel,
                    num_nodes=config.cluster.num_nodes - config.placement.spares,
                    allow_tp_across_nodes=config.placement.allow_tp_across_nodes, trainable=trainable)


def divisors(n: int) -> list[int]:
    """Ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def listed(values: list[int]) -> str:
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")
