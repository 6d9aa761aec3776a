"""Runs that exist: finding one by name, asking how it is, following it, stopping it.

Used by the CLI on any machine that sees the run directory; it reads files and asks the scheduler, and
the one thing it may tell a supervisor is to stop.
"""
import json
import os
import secrets
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console

from jobs.spec.control import Challenge, Command, CommandAccepted, Knock, prove, proves
from jobs.spec.events import EXIT_CODES, Event, RunEnded, RunStarted
from jobs.spec.lines import UNPROVEN_LIMIT
from jobs.spec.load import Problem, SpecError, suggest
from jobs.spec.rundir import RunDir
from jobs.spec.wire import decode, encode
from orchestrator.layers import first_line
from orchestrator.monitoring.history import last_of, read_history, read_submissions
from orchestrator.monitoring.progress import Progress
from orchestrator.monitoring.summary import RunSummary, summarize
from orchestrator.submission import Executor, JobState
from orchestrator.submission.local import LocalExecutor
from orchestrator.submission.slurm import SlurmExecutor

FOLLOW_S = 0.2  # between looks at the history
STATE_S = 10.0  # between questions to the scheduler while following
STOP_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory with the job that was last submitted for it."""

    run_dir: RunDir
    job_id: str | None
    executor: Executor

    def events(self) -> list[Event]:
        return read_history(self.run_dir.events)[0]

    def job_state(self) -> JobState:
        return self.executor.state(self.job_id) if self.job_id else "unknown"

    def summarize(self) -> RunSummary:
        return summarize(self.events(), run_dir=self.run_dir, submissions=read_submissions(self.run_dir.submissions),
                         job_state=self.job_state(), now=time.time())

    def refuse_if_alive(self) -> None:
        """Two supervisors must never work on one run."""
        events, state = self.events(), self.job_state()
        if ended := _end_of(self.job_id, events):
            steps = self.steps()
            if ended.state == "completed" and (steps is None or (ended.final_step or 0) >= steps):
                raise SpecError([Problem(where="run", value=self.run_dir.path.name, message="has completed; to go on, "
                                         f"raise training.steps in {self.run_dir.config}")])
        elif self.job_id is not None and state in ("running", "pending", "unknown"):
            raise SpecError([Problem(where="run", value=self.run_dir.path.name, message=(
                f"is {state}{' and may still be at work' if state == 'unknown' else ''} as job {self.job_id}; "
                "`orc stop` ends it"))])

    def history_end(self) -> int:
        """Offset behind the last complete line: a torn one after it the next supervisor takes away."""
        return read_history(self.run_dir.events)[1]

    def steps(self) -> int | None:
        """The run's last step; None for a `command:`."""
        return (_stored(self.run_dir).get("training") or {}).get("steps")

    def log(self, *, attempt: int | None, rank: int | None, node: str | None) -> Path:
        """Path of one log. Raises SpecError with those that exist."""
        if node is not None and rank is not None:
            raise SpecError([Problem(where="--node", value=node, message=f"and --rank {rank} are two logs; give one")])
        if node is not None:
            path = self.run_dir.agent_log(node)
        elif rank is not None:
            attempts = sorted(int(p.name) for p in (self.run_dir.path / "attempts").glob("[0-9]*"))
            path = self.run_dir.rank_log(attempt or (attempts or [1])[-1], rank)
        else:
            path = self.run_dir.supervisor_log
        if not path.exists():
            there = sorted(p.name for p in path.parent.glob("*")) if path.parent.is_dir() else []
            remedy = suggest(path.name, there) if there else f"nothing is in {path.parent}"
            raise SpecError([Problem(where="log", value=str(path), message=f"does not exist; {remedy}")])
        return path


def find_run(name: str, root: Path) -> Run:
    """By directory, or by name under `root`. Raises SpecError."""
    for path in (Path(name), root / name):
        run_dir = RunDir(Path(os.path.abspath(os.path.expanduser(path))))
        if os.path.isfile(run_dir.config):
            submissions = read_submissions(run_dir.submissions)
            kind = (_stored(run_dir).get("cluster") or {}).get("kind")
            return Run(run_dir, submissions[-1].job_id if submissions else None, executor_for(kind))
    known = sorted(p.parent.name for p in root.glob("*/config.yaml")) if root.is_dir() else []
    raise SpecError([Problem(where="run", value=name, message=f"is no run directory and no run under {root}; "
                             f"{suggest(name, known) if known else 'there are none; set --root or ORC_ROOT'}")])


def executor_for(kind: str | None) -> Executor:
    """Of a cluster of this kind."""
    return LocalExecutor() if kind == "local" else SlurmExecutor()


def _stored(run_dir: RunDir) -> dict:
    """The run's config as plain data: enough to look at a run and to stop it, even one of another version."""
    try:
        data = yaml.safe_load(run_dir.config.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SpecError([Problem(where="config", value=str(run_dir.config),
                                 message=f"cannot be read: {first_line(error)}")]) from error
    return data if isinstance(data, dict) else {}


def follow_run(run: Run, console: Console, *, offset: int = 0) -> int:
    """Show the run's progress until it ends; Ctrl-C stops it. Returns the run's exit code."""
    with Progress(steps=run.steps(), console=console) as progress:
        while True:
            try:
                # whoever submitted held it back until somebody could answer it
                signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
                ended = _follow(run, progress, offset)
                break
            except KeyboardInterrupt:
                console.print(stop_run(run, "stopped by Ctrl-C"), highlight=False, markup=False)
    if ended is None:
        console.print(f"job {run.job_id} is gone and its supervisor has not written an end; see "
                      f"{run.run_dir.supervisor_log}", highlight=False, soft_wrap=True, markup=False)
        return 1
    return EXIT_CODES[ended.state]


def _follow(run: Run, progress: Progress, offset: int) -> RunEnded | None:
    """None if the job ended without a word in the history."""
    next_question = time.monotonic() + STATE_S
    gone = False
    while True:
        events, offset = read_history(run.run_dir.events, offset)
        for event in events:
            progress.show(event)
        if ended := next((e for e in events if isinstance(e, RunEnded)), None):
            return ended
        if gone:
            return None
        if time.monotonic() >= next_question:
            state, next_question = run.job_state(), time.monotonic() + STATE_S
            gone = state not in ("pending", "running", "unknown")
        time.sleep(FOLLOW_S)  # a file has no event to wait for on a shared file system


def stop_run(run: Run, reason: str) -> str:
    """Ask the supervisor to stop; if it cannot be reached, end its job. Returns what was done."""
    if _end_of(run.job_id, run.events()):
        return f"{run.run_dir.path.name} has ended already"
    try:
        address = json.loads(run.run_dir.supervisor.read_text())
        accepted = _command((address["address"], address["port"]), run.run_dir.secret.read_text().strip(), reason)
        return f"{run.run_dir.path.name}: {accepted.message} (job {run.job_id})"
    except (OSError, ValueError, KeyError) as error:
        if run.job_id is None:
            raise SpecError([Problem(where="run", value=run.run_dir.path.name,
                                     message="was never submitted")]) from error
        run.executor.cancel(run.job_id)
        return f"{run.run_dir.path.name}: its supervisor does not answer ({error}); job {run.job_id} was cancelled"


def _command(address: tuple[str, int], secret: str, reason: str) -> CommandAccepted:
    with socket.create_connection(address, timeout=STOP_CONNECT_S) as connection, connection.makefile("rwb") as lines:
        mine = secrets.token_hex(16)
        lines.write(encode(Knock(nonce=mine)))
        lines.flush()
        challenge = decode(lines.readline(UNPROVEN_LIMIT), Challenge | CommandAccepted, origin="supervisor")
        if not proves(challenge.proof, secret, "supervisor", mine, challenge.nonce, challenge.term):
            raise OSError("another program listens on its port")
        proof = prove(secret, "command", mine, challenge.nonce, "stop", reason)
        lines.write(encode(Command(proof=proof, verb="stop", reason=reason)))
        lines.flush()
        return decode(lines.readline(), Challenge | CommandAccepted, origin="supervisor")


def _end_of(job_id: str | None, events: list[Event]) -> RunEnded | None:
    """How the run ended, if the job has come and gone. The end of an earlier job says nothing about this one."""
    ended, started = last_of(events, RunStarted | RunEnded), last_of(events, RunStarted)
    return ended if isinstance(ended, RunEnded) and started is not None and started.job_id == job_id else None
