"""What supervisor and agents say to each other, beside the reports of jobs.spec.reports.

Newline-delimited JSON over one TCP connection per agent. Before anything else is believed, the listener
proves that it knows the run's secret, and then the caller does; each proof binds who speaks, to whom, and
what is said, so that none can be used elsewhere. Every order carries the supervisor's `term`: an agent
refuses a lower one than it has seen.
"""
import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Literal

from jobs.spec.job import JobSpec, RankSlot


def prove(secret: str, role: str, *said: str | int) -> str:
    """HMAC-SHA256 over the speaker's role and everything it says, both nonces among it; hex."""
    return hmac.new(secret.encode(), json.dumps([role, *said]).encode(), hashlib.sha256).hexdigest()


def proves(proof: str, secret: str, role: str, *said: str | int) -> bool:
    return hmac.compare_digest(prove(secret, role, *said).encode(), proof.encode())


# ------------------------------------------------------------------ connection
@dataclass(frozen=True, kw_only=True, slots=True)
class Knock:
    """First line of whoever connects."""

    nonce: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Challenge:
    """The supervisor's answer: proof over ("supervisor", both nonces, term)."""

    nonce: str
    term: int
    proof: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """An agent: proof over ("agent", both nonces, node, pid, term)."""

    proof: str
    node: str
    host: str
    address: str  # where other nodes reach this one
    pid: int
    gpus: int
    term: int  # highest term this agent has obeyed
    attempt: int  # attempt that runs here now; 0 if none


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A person's client (`orc stop`): proof over ("command", both nonces, verb, reason)."""

    proof: str
    verb: Literal["stop"]
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandAccepted:
    message: str


# ------------------------------------------------------------------ supervisor → agent
@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    term: int
    ack_seq: int  # reports up to here are recorded: resend what follows
    heartbeat_s: float
    sample_s: float
    orphan_s: float  # without a supervisor for so long an agent ends its ranks and itself
    preload: bool  # start a fork server with the training core loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """Get ready for an attempt; the first node's agent also picks the master port."""

    term: int
    attempt: int
    pick_port: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Fork the ranks of this node: the agent's own slice of the placement, nothing of the others'."""

    term: int
    attempt: int
    job: JobSpec
    slots: tuple[RankSlot, ...]
    node_index: int
    master_addr: str
    master_port: int
    max_restarts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """End every rank of the attempt: SIGTERM, then SIGKILL after grace_s."""

    term: int
    attempt: int
    grace_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown:
    term: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    seq: int


# ------------------------------------------------------------------ agent → supervisor
@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Ready for the attempt; or, with a `problem`, not."""

    attempt: int
    port: int | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Killed:
    """No rank of the attempt is left on this node."""

    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """Where a rank was when it last told its agent."""

    rank: int
    pid: int
    step: int
    phase: str
    t: float  # 0: it has told nothing yet
    active_t: float = 0.0  # when it last told something or wrote to its log; 0: never


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    node: str
    t: float
    attempt: int
    ranks: tuple[RankState, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spooled:
    """A report that must not be lost: kept by the agent until the supervisor acknowledges `seq`."""

    seq: int
    report: dict  # an encoded Report of jobs.spec.reports


ToAgent = Challenge | Welcome | Prepare | Start | Kill | Shutdown | Ack
ToSupervisor = Knock | Hello | Command | Prepared | Killed | Heartbeat | Spooled
