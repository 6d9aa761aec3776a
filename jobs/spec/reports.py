"""What ranks and agents tell the supervisor, who records it in the run's history (events).

They travel rank → agent → supervisor as one JSON object per line (wire). Each dataclass is one kind of line.
"""
from dataclasses import dataclass


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
    step's checkpoint is: what is behind a committed step need not be validated again. Or rank 0's of a trainer of the
    user's own (jobs.report). None is unknown."""

    attempt: int
    rank: int
    step: int
    t: float  # when it was done
    loss: float  # mean over all tokens of the batches, as a step's
    tokens: int | None = None  # all ranks
    validation_s: float | None = None


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


Recorded = StepReport | ValidationReport | CheckpointSaved | RankError | FaultInjected | RankExit | NodeSample
RankReport = StepReport | ValidationReport | ShardReport | CheckpointSaved | RankError | FaultInjected
Report = Recorded | ShardReport  # of the last a whole checkpoint's are recorded as one CheckpointCommitted
