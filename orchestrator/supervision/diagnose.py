"""diagnose: from the facts of an attempt to the earliest root cause, with its evidence. Pure.

When one rank dies, its neighbours fail a moment later with "connection closed by peer", and those are
what a log shows most of. An echo is recognised by what it says, and is only believed when nothing else
was found.
"""
import hashlib
import re
import signal as signals
from dataclasses import dataclass

from jobs.spec.events import AgentLost, Diagnosis, DiagnosisKind, RanksSilent
from jobs.spec.reports import RankError, RankExit
from orchestrator.supervision.observe import Health

# What ranks say when *another* rank has gone. Collected from gloo, NCCL and c10d themselves.
_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|peer closed|remote peer|"
    r"timed out (waiting|after)|DistNetworkError|DistBackendError|ncclRemoteError|ncclSystemError|"
    r"NCCL (communicator|watchdog)|read (0|error)|no longer alive|store.*(recv|wait)", re.IGNORECASE)
_EXCEPTION_LINE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(: (?P<message>.*))?$")
_CAUSED = "The above exception was the direct cause of the following exception:"
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
EVIDENCE_LINES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cause:
    """One candidate for the root."""

    t: float
    echo: bool
    kind: DiagnosisKind
    summary: str
    fingerprint: str
    rank: int | None = None
    node: str | None = None
    evidence: tuple[str, ...] = ()


def diagnose(health: Health, *, history: tuple[Diagnosis, ...], user_error_repeats: int, t: float) -> Diagnosis:
    """The earliest cause over all ranks; `history` holds the run's earlier diagnoses, oldest first.

    The same exception at the same step, `user_error_repeats` times in a row, is the user's own bug:
    hardware does not fail twice at the same line.
    """
    if health.diverged:
        step = health.diverged_step
        return Diagnosis(t=t, attempt=health.attempt, kind="divergence", step=step, fingerprint="divergence",
                         summary=f"loss or gradient norm of step {step} is not a finite number")
    causes = sorted(_causes(health), key=lambda cause: (cause.echo, cause.t))
    if not causes:
        raise ValueError(f"attempt {health.attempt} shows no failure: nothing to diagnose")
    root = causes[0]
    kind, summary = root.kind, root.summary
    same = 1
    for earlier in reversed(history):
        if earlier.fingerprint != root.fingerprint or earlier.step != health.reached:
            break
        same += 1
    if kind == "crash" and root.fingerprint.startswith("exception:") and same >= user_error_repeats:
        kind = "user_error"
        summary = f"{summary}; the same exception at the same step {same} times"
    suspects = tuple(_suspect(cause) for cause in causes if not cause.echo) or (_suspect(root),)
    return Diagnosis(t=t, attempt=health.attempt, kind=kind, summary=summary, suspects=tuple(dict.fromkeys(suspects)),
                     rank=root.rank, node=root.node, step=health.reached, fingerprint=root.fingerprint,
                     evidence=root.evidence)


def _causes(health: Health) -> list[_Cause]:
    errors = {error.rank: error for error in health.errors}
    where = {e.rank: e.node for e in health.exits}
    causes = [_from_error(error, where.get(error.rank)) for error in health.errors]
    causes += [_from_loss(loss) for loss in health.lost]
    if health.silent is not None:
        causes.append(_from_silence(health.silent))
    lost_nodes = {loss.node for loss in health.lost}
    for end in health.exits:
        if end.exit_code != 0 and end.rank not in errors:
            causes.append(_from_exit(end, node_lost=end.node in lost_nodes))
    return causes


def _from_error(error: RankError, node: str | None) -> _Cause:
    text = f"{error.type}: {error.message}"
    kind: DiagnosisKind = "corruption" if error.type == "CheckpointCorrupt" else "crash"
    first_line = error.message.splitlines()[0] if error.message else ""
    return _Cause(t=error.t, echo=bool(_ECHO.search(text)), kind=kind, rank=error.rank, node=node,
                  summary=f"rank {error.rank}{_on(node)} raised {error.type}{': ' if first_line else ''}{first_line}",
                  fingerprint=_fingerprint("exception", error.type, error.message),
                  evidence=_last_lines(error.traceback))


def _from_loss(loss: AgentLost) -> _Cause:
    since = loss.t if loss.last_heard is None else loss.last_heard
    return _Cause(t=since, echo=False, kind="node_failure", node=loss.node,
                  summary=f"the agent of {loss.node} is lost: {loss.reason}", fingerprint=f"agent:{loss.node}",
                  evidence=(loss.reason,))


def _from_silence(silent: RanksSilent) -> _Cause:
    """A hang shows in all ranks at once; the one furthest behind is the likeliest to have begun it."""
    return _Cause(t=silent.t - silent.silent_s, echo=False, kind="hang", rank=silent.rank, node=silent.node,
                  summary=f"no rank has given a sign of life for {silent.silent_s:.0f} s; furthest behind: "
                  f"{silent.ranks[0]}", fingerprint="hang", evidence=silent.ranks[:EVIDENCE_LINES])


def _from_exit(end: RankExit, *, node_lost: bool) -> _Cause:
    """A process that ended without an exception of its own: by a signal, by exit(), or a `command:`."""
    if end.signal is not None:
        name = signals.Signals(end.signal).name if end.signal in iter(signals.Signals) else f"signal {end.signal}"
        return _Cause(t=end.t, echo=node_lost, kind="crash", rank=end.rank, node=end.node,
                      summary=f"rank {end.rank} on {end.node} was killed by {name} (pid {end.pid})",
                      fingerprint=f"signal:{name}", evidence=_last_lines(end.log_tail))
    exception = _exception_in(end.log_tail)
    if exception is None:
        return _Cause(t=end.t, echo=False, kind="crash", rank=end.rank, node=end.node,
                      summary=f"rank {end.rank} on {end.node} ended with exit code {end.exit_code}",
                      fingerprint=f"exit:{end.exit_code}", evidence=_last_lines(end.log_tail))
    name, message = exception
    return _Cause(t=end.t, echo=bool(_ECHO.search(f"{name}: {message}")), kind="crash", rank=end.rank, node=end.node,
                  summary=f"rank {end.rank} on {end.node} raised {name}{': ' if message else ''}{message}",
                  fingerprint=_fingerprint("exception", name, message), evidence=_last_lines(end.log_tail))


def _exception_in(log: str) -> tuple[str, str] | None:
    """(type, message) of the last Python traceback in a log, for trainers that report nothing themselves.
    Of exceptions raised from one another, the one at the bottom."""
    _, *tracebacks = log.split("Traceback (most recent call last):")
    while len(tracebacks) > 1 and tracebacks[-2].rstrip().endswith(_CAUSED):
        tracebacks.pop()
    for line in tracebacks[-1].splitlines() if tracebacks else []:
        if line and not line[0].isspace() and (match := _EXCEPTION_LINE.match(line)):
            return match["type"].rpartition(".")[2], match["message"] or ""
    return None


def _fingerprint(*parts: str) -> str:
    """Equal for equal root causes: numbers and addresses differ from rank to rank and do not count."""
    head, *rest = parts
    text = _NUMBERS.sub("#", "\n".join(rest))
    return f"{head}:{rest[0]}:{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _last_lines(text: str) -> tuple[str, ...]:
    return tuple(text.strip().splitlines()[-EVIDENCE_LINES:])


def _suspect(cause: _Cause) -> str:
    return f"rank {cause.rank}{_on(cause.node)}" if cause.rank is not None else str(cause.node)


def _on(node: str | None) -> str:
    return f" on {node}" if node else ""
