"""RunConfig: everything a user can say about a run, as frozen dataclasses, and the checks no type can make.

Read from YAML by orchestrator.load. The same names in YAML, code and logs.
"""
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from jobs.spec.hardware import GPUS
from jobs.spec.job import FaultSpec
from jobs.spec.load import Problem, suggest, to_dict
from jobs.spec.model import AttentionConvention, ModelSpec
from jobs.spec.parallel import Recompute, Schedule, ZeroStage
from jobs.spec.training import CheckpointSpec, DataSpec, TrainingSpec
from orchestrator.cluster import ClusterSpec

Degree = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelRequest:
    """What the user fixes of the layout; `auto` is left to the planner."""

    dp_replicate: Degree = "auto"
    dp_shard: Degree = "auto"
    cp: Degree = 1
    tp: Degree = "auto"
    pp: Degree = "auto"
    ep: Degree = 1
    microbatch_size: Degree = "auto"
    schedule: Schedule = "1f1b"
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    zero_stage: ZeroStage = 3
    virtual_stages: int = 1
    layers_per_unit: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySpec:
    headroom: float = 0.1  # share of GPU memory kept free for context, communication and fragmentation


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementSpec:
    allow_tp_across_nodes: bool = False
    spares: int = 0  # nodes of the allocation that wait instead of training


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpec:
    """When to restart, how often, and how long to wait for whom."""

    name: str = "default"
    max_restarts: int = 5  # without a newly committed checkpoint in between; progress resets the count
    user_error_repeats: int = 2  # the same exception at the same step so often is the user's bug
    backoff_s: float = 1.0  # before restart n without progress: backoff_s · 2^(n-1), at most backoff_max_s
    backoff_max_s: float = 300.0
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 15.0  # an agent silent for so long is lost
    agent_start_s: float = 120.0  # to connect after its start
    attempt_start_s: float = 300.0  # fork servers ready
    reconnect_s: float = 5.0  # to come back after a dropped connection
    settle_s: float = 1.0  # after the first failure, how long echoes and earlier roots may still arrive
    kill_grace_s: float = 2.0
    sample_s: float = 10.0  # between node health samples


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbSpec:
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"  # auto: WANDB_MODE; online with a key; else offline
    project: str = "orc"
    entity: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    run: str  # name of the run and of its directory
    root: str = "runs"  # where run directories lie; shared by all nodes
    model: ModelSpec | None = None
    cluster: ClusterSpec
    policy: PolicySpec = field(default_factory=PolicySpec)
    training: TrainingSpec | None = None
    data: DataSpec | None = None
    parallel: ParallelRequest = field(default_factory=ParallelRequest)
    memory: MemorySpec = field(default_factory=MemorySpec)
    placement: PlacementSpec = field(default_factory=PlacementSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    wandb: WandbSpec = field(default_factory=WandbSpec)
    mfu_convention: AttentionConvention = "causal"
    faults: list[FaultSpec] = field(default_factory=list)
    command: list[str] | None = None  # a torchrun-style trainer of the user's own

    @property
    def run_dir(self) -> Path:
        return Path(self.root).expanduser().resolve() / self.run


def to_yaml(config: RunConfig) -> str:
    """The resolved config, as one YAML without includes; load() reads it back to an equal RunConfig."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def check(config: RunConfig) -> list[Problem]:
    """What no single field's type can say. Layout rules are the planner's."""
    found = []

    def refuse(where: str, value: Any, message: str) -> None:
        found.append(Problem(where=where, value=value, message=message))

    for section in ("model", "training", "data"):
        if getattr(config, section) is None and config.command is None:
            refuse(section, None, "is missing; give it, or a `command:` of your own")
    if not config.run or "/" in config.run or config.run.startswith("."):
        refuse("run", config.run, "must be a plain name: it names the run's directory")
    if config.cluster.gpu not in GPUS:
        refuse("cluster.gpu", config.cluster.gpu, f"is unknown; {suggest(config.cluster.gpu, GPUS)}")
    for where, value in _must_be_positive(config):
        if value < 1:
            refuse(where, value, "must be at least 1")
    for where, value in _must_not_be_negative(config):
        if value < 0:
            refuse(where, value, "must not be negative")
    if not 0 <= config.memory.headroom < 1:
        refuse("memory.headroom", config.memory.headroom, "must be a share of the GPU's memory, 0 ≤ headroom < 1")
    if config.placement.spares >= config.cluster.num_nodes:
        refuse("placement.spares", config.placement.spares,
               f"leaves no node to train on; cluster.num_nodes is {config.cluster.num_nodes}")
    found += _check_data(config) + _check_faults(config)
    return found


def _must_be_positive(config: RunConfig) -> list[tuple[str, int]]:
    """(dotted path, value) of every count that cannot be zero."""
    counts = [(config.cluster, "cluster", ("num_nodes", "gpus_per_node")),
              (config.cluster.slurm, "cluster.slurm", ("time_min",)),
              (config.checkpoint, "checkpoint", ("interval_steps", "keep")),
              (config.model, "model", ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")),
              (config.training, "training", ("steps", "seq_len", "global_batch_size")),
              (config.policy, "policy", ("user_error_repeats",))]
    found = [(f"{prefix}.{name}", getattr(part, name)) for part, prefix, names in counts if part for name in names]
    degrees = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "microbatch_size")
    found += [(f"parallel.{name}", value) for name in degrees if (value := getattr(config.parallel, name)) != "auto"]
    return found


def _must_not_be_negative(config: RunConfig) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = [("placement.spares", config.placement.spares)]
    for prefix, part in (("policy", config.policy), ("training.optimizer", config.training and config.training.optimizer)):
        if part is not None:
            numbers = [f.name for f in dataclasses.fields(part) if isinstance(getattr(part, f.name), int | float)]
            found += [(f"{prefix}.{name}", getattr(part, name)) for name in numbers]
    return found


def _check_data(config: RunConfig) -> list[Problem]:
    if config.data is None or Path(config.data.path).expanduser().exists():
        return []
    return [Problem(where="data.path", value=config.data.path, message="does not exist; give a folder or a text file")]


def _check_faults(config: RunConfig) -> list[Problem]:
    world = (config.cluster.num_nodes - config.placement.spares) * config.cluster.gpus_per_node
    return [Problem(where=f"faults[{i}].rank", value=fault.rank, message=f"is outside the {world} ranks of the run")
            for i, fault in enumerate(config.faults) if not 0 <= fault.rank < world]
