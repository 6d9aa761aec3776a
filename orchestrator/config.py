"""RunConfig: one YAML, its included files and the command line's overrides, checked as a whole.

Called by the CLI. Every problem is reported at once, each with value, origin and remedy.
"""
import dataclasses
import difflib
import sysconfig
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jobs.spec.hardware import GPUS
from jobs.spec.job import FaultSpec
from jobs.spec.load import Problem, SpecError, suggest, to_dict
from jobs.spec.model import AttentionConvention, ModelSpec
from jobs.spec.parallel import Recompute, Schedule
from jobs.spec.training import CheckpointSpec, DataSpec, TrainingSpec
from orchestrator.cluster import ClusterSpec

Degree = int | Literal["auto"]
INCLUDED = {"model": "models", "cluster": "clusters", "policy": "policies"}  # section → folder of configs/
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


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
    reshard_after_forward: bool = True


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
