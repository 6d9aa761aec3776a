"""Names of the files in a run directory: one place, so that every reader finds what a writer wrote."""
import re
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run directory. Creates nothing by itself."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def plan_page(self) -> Path:
        return self.path / "plan.html"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def submissions(self) -> Path:
        return self.path / "submissions.jsonl"

    @property
    def secret(self) -> Path:
        """Mode 0600; proves that a connection belongs to this run."""
        return self.path / "secret"

    @property
    def supervisor(self) -> Path:
        """Address of the supervisor in charge, for people's clients."""
        return self.path / "supervisor.json"

    @property
    def data(self) -> Path:
        """Token files made of the run's text."""
        return self.path / "data"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def report(self) -> Path:
        return self.path / "report"

    @property
    def submitit(self) -> Path:
        return self.path / "submitit"

    def attempt(self, n: int) -> Path:
        return self.path / "attempts" / str(n)

    def placement(self, attempt: int) -> Path:
        return self.attempt(attempt) / "placement.json"

    def job(self, attempt: int) -> Path:
        return self.attempt(attempt) / "job.json"

    def request(self, attempt: int) -> Path:
        return self.attempt(attempt) / "request.json"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.attempt(attempt) / "logs" / f"rank-{rank:05d}.log"

    def agent_log(self, node: str) -> Path:
        return self.path / "logs" / f"agent-{node}.log"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "logs" / "supervisor.log"

    def checkpoint(self, step: int) -> Path:
        """A committed checkpoint; it exists only after the supervisor's rename."""
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_in_progress(self, step: int, attempt: int) -> Path:
        """Where ranks write. One folder per attempt: a dying attempt cannot tear its successor's files."""
        return self.checkpoints / f"step-{step:08d}.attempt-{attempt}.tmp"

    def committed_steps(self) -> list[int]:
        """Steps whose folder carries a manifest, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        found = (_STEP.fullmatch(p.name) for p in self.checkpoints.iterdir() if (p / MANIFEST).is_file())
        return sorted(int(m.group(1)) for m in found if m)


MANIFEST = "manifest.json"
INDEX = "index.jsonl"  # of a committed checkpoint: what each rank has written, a line each


def rank_index(rank: int) -> str:
    """The same of one rank, before the checkpoint is committed."""
    return f"rank-{rank:05d}.json"
