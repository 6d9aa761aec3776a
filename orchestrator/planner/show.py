"""The plan as a person reads it in a terminal: winner, memory, communication, step time, losers.

Called by `orc plan`. Presentation only: every figure shown is a field of the Plan.
"""
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from jobs.spec.parallel import AXES, Layout
from orchestrator.planner.plan import GIB, Plan, Prediction, StageMemory, alike
from orchestrator.planner.reasons import SLOWED
from orchestrator.planner.words import details, params, seconds, size

BAR_WIDTH = 52
MEMORY_PARTS = (("parameters", "blue"), ("gradients", "magenta"), ("optimizer", "cyan"), ("gathered", "yellow"),
                ("activations", "green"), ("logits", "red"), ("communication", "white"))
TIME_PARTS = (("compute", "compute_s", "green"), ("exposed communication", "exposed_communication_s", "red"),
              ("bubble", "bubble_s", "yellow"), ("optimizer", "optimizer_s", "cyan"))
MEMORY_HEADS = {"parameters": "params", "gradients": "grads", "optimizer": "optim", "activations": "acts",
                "communication": "buffers"}
REFUSED_SHOWN = 4
ROUNDING = 1e-4  # of the step: less is not worth a line
LABEL_WIDTH = 8
LINKS = {"intra_node": "in node", "nvlink_domain": "NVLink rack", "inter_node": "network", "spine": "spine"}


def show_plan(plan: Plan, console: Console, *, brief: bool = False) -> None:
    """Print the plan; `brief` leaves out the tables."""
    console.print(render_brief(plan) if brief else render(plan))


def render_brief(plan: Plan) -> Group:
    """What and how fast: a few lines."""
    return Group(_headline(plan), _labelled("layout", *_layout(plan)), _labelled("step", _speed(plan)),
                 _labelled("memory", _memory_line(plan)))


def render(plan: Plan) -> Group:
    """Everything; reads well from 80 columns on."""
    parts = [_headline(plan), Text(), _labelled("layout", *_layout(plan)), Text(),
             _labelled("step", _speed(plan), *_step_time(plan)), Text(),
             _labelled("memory", _memory_line(plan), _memory_bar(plan)), _memory(plan), Text()]
    if plan.communication:
        parts += [_communication(plan), Text()]
    return Group(*parts, *_rejected(plan))


def _labelled(label: str, *lines: Text) -> Table:
    """Lines beside their label; what does not fit goes on below its own beginning."""
    rows = Table.grid(padding=(0, 1, 0, 0))
    rows.add_column(width=LABEL_WIDTH, style="bold")
    rows.add_column()
    for i, line in enumerate(lines):
        rows.add_row("" if i else label, line)
    return rows


def _headline(plan: Plan) -> Text:
    job = plan.job
    text = Text.assemble((job.model, "bold"), f"  {params(job.num_params)} parameters  on  ", (job.cluster, "bold"),
                         f"  {job.num_nodes} node{'s' if job.num_nodes > 1 else ''} × {job.gpus_per_node} "
                         f"{job.gpu}\n",
                         (f"sequences of {job.seq_len} tokens, {job.global_batch_size} per step, {job.param_dtype}; "
                          f"{plan.candidates:,} legal layouts searched in {seconds(plan.search_s)}, {plan.priced:,} "
                          "priced", "dim"))
    return text


def _layout(plan: Plan) -> list[Text]:
    layout, dims = plan.layout, plan.layout.dims
    degrees = Text("  ").join(Text(f"{axis}={degree}", "bold green" if degree > 1 else "dim")
                              for axis in AXES for degree in [getattr(dims, axis)])
    empty = layout.slots - plan.job.global_batch_size
    weightless = f" ({empty} of {layout.slots} slots weigh nothing)" if empty else ""
    return [degrees,
            Text(f"microbatch {layout.microbatch_size} × {layout.num_microbatches} per replica{weightless}"),
            Text(details(layout)),
            Text(f"mesh {' × '.join(dims.order)}, the innermost on neighbouring GPUs", "dim")]


def _speed(plan: Plan) -> Text:
    predicted = plan.predicted
    return Text.assemble((seconds(predicted.step_time_s), "bold green"),
                         f"   {predicted.tokens_per_s:,.0f} tokens/s   {predicted.tokens_per_s_per_gpu:,.0f} per GPU   "
                         f"MFU {predicted.mfu:.1%} ({predicted.mfu_convention} attention)   HFU {predicted.hfu:.1%}")


def _step_time(plan: Plan) -> list[Text]:
    predicted = plan.predicted
    parts = [(name, getattr(predicted, field), colour) for name, field, colour in TIME_PARTS]
    bar = _bar([(value, colour) for _, value, colour in parts], total=predicted.step_time_s)
    legend = Text("  ").join(Text.assemble(("■ ", colour), f"{name} {seconds(value)}") for name, value, colour in parts)
    bubble = Text(f"bubble {predicted.bubble_fraction:.1%} of the pipeline's time", "dim")
    return [bar, legend, *([bubble] if plan.layout.dims.pp > 1 else []), Text(amdahl(predicted), "dim")]


def amdahl(predicted: Prediction) -> str:
    """What more GPUs bring at most on the same batch: 1/(s + (1 − s)/N), with any number of them 1/s."""
    if not predicted.serial_share:
        return "All of it is compute: only the batch bounds what more GPUs bring"
    return (f"{predicted.serial_share:.1%} is not compute: 2× the GPUs bring at most {predicted.speedup(2):.2f}×, 8× "
            f"{predicted.speedup(8):.2f}×, any number {predicted.speedup_ceiling:,.1f}× (Amdahl)")


def _heaviest(plan: Plan) -> StageMemory:
    return max(plan.memory, key=lambda stage: stage.total_bytes)


def _memory_line(plan: Plan) -> Text:
    heaviest, limit = _heaviest(plan), plan.predicted.memory_limit_gib * GIB
    return Text.assemble((size(heaviest.total_bytes), "bold green"),
                         f" on pipeline rank {heaviest.pp_rank}, the heaviest, of {size(limit)} "
                         f"({plan.job.gpu} less {plan.job.headroom:.0%} headroom)")


def _memory_bar(plan: Plan) -> Text:
    heaviest = _heaviest(plan)
    parts = [(getattr(heaviest, f"{name}_bytes"), colour) for name, colour in MEMORY_PARTS]
    return _bar(parts, total=plan.predicted.memory_limit_gib * GIB)


def _memory(plan: Plan) -> Table:
    """One unit for all, so that one sees the columns add up."""
    name, unit = ("GiB", GIB) if _heaviest(plan).total_bytes >= GIB else ("MiB", 2**20)
    rows = table("")
    for column in ("rank", "layers", "in flight"):
        rows.add_column(column, justify="right", no_wrap=column != "in flight")
    for part, colour in MEMORY_PARTS:
        rows.add_column(Text(MEMORY_HEADS.get(part, part), colour), justify="right", no_wrap=True)
    rows.add_column(name, justify="right", style="bold", no_wrap=True)
    for rank in _shown_stages(plan.memory):
        rows.add_row(str(rank.pp_rank), str(rank.layers), str(rank.in_flight),
                     *(f"{getattr(rank, f'{part}_bytes') / unit:.2f}" for part, _ in MEMORY_PARTS),
                     f"{rank.total_bytes / unit:.2f}")
    return rows


def _shown_stages(memory: tuple[StageMemory, ...]) -> list[StageMemory]:
    """All of a few pipeline ranks; of many the first, the second, the heaviest and the last."""
    if len(memory) <= 4:
        return list(memory)
    heaviest = max(range(len(memory)), key=lambda i: memory[i].total_bytes)
    return [memory[i] for i in sorted({0, 1, heaviest, len(memory) - 1})]


def table(title: str) -> Table:
    """Without lines, for a terminal of 100 columns."""
    return Table(title=title or None, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0),
                 header_style="dim", pad_edge=False)


def _communication(plan: Plan) -> Table:
    rows = table("communication of one rank per step, on the busiest pipeline rank")
    for column, justify in (("axis", "left"), ("operation", "left"), ("of", "left"), ("size", "right"),
                            ("times", "right"), ("link", "left"), ("time", "right"), ("exposed", "right")):
        rows.add_column(column, justify=justify, no_wrap=column != "of", overflow="fold")
    inner_first = ("tp", "cp", "ep", "pp", "dp_shard", "dp_replicate")
    least_s, small = ROUNDING * plan.predicted.step_time_s, []
    # of forward and backward, and of several stages on one rank, in one line
    lines = alike(plan.communication, "axis", "op", "what", "link", "payload_bytes")
    for same in sorted(lines, key=lambda same: inner_first.index(same[0].axis)):
        one, total_s, exposed_s = same[0], sum(t.seconds for t in same), sum(t.exposed_s for t in same)
        if total_s < least_s:
            small += same
            continue
        rows.add_row(one.axis, one.op, one.what, size(one.payload_bytes), f"{sum(t.times for t in same):,}",
                     LINKS[one.link], seconds(total_s), Text(seconds(exposed_s), "red" if exposed_s > total_s / 2
                                                             else ""))
    if small:
        rows.add_row("", "", f"{len(small)} small ones", "", f"{sum(t.times for t in small):,}", "",
                     seconds(sum(t.seconds for t in small)), seconds(sum(t.exposed_s for t in small)), style="dim")
    slowed_s = plan.predicted.exposed_communication_s - sum(one.exposed_s for one in plan.communication)
    if slowed_s > least_s:  # the column's sum is the step's exposed communication
        rows.add_row("", "", SLOWED, "", "", "", "", seconds(slowed_s))
    return rows


def _rejected(plan: Plan) -> list[RenderableType]:
    rows = table("best rejected")
    rows.add_column("layout")
    rows.add_column("step", justify="right", no_wrap=True)
    rows.add_column("memory", justify="right", no_wrap=True)
    rows.add_column("why not")
    for loser in plan.rejected:
        rows.add_row(_told(loser.layout, plan.layout), seconds(loser.step_time_s), size(loser.memory_gib * GIB),
                     Text(loser.reason, style="" if loser.fits else "red"))
    if not plan.rejected:
        rows.add_row("no other degrees are legal and fit", "", "", "")
    lines: list[RenderableType] = [rows]
    for refusal in plan.refused[:REFUSED_SHOWN]:
        lines.append(Text(f"{refusal.count} × illegal by {refusal.rule}, e.g. {refusal.example}", "dim"))
    return lines


def _told(layout: Layout, winner: Layout) -> str:
    """A loser's degrees, and of the rest what differs from the winner's."""
    own, others = details(layout).split(", "), set(details(winner).split(", "))
    apart = [word for word in own if word not in others and not word.endswith(" per stage")]
    return " ".join([str(layout), *([f"({', '.join(apart)})"] if apart else [])])


def _bar(parts: list[tuple[float, str]], *, total: float) -> Text:
    """Coloured blocks in proportion, the rest of `total` dotted; a part too small for a block is left out."""
    bar, used, done = Text(), 0, 0.0
    for value, colour in parts:
        done += value
        until = min(BAR_WIDTH, round(BAR_WIDTH * done / total))
        bar.append("█" * (until - used), colour)
        used = max(used, until)
    return bar.append("·" * (BAR_WIDTH - used), "dim")
