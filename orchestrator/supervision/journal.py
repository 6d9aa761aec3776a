"""The journal: the one writer of events.jsonl, and what a new supervisor learns from it.

A supervisor keeps no state elsewhere, so whatever a later term must know is derived here from the lines
themselves. Readers use orchestrator.monitoring.history.
"""
import fcntl
import os
from pathlib import Path

from jobs.spec.events import (AttemptStarted, CheckpointCommitted, CheckpointSkipped, Decision, Diagnosis, Event,
                              RunStarted)
from jobs.spec.reports import CheckpointSaved, NodeSample, StepReport
from jobs.spec.wire import encode
from orchestrator.monitoring.history import read_history


class JournalError(RuntimeError):
    """Another supervisor is writing this history."""


class Journal:
    """Appends lines; each is on disk before anybody acts on it (samples and steps may lag a moment)."""

    def __init__(self, path: Path) -> None:
        self.term = 0
        self.wandb_id: str | None = None
        self.last_attempt = 0
        self.last_step: int | None = None  # of the newest attempt that computed one
        self.saved_step: int | None = None  # newest checkpoint of a trainer that keeps its own
        self.diagnoses: tuple[Diagnosis, ...] = ()
        self.decisions: tuple[Decision, ...] = ()
        self.refused_steps: frozenset[int] = frozenset()  # checkpoints found unusable and not written again since
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise JournalError(f"{path}: another supervisor is writing it, or its file system has no locks "
                               f"({error.strerror})") from error
        past, end = read_history(path)
        for event in past:
            self._note(event)
        self._file.truncate(end)  # a line torn by a dying predecessor must not swallow the next one

    def write(self, event: Event) -> None:
        self._note(event)
        self._file.write(encode(event))
        self._file.flush()
        if not isinstance(event, StepReport | NodeSample):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _note(self, event: Event) -> None:
        match event:
            case RunStarted(term=term, wandb_id=wandb_id):
                self.term, self.wandb_id = term, wandb_id
            case AttemptStarted(attempt=attempt):
                self.last_attempt = attempt
            case StepReport(step=step):
                self.last_step = step
            case Diagnosis():
                self.diagnoses = (*self.diagnoses, event)
            case Decision():
                self.decisions = (*self.decisions, event)
            case CheckpointSkipped(step=step):
                self.refused_steps |= {step}
            case CheckpointSaved(step=step):
                self.saved_step = step
            case CheckpointCommitted(step=step):
                self.refused_steps -= {step}
