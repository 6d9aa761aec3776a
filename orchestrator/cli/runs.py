"""Commands of a run: run, submit, resume, stop, status, report, logs."""
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from jobs.spec.load import SpecError
from jobs.spec.rundir import RunDir
from orchestrator.cli.terminal import EMPTY, Json, Overrides, RunFile, console, say
from orchestrator.config import RunConfig
from orchestrator.load import load_traced, read_stored
from orchestrator.monitoring.report import render_report, write_report
from orchestrator.monitoring.status import render_status
from orchestrator.monitoring.summary import summary_json
from orchestrator.planner import Plan
from orchestrator.planner.show import show_plan
from orchestrator.planning import make_plan
from orchestrator.runs import Run, executor_for, find_run, follow_run, stop_run
from orchestrator.submission import SubmissionError
from orchestrator.submission.assemble import assemble_request
from orchestrator.submission.prepare import discard, exclusive, prepare, submit as submit_run

app = typer.Typer()
RunName = Annotated[str, typer.Argument(metavar="RUN", help="a run's name, or its directory")]
Root = Annotated[Path, typer.Option(help="where run directories lie", envvar="ORC_ROOT")]


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
        raise SystemExit(follow_run(Run(RunDir(config.run_dir), job_id, executor_for(config.cluster.kind)), console))


@app.command()
def submit(run_file: RunFile, overrides: Overrides = EMPTY,
           dry_run: Annotated[bool, typer.Option("--dry-run", help="print the exact script, submit nothing")] = False
           ) -> None:
    """Plan and submit one job; `orc status` follows."""
    loaded = load_traced(run_file, overrides)
    config, made = loaded.config, make_plan(loaded, trainable=True)
    if dry_run:
        print(executor_for(config.cluster.kind).preview(assemble_request(config), config.run_dir), end="")
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
         lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="how many")] = 40) -> None:
    """The last lines of a rank's, an agent's or the supervisor's log."""
    path = find_run(name, root).log(attempt=attempt, rank=rank, node=node)
    say(str(path))
    sys.stdout.write("".join(path.read_text(errors="replace").splitlines(keepends=True)[-lines:]))


def start(config: RunConfig, made: Plan | None, *, follow: bool) -> str:
    """Prepare and submit; if the submission is refused, nothing is left behind."""
    run_dir = prepare(config, made)
    hold_interrupts(follow)
    try:
        with exclusive(run_dir) as submissions:
            job_id = submit_run(config, run_dir, executor_for(config.cluster.kind), submissions)
    except (SubmissionError, SpecError):
        discard(run_dir)
        raise
    say(f"submitted {config.run} as job {job_id}; everything about it is in {run_dir.path}")
    return job_id


def hold_interrupts(follow: bool) -> None:
    """Between a submission and whoever follows it a Ctrl-C would leave a run behind that it meant to stop."""
    if follow:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
