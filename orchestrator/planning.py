"""The planner as the command line asks it: a run's config as a question, its plan, and the explanations below it.

Called by the CLI. What `orc run` submits is planned with `trainable=True`; `orc plan` searches everything.
"""
import json
from pathlib import Path
from typing import Any

from jobs.spec.load import Problem, SpecError, to_dict
from jobs.spec.own_model import OwnModel
from orchestrator.config import RunConfig
from orchestrator.layers import read_text
from orchestrator.load import Loaded
from orchestrator.planner import Plan, plan, plan_from_dict
from orchestrator.planner.cost import Priced, price
from orchestrator.planner.explain import Explained, explain, parse_wishes
from orchestrator.planner.question import question_of
from orchestrator.planning_own import make_own_plan


def make_plan(loaded: Loaded, *, trainable: bool, axes: bool = False) -> Plan | None:
    """None for a `command:`. With `axes`, also what each axis is worth. Raises SpecError, each problem with the place
    that its value was written at."""
    config = loaded.config
    if config.lays_itself_out:
        return None
    try:
        if isinstance(config.model, OwnModel):
            return make_own_plan(config)
        return plan(question_of(config, trainable=trainable), headroom=config.memory.headroom,
                    convention=config.mfu_convention, axes=axes)
    except SpecError as refused:
        raise SpecError(loaded.with_origins(refused.problems)) from refused


def runnable(loaded: Loaded) -> tuple[Plan | None, str]:
    """What `orc run` would take, or the first reason why it takes nothing."""
    try:
        return make_plan(loaded, trainable=True), ""
    except SpecError as refused:
        return None, str(refused.problems[0])


def winner_of(made: Plan, config: RunConfig) -> Priced:
    return price(config.model, made.layout, training=config.training, cluster=config.cluster,
                 headroom=config.memory.headroom, convention=config.mfu_convention)


def explained(text: str, made: Plan, config: RunConfig) -> Explained:
    """The layout that "tp=16,pp=2" asks for, beside the winner. Raises SpecError if the text cannot be read."""
    return explain(question_of(config, trainable=False), parse_wishes(text), asked=text, winner=winner_of(made, config),
                   headroom=config.memory.headroom)


def explained_json(one: Explained) -> dict[str, Any]:
    """For `--json`: layout and prediction are null where nothing has these degrees."""
    return {"asked": one.asked, "layout": one.priced and one.priced.layout.flat(), "reasons": list(one.reasons),
            "predicted": one.priced and to_dict(one.priced.predicted)}


def read_plan(path: Path) -> Plan:
    """A stored plan: plan.json, or the directory of a run. Raises SpecError."""
    file = path / "plan.json" if path.is_dir() else path
    try:
        return plan_from_dict(json.loads(read_text(file, limit_kib=64 * 1024)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError([Problem(where="plan", value=str(file), message=f"cannot be read as a plan: {error}; `orc plan "
                                 "RUN.yaml --json > plan.json` writes one")]) from error
