"""The submitit plugin on a real cluster: what is submitted, where it runs, which signals reach it."""
import pickletools
import subprocess
from pathlib import Path

import pytest
import submitit

from jobs.spec.rundir import RunDir
from orchestrator.submission import SubmissionError
from orchestrator.submission.executor import OrcExecutor
from orchestrator.submission.slurm import SlurmExecutor, executor_for
from tests.helpers import slurm_jobs
from tests.helpers.slurm import REPOSITORY, slurm_request, wait_until, wait_until_over
from tests.helpers.slurm_jobs import told

pytestmark = pytest.mark.slurm

REFUSALS = [
    # change of the request            Slurm's complaint        what we say to do
    ({"partition": "nope"}, "invalid partition", "cluster.slurm.partition must be one of: main, short, low"),
    ({"account": "nope"}, "Invalid account", "cluster.slurm.account must be one of your accounts: root"),
    ({"qos": "nope"}, "Invalid qos", "cluster.slurm.qos must be one of: normal"),
    ({"gres": "tpu:2"}, "generic resource", "cluster.slurm.gres must be one of: gpu:2"),
    ({"extra": {"no-such-flag": 1}}, "unrecognized option", "sbatch --help"),
]
EXIT_CODES = [0, 1, 3, 93]


@pytest.fixture
def submit():
    """Submits a function; cancels at the end what a failing test would leave."""
    jobs: list[submitit.Job] = []

    def submit_one(function, *args, run_dir: Path, **changes) -> submitit.Job:
        jobs.append(executor_for(slurm_request(**changes), run_dir).submit(function, *args))
        return jobs[-1]

    yield submit_one
    for job in jobs:
        SlurmExecutor().cancel(job.job_id)


def test_job_runs_in_the_batch_step_of_all_its_nodes(slurm_cluster, tmp_path):
    auto = submitit.AutoExecutor(folder=tmp_path, cluster="orc")
    auto.update_parameters(name="auto", timeout_min=5, nodes=4, gpus_per_node=2, cpus_per_task=3, mem_gb=1,
                           orc_partition="main", orc_signal_lead_s=60, orc_setup=["export FROM_SETUP='a b'"],
                           orc_extra={"chdir": str(REPOSITORY), "comment": "it's \"quoted\" # here"})
    job = auto.submit(slurm_jobs.probe, str(tmp_path / "told"))
    assert job.result() == "told"
    seen, = told(tmp_path / "told")
    env = seen["env"]
    assert (env["SLURM_JOB_NUM_NODES"], env["SLURM_JOB_GPUS"], env["SLURM_CPUS_PER_TASK"]) == ("4", "0,1", "3")
    assert env["SLURM_STEP_ID"] is None and env["SLURM_JOB_ID"] == job.job_id
    assert env["SUBMITIT_EXECUTOR"] == "orc" and env["FROM_SETUP"] == "a b"
    comment = subprocess.run(["scontrol", "show", "job", job.job_id], capture_output=True, text=True, check=True)
    assert "Comment=it's \"quoted\" # here" in comment.stdout
    assert wait_until_over(job.job_id) == "COMPLETED|0:0"
    assert job.done(force_check=True) and job.watcher.get_state(job.job_id, mode="force") == "COMPLETED"


def test_preview_is_the_script_that_slurm_runs(slurm_cluster, tmp_path):
    request = slurm_request(num_nodes=2, gres="gpu:1", setup=("true",), extra={"comment": "x y", "exclusive": True})
    preview = SlurmExecutor().preview(request, tmp_path)
    assert list(tmp_path.iterdir()) == []
    job = executor_for(request, tmp_path).submit(slurm_jobs.probe, str(tmp_path / "told"))
    job.result()
    assert told(tmp_path / "told")[0]["script"].rstrip("\0\n") == preview.rstrip("\n")


def test_secrets_reach_the_job_but_not_its_script(slurm_cluster, submit, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTER_API_KEY", "hush-hush-0123456789")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "77")  # as inside an interactive job
    submit(slurm_jobs.probe, str(tmp_path / "told"), run_dir=tmp_path).result()
    seen, = told(tmp_path / "told")
    assert seen["env"]["OUTER_API_KEY"] == "hush-hush-0123456789" and seen["env"]["SLURM_MEM_PER_CPU"] is None
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "told"]
    assert len(written) == 4 and not any(b"hush-hush" in path.read_bytes() for path in written)
    with pytest.raises(SubmissionError, match="value of OUTER_API_KEY"):
        submit(slurm_jobs.probe, "", run_dir=tmp_path, setup=("export OUTER_API_KEY=hush-hush-0123456789",))


def test_pickle_holds_a_path_and_an_id_only(slurm_cluster, tmp_path):
    job_id = SlurmExecutor().submit(slurm_request(extra={"hold": True}), tmp_path)
    SlurmExecutor().cancel(job_id)
    pickle, = tmp_path.rglob("*.pkl")
    texts = [arg for op, arg, _ in pickletools.genops(pickle.read_bytes()) if isinstance(arg, str)]
    values = [text for text in texts if "submi" not in text and not text.startswith("_") and text not in (
        "function", "args", "kwargs", "supervise", "DelayedSubmission")]
    assert values[0] == str(tmp_path) and len(values) == 2 and len(values[1]) == 32
    assert pickle.stat().st_size < 500


@pytest.mark.parametrize("changes, complaint, remedy", REFUSALS, ids=lambda value: str(value)[:30])
def test_a_refusal_says_what_to_do_and_leaves_nothing_behind(slurm_cluster, submit, tmp_path, changes, complaint,
                                                              remedy):
    run_dir = tmp_path / "runs" / "new"
    with pytest.raises(SubmissionError) as refused:
        submit(slurm_jobs.probe, "", run_dir=run_dir, **changes)
    assert complaint in str(refused.value) and remedy in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_without_sbatch_the_dry_run_works_and_the_submission_says_why_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "#SBATCH --no-kill" in SlurmExecutor().preview(slurm_request(), tmp_path / "run")
    with pytest.raises(SubmissionError, match="no sbatch on PATH"):
        SlurmExecutor().submit(slurm_request(), tmp_path / "run")
    assert OrcExecutor.affinity() == -1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("code", EXIT_CODES)
def test_exit_code_of_the_function_is_the_jobs(slurm_cluster, submit, tmp_path, code):
    job = submit(slurm_jobs.fail, str(tmp_path / "told"), code, run_dir=tmp_path)
    assert wait_until_over(job.job_id) == (f"FAILED|{code}:0" if code else "COMPLETED|0:0")


def test_a_failing_setup_line_ends_the_job_and_is_named(slurm_cluster, submit, tmp_path):
    job = submit(slurm_jobs.probe, str(tmp_path / "told"), run_dir=tmp_path,
                 setup=("if true; then", "  false || true", "fi", "no_such_module load", "echo not reached"))
    assert wait_until_over(job.job_id) == "FAILED|1:0" and not (tmp_path / "told").exists()
    script = job.paths.submission_file.read_text().splitlines()
    assert f"setup failed at line {script.index('no_such_module load') + 1} " in (
        RunDir(tmp_path).supervisor_log.read_text())


def test_usr2_reaches_the_function_and_scancel_ends_it(slurm_cluster, submit, tmp_path):
    job = submit(slurm_jobs.wait_for_signals, str(tmp_path / "told"), run_dir=tmp_path)
    start, = wait_until(lambda: told(tmp_path / "told"), what="start")
    assert start["term_ends"], "SIGTERM is caught or ignored before the supervisor takes it: submitit does so"
    subprocess.run(["scancel", "--batch", "--signal=USR2", job.job_id], check=True)
    wait_until(lambda: told(tmp_path / "told")[-1]["event"] == "SIGUSR2", what="USR2")
    SlurmExecutor().cancel(job.job_id)
    wait_until(lambda: told(tmp_path / "told")[-1]["event"] == "SIGTERM", what="TERM")
    assert wait_until_over(job.job_id).startswith("CANCELLED by 0|")
    assert not process_of_job_lives(start["child"], slurm_cluster), "a child in its own session outlived the job"
    assert job.done(force_check=True)


def test_usr2_during_setup_does_not_end_the_job(slurm_cluster, submit, tmp_path):
    gate = tmp_path / "gate"
    job = submit(slurm_jobs.probe, str(tmp_path / "told"), run_dir=tmp_path,
                 setup=(f"touch {tmp_path}/in-setup; while [[ ! -e {gate} ]]; do sleep 0.1; done",))
    wait_until((tmp_path / "in-setup").exists, what="setup started")
    subprocess.run(["scancel", "--batch", "--signal=USR2", job.job_id], check=True)
    gate.touch()
    assert job.result() == "told"


def test_requeue_is_refused_unless_asked_for(slurm_cluster, submit, tmp_path):
    job = submit(slurm_jobs.requeue_once, str(tmp_path / "no"), run_dir=tmp_path / "a")
    assert wait_until_over(job.job_id) == "FAILED|1:0" and len(told(tmp_path / "no")) == 1
    job = submit(slurm_jobs.requeue_once, str(tmp_path / "yes"), run_dir=tmp_path / "b", extra={"requeue": True})
    wait_until(lambda: len(told(tmp_path / "yes")) == 2, what="second life",
               details=lambda: str(told(tmp_path / "yes")))
    assert [line["restart"] for line in told(tmp_path / "yes")] == ["0", "1"]
    assert wait_until_over(job.job_id) == "COMPLETED|0:0"


def process_of_job_lives(pid: int, cluster) -> bool:
    """Whether `pid`, counted in the node's own namespace, is a sleep that is no zombie."""
    look = f"cat /proc/{pid}/cmdline 2>/dev/null | tr '\\0' ' '; true"
    return "sleep 600" in cluster.command("exec", "n1", "sh", "-c", look)
