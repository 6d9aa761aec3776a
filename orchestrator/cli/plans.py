"""Commands before a run: plan, verify, export, validate. Nothing is started and no run directory is touched."""
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from jobs.spec.load import Problem, SpecError, to_dict
from jobs.spec.own_model import OwnModel
from orchestrator.cli.terminal import EMPTY, Json, Overrides, RunFile, console, say
from orchestrator.config import RunConfig
from orchestrator.dialects import wishes_for
from orchestrator.export import export, notes
from orchestrator.foreign import read_request
from orchestrator.load import load_traced
from orchestrator.planner import Plan, plan_json
from orchestrator.planner.explain import diff
from orchestrator.planner.page import check_writable, write_page
from orchestrator.planner.show import show_plan
from orchestrator.planner.show_explain import axes_table, diff_table, show_explained, untrained_note
from orchestrator.planning import explained, explained_json, make_plan, read_plan, runnable, winner_of
from orchestrator.planning_own import OWN_PLAN_NOTE
from orchestrator.validation import validate
from orchestrator.validation.show import show_report
from orchestrator.verification import parse_ranks, verify
from orchestrator.verification.show import show_verification

app = typer.Typer()
Html = Annotated[Path | None, typer.Option("--html", metavar="PAGE.html", help="also write the plan as a page")]


@app.command("plan")
def plan_command(run_file: RunFile, overrides: Overrides = EMPTY, as_json: Json = False, html: Html = None,
                 explain: Annotated[str | None, typer.Option(metavar="KEY=VALUE,…", help="any layout beside the "
                                                             "winner, e.g. tp=16,pp=2")] = None,
                 other: Annotated[Path | None, typer.Option("--from", metavar="FILE", help="take the degrees of an "
                                                            "Accelerate or Axolotl YAML")] = None,
                 tool: Annotated[str | None, typer.Option("--for", metavar="TOOL", help="only what accelerate, "
                                                          "axolotl, torchtitan or megatron can say, to be "
                                                          "exported")] = None,
                 against: Annotated[Path | None, typer.Option("--diff", metavar="PLAN.json", help="RUN is a plan.json "
                                                              "too: what changes from RUN to this one")] = None,
                 axes: Annotated[bool, typer.Option(help="search each axis without and with it")] = True) -> None:
    """Choose the layout, with its predicted cost, and say why the others lost.

    Everything is searched; what of the winner this version does not train is said, with what `orc run` would take."""
    if against is not None:
        plans = read_plan(run_file), read_plan(against)
        console.print(diff_table(diff(*plans), names=(run_file.name, against.name)), highlight=False)
        return
    if html is not None:
        check_writable(html)
    loaded = load_traced(run_file, overrides)
    request = loaded.config.parallel
    if other is not None:
        request = read_request(other, request=request)
    if tool is not None:
        request = wishes_for(request, tool=tool)
    loaded = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, parallel=request))
    made = make_plan(loaded, trainable=False, axes=axes and explain is None)
    if made is None:
        raise refused(loaded.config, "there is nothing to plan")
    config = loaded.config
    if isinstance(config.model, OwnModel):
        show_own_plan(made, as_json=as_json, asked={"--explain": explain, "--html": html})
        return
    beside = explained(explain, made, config) if explain is not None else None
    if as_json:
        print(json.dumps(plan_json(made) | ({"explained": explained_json(beside)} if beside else {}), indent=1))
    elif beside is not None:
        show_plan(made, console, brief=True)
        show_explained(beside, winner_of(made, config), console)
    else:
        show_plan(made, console)
        console.print(axes_table(made.axes) if made.axes else "", highlight=False)
    if made.untrained and not as_json:
        console.print(untrained_note(made, *runnable(loaded)))
    if html is not None:
        with console.status("pricing variations for the page"):
            write_page(html, made, loaded.config)
        print(f"wrote {html}", file=sys.stderr)


def refused(config: RunConfig, why: str) -> SpecError:
    """Of a trainer of the user's own."""
    key = "command" if config.command else "entrypoint"
    return SpecError([Problem(where=key, value=config.command or config.entrypoint, message=f"lays itself out: {why}; "
                              f"`orc run` starts it, or leave {key} out")])


def show_own_plan(made: Plan, *, as_json: bool, asked: dict[str, object]) -> None:
    """Of an own model: what was measured has no variations to show."""
    for option, value in asked.items():
        if value is not None:
            raise SpecError([Problem(where=option, value=str(value), message="varies sizes that only a decoder of "
                                     "orc's has; of an own model `orc plan` shows what fixing parallel.* costs")])
    if as_json:
        print(json.dumps(plan_json(made), indent=1))
    else:
        show_plan(made, console)
        say(OWN_PLAN_NOTE)


@app.command("verify")
def verify_command(run_file: RunFile, overrides: Overrides = EMPTY, as_json: Json = False,
                   ranks: Annotated[str, typer.Option(metavar="RANK,…", help="default: one of the first, a middle and "
                                                      "the last stage")] = "") -> None:
    """Run some ranks' step on tensors without data, and hold it against the plan.

    The step that `orc submit` would run, in its whole world: memory, shapes and collectives. Needs no GPU."""
    loaded = load_traced(run_file, overrides)
    made = make_plan(loaded, trainable=True)
    if made is None:
        raise refused(loaded.config, "only what orc lays out can be verified")
    found = verify(loaded.config, made, ranks=parse_ranks(ranks))
    if as_json:
        print(json.dumps(to_dict(found) | {"problems": found.problems}, indent=1))
    else:
        show_verification(found, console)
    raise SystemExit(1 if found.problems else 0)


@app.command("export")
def export_command(plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, or a run's directory")],
                   to: Annotated[str, typer.Option(help="accelerate, axolotl, torchtitan or megatron")]) -> None:
    """A plan in another trainer's own terms.

    On standard output; what is lost on the way, on standard error."""
    plan = read_plan(plan_file)
    print(export(plan, to=to), end="")
    for note in notes(plan, to=to):
        print(f"orc: {note}", file=sys.stderr)


@app.command("validate")
def validate_command(table: Annotated[Path, typer.Argument(metavar="TABLE.csv", help="measured runs, one per line")],
                     as_json: Json = False,
                     group_by: Annotated[str, typer.Option(help="column whose rows are compared")] = "group") -> None:
    """Hold predictions against measured runs: error, order and regret per group."""
    made = validate(table, group_by=group_by)
    if as_json:
        print(json.dumps(made.to_json(), indent=1))
    else:
        show_report(made, console)
