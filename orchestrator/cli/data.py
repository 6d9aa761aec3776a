"""`orc data`: programs of jobs/data, which this process becomes, for their work belongs to compute nodes too."""
import os
import sys

import typer

app = typer.Typer(no_args_is_help=True)
PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}  # the program behind it knows its options


@app.command("tokenize", context_settings=PASSED_ON, add_help_option=False)
def tokenize_command(context: typer.Context) -> None:
    """Text or JSON lines → a token file. `--help` has the options."""
    become("jobs.data.tokenize", context.args)


@app.command("inspect", context_settings=PASSED_ON, add_help_option=False)
def inspect_command(context: typer.Context) -> None:
    """Count, vocabulary, documents and a sample of a token file."""
    become("jobs.data.inspect", context.args)


def become(module: str, arguments: list[str]) -> None:
    """The rest of this command is another program's: signals and exit code, too."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
