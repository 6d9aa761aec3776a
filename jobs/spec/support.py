"""What the trainer does not run: the planner may look further, but nothing is submitted that this refuses.

Read by the planner (which layouts can be trained) and by `orc run/submit`; kept by those who extend
jobs.model and jobs.parallel. Knows no torch.
"""
from typing import Any

from jobs.spec.load import Problem
from jobs.spec.model import ModelSpec, MoeSpec
from jobs.spec.parallel import VIRTUAL_STAGES, ZERO_BUBBLE_SCHEDULES, Layout


def layout_problems(layout: Layout) -> list[Problem]:
    """Why this trainer cannot run the layout; empty if it can."""
    dims, found = layout.dims, _pipeline_problems(layout)
    if layout.reduce_every_microbatch and (layout.zero_stage == 1 or dims.fsdp == 1):
        found.append(Problem(where="parallel.reduce_every_microbatch", value=True, message="keeps gradients in shards, "
                             "which needs zero_stage 2 or 3 and dp_shard·cp above 1; set false"))
    if dims.order.index("dp_replicate") > dims.order.index("dp_shard"):
        found.append(Problem(where="parallel.mesh_order", value=list(dims.order), message="has dp_shard outside "
                             "dp_replicate, which FSDP does not take; put dp_replicate first"))
    return found


def _pipeline_problems(layout: Layout) -> list[Problem]:
    """What a schedule asks for. The rules of microbatches are those of torch.distributed.pipelining."""
    pp, schedule, m = layout.dims.pp, layout.schedule, layout.num_microbatches
    least, most = VIRTUAL_STAGES[schedule] if pp > 1 else (1, 1)
    found = []

    def refuse(where: str, value: Any, message: str) -> None:
        found.append(Problem(where=f"parallel.{where}", value=value, message=message))

    if layout.virtual_stages < least or (most is not None and layout.virtual_stages > most):
        wanted = f"{least} or more" if most is None else str(least)
        against = f"schedule={schedule}" if pp > 1 else "pp=1"
        refuse("virtual_stages", layout.virtual_stages, f"does not go with {against}; set {wanted}")
    if pp == 1:
        return found
    fewest = {"1f1b": pp, "dualpipev": layout.num_stages}.get(schedule, 1)
    if m < fewest:
        refuse("num_microbatches", m, f"microbatches are fewer than the {fewest} stages of {schedule}; set at least "
               f"{fewest}, with a smaller microbatch_size or less data parallelism, or schedule=gpipe")
    rounds = max(1, m // pp)
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and m % rounds:
        refuse("num_microbatches", m, f"microbatches do not split into {rounds} equal rounds over pp={pp} under "
               f"{schedule}; the nearest that do are {m // rounds * rounds} and {-(-m // pp) * pp}")
    if schedule in ZERO_BUBBLE_SCHEDULES and layout.zero_stage == 3 and layout.dims.fsdp > 1:
        refuse("zero_stage", 3, f"drops weights that the second half of a backward under {schedule} still needs: "
               "gradients would be silently wrong; set 1 or 2, or schedule=1f1b")
    return found


def compile_problems(layout: Layout) -> list[Problem]:
    """Why training.compile cannot be under this layout; empty if it can."""
    found = []
    if layout.dims.pp > 1 and layout.schedule in ZERO_BUBBLE_SCHEDULES and layout.recompute == "none":
        found.append(Problem(where="training.compile", value=True, message="does not go with "
                             f"schedule={layout.schedule}, which cuts a layer's backward in two where a compiled one "
                             "is whole; set false, recompute=full, or schedule=1f1b"))
    return found


def model_problems(model: ModelSpec) -> list[Problem]:
    """Why this trainer cannot build the model; empty if it can. An option that would silently do nothing is refused."""
    found = []

    def refuse(where: str, value: Any, message: str) -> None:
        found.append(Problem(where=f"model.{where}", value=value, message=message))

    for name in ("dropout", "attention_dropout"):
        if not 0 <= (p := getattr(model, name)) < 1:
            refuse(name, p, "is not a probability below 1")
    if model.sliding_window is not None and model.global_every < 2:
        refuse("global_every", model.global_every, "makes every layer global, and sliding_window without effect; "
               "set 2 or more, or sliding_window=none")
    if model.norm_offset and model.norm == "layernorm":
        refuse("norm_offset", True, "is without effect on layernorm; set false, or norm=rmsnorm")
    if model.mla is not None:
        if model.positions == "learned":
            refuse("positions", "learned", "does not go with model.mla, whose heads have a rotary part; set rotary")
        if model.qk_norm:
            refuse("qk_norm", True, "is without effect on model.mla, whose latents have norms of their own; set false")
        if model.mla.qk_rope_head_dim % 2:
            refuse("mla.qk_rope_head_dim", model.mla.qk_rope_head_dim, "is odd, but rotary positions turn pairs; try "
                   f"{model.mla.qk_rope_head_dim + 1}")
    if model.moe is not None:
        found += _mixture_problems(model.moe)
    return found


def _mixture_problems(moe: MoeSpec) -> list[Problem]:
    if moe.num_groups < 1 or moe.num_experts % moe.num_groups:
        return [Problem(where="model.moe.num_groups", value=moe.num_groups, message="does not divide "
                        f"model.moe.num_experts={moe.num_experts}")]
    eligible = moe.num_experts // moe.num_groups * min(moe.top_groups, moe.num_groups)
    if not 1 <= moe.top_k <= eligible:
        return [Problem(where="model.moe.top_k", value=moe.top_k, message=f"is not between 1 and the {eligible} experts"
                        " that a token may choose from")]
    return []
