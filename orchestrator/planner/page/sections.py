"""The page's sections whose marks are plain HTML: headline, step time, memory, communication, batch, losers.

Called by the page. Each takes what the planner said and returns markup; what needs a canvas is drawn in the
browser from data instead.
"""
import dataclasses

from jobs.spec.parallel import AXES, Layout
from orchestrator.planner.cost import Priced
from orchestrator.planner.page.asked import described
from orchestrator.planner.page.batch import BatchChoices, spending
from orchestrator.planner.page.markup import Html, bar, join, key, table, tag
from orchestrator.planner.plan import GIB, Plan, Prediction, StageMemory, Transfer, alike
from orchestrator.planner.show import amdahl
from orchestrator.planner.words import params, seconds, size

COLOURS = tuple(f"var(--c{i})" for i in range(1, 9))
PARTS = (("compute", "compute_s", "var(--c1)"), ("exposed communication", "exposed_communication_s", "var(--c4)"),
         ("pipeline bubble", "bubble_s", "var(--c3)"), ("optimizer", "optimizer_s", "var(--c2)"))
MEMORY_FIELDS = tuple(f.name for f in dataclasses.fields(StageMemory) if f.name.endswith("_bytes"))
LINKS = {"intra_node": "in node", "nvlink_domain": "NVLink domain", "inter_node": "network", "spine": "spine switches"}
MAX_STAGE_ROWS = 32
FAR = 6  # a limit so many times above the heaviest stage is named, not drawn


def headline(plan: Plan) -> Html:
    """What is trained on what, the layout in words, and the figures one asks for first."""
    job, predicted = plan.job, plan.predicted
    figures = [
        ("step", seconds(predicted.step_time_s), f"{job.global_batch_size * job.seq_len:,} tokens"),
        ("tokens/s", f"{predicted.tokens_per_s:,.0f}", f"{predicted.tokens_per_s_per_gpu:,.0f} per GPU"),
        ("MFU", f"{predicted.mfu:.1%}", f"{predicted.mfu_convention} attention · HFU {predicted.hfu:.1%}"),
        ("memory", size(predicted.memory_gib * GIB),
         f"of {size(predicted.memory_limit_gib * GIB)} · pipeline rank {predicted.memory_pp_rank}"),
    ]
    return join(
        tag("p", f"{job.num_nodes:,} nodes × {job.gpus_per_node} {job.gpu} · {job.cluster}", class_="over"),
        tag("h1", job.model, tag("small", f" {params(job.num_params)} parameters")),
        tag("p", in_words(plan.layout, plan), class_="lead"),
        tag("ul", *(_chip(axis, getattr(plan.layout.dims, axis)) for axis in AXES), class_="chips",
            aria_label="degrees of parallelism"),
        tag("dl", *(tag("div", tag("dt", name), tag("dd", value), tag("dd", more, class_="more"))
                    for name, value, more in figures), class_="figures"),
        tag("p", tag("b", "Not trained by this version of orc: "), "; ".join(plan.untrained), class_="warn")
        if plan.untrained else None)


def in_words(layout: Layout, plan: Plan) -> str:
    """The layout as one sentence."""
    dims = layout.dims
    phrases = [(dims.pp, f"{dims.pp} pipeline stages"), (dims.tp, f"every matmul split over {dims.tp} GPUs"),
               (dims.cp, f"every sequence over {dims.cp}"), (dims.ep, f"experts spread over {dims.ep}"),
               (dims.dp_shard, f"states in {dims.dp_shard} shards (ZeRO-{layout.zero_stage})"),
               (dims.dp_replicate, f"{dims.dp_replicate} replicas")]
    used = [phrase for degree, phrase in phrases if degree > 1] or ["one GPU, nothing split"]
    sentence = ", ".join(used)
    rest = [f"microbatch {layout.microbatch_size} × {layout.num_microbatches}", f"recompute {layout.recompute}",
            plan.job.param_dtype]
    if dims.pp > 1:
        chunks = f" with {layout.virtual_stages} stages per rank" if layout.virtual_stages > 1 else ""
        rest.insert(1, layout.schedule + chunks)
    return f"{sentence[0].upper()}{sentence[1:]}; {', '.join(rest)}."


def _chip(axis: str, degree: int) -> Html:
    return tag("li", axis, tag("b", degree), class_=None if degree > 1 else "one")


# ------------------------------------------------------------------ step time and memory
def step_parts(predicted: Prediction) -> list[tuple[str, float, str]]:
    parts = [(f"{name} {seconds(getattr(predicted, field))}", getattr(predicted, field), colour)
             for name, field, colour in PARTS]
    rest = predicted.step_time_s - sum(value for _, value, _ in parts)
    return parts + ([(f"other {seconds(rest)}", rest, "var(--c6)")] if rest > 1e-3 * predicted.step_time_s else [])


def step_time(plan: Plan) -> Html:
    predicted = plan.predicted
    parts = [part for part in step_parts(predicted) if part[1] > 0]
    legend = [(name.removesuffix(f" {seconds(value)}"), f"{seconds(value)} · {value / predicted.step_time_s:.1%}",
               colour) for name, value, colour in parts]
    return join(bar(parts, total=predicted.step_time_s, label="; ".join(name for name, _, _ in parts)), key(legend),
                tag("p", f"{amdahl(predicted)}.", class_="note"))


def memory(plan: Plan, *, gpu_gib: float) -> Html:
    """One stacked bar per pipeline rank against the GPU's memory; the limit is what the headroom leaves."""
    limit = plan.predicted.memory_limit_gib * GIB
    heaviest = max(plan.memory, key=lambda stage: stage.total_bytes)
    far = limit > FAR * heaviest.total_bytes  # against the limit nothing could be seen
    scale = 1.05 * heaviest.total_bytes if far else max(gpu_gib * GIB, heaviest.total_bytes)
    used = [name for name in MEMORY_FIELDS if any(getattr(stage, name) for stage in plan.memory)]
    rows = [_stage_bar(stage, used, scale=scale, heaviest=stage is heaviest) for stage in _shown_stages(plan.memory)]
    legend = [(_label(name), size(getattr(heaviest, name)), COLOURS[MEMORY_FIELDS.index(name) % len(COLOURS)])
              for name in used]
    marks = tag("div", tag("span", f"limit {size(limit)}"), class_="limit", style=f"--at:{limit / scale:.5f}")
    if far:
        times = limit / heaviest.total_bytes
        marks = tag("p", f"The limit, {size(limit)}, lies {times:.0f}× as far right.", class_="note")
    which = f"pipeline rank {heaviest.pp_rank}, the heaviest: " if len(plan.memory) > 1 else ""
    figures = [[stage.pp_rank, stage.layers, stage.in_flight, *(size(getattr(stage, name)) for name in used),
                size(stage.total_bytes)] for stage in plan.memory]
    head = ["rank", "layers", "in flight", *(_label(name) for name in used), "total"]
    return join(
        tag("div", marks, *rows, class_="stack" + (" many" if len(rows) > 12 else "") + (" far" if far else "")),
        tag("p", f"{which}{size(heaviest.total_bytes)}", class_="sum"), key(legend),
        tag("details", tag("summary", "every rank in figures"),
            table(head, figures, caption="memory of each pipeline rank, all its stages together",
                  numbers=set(range(1, len(head))), marked=heaviest.pp_rank if len(plan.memory) > 1 else None)))


def _stage_bar(stage: StageMemory, used: list[str], *, scale: float, heaviest: bool) -> Html:
    parts = [(f"{_label(name)} {size(getattr(stage, name))}", getattr(stage, name),
              COLOURS[MEMORY_FIELDS.index(name) % len(COLOURS)]) for name in used]
    label = "; ".join([f"pipeline rank {stage.pp_rank}: {size(stage.total_bytes)}",
                       *(name for name, value, _ in parts if value)])
    return tag("div", tag("span", stage.pp_rank, class_="stage"), bar(parts, total=scale, label=label),
               class_="row heaviest" if heaviest else "row")


def _shown_stages(stages: tuple[StageMemory, ...]) -> list[StageMemory]:
    """All, or of very many an even choice with the heaviest and both ends."""
    if len(stages) <= MAX_STAGE_ROWS:
        return list(stages)
    heaviest = max(range(len(stages)), key=lambda i: stages[i].total_bytes)
    step = -(-len(stages) // (MAX_STAGE_ROWS - 3))
    return [stages[i] for i in sorted({*range(0, len(stages), step), heaviest, len(stages) - 1})]


def _label(field: str) -> str:
    return field.removesuffix("_bytes").replace("_", " ")


# ------------------------------------------------------------------ communication
def communication(plan: Plan) -> Html:
    """Seconds per axis and link with the exposed part filled, and every operation below."""
    if not plan.communication:
        return tag("p", "Nothing is communicated: one rank does it all.", class_="note")
    groups: dict[tuple[str, str], list] = {}
    for transfer in plan.communication:
        groups.setdefault((transfer.axis, transfer.link), []).append(transfer)
    longest = max(sum(t.seconds for t in group) for group in groups.values())
    rows = []
    for (axis, link), group in groups.items():
        total, exposed = sum(t.seconds for t in group), sum(t.exposed_s for t in group)
        parts = [(f"exposed {seconds(exposed)}", exposed, "var(--c4)"),
                 (f"hidden behind compute {seconds(total - exposed)}", total - exposed, "var(--hidden)")]
        who = join(axis, tag("small", f"{group[0].ranks:,} ranks, {_link(link)}"))
        rows.append([who, size(sum(t.wire_bytes for t in group)), seconds(total),
                     seconds(exposed), bar(parts, total=longest, label=f"{axis}: {parts[0][0]}, {parts[1][0]}")])
    # the same operation of several stages on one rank counts as one
    every = [_operation(one) for one in alike(plan.communication, "axis", "op", "what", "phase", "payload_bytes")]
    beside_many = True if len(plan.memory) > 12 else None  # the card next to it is tall
    return join(
        table(["axis", "sent", "time", "exposed", "of the longest"], rows,
              caption="per step, by the busiest pipeline rank", numbers={1, 2, 3}),
        key([("exposed: compute waits", "", "var(--c4)"), ("hidden behind compute", "", "var(--hidden)")]),
        tag("details", tag("summary", "every operation"),
            table(["operation", "size", "times", "time", "exposed"], every, numbers={1, 2, 3, 4},
                  caption="size: of one operation, before it is divided among the ranks"), open=beside_many))


def _operation(same: list[Transfer]) -> list:
    one = same[0]
    when = "" if one.phase == "step" else f", {one.phase}"
    return [join(one.op.replace("_", " "), tag("small", f"{one.axis}: {one.what}{when}")), size(one.payload_bytes),
            f"{sum(t.times for t in same):,}", seconds(sum(t.seconds for t in same)),
            seconds(sum(t.exposed_s for t in same))]


def _link(link: str) -> str:
    return LINKS.get(link, link.replace("_", " "))


# ------------------------------------------------------------------ batch and losers
def batch(plan: Plan, choices: BatchChoices) -> Html:
    layout = plan.layout
    factors = [("global batch", layout.slots, "sequences"), ("dp", layout.dims.dp, "replicas × shards"),
               ("microbatches", layout.num_microbatches, "one after another"),
               ("microbatch size", layout.microbatch_size, "sequences at once")]
    signs = ["=", "×", "×", ""]
    product = [tag("div", tag("span", f"{value:,}"), tag("b", name), tag("small", unit), data_sign=sign or None)
               for (name, value, unit), sign in zip(factors, signs)]
    own = [one.layout == layout for one in choices.by_dp]
    sizes = [one.layout == layout for one in choices.by_microbatch]
    tables = [_choices(choices.by_dp, "dp", "the best layout for each dp", own)]
    if len(choices.by_microbatch) > 1:
        tables.append(_choices(choices.by_microbatch, "microbatch", "the plan's degrees, each microbatch size", sizes))
    legend = key([(name, "", colour) for name, _, colour in PARTS])
    return join(tag("div", *product, class_="product"), tag("p", f"{spending(plan)}.", class_="lead"),
                tag("div", *tables, class_="pair"), legend)


def _choices(found: tuple[Priced, ...], what: str, caption: str, own: list[bool]) -> Html:
    slowest = max((one.predicted.step_time_s for one in found if one.fits), default=1.0)
    rows = []
    for one in found:
        layout, by_dp = one.layout, what == "dp"
        first = f"{layout.dims.dp:,}" if by_dp else f"{layout.microbatch_size} × {layout.num_microbatches}"
        parts = step_parts(one.predicted)
        rows.append([first, tag("span", layout, class_="wrap") if by_dp else size(one.predicted.memory_gib * GIB),
                     f"{max(0.0, one.predicted.bubble_fraction):.1%}", seconds(one.predicted.step_time_s),
                     bar(parts, total=slowest, label="; ".join(name for name, _, _ in parts)) if one.fits
                     else tag("em", "does not fit")])
    second = "layout" if what == "dp" else "memory"
    return table([what, second, "bubble", "step", ""], rows, caption=caption,
                 numbers={2, 3} if what == "dp" else {1, 2, 3}, marked=own.index(True) if any(own) else None)


def losers(plan: Plan) -> Html:
    """The planner's own short list, in its words."""
    if not plan.rejected:
        return tag("p", "No other layout is legal.", class_="note")
    items = [tag("li", tag("b", described(loser.layout, beside=plan.layout)),
                 tag("span", f"{seconds(loser.step_time_s)} · {size(loser.memory_gib * GIB)} · "),
                 tag("span", loser.reason, class_=None if loser.fits else "big")) for loser in plan.rejected]
    return join(tag("h3", "The best that lost"), tag("ol", *items, class_="losers"))


def axes(plan: Plan) -> Html:
    """What each axis is worth: the best layout without or with it."""
    if not plan.axes:
        return Html("")
    rows = [[effect.what, f"{effect.change:+.1%}" if effect.change is not None else "–",
             tag("span", described(effect.other.layout, beside=plan.layout) if effect.other else effect.note,
                 class_="wrap"),
             seconds(effect.other.step_time_s) if effect.other else "–"] for effect in plan.axes]
    return table(["axis", "step time", "the best such layout", "step"], rows, numbers={1, 3},
                 caption="what each axis is worth")


def refusals(plan: Plan) -> Html:
    if not plan.refused:
        return Html("")
    items = [tag("li", f"{refusal.count:,} × ", tag("b", refusal.rule), f": e.g. {refusal.example}")
             for refusal in plan.refused]
    count = sum(refusal.count for refusal in plan.refused)
    return tag("details", tag("summary", f"{count:,} layouts are illegal"), tag("ul", *items))
