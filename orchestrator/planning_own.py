"""The plan of a model of the user's own: measured in a process of its own, then planned.

Called by orchestrator.planning. The user's code never runs in a process of the orchestrator.
"""
import json
import os
import subprocess
import sys
from collections.abc import Iterable

from jobs.spec.load import Problem, SpecError, from_dict, to_dict
from jobs.spec.own_model import MeasureAnswer, MeasureOrder, OwnProfile
from orchestrator.config import RunConfig
from orchestrator.planner.own import plan_own
from orchestrator.planner.own_memory import OwnQuestion
from orchestrator.planner.plan import Plan
from orchestrator.planner.question import divisors

OWN_PLAN_NOTE = ("an own model: parameters, FLOPs and bytes are counted from its code; how fast its matmuls run is not "
                 "known, the chip's sustained rate is taken. cp and ep are not searched.")


def make_own_plan(config: RunConfig) -> Plan:
    """Raises SpecError: what the user's code or plan table gets wrong, or why no layout is possible."""
    request = config.parallel
    question = own_question(config, request.options("tp") or divisors(config.cluster.gpus_per_node))
    return plan_own(question, request=request, num_nodes=config.cluster.num_nodes - config.placement.spares,
                    allow_tp_across_nodes=config.placement.allow_tp_across_nodes)


def own_question(config: RunConfig, degrees: Iterable[int]) -> OwnQuestion:
    """The run's model, measured at these degrees of tp. Raises SpecError."""
    return OwnQuestion(model=config.model, profile=measure(config, degrees), training=config.training,
                       cluster=config.cluster, headroom=config.memory.headroom)


def measure(config: RunConfig, degrees: Iterable[int]) -> OwnProfile:
    """Ask `python -m jobs.own.measure`. Raises SpecError with the problems that it found."""
    order = MeasureOrder(model=config.model, seq_len=config.training.seq_len, workdir=config.workdir, tp=tuple(degrees))
    said = ask("jobs.own.measure", given=json.dumps(to_dict(order)))
    if isinstance(said, str):
        raise SpecError([Problem(where="model.entrypoint", value=config.model.entrypoint,
                                 message=f"could not be measured: {said}")])
    answer = from_dict(MeasureAnswer, said, origin="jobs.own.measure")
    if answer.profile is None:
        raise SpecError([Problem.told(text, where="model") for text in answer.problems])
    return answer.profile


def ask(module: str, *arguments: str, given: str = "") -> dict | str:
    """What `python -m module` answers, the last line of its output that is a JSON object; else, as a string, the last
    line of what went wrong. The user's code runs there: it may print, and end, whenever it likes."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], input=given, capture_output=True, text=True,
                          errors="replace", env=os.environ | {"OMP_NUM_THREADS": "1"})
    for line in reversed(done.stdout.splitlines() if done.returncode == 0 else []):
        try:
            if isinstance(answer := json.loads(line), dict):
                return answer
        except ValueError:
            continue
    lines = [line for line in done.stderr.splitlines() if line.strip()] if done.returncode else []
    return lines[-1].removeprefix("[rank0]: ") if lines else f"it ended with code {done.returncode} and no answer"
