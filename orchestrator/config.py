"""RunConfig: everything a user can say about a run, as frozen dataclasses, and the checks no type can make.

Read from YAML by orchestrator.load. The same names in YAML, code and logs.
"""
import dataclasses
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from jobs.spec.hardware import GPUS
from jobs.spec.job import FaultSpec
from jobs.spec.load import Problem, suggest, to_dict
from jobs.spec.model import AttentionConvention, ModelSpec
from jobs.spec.own_model import OwnModel
from jobs.spec.sources import all_data
from jobs.spec.training import CheckpointSpec, DataSpec, TrainingSpec
from orchestrator.checks import number_problems
from orchestrator.cluster import ClusterSpec
from orchestrator.datasets import data_problems
from orchestrator.request import ParallelRequest, request_value_problems

_RUN = re.compile(r"[^\W_][\w.-]{0,99}")


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
    hang_s: float = 900.0  # ranks that report what they do have neither reported nor written a line for so long
    silence_s: float | None = None  # the same of ranks that report nothing, whose silence alone proves nothing
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
    model: ModelSpec | OwnModel | None = None  # one with an `entrypoint` is the user's own
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
    # a torchrun-style trainer of the user's own: a program, or package.module:function, called in ranks that have torch
    command: list[str] | None = None
    entrypoint: str | None = None
    arguments: list[str] = field(default_factory=list)  # of the entrypoint: sys.argv[1:]
    workdir: str | None = None  # where the user's own code runs and is imported from; None: where orc was called

    @property
    def lays_itself_out(self) -> bool:
        """The trainer is the user's own: nothing is planned, and what it does is known from its reports alone."""
        return self.command is not None or self.entrypoint is not None

    @property
    def run_dir(self) -> Path:
        return Path(self.root) / self.run


def to_yaml(config: RunConfig) -> str:
    """The resolved config, as one YAML without includes; load() reads it back to an equal RunConfig."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def check(config: RunConfig) -> list[Problem]:
    """What no single field's type can say. Layout rules are the planner's."""
    found = []

    def refuse(where: str, value: Any, message: str) -> None:
        found.append(Problem(where=where, value=value, message=message))

    for section in ("model", "training", "data"):
        if getattr(config, section) is None and not config.lays_itself_out:
            refuse(section, None, "is missing; give it, or a `command:` or `entrypoint:` of your own")
    if not _RUN.fullmatch(config.run):
        refuse("run", config.run, "must be a plain name of letters, digits, - _ and . (100 at most): it names the "
               "run's directory")
    if config.cluster.gpu not in GPUS:
        refuse("cluster.gpu", config.cluster.gpu, f"is unknown; {suggest(config.cluster.gpu, GPUS)}")
    domain, per_node = config.cluster.nvlink_domain, config.cluster.gpus_per_node
    if domain is not None and domain > 0 and per_node > 0 and domain % per_node:
        refuse("cluster.nvlink_domain", domain, f"is no multiple of cluster.gpus_per_node={per_node}; the links join "
               f"whole nodes: try {-(-domain // per_node) * per_node}")
    found += number_problems(dataclasses.replace(config, parallel=ParallelRequest()))
    if config.placement.spares >= config.cluster.num_nodes:
        refuse("placement.spares", config.placement.spares,
               f"leaves no node to train on; cluster.num_nodes is {config.cluster.num_nodes}")
    found += request_value_problems(config.parallel) + _check_data(config) + _check_faults(config)
    found += _check_weights(config) + _check_own_code(config)
    return found


def _check_own_code(config: RunConfig) -> list[Problem]:
    """A trainer or a model of the user's own. What only its code can tell is found when it is run or measured."""
    found = []

    def refuse(where: str, value: Any, message: str) -> None:
        found.append(Problem(where=where, value=value, message=message))

    command, own_model = config.command, isinstance(config.model, OwnModel)
    if command is not None and not command:
        refuse("command", command, "names no program")
    if command and config.cluster.kind == "local" and shutil.which(_program(config)) is None:
        refuse("command", command[0], "is no program that can be run here")
    if command is not None and config.entrypoint is not None:
        refuse("entrypoint", config.entrypoint, "and `command:` are two trainers; leave one")
    for where, value in (("entrypoint", config.entrypoint),
                         ("model.entrypoint", own_model and config.model.entrypoint)):
        if value and not re.fullmatch(r"[\w.]+:[\w.]+", value):
            refuse(where, value, "is not package.module:function")
    if config.arguments and config.entrypoint is None:
        refuse("arguments", config.arguments, "are an `entrypoint:`'s; a `command:` has its own in its list")
    if config.lays_itself_out and any(fault.kind == "nan" for fault in config.faults):
        refuse("faults", "nan", "damages weights, which the built-in trainer alone can; choose another kind")
    if config.lays_itself_out and config.training and config.training.validation:
        refuse("training.validation", config.training.validation.interval_steps, "is what the built-in trainer does; a "
               "trainer of your own validates itself")
    if config.workdir is not None and not os.path.isdir(config.workdir):
        refuse("workdir", config.workdir, "is no directory; give the one that your code is imported from")
    if own_model and config.training and config.training.initial_weights:
        refuse("training.initial_weights", config.training.initial_weights, "is for the decoders that orc builds; an "
               "own model reads weights in its `build`")
    for at, data in all_data(config.data, config.training).items():
        if own_model and data.document_mask:
            refuse(f"{at}.document_mask", True, "is for the decoders that orc builds; an own model is given tokens "
                   "alone")
    return found


def _program(config: RunConfig) -> str:
    """As its rank will find it: by a path from workdir, or by a name in PATH."""
    program = config.command[0]
    return os.path.join(config.workdir or "", program) if "/" in program else program


def _check_weights(config: RunConfig) -> list[Problem]:
    folder = config.training and config.training.initial_weights
    if folder is None or os.path.isdir(folder):
        return []
    return [Problem(where="training.initial_weights", value=folder, message="is not a folder; give one of safetensors "
                    "files on a file system that all nodes share, or none")]


def _check_data(config: RunConfig) -> list[Problem]:
    return data_problems(config.data, vocab_size=config.model and config.model.vocab_size, training=config.training)


def _check_faults(config: RunConfig) -> list[Problem]:
    world = (config.cluster.num_nodes - config.placement.spares) * config.cluster.gpus_per_node
    return [Problem(where=f"faults[{i}].rank", value=fault.rank, message=f"is outside the {world} ranks of the run")
            for i, fault in enumerate(config.faults) if not 0 <= fault.rank < world]
