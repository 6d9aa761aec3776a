"""orc: the command line. Each command reads as its sentence; the work is done elsewhere.

The only package that sees everything above it. Exit codes: 0 done, 1 the run failed, 2 refused input,
3 stopped before its end.
"""
import sys

import typer

from jobs.spec.load import SpecError
from orchestrator.cli import data, plans, runs
from orchestrator.monitoring.history import HistoryError
from orchestrator.submission import SubmissionError

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]})
for commands in (plans, runs):
    app.add_typer(commands.app)
app.add_typer(data.app, name="data", help="Token files: make them of text, and look into them.")


@app.callback()
def orc() -> None:
    """Plan, place, submit, train, survive, see: 3D-parallel training on Slurm from one YAML."""


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
