"""orc: the command line. Each command reads as its sentence; the work is done elsewhere.

The only file that sees everything above it. Exit codes: 0 done, 1 the run failed, 2 refused input,
3 stopped before its end.
"""
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jobs.spec.load import Problem, SpecError, to_dict
from jobs.spec.own_model import OwnModel
from jobs.spec.rundir import RunDir
from orchestrator.config import RunConfig
from orchestrator.load import load_traced, read_stored
from orchestrator.monitoring.history import HistoryError
from orchestrator.monitoring.status import render_report, render_status, write_report
from orchestrator.monitoring.summary import summary_json
from orchestrator.dialects import wishes_for
from orchestrator.export import export, notes
from orchestrator.foreign import read_request
from orchestrator.planner import Plan, plan_json
from orchestrator.planner.explain import diff
from orchestrator.planner.page import check_writable, write_page
from orchestrator.planner.show import show_plan
from orchestrator.planner.show_explain import axes_table, diff_table, show_explained, untrained_note
from orchestrator.planning_own import OWN_PLAN_NOTE
from orchestrator.planning import (explained, explained_json, make_plan, read_plan, runnable, winner_of)
from orchestrator.submission import Executor, SubmissionError
from orchestrator.submission.assemble import assemble_request
from orchestrator.submission.local import LocalExecutor
from orchestrator.submission.prepare import discard, exclusive, prepare, submit as submit_run
from orchestrator.submission.slurm import SlurmExecutor
from orchestrator.runs import Run, find_run, follow_run, stop_run
from orchestrator.validation import validate
from orchestrator.validation.show import show_report
from orchestrator.verification import parse_ranks, verify
from orchestrator.verification.show import show_verification

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]})
console = Console()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console = Console(width=110)  # a file or a pipe has no width of its own; 80 columns cut the tables

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="the run's YAML, e.g. configs/runs/demo.yaml")]
Overrides = Annotated[list[str], typer.Argument(metavar="[KEY=VALUE]…", help="e.g. parallel.tp=4 cluster=slurm",
                                                show_default=False)]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="a run's name, or its directory")]
Root = Annotated[Path, typer.Option(help="where run directories lie", envvar="ORC_ROOT")]
Json = Annotated[bool, typer.Option("--json", help="for machines")]
Html = Annotated[Path | None, typer.Option("--html", metavar="PAGE.html", help="also write the plan as a page")]
EMPTY: list[str] = []
data_app = typer.Typer(no_args_is_help=True)
app.add_typer(data_app, name="data", help="Token files: make them of text, and look into them.")
PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}  # the program behind it knows its options


@app.callback()
def orc() -> None:
    """Plan, place, submit, train, survive, see: 3D-parallel training on Slurm from one YAML."""


@app.command("plan")
def plan_command(run_file: RunFile, overrides: Overrides = EMPTY, as_json: Json = False, html: Html = None,
                 explain: Annotated[str | None, typer.Option(metavar="KEY=VALUE,…", help="any layout beside the "
                                                             "winner, e.g. tp=16,pp=2")] = None,
                 other: Annotated[Path | None, typer.Option("--from", metavar="FILE", help="take the degrees of an "
                                                            "Accelerate or Axolotl YAML")] = None,
                 tool: Annotated[str | None, typer.Option("--for", metavar="TOOL", help="only what accelerate, axolotl, "
                                                          "torchtitan or megatron can say, to be exported")] = None,
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


@app.command()
def run(run_file: RunFile, overrides: Overrides = EMPTY,
        detach: Annotated[bool, typer.Option("--detach", "-d", help="do not follow")] = False) -> None:
    """Plan, submit and follow to the end. Ctrl-C stops the run; `orc resume` continues it."""
    loaded = load_traced(run_file, overrides)
    config, made = loaded.config, make_plan(loaded, trainable=True)
    if made is not None:
        show_plan(made, console, brief=True)
    job_id = start(config, made, follow=not detach)
    if not detach:
        raise SystemExit(follow_run(Run(RunDir(config.run_dir), job_id, executor_for(config)), console))


@app.command()
def submit(run_file: RunFile, overrides: Overrides = EMPTY,
           dry_run: Annotated[bool, typer.Option("--dry-run", help="print the exact script, submit nothing")] = False
           ) -> None:
    """Plan and submit one job; `orc status` follows."""
    loaded = load_traced(run_file, overrides)
    config, made = loaded.config, make_plan(loaded, trainable=True)
    if dry_run:
        print(executor_for(config).preview(assemble_request(config), config.run_dir), end="")
        return
    if made is not None:
        show_plan(made, console, brief=True)
    start(config, made, follow=False)


@app.command()
def resume(name: RunName, root: Root = Path("runs"),
           detach: Annotated[bool, typer.Option("--detach", "-d", help="do not follow")] = False) -> None:
    """Continue a run that has ended, from its newest committed checkpoint."""
    with exclusive(find_run(name, root).run_dir) as submissions:
        found = find_run(name, root)  # again: another resume may have been first
        found.refuse_if_alive()
        config, offset = read_stored(found.run_dir.config), found.history_end()
        hold_interrupts(not detach)
        job_id = submit_run(config, found.run_dir, found.executor, submissions)
    say(f"resumed {config.run} as job {job_id}")
    if not detach:
        raise SystemExit(follow_run(Run(found.run_dir, job_id, found.executor), console, offset=offset))


@app.command()
def stop(name: RunName, root: Root = Path("runs"),
         reason: Annotated[str, typer.Option(help="is recorded in the run's history")] = "") -> None:
    """End a run now. What was committed stays; `orc resume` continues from there."""
    say(stop_run(find_run(name, root), reason))


@app.command()
def status(name: RunName, root: Root = Path("runs"), as_json: Json = False) -> None:
    """Where a run stands: state, attempts, last steps, nodes, checkpoints, W&B."""
    found = find_run(name, root)
    summary = found.summarize()
    if as_json:
        print(summary_json(summary))
    else:
        console.print(render_status(summary, found.events(), run_dir=found.run_dir))


@app.command()
def report(name: RunName, root: Root = Path("runs"), as_json: Json = False) -> None:
    """A run in depth: attempts, diagnoses, decisions, loss curve (PNG), throughput, goodput."""
    found = find_run(name, root)
    summary, events = found.summarize(), found.events()
    pictures = write_report(summary, events, run_dir=found.run_dir)
    if as_json:
        print(summary_json(summary))
    else:
        console.print(render_report(summary, events, run_dir=found.run_dir, pictures=pictures))


@app.command()
def logs(name: RunName, root: Root = Path("runs"),
         attempt: Annotated[int | None, typer.Option(help="default: the newest")] = None,
         rank: Annotated[int | None, typer.Option(help="a rank's output; default: the supervisor's")] = None,
         node: Annotated[str | None, typer.Option(help="a node's agent")] = None,
         lines: Annotated[int, typer.Option("--lines", "-n", help="how many")] = 40) -> None:
    """The last lines of a rank's, an agent's or the supervisor's log."""
    path = find_run(name, root).log(attempt=attempt, rank=rank, node=node)
    say(str(path))
    sys.stdout.write("".join(path.read_text(errors="replace").splitlines(keepends=True)[-lines:]))


@data_app.command("tokenize", context_settings=PASSED_ON, add_help_option=False)
def tokenize_command(context: typer.Context) -> None:
    """Text or JSON lines → a token file. `--help` has the options."""
    become("jobs.data.tokenize", context.args)


@data_app.command("inspect", context_settings=PASSED_ON, add_help_option=False)
def inspect_command(context: typer.Context) -> None:
    """Count, vocabulary, documents and a sample of a token file."""
    become("jobs.data.inspect", context.args)


def become(module: str, arguments: list[str]) -> None:
    """The rest of this command is another program's: signals and exit code, too."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def start(config: RunConfig, made: Plan | None, *, follow: bool) -> str:
    """Prepare and submit; if the submission is refused, nothing is left behind."""
    run_dir = prepare(config, made)
    hold_interrupts(follow)
    try:
        with exclusive(run_dir) as submissions:
            job_id = submit_run(config, run_dir, executor_for(config), submissions)
    except (SubmissionError, SpecError):
        discard(run_dir)
        raise
    say(f"submitted {config.run} as job {job_id}; everything about it is in {run_dir.path}")
    return job_id


def hold_interrupts(follow: bool) -> None:
    """Between a submission and whoever follows it a Ctrl-C would leave a run behind that it meant to stop."""
    if follow:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))


def say(message: str) -> None:
    """One line; what it quotes of a user's names is no markup."""
    console.print(message, highlight=False, soft_wrap=True, markup=False)


def executor_for(config: RunConfig) -> Executor:
    return LocalExecutor() if config.cluster.kind == "local" else SlurmExecutor()


def main() -> None:
    try:
        app()
    except SpecError as error:
        for problem in error.problems:
            print(f"orc: {problem}", file=sys.stderr)
        sys.exit(2)
    except (SubmissionError, HistoryError) as error:
        print(f"orc: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
