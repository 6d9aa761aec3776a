"""What other trainers can say of a layout: the nearest layout in their words, and what is lost on the way.

Called by orchestrator.export and by `orc plan --for`. A degree, a schedule or a batch that a tool has no words for is
refused: without it the file would be another plan. A detail (recompute, sharding stage, when to reduce) is written as
the tool's nearest, and said. Facts are of Accelerate 1.15, Axolotl 0.19, torchtitan 0.3 and Megatron-LM of 2026; no
file is written here.
"""
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from jobs.spec.load import Problem, SpecError, suggest
from jobs.spec.parallel import MESH_ORDER, Layout
from orchestrator.request import CHOICES, ParallelRequest
from orchestrator.planner.plan import Plan

Tool = Literal["accelerate", "axolotl", "torchtitan", "megatron"]
PP_OUTSIDE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """Fields that are not named take any value."""

    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # another value is refused
    nearest: dict[str, dict[Any, Any]] = field(default_factory=dict)  # value without a word → what is written
    order: tuple[str, ...] = MESH_ORDER  # of the ranks, outermost first
    lacks: str  # features of our trainer that no file can ask of this one


_HUGGING_FACE = Dialect(
    only={"pp": (1,), "ep": (1,)},
    nearest={"zero_stage": {1: 2}, "recompute": {"selective": "full"}, "sequence_parallel": {True: False}},
    lacks="pipelines, experts folded over dp_shard·cp·tp, sequence_parallel, ZeRO-1, several layers per FSDP unit, "
          "selective recompute")
DIALECTS: dict[str, Dialect] = {
    "accelerate": _HUGGING_FACE,
    "axolotl": dataclasses.replace(_HUGGING_FACE, nearest=_HUGGING_FACE.nearest | {"cp_method": {"allgather": "ring"}}),
    "torchtitan": Dialect(nearest={"zero_stage": {1: 2}, "cp_method": {"ring": "allgather"}}, order=PP_OUTSIDE,
                          lacks="ZeRO-1, several layers per FSDP unit, ring attention, a choice of when gradients are "
                                "reduced"),
    "megatron": Dialect(only={"schedule": ("1f1b", "interleaved_1f1b")}, nearest={"recompute": {"selective": "full"}},
                        order=PP_OUTSIDE, lacks="gpipe, interleaved_zero_bubble, zbv, dualpipev, several layers per "
                        "FSDP unit, recompute of all but matmuls and attention"),
}
# What the reader of the note gets instead of what was planned.
EFFECTS = {
    "zero_stage": "gradients are sharded too",
    "recompute": "slower, with less memory than planned",
    "sequence_parallel": "every tp rank holds whole activations between layers: more memory than planned",
    "layers_per_unit": "less memory than planned, in more and smaller messages",
    "cp_method": "other messages than planned",
    "mesh_order": "other axes cross the slow links than planned",
}


def dialect(tool: str) -> Dialect:
    """Raises SpecError for a tool that is not known."""
    if tool not in DIALECTS:
        raise SpecError([Problem(where="tool", value=tool, message=f"is not known; {suggest(tool, get_args(Tool))}")])
    return DIALECTS[tool]


def nearest(layout: Layout, *, to: str) -> Layout:
    """The layout as the tool will run it: every detail that it has no word for replaced by what it does."""
    known = dialect(to)
    changes = {name: values.get(getattr(layout, name), getattr(layout, name)) for name, values in known.nearest.items()}
    dims = dataclasses.replace(layout.dims, order=known.order)
    said = dataclasses.replace(layout, dims=dims, layers_per_unit=1, **changes)
    return dataclasses.replace(said, reduce_every_microbatch=_reduces_every(said, to))


def _reduces_every(said: Layout, to: str) -> bool:
    """torchtitan reduces with every backward, and in a pipeline after the last; Megatron-FSDP with every backward
    where it shards gradients."""
    if to == "torchtitan":
        return said.dims.pp == 1
    return said.zero_stage > 1 if to == "megatron" else said.reduce_every_microbatch and said.zero_stage > 1


def losses(layout: Layout, *, to: str) -> list[str]:
    """One line per detail of the layout that the tool will do otherwise."""
    said = nearest(layout, to=to)
    ours, theirs = layout.flat(), said.flat()
    lines = []
    for name, value in ours.items():
        if theirs[name] == value or _idle(layout, name) or (name == "mesh_order" and _active(layout) == _active(said)):
            continue
        if name == "reduce_every_microbatch":
            effect = "whole gradients are held between microbatches: more memory than planned" if value else \
                "less memory than planned, in more messages"
        else:
            effect = EFFECTS[name]
        lines.append(f"{name}: {value} has no words in {to}, which does {theirs[name]}: {effect}")
    if to == "torchtitan" and layout.recompute == "selective":
        lines.append("recompute: selective recomputes every second matmul too in torchtitan: slower, with less memory "
                     "than planned")
    return lines


def _idle(layout: Layout, name: str) -> bool:
    """Where the field makes no difference to this layout."""
    dims = layout.dims
    return {"zero_stage": dims.fsdp == 1, "layers_per_unit": dims.fsdp == 1, "cp_method": dims.cp == 1,
            "reduce_every_microbatch": dims.fsdp == 1 or layout.num_microbatches == 1, "schedule": dims.pp == 1,
            "sequence_parallel": dims.tp == 1}.get(name, False)


def _active(layout: Layout) -> list[str]:
    """The axes that rank order matters to."""
    return [axis for axis in layout.dims.order if getattr(layout.dims, axis) > 1]


def refusals(plan: Plan, *, to: str) -> list[Problem]:
    """Why the plan would be another one in the tool's words; empty if it can be said."""
    layout, job, found = plan.layout, plan.job, []
    dims, flat = layout.dims, layout.flat()

    def refuse(name: str, value: Any, message: str) -> None:
        found.append(Problem(where=f"layout.{name}", value=value, message=message))

    remedy = f"`orc plan RUN.yaml --for {to}` finds the best plan that has"
    for name, sayable in dialect(to).only.items():
        if flat[name] not in sayable and not _idle(layout, name):
            refuse(name, flat[name], f"has no words in {to}, which knows {', '.join(map(str, sayable))}; {remedy}")
    if layout.slots != job.global_batch_size:
        refuse("num_microbatches", layout.num_microbatches, f"× microbatch_size × dp = {layout.slots} slots for "
               f"global_batch_size={job.global_batch_size}, and {to} has no weightless ones; {remedy}, and so does a "
               f"global_batch_size that is a multiple of {layout.microbatch_size * dims.dp}")
    if to in ("accelerate", "axolotl") and max(dims.tp, dims.cp) > 1 and dims.dp_shard == 1 and (
            dims.dp_replicate > 1 or dims.cp == 1):
        refuse("dp_shard", 1, f"beside tp or cp and dp_replicate={dims.dp_replicate} leaves {to}'s FSDP nothing to "
               "shard over; plan again with parallel.dp_replicate=1 and parallel.dp_shard of 2 or more")
    if to == "megatron" and layout.virtual_stages > 1 and dims.pp > 1 and layout.num_microbatches % dims.pp:
        refuse("num_microbatches", layout.num_microbatches, f"is no multiple of pp={dims.pp}, which megatron's "
               f"interleaved schedule asks for; try {-(-layout.num_microbatches // dims.pp) * dims.pp}")
    return found


def wishes_for(request: ParallelRequest, *, tool: str) -> ParallelRequest:
    """The request narrowed to what the tool can say without a loss. Raises SpecError where the user fixed otherwise."""
    known = dialect(tool)
    sayable: dict[str, tuple[Any, ...]] = dict(known.only) | {"layers_per_unit": (1,)} | {
        name: tuple(value for value in CHOICES[name] if value not in wordless)
        for name, wordless in known.nearest.items()}
    narrowed: dict[str, Any] = {"mesh_order": list(known.order)} if request.mesh_order == "auto" else {}
    problems = []
    for name, values in sayable.items():
        asked = request.options(name)
        both = list(values if asked is None else [value for value in asked if value in values])
        if not both:
            problems.append(Problem(where=f"parallel.{name}", value=getattr(request, name), message=f"has no words in "
                                    f"{tool}, which knows {', '.join(map(str, values))}; leave it auto"))
        narrowed[name] = both[0] if len(both) == 1 else both
    if problems:
        raise SpecError(problems)
    return dataclasses.replace(request, uneven_batch=False, **narrowed)
