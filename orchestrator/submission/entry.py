"""What submitit runs in the batch step: the supervisor of a run, for as long as the allocation lasts.

The pickle that submitit loads names this function, a path and an id. Code changes between submission
and start therefore take effect, and nothing of the login node's memory travels.
"""
import sys
from pathlib import Path

from orchestrator.submission.launch import SlurmLauncher


def supervise(run_dir: str, submission: str) -> None:
    """Runs the supervisor of `run_dir`; the job's exit code becomes the supervisor's.

    SystemExit passes through submitit, which would turn any other exception into exit code 1.
    """
    from orchestrator.supervision.supervisor import main  # the one arrow upwards: Slurm starts it here

    launcher = SlurmLauncher.from_environment()
    print(f"orc: submission {submission} is job {launcher.job_id} on {', '.join(launcher.nodes)}; "
          f"supervisor at {launcher.address}", flush=True)
    code = main(Path(run_dir), launcher)
    if code:
        sys.exit(code)
