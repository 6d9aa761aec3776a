"""What a run tells: reports of ranks and agents, and the lines of its history, `events.jsonl`.

The supervisor is the only writer of the history; status, reports, the goodput ledger and W&B are its
readers. Reports travel rank → agent → supervisor as one JSON object per line (wire). Each dataclass is one
kind of line.
"""
from dataclasses import dataclass
from typing import Literal

DiagnosisKind = Literal["crash", "hang", "straggler", "preemption", "time_limit", "node_failure", "divergence",
                        "corruption", "user_error", "stopped", "completed"]
OWN_LAYOUT = "command"  # in AttemptStarted: a trainer of the user's own lays itself out
Act = Literal["restart", "stop", "finish"]


# ------------------------------------------------------------------ reports of a rank
@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One optimizer step, from the rank that owns the loss (first rank of the last stage); or rank 0 of a trainer of
    the user's own, which need not know everything (jobs.report). None is unknown, not zero."""

    attempt: int
    rank: int
    step: int  # updates completed, this one included
    t: float
    loss: float | None = None  # mean over the global batch's tokens
    grad_norm: float | None = None
    lr: float | None = None
    tokens: int | None = None  # of this step, all ranks
    step_time_s: float | None = None
    data_s: float | None = None
    forward_backward_s: float | None = None
    optimizer_s: float | None = None
    checkpoint_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    mfu_convention: str | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationReport:
    """The loss on training.validation.data after `step` updates, from the rank that owns the loss. Told before the
    step's checkpoint is: what is behind a committed step need not be validated again."""

    attempt: int
    rank: int
    step: int
    t: float  # when it was done
    loss: float  # mean over all tokens of the batches, as a step's
    tokens: int  # all ranks
    validation_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """One file of a checkpoint, relative to the checkpoint's folder."""

    name: str
    size_bytes: int
    checksum: str  # "crc32:…" of the whole file


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReport:
    """A rank has written and synced its part of a checkpoint."""

    attempt: int
    rank: int
    step: int
    t: float
    files: tuple[ShardFile, ...]
    data_cursor: int
    save_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaved:
    """A trainer of the user's own has saved: it will continue behind `step`. Where and what, it alone knows."""

    attempt: int
    rank: int
    step: int
    t: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """An exception that ended a rank, with the traceback, told before the rank dies of it."""

    attempt: int
    rank: int
    step: int
    t: float
    type: str
    message: str
    traceback: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultInjected:
    attempt: int
    rank: int
    step: int
    t: float
    fault: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFinished:
    """The rank has done its last step and is about to exit with 0."""

    attempt: int
    rank: int
    step: int
    t: float


# ------------------------------------------------------------------ reports of an agent
@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """A rank process has ended. Exactly one of exit_code and signal is set."""

    attempt: int
    rank: int
    local_rank: int
    node: str
    pid: int
    t: float
    exit_code: int | None = None
    signal: int | None = None
    log_tail: str = ""  # last lines of its output


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSample:
    """Health of one node, from psutil and NVML. None is unknown, not zero."""

    node: str
    t: float
    cpu_percent: float
    memory_used_bytes: int
    memory_total_bytes: int
    network_sent_bytes: int
    network_received_bytes: int
    gpu_utilization: tuple[float | None, ...] = ()
    gpu_memory_used_bytes: tuple[int | None, ...] = ()
    gpu_temperature_c: tuple[float | None, ...] = ()


# ------------------------------------------------------------------ the supervisor's own lines
@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """A supervisor has taken charge (first line, and again after every resume)."""

    t: float
    run: str
    job_id: str
    term: int
    host: str
    wandb_id: str | None  # None: wandb.mode is disabled
    max_restarts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentJoined:
    t: float
    node: str
    host: str
    pid: int
    gpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentLost:
    t: float
    node: str
    reason: str
    last_heard: float | None = None  # when it was last known to live; t is when that was given up


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksSilent:
    """No rank of the attempt has given a sign of life for so long that it is taken to hang."""

    t: float
    attempt: int
    silent_s: float  # the rank that was heard last
    ranks: tuple[str, ...]  # what each said last, the one that is furthest behind first
    rank: int  # that one
    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStarted:
    t: float
    attempt: int
    nodes: tuple[str, ...]
    world_size: int
    resume_step: int | None
    layout: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommitted:
    t: float
    attempt: int
    step: int
    data_cursor: int
    size_bytes: int
    save_s: float  # the slowest rank's


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSkipped:
    """A checkpoint that was found torn or corrupt and is not used."""

    t: float
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Why an attempt ended: the earliest root over all reports, with the evidence."""

    t: float
    attempt: int
    kind: DiagnosisKind
    summary: str  # one sentence for a person
    suspects: tuple[str, ...] = ()  # "rank 3 on node-0"
    rank: int | None = None
    node: str | None = None
    step: int | None = None  # last step known to be completed
    fingerprint: str = ""  # equal for equal root causes
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    t: float
    attempt: int
    act: Act
    reason: str
    resume_step: int | None = None
    delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded:
    t: float
    attempt: int
    first_step: int | None
    last_step: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded:
    t: float
    state: Literal["completed", "failed", "stopped"]
    reason: str
    final_step: int | None


# of a run's supervisor, and of the command that followed it; 2 is refused input
EXIT_CODES = {"completed": 0, "failed": 1, "stopped": 3}

RankReport = StepReport | ValidationReport | ShardReport | CheckpointSaved | RankError | FaultInjected | RankFinished
AgentReport = RankExit | NodeSample
Event = (StepReport | ValidationReport | CheckpointSaved | RankError | FaultInjected | RankFinished | RankExit
         | NodeSample | RunStarted | AgentJoined | AgentLost | RanksSilent | AttemptStarted | CheckpointCommitted
         | CheckpointSkipped | Diagnosis | Decision | AttemptEnded | RunEnded)
