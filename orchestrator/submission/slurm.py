"""Slurm as an Executor: one job per submission, through the submitit plugin.

Used by the CLI on a login node. It keeps no state: everything is in the run directory and in Slurm.
"""
import dataclasses
import uuid
from pathlib import Path

from jobs.spec.rundir import RunDir
from orchestrator.submission import JobState, SlurmRequest, SubmissionError
from orchestrator.submission.client import ask, job_states
from orchestrator.submission.entry import supervise
from orchestrator.submission.executor import OrcExecutor
from orchestrator.submission.jobstate import FINAL


class SlurmExecutor:
    """Implements orchestrator.submission.Executor."""

    def preview(self, request: SlurmRequest, run_dir: Path) -> str:
        """The exact sbatch script. Needs no Slurm. Raises SpecError for a request that cannot be."""
        return executor_for(request, run_dir).script()

    def submit(self, request: SlurmRequest, run_dir: Path) -> str:
        """Returns the job id. The job's pickle holds the run directory and an id of this submission only.

        Raises SpecError before, and SubmissionError when Slurm was asked; neither leaves a file.
        """
        job = executor_for(request, run_dir).submit(supervise, str(run_dir.resolve()), uuid.uuid4().hex)
        return job.job_id

    def state(self, job_id: str) -> JobState:
        """"unknown" where Slurm gives no answer."""
        return job_states([job_id])[job_id]

    def cancel(self, job_id: str) -> None:
        """End the job. A job that has ended already is no error. Raises SubmissionError."""
        if ask("scancel", job_id) is None and self.state(job_id) not in FINAL:
            raise SubmissionError(f"scancel could not reach job {job_id}: see whether `scontrol ping` answers and "
                                  f"whether the job is yours (`squeue --job {job_id}`)")


def executor_for(request: SlurmRequest, run_dir: Path) -> OrcExecutor:
    """The plugin, set to `request`, with its files in the run directory. Raises SpecError."""
    files = RunDir(run_dir.resolve())
    executor = OrcExecutor(files.submitit, log=files.supervisor_log)
    executor.update_parameters(**{f.name: getattr(request, f.name) for f in dataclasses.fields(request)})
    return executor
