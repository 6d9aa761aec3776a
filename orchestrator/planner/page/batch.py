"""What spends the global batch: data parallelism, microbatches that fill the pipeline, accumulation.

Called by the page. For each dp the best layout that fits shows the trade:
more replicas leave fewer microbatches, fewer microbatches leave a larger bubble.
"""
from dataclasses import dataclass

from jobs.spec.parallel import AXES
from orchestrator.planner.cost import Priced
from orchestrator.planner.page.asked import Asked
from orchestrator.planner.plan import Plan
from orchestrator.planner.question import divisors
from orchestrator.planner.waiting import Group
from orchestrator.planner.space import every_layout

SHOWN_DP = 9
SHOWN_SIZES = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchChoices:
    by_dp: tuple[Priced, ...]  # the best that fits for each dp, dp ascending
    by_microbatch: tuple[Priced, ...]  # the plan's degrees with every microbatch_size, fitting or not


def batch_choices(plan: Plan, asked: Asked, *, searching: bool) -> BatchChoices:
    """Without `searching` no other dp. Everything but the degrees in question is as in the plan."""
    layout, world = plan.layout, plan.layout.dims.world_size
    alike = asked.without_wishes().in_detail_like(layout)
    degrees = _around([dp for dp in divisors(world) if dp <= plan.job.global_batch_size], layout.dims.dp, SHOWN_DP)
    degrees = degrees if searching else [layout.dims.dp]
    by_dp = _best_with(degrees, alike, plan)
    fixed = alike.wishing(**{axis: getattr(layout.dims, axis) for axis in AXES})
    sizes = {one.microbatch_size: one for one in every_layout(fixed.question)
             if one.slots < 2 * plan.job.global_batch_size}
    sizes[layout.microbatch_size] = layout
    near = _around(sorted(sizes), layout.microbatch_size, SHOWN_SIZES)
    return BatchChoices(by_dp=tuple(by_dp), by_microbatch=tuple(asked.price(sizes[size]) for size in near))


def _best_with(degrees: list[int], alike: Asked, plan: Plan) -> list[Priced]:
    """The fastest that fits of each dp that has any: the plan itself, or with everything chosen anew."""
    groups = [Group(name=str(dp), holds=lambda layout, own=dp: layout.dims.dp == own,
                    may=lambda shape, own=dp: shape.dp == own) for dp in degrees if dp != plan.layout.dims.dp]
    nodes = plan.layout.dims.world_size // plan.job.gpus_per_node
    search = alike.wishing(num_nodes=nodes or 1).search()
    firsts = {} if isinstance(search, str) else search.best(0, groups=groups)[1]
    firsts[str(plan.layout.dims.dp)] = alike.price(plan.layout)
    return [firsts[str(dp)] for dp in degrees if str(dp) in firsts]


def spending(plan: Plan) -> str:
    """The batch as a product, in words."""
    layout, pp = plan.layout, plan.layout.dims.pp
    m = layout.num_microbatches
    if pp > 1:
        filled = f"{m} microbatches keep {pp} stages busy: {plan.predicted.bubble_fraction:.1%} of the time is bubble"
    elif m > 1:
        filled = f"{m} microbatches are accumulated, one after another, before the optimizer steps"
    else:
        filled = "one microbatch: nothing is accumulated"
    surplus = layout.slots - plan.job.global_batch_size
    return filled + (f"; {surplus} of {layout.slots} slots stay empty and weigh nothing" if surplus else "")


def _around(values: list[int], own: int, count: int) -> list[int]:
    """Of ascending values the `count` nearest to the plan's own, by position."""
    position = min(range(len(values)), key=lambda i: abs(values[i] - own), default=0)
    first = max(0, min(position - count // 2, len(values) - count))
    return values[first:first + count]
