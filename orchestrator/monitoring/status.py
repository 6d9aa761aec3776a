"""What a person sees of a run at a glance: `orc status`, and the head of `orc report`.

Called by the CLI and by the report. Renders a RunSummary and the history behind it; decides nothing and asks nobody.
"""
import time
from collections.abc import Sequence

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jobs.spec.events import (AttemptStarted, CheckpointCommitted, CheckpointSkipped, Decision, Diagnosis, Event,
                              RunEnded, RunStarted)
from jobs.spec.reports import CheckpointSaved, NodeSample, StepReport, ValidationReport
from jobs.spec.rundir import RunDir
from orchestrator.monitoring.goodput import PARTS, Goodput
from orchestrator.monitoring.history import all_of, last_of
from orchestrator.monitoring.summary import RunSummary
from orchestrator.monitoring.wandb_files import wandb_location
from orchestrator.monitoring.wording import KIND_STYLE, PART_STYLE, STATE_STYLE, duration, shown

BAR_WIDTH = 64  # characters of the goodput bar
GIB = 2**30


def render_status(summary: RunSummary, events: Sequence[Event], *, run_dir: RunDir) -> RenderableType:
    """State, attempts, last steps, nodes, checkpoints, goodput and W&B, on about one screen."""
    parts: list[RenderableType] = [_headline(summary, events, run_dir=run_dir)]
    if summary.attempts:
        parts.append(_attempts(summary, events))
    if any(isinstance(event, StepReport) for event in events):
        parts.append(_steps(events, count=5))
    nodes = _nodes(events)
    if nodes.row_count:
        parts.append(nodes)
    parts += [_checkpoints(events, run_dir=run_dir), _goodput(summary.goodput), _wandb(summary, run_dir=run_dir)]
    return Group(*spaced(parts))


def _headline(summary: RunSummary, events: Sequence[Event], *, run_dir: RunDir) -> RenderableType:
    lines = [Text.assemble((run_dir.path.name, "bold"), "  ", (summary.state, STATE_STYLE[summary.state]))]
    if summary.state in ("completed", "failed", "stopped") and (ended := last_of(events, RunEnded)):
        lines[0].append(f"  {ended.reason}")
    if summary.state == "unknown":
        lines.append(Text("the job is over or unknown, and its supervisor did not say how it ended", style="magenta"))
        lines.append(Text("`orc resume` continues from the newest checkpoint", style="magenta"))
    if started := last_of(events, RunStarted):
        lines.append(Text(f"job {started.job_id} on {started.host}, supervisor term {started.term}", style="dim"))
    if attempt := last_of(events, AttemptStarted):
        lines.append(Text(f"{attempt.world_size} ranks on {', '.join(attempt.nodes)}  ({attempt.layout})", style="dim"))
    if summary.final_step is not None:
        loss = "" if summary.final_loss is None else f"  loss {summary.final_loss:.4f}"
        rate = "" if summary.tokens_per_s is None else f"  {summary.tokens_per_s:,.0f} tokens/s"
        convention = last_of(events, StepReport).mfu_convention
        mfu = "" if summary.mfu is None else f"  MFU {summary.mfu:.1%} ({convention})"
        lines.append(Text(f"step {summary.final_step}{loss}{rate}{mfu}", style="bold"))
    if validated := last_of(events, ValidationReport):
        tokens = "" if validated.tokens is None else f"  {validated.tokens:,} tokens"
        took = "" if validated.validation_s is None else f" in {duration(validated.validation_s)}"
        lines.append(Text(f"validation after step {validated.step}  loss {validated.loss:.4f}{tokens}{took}"))
    return Group(*lines)


def _attempts(summary: RunSummary, events: Sequence[Event]) -> Table:
    table = _table("attempt", "started", "took", "steps", "diagnosis", "decision", title="attempts")
    verdicts = {diagnosis.attempt: diagnosis for diagnosis in all_of(events, Diagnosis)}
    decisions = {decision.attempt: decision for decision in all_of(events, Decision)}
    for a in summary.attempts:
        unended = "running" if summary.state == "running" else "unknown"
        took = unended if a.end is None else duration(a.end - a.start)
        steps = "none" if a.first_step is None else f"{a.first_step}–{a.last_step}"
        verdict, decision = verdicts.get(a.n), decisions.get(a.n)
        diagnosis = Text("")
        if verdict is not None:
            diagnosis = Text.assemble((verdict.kind, KIND_STYLE.get(verdict.kind, "bold red")), f"  {verdict.summary}")
        chosen = Text("")
        if decision is not None:
            resume = "" if decision.resume_step is None else f" from step {decision.resume_step}"
            chosen = Text.assemble((f"{decision.act}{resume}", "bold"), f"  {decision.reason}")
        table.add_row(str(a.n), _clock(a.start), took, steps, diagnosis, chosen)
    return table


def _steps(events: Sequence[Event], *, count: int) -> Table:
    table = _table("step", "attempt", "loss", "grad norm", "lr", "step time", "tokens/s", "MFU", "peak memory",
                   title="last steps")
    for column in table.columns:
        column.justify = "right"
    for s in all_of(events, StepReport)[-count:]:
        memory = None if s.peak_memory_bytes is None else s.peak_memory_bytes / GIB
        table.add_row(f"{s.step}", f"{s.attempt}", shown(s.loss, ".4f"), shown(s.grad_norm, ".3f"), shown(s.lr, ".2e"),
                      shown(s.step_time_s, ".3f", unit=" s"), shown(s.tokens_per_s, ",.0f"), shown(s.mfu, ".1%"),
                      shown(memory, ".2f", unit=" GiB"))
    return table


def _nodes(events: Sequence[Event]) -> Table:
    """The newest sample of every node."""
    newest = {sample.node: sample for sample in all_of(events, NodeSample)}
    gpu_columns = ("GPU utilization", "GPU memory", "GPU temperature")
    has_gpus = any(sample.gpu_utilization for sample in newest.values())
    table = _table("node", "sampled", "CPU", "memory", *(gpu_columns if has_gpus else ()), title="nodes")
    for node, s in sorted(newest.items()):
        row = [node, _clock(s.t), f"{s.cpu_percent:.0f}%",
               f"{s.memory_used_bytes / GIB:.1f}/{s.memory_total_bytes / GIB:.1f} GiB"]
        if has_gpus:
            gpu_memory = [None if used is None else used / GIB for used in s.gpu_memory_used_bytes]
            row += [_per_gpu(s.gpu_utilization, "{:.0f}%"), _per_gpu(gpu_memory, "{:.1f} GiB"),
                    _per_gpu(s.gpu_temperature_c, "{:.0f} °C")]
        table.add_row(*row)
    return table


def _per_gpu(values: Sequence[float | None], form: str) -> str:
    """One figure if all GPUs agree on it, else each; an unknown one is a question mark."""
    shown = ["?" if value is None else form.format(value) for value in values]
    if not shown:
        return "no GPU"
    return f"{len(shown)} × {shown[0]}" if len(set(shown)) == 1 and len(shown) > 1 else ", ".join(shown)


def _checkpoints(events: Sequence[Event], *, run_dir: RunDir) -> Text:
    text = Text.assemble(("checkpoints  ", "bold"))
    committed, on_disk = all_of(events, CheckpointCommitted), run_dir.committed_steps()
    kept = ", ".join(map(str, on_disk)) or "none"
    if not committed and (saved := last_of(events, CheckpointSaved)):
        return text.append(f"its trainer's own; the newest holds step {saved.step}, since {_clock(saved.t)}")
    if not committed:
        return text.append(f"on disk: {kept}; the history does not tell of them" if on_disk else "none committed yet")
    newest = committed[-1]
    text.append(f"newest step {newest.step} at {_clock(newest.t)}, {newest.size_bytes / GIB:.3f} GiB, saved in "
                f"{newest.save_s:.2f} s; committed {len(committed)}, on disk: {kept}")
    for skipped in all_of(events, CheckpointSkipped):
        text.append(f"\n             step {skipped.step} skipped: {skipped.reason}", style="red")
    return text


def _goodput(ledger: Goodput) -> RenderableType:
    share = "unknown, no step reported" if ledger.goodput is None else f"{ledger.goodput:.1%}"
    headline = Text.assemble(("goodput      ", "bold"), (share, "bold"), f" of {duration(ledger.wall_s)}")
    if ledger.steps_lost:
        headline.append(f"; {ledger.steps_lost} steps lost")
    lines: list[RenderableType] = [headline]
    if ledger.wall_s > 0:
        bar, legend, filled, spent = Text(" " * 13), [], 0, 0.0
        for part in PARTS:
            seconds = getattr(ledger, part)
            if seconds <= 0:
                continue
            name, color = PART_STYLE[part]
            spent += seconds
            width = round(BAR_WIDTH * spent / ledger.wall_s) - filled  # rounding the ends keeps the bar's length
            bar.append("█" * width, style=color)
            filled += width
            legend.append(Text.assemble(("■ ", color), f"{name} {duration(seconds)}"))
        lines += [bar, Padding(Columns(legend, padding=(0, 3)), (0, 0, 0, 13))]
    return Group(*lines)


def _wandb(summary: RunSummary, *, run_dir: RunDir) -> Text:
    if summary.wandb.dir is None:
        return Text.assemble(("W&B          ", "bold"), "off: wandb.mode is disabled")
    if summary.wandb.id is None and summary.state != "pending":
        return Text.assemble(("W&B          ", "bold"), "unknown: the history, which names its run, does not; what was "
                             f"written lies in {summary.wandb.dir}")
    place = wandb_location(run_dir, run_id=summary.wandb.id)
    text = Text.assemble(("W&B          ", "bold"), f"run {place['id'] or 'not started'} in {place['dir']}")
    text.append(f"\n  open       {place['how_to_open']}")
    if place["how_to_upload"]:
        text.append(f"\n  upload     {place['how_to_upload']}")
    text.no_wrap, text.overflow = True, "ignore"  # a command that is broken into lines cannot be copied
    return text


def _table(*columns: str, title: str) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                 header_style="dim", padding=(0, 1), show_edge=False)


def spaced(parts: Sequence[RenderableType]) -> list[RenderableType]:
    return [line for part in parts for line in (part, Text(""))][:-1]


def _clock(t: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(t))
