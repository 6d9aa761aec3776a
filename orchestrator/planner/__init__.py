"""plan: model, training, cluster and what the user fixed → the fastest layout that fits, and why.

Called by the CLI and, when nodes are lost, by the supervisor. Pure but for the clock that times the search: nothing
is sampled, every legal layout is either priced or shown to be slower than those that were. Never imports torch.
"""
import dataclasses
import time
from collections.abc import Callable

from jobs.spec import support
from jobs.spec.counts import num_params
from jobs.spec.model import AttentionConvention
from jobs.spec.parallel import AXES, Layout
from orchestrator.request import ParallelRequest
from orchestrator.planner.axes import axis_effects, axis_groups
from orchestrator.planner.memory import stage_memory
from orchestrator.planner.plan import Plan, PlanError, PlannedJob, layout_from_flat, plan_from_dict, plan_json
from orchestrator.planner.question import Question
from orchestrator.planner.reasons import against_request, reject
from orchestrator.planner.refusals import question_problems, too_big, with_crossing_cost
from orchestrator.planner.search import Search

__all__ = ["Plan", "PlanError", "layout_from_flat", "plan", "plan_from_dict", "plan_json"]

SHOWN_SLOWER = 5  # of the losers that fit, one per combination of degrees
SHOWN_TOO_BIG = 3
SHOWN_FREE = 3  # faster ones that the request rules out


def plan(question: Question, *, headroom: float, convention: AttentionConvention = "causal", axes: bool = False,
         clock: Callable[[], float] = time.perf_counter) -> Plan:
    """The fastest legal layout whose heaviest stage fits. Raises PlanError with every reason if there is none.

    A `trainable` question leaves out what this version's trainer does not run: for a run. Without it everything is
    searched, and `Plan.untrained` says what of the winner the trainer does not run. With `axes`, also what each axis is
    worth.
    """
    started = clock()
    problems = question_problems(question)
    if problems:
        raise PlanError([with_crossing_cost(p, question, headroom=headroom, convention=convention) for p in problems])
    search = Search(question, headroom=headroom, convention=convention)
    free = search.again(_freed(question)) if question.request.fixed() else search
    groups = axis_groups(question) if axes else ()
    best, firsts = search.best(1 + SHOWN_SLOWER, key=_degrees if search.space.several_dims() else _gist,
                               groups=groups if free is search else ())
    if not best:
        raise PlanError(too_big(search))
    winner, faster = best[0], []
    if free is not search:
        faster, firsts = free.best(SHOWN_FREE, key=_degrees, groups=groups)
        faster = [against_request(one, winner, request=question.request) for one in faster
                  if one.predicted.step_time_s < winner.predicted.step_time_s]
    effects = axis_effects(free, firsts, winner, wishes=question.request) if axes else ()
    losers = tuple(reject(one, winner) for one in (*best[1:], *search.too_big(SHOWN_TOO_BIG)))
    return Plan(
        job=_job(question, headroom=headroom),
        layout=winner.layout,
        predicted=winner.predicted,
        memory=tuple(stage_memory(question.model, winner.layout, training=question.training, stage=s,
                                  device=question.cluster.device) for s in range(winner.layout.dims.pp)),
        communication=winner.transfers,
        candidates=search.space.count(),
        priced=search.effort.priced,
        rejected=(*losers, *faster),
        axes=effects,
        search_s=clock() - started,
        refused=search.space.ledger.refusals(),
        untrained=tuple(str(p) for p in (*support.model_problems(question.model), *question.untrained(winner.layout))),
    )


def _degrees(layout: Layout) -> tuple[int, ...]:
    return tuple(getattr(layout.dims, axis) for axis in AXES)


def _gist(layout: Layout) -> tuple[object, ...]:
    """What a person would call another layout of the same degrees; mesh order and units are details."""
    return (layout.microbatch_size, layout.num_microbatches, layout.schedule, layout.virtual_stages, layout.recompute,
            layout.zero_stage, layout.sequence_parallel)


def _freed(question: Question) -> Question:
    """Without what the user fixed."""
    return dataclasses.replace(question, request=ParallelRequest(uneven_batch=question.request.uneven_batch))


def _job(question: Question, *, headroom: float) -> PlannedJob:
    training, cluster = question.training, question.cluster
    return PlannedJob(model=question.model.name, num_params=num_params(question.model), cluster=cluster.name,
                      num_nodes=question.num_nodes, gpus_per_node=cluster.gpus_per_node, gpu=cluster.gpu,
                      seq_len=training.seq_len, global_batch_size=training.global_batch_size,
                      param_dtype=training.param_dtype, headroom=headroom)
