"""A run's directory, made before anything is submitted: config, plan, secret, tokens.

Called by the CLI. Either the directory is complete or it is not there.
"""
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from jobs.spec.load import Problem, SpecError, from_dict, to_dict
from jobs.spec.model import ModelSpec
from jobs.spec.rundir import RunDir
from jobs.spec.sources import all_data
from jobs.spec.tokens import TokensInfo
from jobs.spec.training import DataSpec
from orchestrator.config import RunConfig, to_yaml
from orchestrator.datasets import data_problems, record_files, refuse_changed_files
from orchestrator.planner.page import write_page
from orchestrator.planner.plan import Plan, plan_json
from orchestrator.submission import Executor
from orchestrator.submission.assemble import assemble_request
from orchestrator.submission.script import leaked_secrets


def prepare(config: RunConfig, plan: Plan | None) -> RunDir:
    """Make the run directory. Raises SpecError if the name is taken or the data cannot be used."""
    run_dir = RunDir(config.run_dir)
    new_parents = [parent for parent in run_dir.path.parents if not parent.exists()]
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
        discard(run_dir, new_parents)
        raise
    return run_dir


def discard(run_dir: RunDir, parents: Sequence[Path] = ()) -> None:
    """Take back what prepare() made, and those of `parents` that are empty then."""
    shutil.rmtree(run_dir.path)
    for parent in parents:
        try:
            parent.rmdir()
        except OSError:
            return  # somebody else's run is in it


@contextlib.contextmanager
def exclusive(run_dir: RunDir) -> Iterator[TextIO]:
    """The run's list of submissions, for one submitter at a time: two of them would start two supervisors."""
    with run_dir.submissions.open("a+") as lines:
        fcntl.flock(lines, fcntl.LOCK_EX)
        lines.seek(0)
        text = lines.read()
        lines.truncate(len(text[:text.rfind("\n") + 1].encode()))  # a line torn by a full disk or a dead submitter
        yield lines


def submit(config: RunConfig, run_dir: RunDir, executor: Executor, submissions: TextIO) -> str:
    """Hand the run to the executor and record the submission; returns the job id. Raises SubmissionError, and SpecError
    if the run's data is not what it was."""
    if datasets := all_data(config.data, config.training):
        refuse_changed_files(datasets, run_dir.data)
    request = assemble_request(config)
    submitted = time.time()
    job_id = executor.submit(request, run_dir.path)
    submissions.write(json.dumps({"t": submitted, "job_id": job_id, "request": to_dict(request)}) + "\n")
    return job_id


def _fill(run_dir: RunDir, config: RunConfig, plan: Plan | None) -> None:
    text = to_yaml(config)
    if names := leaked_secrets(text, os.environ):
        raise SpecError([Problem(
            where="config", value=None, message=f"holds the value of {', '.join(names)}, and others may read the run's "
            "files; name the variable instead and escape it, \\${NAME}: ranks inherit the environment")])
    run_dir.config.write_text(text)
    (run_dir.path / "logs").mkdir()
    run_dir.checkpoints.mkdir()
    descriptor = os.open(run_dir.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(secrets.token_hex(32) + "\n")
    if plan is not None:
        run_dir.plan.write_text(json.dumps(plan_json(plan), indent=1) + "\n")
        if isinstance(config.model, ModelSpec):  # the page varies what an own model has measured figures of no more
            write_page(run_dir.plan_page, plan, config, searching=False)
    if datasets := all_data(config.data, config.training):
        _make_tokens(run_dir, config, datasets)


def _make_tokens(run_dir: RunDir, config: RunConfig, datasets: dict[str, DataSpec]) -> None:
    """Of what is text, in a process of its own: what that needs of the jobs package is not the orchestrator's to
    import."""
    run_dir.data.mkdir()
    spec = run_dir.data / "data.json"
    spec.write_text(json.dumps(to_dict(datasets)) + "\n")
    done = subprocess.run([sys.executable, "-m", "jobs.tokens", str(spec), str(run_dir.data)], capture_output=True,
                          text=True)
    if done.returncode == 2:
        raise SpecError([Problem.told(line, where="data") for line in done.stderr.splitlines()])
    if done.returncode:
        lines = done.stderr.splitlines() or [f"jobs.tokens ended with code {done.returncode}"]
        raise SpecError([Problem(where="data", value=None, message=lines[-1])])
    made = {where: from_dict(TokensInfo, info) for where, info in json.loads(done.stdout).items()}
    if problems := data_problems(config.data, vocab_size=config.model and config.model.vocab_size,
                                 training=config.training, made=made):
        raise SpecError(problems)
    record_files(datasets, run_dir.data)
