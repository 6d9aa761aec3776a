"""The plan as a person reads it in a terminal: winner, memory, communication, step time, losers.

Called by `orc plan`. Presentation only: every figure shown is a field of the Plan.
"""
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from jobs.spec.parallel import AXES
from orchestrator.planner.plan import GIB, Plan, StageMemory

BAR_WIDTH = 52
MEMORY_PARTS = (("parameters", "blue"), ("gradients", "magenta"), ("optimizer", "cyan"), ("gathered", "yellow"),
                ("activations", "green"), ("logits", "red"))
TIME_PARTS = (("compute", "compute_s", "green"), ("exposed communication", "exposed_communication_s", "red"),
              ("bubble", "bubble_s", "yellow"), ("optimizer", "optimizer_s", "cyan"))
REFUSED_SHOWN = 4
INDENT = " " * 9
LINKS = {"intra_node": "in node", "nvlink_domain": "NVLink rack", "inter_node": "network", "spine": "spine"}


def show_plan(plan: Plan, console: Console, *, brief: bool = False) -> None:
    """Print the plan; `brief` leaves out the tables."""
    console.print(render_brief(plan) if brief else render(plan))


def render_brief(plan: Plan) -> Group:
    """What and how fast: a few lines."""
    return Group(_headline(plan), _layout(plan), *_step_time(plan)[:1], _memory_line(plan))


def render(plan: Plan) -> Group:
    """Everything; reads well from 100 columns on."""
    parts = [_headline(plan), Text(), _layout(plan), Text(), *_step_time(plan), Text(), _memory_line(plan),
             _memory_bar(plan), _memory(plan), Text()]
    if plan.communication:
        parts += [_communication(plan), Text()]
    return Group(*parts, *_rejected(plan))


def seconds(value: float) -> str:
    """1.25 s, 12.5 ms, 8.0 µs"""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} µs"


def size(value: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _headline(plan: Plan) -> Text:
    job = plan.job
    params = f"{job.num_params / 1e9:.2f} B" if job.num_params >= 1e9 else f"{job.num_params / 1e6:.2f} M"
    text = Text.assemble((job.model, "bold"), f"  {params} parameters  on  ", (job.cluster, "bold"),
                         f"  {job.num_nodes} nodes × {job.gpus_per_node} {job.gpu}\n",
                         (f"sequences of {job.seq_len} tokens, {job.global_batch_size} per step, {job.param_dtype}; "
                          f"{plan.candidates} legal layouts priced in {seconds(plan.search_s)}", "dim"))
    return text


def _layout(plan: Plan) -> Text:
    layout, dims = plan.layout, plan.layout.dims
    text = Text("layout   ", style="bold")
    for axis in AXES:
        degree = getattr(dims, axis)
        text.append(f"{axis}={degree}  ", style="bold green" if degree > 1 else "dim")
    layers = layout.layers_per_stage
    split = f"{layers[0]} layers" if len(set(layers)) == 1 else f"{min(layers)}–{max(layers)} layers"
    text.append(f"\n{INDENT}microbatch {layout.microbatch_size} × {layout.num_microbatches} per replica, "
                f"{layout.schedule if dims.pp > 1 else 'no pipeline'}, {split} per stage, "
                f"recompute {layout.recompute}\n")
    text.append(f"{INDENT}mesh {' × '.join(dims.order)}, the innermost on neighbouring GPUs", "dim")
    return text


def _step_time(plan: Plan) -> list[RenderableType]:
    predicted = plan.predicted
    head = Text.assemble(("step     ", "bold"), (seconds(predicted.step_time_s), "bold green"),
                         f"   {predicted.tokens_per_s:,.0f} tokens/s   {predicted.tokens_per_s_per_gpu:,.0f} per GPU   "
                         f"MFU {predicted.mfu:.1%} ({predicted.mfu_convention} attention)   HFU {predicted.hfu:.1%}")
    parts = [(name, getattr(predicted, field), colour) for name, field, colour in TIME_PARTS]
    bar = _bar([(value, colour) for _, value, colour in parts], total=predicted.step_time_s)
    legend = Text(INDENT)
    for name, value, colour in parts:
        legend.append("■ ", colour)
        legend.append(f"{name} {seconds(value)}  ")
    bubble = Text(f"{INDENT}bubble {predicted.bubble_fraction:.1%} of the pipeline's time", "dim")
    return [head, Text(INDENT).append_text(bar), legend, *([bubble] if plan.layout.dims.pp > 1 else [])]


def _heaviest(plan: Plan) -> StageMemory:
    return max(plan.memory, key=lambda stage: stage.total_bytes)


def _memory_line(plan: Plan) -> Text:
    heaviest, limit = _heaviest(plan), plan.predicted.memory_limit_gib * GIB
    return Text.assemble(("memory   ", "bold"), (size(heaviest.total_bytes), "bold green"),
                         f" on stage {heaviest.stage}, the heaviest, of {size(limit)} "
                         f"(GPU less {plan.job.headroom:.0%} headroom)")


def _memory_bar(plan: Plan) -> Text:
    heaviest = _heaviest(plan)
    parts = [(getattr(heaviest, f"{name}_bytes"), colour) for name, colour in MEMORY_PARTS]
    return Text(INDENT).append_text(_bar(parts, total=plan.predicted.memory_limit_gib * GIB))


def _memory(plan: Plan) -> Table:
    table = _table("")
    for column in ("stage", "layers", "in flight"):
        table.add_column(column, justify="right")
    for name, colour in MEMORY_PARTS:
        table.add_column(Text(name, colour), justify="right")
    table.add_column("total", justify="right", style="bold")
    for stage in _shown_stages(plan.memory):
        table.add_row(str(stage.stage), str(stage.layers), str(stage.in_flight),
                      *(size(getattr(stage, f"{name}_bytes")) for name, _ in MEMORY_PARTS), size(stage.total_bytes))
    return table


def _shown_stages(memory: tuple[StageMemory, ...]) -> list[StageMemory]:
    """All of a few stages; of many the first, the second, the heaviest and the last."""
    if len(memory) <= 4:
        return list(memory)
    heaviest = max(range(len(memory)), key=lambda i: memory[i].total_bytes)
    return [memory[i] for i in sorted({0, 1, heaviest, len(memory) - 1})]


def _table(title: str) -> Table:
    return Table(title=title or None, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0),
                 header_style="dim", pad_edge=False)


def _communication(plan: Plan) -> Table:
    table = _table("communication of one rank per step, on the busiest stage")
    for column, justify in (("axis", "left"), ("operation", "left"), ("of", "left"), ("size", "right"),
                            ("times", "right"), ("link", "left"), ("time", "right"), ("exposed", "right")):
        table.add_column(column, justify=justify)
    for transfer in plan.communication:
        exposed = Text(seconds(transfer.exposed_s), "red" if transfer.exposed_s > 0.5 * transfer.seconds else "")
        table.add_row(transfer.axis, transfer.op, transfer.what, size(transfer.payload_bytes), str(transfer.times),
                      LINKS[transfer.link], seconds(transfer.seconds), exposed)
    return table


def _rejected(plan: Plan) -> list[RenderableType]:
    table = _table("best rejected")
    table.add_column("layout", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("why not")
    for loser in plan.rejected:
        table.add_row(str(loser.layout), seconds(loser.step_time_s), size(loser.memory_gib * GIB),
                      Text(loser.reason, style="" if loser.fits else "red"))
    if not plan.rejected:
        table.add_row("no other layout is legal", "", "", "")
    lines: list[RenderableType] = [table]
    for refusal in plan.refused[:REFUSED_SHOWN]:
        plural = "layout is" if refusal.count == 1 else "layouts are"
        lines.append(Text(f"{refusal.count} {plural} illegal, e.g. {refusal.example}", "dim"))
    return lines


def _bar(parts: list[tuple[float, str]], *, total: float) -> Text:
    """Coloured blocks in proportion, the rest of `total` dotted; a part too small for a block is left out."""
    bar, used, done = Text(), 0, 0.0
    for value, colour in parts:
        done += value
        until = min(BAR_WIDTH, round(BAR_WIDTH * done / total))
        bar.append("█" * (until - used), colour)
        used = max(used, until)
    return bar.append("·" * (BAR_WIDTH - used), "dim")
