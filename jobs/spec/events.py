"""The history of a run, `events.jsonl`: what the supervisor writes of itself, beside what ranks and agents have told.

The supervisor is the only writer; status, reports, the goodput ledger and W&B are its readers. Each dataclass is one
kind of line (wire); those of ranks and agents are in reports.
"""
from dataclasses import dataclass
from typing import Literal

from jobs.spec.reports import Recorded

DiagnosisKind = Literal["crash", "hang", "straggler", "preemption", "time_limit", "node_failure", "divergence",
                        "corruption", "user_error", "stopped", "completed"]
OWN_LAYOUT = "command"  # in AttemptStarted: a trainer of the user's own lays itself out
Act = Literal["restart", "stop", "finish"]


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

Event = (Recorded | RunStarted | AgentJoined | AgentLost | RanksSilent | AttemptStarted | CheckpointCommitted
         | CheckpointSkipped | Diagnosis | Decision | AttemptEnded | RunEnded)
