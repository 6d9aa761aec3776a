"""The sbatch script: a pure function of the request.

Called by the submitit plugin, for the submission and for the dry run alike, so that what is shown is
what is sent. It holds nothing of the submitting user's environment.
"""
import re
import shlex
from collections.abc import Mapping
from typing import Any

from jobs.spec.load import Problem, SpecError
from orchestrator.submission import SlurmRequest

MIN_BEFORE_WARNING_S = 60  # Slurm looks at time limits every 30 s, and may warn up to 60 s early

# What the script sets itself → where the user sets it. None: not open to change.
_OWNED: dict[str, str | None] = {
    "job-name": "run", "nodes": "cluster.num_nodes", "gres": "cluster.slurm.gres",
    "cpus-per-task": "cluster.slurm.cpus_per_node", "mem": "cluster.slurm.mem_gb", "time": "cluster.slurm.time_min",
    "partition": "cluster.slurm.partition", "account": "cluster.slurm.account", "qos": "cluster.slurm.qos",
    "exclude": "cluster.slurm.exclude", "signal": "cluster.slurm.signal_lead_s",
    "no-requeue": "cluster.slurm.extra.requeue", "ntasks": None, "ntasks-per-node": None, "no-kill": None,
    "output": None, "error": None, "open-mode": None, "array": None, "wrap": None, "parsable": None,
}
_SECRET_NAME = re.compile(r"(API_?KEY|ACCESS_KEY|TOKEN|SECRET|PASSWORD)$", re.IGNORECASE)


def sbatch_script(request: SlurmRequest, *, command: str, output: str) -> str:
    """One task in the batch step of an allocation of `request.num_nodes` nodes.

    `command` is a valid shell command; `output` the log's path, with sbatch's %j for the job id.
    Raises SpecError with everything that is wrong with the request.
    """
    problems = check_request(request)
    if "%" in output.replace("%j", ""):
        problems.append(Problem(where="root", value=output, message="must not contain %, which sbatch would replace"))
    if problems:
        raise SpecError(problems)
    lines = ["#!/bin/bash", *(_directive(k, v) for k, v in _flags(request, output=output)), ""]
    lines += ["# A warning that comes before Python listens must not end the job: exec keeps USR2 ignored till then.",
              "trap '' USR2", "export SUBMITIT_EXECUTOR=orc"]
    if request.setup:
        lines += ["# setup: the first command that fails ends the job",
                  "trap 'echo \"orc: setup failed at line $LINENO of the job script\" >&2; exit 1' ERR",
                  *request.setup, "trap - ERR"]
    # exec: the batch process must be Python itself, since --signal=B: reaches that one process only.
    return "\n".join([*lines, f"exec {command}", ""])


def check_request(request: SlurmRequest) -> list[Problem]:
    """What sbatch would misunderstand or accept in silence."""
    problems = []
    if request.num_nodes < 1:
        problems.append(Problem(where="cluster.num_nodes", value=request.num_nodes, message="must be at least 1"))
    limit_s = request.time_min * 60
    if not 1 <= request.signal_lead_s <= limit_s - MIN_BEFORE_WARNING_S:
        problems.append(Problem(
            where="cluster.slurm.signal_lead_s", value=request.signal_lead_s,
            message=f"must lie between 1 and {limit_s - MIN_BEFORE_WARNING_S}, {MIN_BEFORE_WARNING_S} s less than "
                    f"cluster.slurm.time_min={request.time_min}; raise time_min or lower it"))
    for key, value in request.extra.items():
        where, flag = f"cluster.slurm.extra.{key}", key.replace("_", "-")
        if not re.fullmatch(r"[a-z][a-z0-9-]+", flag):
            problems.append(Problem(where=where, value=value, message="is not a long option of sbatch"))
        elif flag in _OWNED:
            remedy = f"set {_OWNED[flag]} instead" if _OWNED[flag] else "cannot be changed: supervision relies on it"
            problems.append(Problem(where=where, value=value, message=remedy))
        elif not isinstance(value, str | int | float | bool | None):
            problems.append(Problem(where=where, value=value, message="must be text, a number or true"))
    texts = {"run": request.job_name, "partition": request.partition, "account": request.account, "qos": request.qos,
             "gres": request.gres, **{f"exclude[{i}]": node for i, node in enumerate(request.exclude)},
             **{f"extra.{key}": value for key, value in request.extra.items()}}
    problems += [Problem(where=f"cluster.slurm.{name}", value=text, message="must be a single line")
                 for name, text in texts.items() if isinstance(text, str) and re.search(r"[\r\n\0]", text)]
    return problems


def leaked_secrets(script: str, env: Mapping[str, str]) -> list[str]:
    """Names of the environment's secrets whose values stand in the script, which others may read."""
    return [name for name, value in env.items()
            if _SECRET_NAME.search(name) and len(value) >= 8 and not value.startswith("/") and value in script]


def _flags(request: SlurmRequest, *, output: str) -> list[tuple[str, Any]]:
    extra = {key.replace("_", "-"): value for key, value in request.extra.items()}
    requeue = extra.pop("requeue", False)
    mem = None if request.mem_gb is None else f"{request.mem_gb}G"
    flags = [
        ("job-name", request.job_name),
        ("nodes", request.num_nodes),
        ("ntasks-per-node", 1),  # one agent per node
        ("cpus-per-task", request.cpus_per_node),
        ("mem", mem),
        ("gres", request.gres),
        ("time", request.time_min),
        ("partition", request.partition),
        ("account", request.account),
        ("qos", request.qos),
        ("exclude", ",".join(request.exclude) or None),
        ("signal", f"B:USR2@{request.signal_lead_s}"),
        ("no-kill", True),  # a dead node must not take the job with it
        ("requeue" if requeue else "no-requeue", True),
        ("output", output),
        ("open-mode", "append"),  # a requeued job goes on in the same file
        *extra.items(),
    ]
    return [(name, value) for name, value in flags if value is not None and value is not False]


def _directive(name: str, value: Any) -> str:
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"
