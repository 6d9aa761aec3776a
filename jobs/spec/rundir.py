"""Names of the files in a run directory: one place, so that every reader finds what a writer wrote."""
import re
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"step-(\d{8})")


def _file(*names: str) -> property:
    return property(lambda run_dir: run_dir.path.joinpath(*names))


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run directory. Creates nothing by itself."""

    path: Path

    config = _file("config.yaml")
    plan = _file("plan.json")
    plan_page = _file("plan.html")
    events = _file("events.jsonl")
    submissions = _file("submissions.jsonl")
    secret = _file("secret")  # mode 0600; proves that a connection belongs to this run
    supervisor = _file("supervisor.json")  # address of the supervisor in charge, for people's clients
    supervisor_log = _file("logs", "supervisor.log")
    data = _file("data")  # token files made of the run's text
    checkpoints = _file("checkpoints")
    wandb = _file("wandb")
    report = _file("report")
    submitit = _file("submitit")

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
