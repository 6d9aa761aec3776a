"""The plan as one page that needs nothing else: no network, no second file, any browser.

Called by `orc plan --html` and, for the run directory, by prepare. Figures are the planner's: the page adds none.
"""
import base64
import hashlib
import os
from importlib import resources
from pathlib import Path
from string import Template

from jobs.spec.load import Problem, SpecError
from orchestrator.config import RunConfig
from orchestrator.planner.page import sections
from orchestrator.planner.page.asked import Asked, asked_of
from orchestrator.planner.page.batch import batch_choices
from orchestrator.planner.page.families import FAMILIES
from orchestrator.planner.page.markup import Html, json_block, tag
from orchestrator.planner.page.mesh import mesh_data
from orchestrator.planner.page.pipeline import timeline_data
from orchestrator.planner.page.scatter import priced_points, scatter_data
from orchestrator.planner.page.whatif import what_ifs
from orchestrator.planner.plan import Plan
from orchestrator.planner.words import seconds

__all__ = ["check_writable", "page", "write_page"]

SCRIPTS = ("lib.js", "grid.js", "timeline.js", "scatter.js", "whatif.js", "main.js")


def write_page(path: Path, plan: Plan, config: RunConfig, *, searching: bool = True) -> None:
    """Write the page of `plan`, which `config` asked for. `searching=False` shows what the plan itself holds, at once;
    otherwise hundreds of further layouts are priced, for the scatter and the what-ifs. Raises SpecError if the file
    cannot be written."""
    text = page(plan, asked_of(config), searching=searching)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError([_unwritable(path, str(error.strerror))]) from error


def check_writable(path: Path) -> None:
    """Before the minutes of a search. Raises SpecError where write_page() would."""
    try:
        if not path.parent.is_dir() or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise SpecError([_unwritable(path, "it is a folder" if path.is_dir() else "no folder to write to")])
    except OSError as error:  # a name too long for any file system
        raise SpecError([_unwritable(path, str(error.strerror))]) from error


def _unwritable(path: Path, why: str) -> Problem:
    return Problem(where="--html", value=str(path), message=f"cannot be written: {why}; give a file in a folder that "
                   "exists")


def page(plan: Plan, asked: Asked, *, searching: bool) -> str:
    """The page as one string of HTML."""
    priced = priced_points(plan, asked, sample=searching)
    data = {
        "mesh": mesh_data(plan.layout, cluster=asked.question.cluster, num_nodes=plan.job.num_nodes),
        "timeline": timeline_data(asked.timeline(plan.layout)),
        "scatter": scatter_data(plan, priced),
        "families": [{"name": f.name, "means": f.means, "colour": f.colour} for f in FAMILIES],
        "what_if": what_ifs(asked, plan) if searching else [],
    }
    script = "'use strict';\n(() => {\n" + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    fields = {
        "title": tag("title", f"{plan.job.model} on {plan.job.num_nodes} × {plan.job.gpus_per_node} {plan.job.gpu}"),
        "digest": digest,
        "style": _asset("page.css"),
        "headline": sections.headline(plan),
        "step_time": sections.step_time(plan),
        "memory": sections.memory(plan, gpu_gib=asked.question.cluster.gpu_memory_gib),
        "communication": sections.communication(plan),
        "pipeline_note": _pipeline_note(plan),
        "candidates_note": _candidates_note(plan, len(priced)),
        "losers": sections.losers(plan),
        "axes": sections.axes(plan),
        "refusals": sections.refusals(plan),
        "batch": sections.batch(plan, batch_choices(plan, asked, searching=searching)),
        "what_if_hidden": "" if searching else " hidden",
        "data": json_block("data", data),
        "script": script,
    }
    return Template(_asset("page.html")).substitute(fields)


def _pipeline_note(plan: Plan) -> Html:
    dims, predicted = plan.layout.dims, plan.predicted
    if dims.pp == 1:
        text = "There is no pipeline, so no bubble: every GPU computes all layers, microbatch after microbatch."
    else:
        text = (f"{plan.layout.schedule}: {plan.layout.num_microbatches} microbatches through {dims.pp} stages. "
                f"Filling and draining leaves {predicted.bubble_fraction:.1%} of the pipeline's time idle "
                f"({seconds(predicted.bubble_s)} of a step).")
    return tag("p", text, class_="note")


def _candidates_note(plan: Plan, shown: int) -> Html:
    among = " of them, the best and a sample of the rest" if shown < plan.candidates else ""
    return tag("p", f"{plan.candidates:,} legal layouts were searched in {seconds(plan.search_s)}. The chart shows "
                    f"{shown:,}{among}: smaller ones to the left, faster ones below. On the stepped line, the "
                    "Pareto front, less memory costs time.", class_="note")


def _asset(name: str) -> str:
    return resources.files(__name__).joinpath("assets", name).read_text(encoding="utf-8")
