"""Slurm's commands as functions: the only place of the login node that runs them.

Called by executor.py, slurm.py and launch.py. A command that fails, hangs or is not there is "no
answer", and no answer is never turned into a state. What an answer means is jobstate.py's to say.
"""
import logging
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from jobs.spec.job import SCRUBBED_PREFIXES
from orchestrator.submission import JobState, SubmissionError
from orchestrator.submission.jobstate import parse_states

log = logging.getLogger(__name__)

ANSWER_S = 30.0  # a healthy controller answers in milliseconds, a busy one in seconds
SUBMIT_S = 120.0  # sbatch itself retries while the controller is busy
# What Slurm's commands read of their environment; the other SLURM_ variables describe a job.
CLIENT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")

# (part of Slurm's message, what to do, command that lists the valid values)
REMEDIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("invalid partition", "cluster.slurm.partition must be one of", ("sinfo", "--noheader", "--format=%R")),
    ("invalid account", "cluster.slurm.account must be one of your accounts",
     ("sacctmgr", "--noheader", "--parsable2", "show", "associations", "user={user}", "format=account")),
    ("invalid qos", "cluster.slurm.qos must be one of",
     ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=name")),
    ("(gres)", "cluster.slurm.gres must be one of", ("sinfo", "--noheader", "--format=%G")),
    ("node configuration is not available", "ask for no more nodes, CPUs, memory and GPUs than a partition has",
     ("sinfo", "--noheader", "--format=%R: %D nodes of %c CPUs, %m MB, %G;")),
    ("time limit", "cluster.slurm.time_min must not exceed the partition's limit",
     ("sinfo", "--noheader", "--format=%R: %l;")),
    ("unable to contact slurm controller", "is slurmctld up? `scontrol ping` tells", ()),
    ("unrecognized option", "cluster.slurm.extra must hold sbatch's long options only; see `sbatch --help`", ()),
)


def ask(*argv: str, timeout_s: float = ANSWER_S) -> str | None:
    """Standard output of a command; None if there was no answer (the reason is logged)."""
    env = os.environ | {"SLURM_TIME_FORMAT": "%s"}  # times as seconds since 1970, whatever the time zone
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL,
                              env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.info("no answer from %s: %s", argv[0], error)
        return None
    if done.returncode:
        log.info("no answer from %s (exit %d): %s", argv[0], done.returncode, done.stderr.strip())
        return None
    return done.stdout


def job_states(job_ids: list[str]) -> dict[str, JobState]:
    """State of each job; "unknown" where Slurm gives no answer.

    sacct comes first: it remembers jobs that the controller has forgotten. It is asked without
    --duplicates, so of a requeued job it tells the latest life, and with --allocations, so that no
    step's state is taken for the job's. It knows a new job only after a second or two, and some sites
    have no accounting: what it does not know, squeue may.
    """
    ids = ",".join(job_ids)
    answer = ask("sacct", "--allocations", "--noheader", "--parsable2", "--format=JobID,State", f"--jobs={ids}")
    states = parse_states(answer or "", job_ids=job_ids)
    missing = [job_id for job_id in job_ids if states.get(job_id, "unknown") == "unknown"]
    if missing:
        answer = ask("squeue", "--noheader", "--states=all", "--format=%i|%T", f"--jobs={','.join(missing)}")
        states |= parse_states(answer or "", job_ids=missing)
    return {job_id: states.get(job_id, "unknown") for job_id in job_ids}


def run_sbatch(script: Path) -> str:
    """Submit `script`; returns the job id. Raises SubmissionError."""
    if shutil.which("sbatch") is None:
        raise SubmissionError("no sbatch on PATH: submit from a login node of the Slurm cluster, or choose a cluster "
                              "of kind local to run on this machine")
    try:
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True,
                              timeout=SUBMIT_S, stdin=subprocess.DEVNULL, env=submission_environment(os.environ))
    except subprocess.TimeoutExpired as error:
        raise SubmissionError(f"sbatch gave no answer within {SUBMIT_S:.0f} s; the job may exist all the same: look "
                              "at `squeue --me` before you submit again") from error
    if done.returncode:
        raise SubmissionError(explain_refusal(done.stderr))
    # job id, or job id;cluster. A site's job-submit plugin may print lines of its own before it.
    match = re.fullmatch(r"(\d+)(;.*)?", (done.stdout.strip().splitlines() or [""])[-1].strip())
    if match is None:
        raise SubmissionError(f"sbatch printed {done.stdout!r} instead of a job id; look at `squeue --me`")
    return match[1]


def submission_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment that sbatch hands on to the job, without traces of a job that we are in ourselves:
    inherited SLURM_MEM_PER_NODE, SLURM_TRES_PER_TASK and the like would shape the new job's steps."""
    job_prefixes = tuple(p for p in SCRUBBED_PREFIXES if p != "SBATCH_")  # a user's own defaults for sbatch
    return {k: v for k, v in env.items() if k in CLIENT_VARIABLES or not k.startswith(job_prefixes)}


def explain_refusal(stderr: str) -> str:
    """sbatch's own words, and what to do about them, with the values that this cluster would take."""
    prefixes = r"sbatch: (error: )?(Batch job submission failed: )?"
    lines = dict.fromkeys(re.sub(prefixes, "", line).strip() for line in stderr.splitlines())
    message = "Slurm refused the job: " + "; ".join(line for line in lines if line)
    for part, remedy, command in REMEDIES:
        if part in message.lower():
            answer = ask(*(word.replace("{user}", _user()) for word in command)) if command else None
            values = ", ".join(dict.fromkeys((answer or "").split("\n"))).strip(", ")
            return f"{message}\n{remedy}{': ' + values if values else ''}"
    return message


def _user() -> str:
    """The user as Slurm sees them; USER may be somebody else after `su`."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container without the site's user data base
        return str(os.getuid())
