"""What the commands share: the terminal, and the arguments that several of them take."""
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console = Console(width=110)  # a file or a pipe has no width of its own; 80 columns cut the tables

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="the run's YAML, e.g. configs/runs/demo.yaml")]
Overrides = Annotated[list[str], typer.Argument(metavar="[KEY=VALUE]…", help="e.g. parallel.tp=4 cluster=slurm",
                                                show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="for machines")]
EMPTY: list[str] = []


def say(message: str) -> None:
    """One line; what it quotes of a user's names is no markup."""
    console.print(message, highlight=False, soft_wrap=True, markup=False)
