"""Explanations as a person reads them: axes without and with, a layout beside the winner, two plans side by side.

Called by `orc plan`. Presentation only.
"""
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from orchestrator.planner.explain import Explained
from orchestrator.planner.plan import AxisEffect, Plan
from orchestrator.planner.reasons import EQUAL, cost_parts
from orchestrator.planner.show import MEMORY_PARTS, table
from orchestrator.planner.words import details, seconds, size
from orchestrator.planner.cost import Priced


def axes_table(effects: tuple[AxisEffect, ...]) -> Group:
    """One line per axis: what the step would take without it, or with it."""
    rows = table("each axis: the best layout without it, or with it")
    for column, justify in (("axis", "left"), ("step", "right"), ("layout", "left"), ("why", "left")):
        rows.add_column(column, justify=justify, no_wrap=column in ("axis", "step"))
    for effect in effects:
        if effect.other is None:
            rows.add_row(effect.what, Text("none", "red"), "", Text(effect.note, "dim"))
            continue
        change = f"{effect.change:+.1%}" if abs(effect.change) >= EQUAL else "same"
        rows.add_row(effect.what, Text(change, "red" if effect.change > 0.05 else ""), str(effect.other.layout),
                     Text(effect.other.reason))  # which may quote a list of the request: brackets that are no markup
    return Group(rows)


def show_explained(explained: Explained, winner: Priced, console: Console) -> None:
    """The layout in full beside the winner, and why it lost."""
    console.print(Text.assemble(("explain  ", "bold"), explained.asked))
    if explained.priced is not None:
        console.print(_beside(explained.priced, winner))
    for reason in explained.reasons:
        console.print(f"  • {reason}", highlight=False, markup=False)


def _beside(one: Priced, winner: Priced) -> Table:
    rows = table("")
    rows.add_column("")
    rows.add_column("asked for", justify="right")
    rows.add_column("winner", justify="right")
    mine, best = one.layout.flat(), winner.layout.flat()
    for name in mine:
        if mine[name] != best[name] or name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"):
            rows.add_row(name, _worded(mine[name]), _worded(best[name]))
    parts, others = cost_parts(one), cost_parts(winner)
    rows.add_row("step", seconds(one.predicted.step_time_s), seconds(winner.predicted.step_time_s), style="bold")
    for name in dict.fromkeys((*parts, *others)):
        rows.add_row(f"  {name}", seconds(parts.get(name, 0.0)), seconds(others.get(name, 0.0)))
    rows.add_row("tokens/s per GPU", f"{one.predicted.tokens_per_s_per_gpu:,.0f}",
                 f"{winner.predicted.tokens_per_s_per_gpu:,.0f}")
    rows.add_row("MFU", f"{one.predicted.mfu:.1%}", f"{winner.predicted.mfu:.1%}")
    rows.add_row("memory of the heaviest", size(one.memory.total_bytes), size(winner.memory.total_bytes), style="bold")
    for name, _ in MEMORY_PARTS:
        rows.add_row(f"  {name}", *(size(getattr(side.memory, f"{name}_bytes")) for side in (one, winner)))
    return rows


def diff_table(rows: list[tuple[str, Any, Any]], *, names: tuple[str, str]) -> Group | Text:
    if not rows:
        return Text("the plans are the same")
    shown = table("")
    for column in ("", *names, "change"):
        shown.add_column(Text(column), justify="left" if not column else "right")
    for field, before, after in rows:
        number = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (before, after))
        change = f"{after / before - 1:+.1%}" if number and before else ""
        shown.add_row(field, Text(_worded(before)), Text(_worded(after)), change)
    return Group(shown)


def untrained_note(plan: Plan, runs: Plan | None, why_not: str = "") -> Text:
    """What `orc run` would do instead of a winner that this version does not train."""
    text = Text("trained  ", style="bold")
    text.append("not by this version: ", "red")
    text.append("; ".join(plan.untrained))
    if runs is not None:
        slower = runs.predicted.step_time_s / plan.predicted.step_time_s - 1
        text.append(f"\n         `orc run` takes {runs.layout} ({details(runs.layout)}), {slower:+.1%}")
    elif why_not:
        text.append(f"\n         `orc run` refuses: {why_not}")
    return text


def _worded(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        text = ",".join(map(str, value))
        return text if len(text) <= 40 else f"{text[:18]}…{text[-18:]}"
    return "" if value is None else str(value)
