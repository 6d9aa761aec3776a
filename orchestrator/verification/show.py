"""A verification as a person reads it in a terminal. Called by `orc verify`; every figure is a field."""
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.planner.words import size
from orchestrator.verification import (BYTES_TOLERANCE, MEMORY_TOLERANCE, SCALAR_BYTES, SMALL_PRINT_BYTES, Compared,
                                       Verification, VerifiedRank, rank_name)

SHAPES_SHOWN = 12


def show_verification(found: Verification, console: Console) -> None:
    """Each rank's memory and communication beside the plan's, then what is wrong."""
    console.print(Text.assemble(("verified ", "bold"), f"{found.layout} on {found.world_size} ranks, without a GPU"),
                  highlight=False)
    for rank in found.ranks:
        console.print(_rank(found, rank), highlight=False)
    for problem in found.problems:
        console.print(Text(problem, "red"), soft_wrap=True)
    if not found.problems:
        console.print(Text("every rank fits, and does what the plan says", "green"))
    console.print(Text(f"held to: memory {MEMORY_TOLERANCE:.0%}, or {size(SMALL_PRINT_BYTES)} where that is more; "
                       f"bytes {BYTES_TOLERANCE:.0%} per axis, and then the number of messages exactly", "dim"))


def _rank(found: Verification, rank: VerifiedRank) -> RenderableType:
    report = rank.report
    head = Text.assemble((rank_name(found.layout, report.rank), "bold"),
                         f"   needs {size(report.total_bytes)} of {size(found.limit_bytes)}, "
                         f"{size(rank.unseen_bytes)} more for NCCL's buffers   {report.seconds:.0f} s")
    memory = Table("memory", "needed", "planned", "", box=None, pad_edge=False)
    for row in (*rank.memory, rank.total):
        memory.add_row("all" if row is rank.total else row.what, size(row.measured_bytes), size(row.planned_bytes),
                       _error(row))
    return Group(Text(), head, memory, *([_communication(rank)] if rank.axes else []), _shapes(rank))


def _communication(rank: VerifiedRank) -> Table:
    table = Table("axis", "operations", "planned", "bytes per step", "planned", "", box=None, pad_edge=False)
    for row in rank.axes:
        ops: dict[str, int] = {}
        for one in rank.report.collectives:
            if one.axis == row.what and one.payload_bytes > SCALAR_BYTES:
                ops[one.op] = ops.get(one.op, 0) + one.times
        table.add_row(row.what, ", ".join(f"{times}× {op}" for op, times in ops.items()), f"{row.planned_times}×",
                      f"{row.measured_bytes:,}", f"{row.planned_bytes:,}", _error(row))
    return table


def _error(row: Compared) -> str:
    if row.planned_bytes == row.measured_bytes or row.measured_bytes == 0:
        return "" if row.planned_bytes == row.measured_bytes else "is none"
    return f"{row.error:+.1%}"


def _shapes(rank: VerifiedRank) -> Text:
    """One of each kind of parameter: layers are alike."""
    kinds = {}
    for shape in rank.report.shapes:
        kinds.setdefault((shape.name.split(".", 2)[-1], shape.local), shape)
    shown = [f"{'.'.join(one.name.split('.')[-2:])} {'×'.join(map(str, one.local))} of {'×'.join(map(str, one.whole))}"
             for one in list(kinds.values())[:SHAPES_SHOWN]]
    more = len(kinds) - len(shown)
    return Text("shapes  " + "; ".join(shown) + (f"; and {more} more kinds" if more > 0 else ""), "dim")
