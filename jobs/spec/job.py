"""JobSpec: all that the ranks of one attempt need to know, and the environment they find it in."""
from dataclasses import dataclass
from typing import Literal

from jobs.spec.model import AttentionConvention, ModelSpec
from jobs.spec.own_model import OwnModel
from jobs.spec.parallel import Layout
from jobs.spec.training import CheckpointSpec, DataSpec, TrainingSpec

Device = Literal["cpu", "cuda"]
FaultKind = Literal["sigkill", "exception", "exit", "agent_kill", "nan"]

# Variables of the agent's own environment that ranks must not see: Lightning, Accelerate and others
# would believe that Slurm or submitit started them.
SCRUBBED_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "PMI_", "PMIX_", "PMI2_", "SUBMITIT_")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSpec:
    """A fault to inject, as data: when and where it strikes, and how."""

    attempt: int
    step: int  # strikes when this step is about to be computed
    rank: int
    kind: FaultKind


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """One attempt, for its ranks."""

    run: str
    attempt: int
    run_dir: str
    device: Device
    world_size: int
    # What is trained. None where `command` or `entrypoint` runs a trainer of the user's own.
    model: ModelSpec | OwnModel | None = None
    layout: Layout | None = None
    training: TrainingSpec | None = None
    data: DataSpec | None = None  # of token files: what was text in the config lies tokenized in the run's directory
    checkpoint: CheckpointSpec
    resume_step: int | None  # newest committed checkpoint; None starts from step 0
    peak_tflops: float  # of one rank, for MFU
    mfu_convention: AttentionConvention = "causal"
    faults: tuple[FaultSpec, ...] = ()
    command: tuple[str, ...] | None = None  # exec'd instead of the built-in trainer
    entrypoint: str | None = None  # package.module:function, called instead of it in the forked rank
    arguments: tuple[str, ...] = ()  # of the entry point, as sys.argv[1:]
    workdir: str | None = None  # where code of the user's own runs, and first on its import path
    dist_timeout_s: float = 600.0  # of a collective
    threads_per_rank: int | None = None  # OMP_NUM_THREADS; None: the node's CPUs / its ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlot:
    """One rank of an attempt, as its node's agent sees it."""

    rank: int
    local_rank: int
    gpu: int | None  # device index on the node; None on CPU


def rank_environment(slot: RankSlot, *, world_size: int, local_world_size: int, node_index: int, master_addr: str,
                     master_port: int, attempt: int, max_restarts: int, run: str) -> dict[str, str]:
    """The torchrun environment of one rank, so that any torchrun-style trainer runs unchanged."""
    env = {
        "RANK": slot.rank,
        "LOCAL_RANK": slot.local_rank,
        "GROUP_RANK": node_index,
        "ROLE_RANK": slot.rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": attempt - 1,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        # every attempt has a port and a store of its own: nobody else hosts it
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return {name: str(value) for name, value in env.items()}
