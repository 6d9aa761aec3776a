"""A run's directory, made before anything is submitted: config, plan, secret, tokens.

Called by the CLI. Either the directory is complete or it is not there.
"""
import json
import os
import secrets
import shutil
import subprocess
import sys
import time

from jobs.spec.load import Problem, SpecError, to_dict
from jobs.spec.rundir import RunDir
from orchestrator.config import RunConfig, to_yaml
from orchestrator.planner.plan import Plan, plan_json
from orchestrator.submission import Executor
from orchestrator.submission.assemble import assemble_request


def prepare(config: RunConfig, plan: Plan | None) -> RunDir:
    """Make the run directory. Raises SpecError if the name is taken or the data cannot be used."""
    run_dir = RunDir(config.run_dir)
    try:
        run_dir.path.mkdir(parents=True)
    except FileExistsError:
        raise SpecError([Problem(
            where="run", value=config.run, message=f"is in use: {run_dir.path} exists; continue it with "
            f"`orc resume {config.run}`, or choose another run=NAME")]) from None
    except OSError as error:
        raise SpecError([Problem(where="root", value=config.root, message=f"cannot hold run directories: {error}")]) \
            from error
    try:
        _fill(run_dir, config, plan)
    except BaseException:
        shutil.rmtree(run_dir.path)
        raise
    return run_dir


def submit(config: RunConfig, run_dir: RunDir, executor: Executor) -> str:
    """Hand the run to the executor and record the submission; returns the job id. Raises SubmissionError."""
    request = assemble_request(config)
    submitted = time.time()
    job_id = executor.submit(request, run_dir.path)
    with run_dir.submissions.open("a") as out:
        out.write(json.dumps({"t": submitted, "job_id": job_id, "request": to_dict(request)}) + "\n")
    return job_id


def _fill(run_dir: RunDir, config: RunConfig, plan: Plan | None) -> None:
    run_dir.config.write_text(to_yaml(config))
    (run_dir.path / "logs").mkdir()
    run_dir.checkpoints.mkdir()
    descriptor = os.open(run_dir.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(secrets.token_hex(32) + "\n")
    if plan is not None:
        run_dir.plan.write_text(json.dumps(plan_json(plan), indent=1) + "\n")
    if config.data is not None:
        _make_tokens(run_dir, config)


def _make_tokens(run_dir: RunDir, config: RunConfig) -> None:
    """In a process of its own: what it needs of the jobs package is not the orchestrator's to import."""
    run_dir.tokens.parent.mkdir()
    spec = run_dir.tokens.with_name("data.json")
    spec.write_text(json.dumps(to_dict(config.data)) + "\n")
    done = subprocess.run([sys.executable, "-m", "jobs.tokens", str(spec), str(run_dir.tokens)], capture_output=True,
                          text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"jobs.tokens ended with code {done.returncode}"]
        raise SpecError([Problem(where="data", value=None, message=lines[-1])])
