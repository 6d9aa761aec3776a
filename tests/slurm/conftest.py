"""Fixtures of the Slurm tests: the cluster, and a job that takes its time."""
import pytest

from orchestrator.submission.slurm import SlurmExecutor, executor_for
from tests.helpers import slurm_jobs
from tests.helpers.slurm import slurm_cluster, slurm_request  # noqa: F401  (slurm_cluster is a fixture)


@pytest.fixture(scope="session", autouse=True)
def limited_job(slurm_cluster, tmp_path_factory):  # noqa: F811
    """Id and report of a job with the shortest limit: started first and looked at last."""
    folder = tmp_path_factory.mktemp("limit")
    executor = executor_for(slurm_request(time_min=2, signal_lead_s=20), folder)
    job = executor.submit(slurm_jobs.wait_for_signals, str(folder / "told"))
    yield job.job_id, folder / "told"
    SlurmExecutor().cancel(job.job_id)
