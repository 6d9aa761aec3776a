"""plan: model, training, cluster and what the user fixed → the fastest layout that fits, and why.

Called by the CLI and, when nodes are lost, by the supervisor. Pure but for the clock that times the search:
every legal layout is priced by memory and cost, nothing is sampled. Never imports torch.
"""
import dataclasses
import time
from collections.abc import Callable

from jobs.spec.load import Problem
from jobs.spec.model import AttentionConvention, ModelSpec, num_params
from jobs.spec.parallel import ParallelDims
from jobs.spec.training import TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.config import ParallelRequest
from orchestrator.planner.candidates import WORLD_AXES, Question, candidates, request_problems
from orchestrator.planner.cost import Priced, price
from orchestrator.planner.memory import stage_memory
from orchestrator.planner.plan import (Plan, PlanError, PlannedJob, Prediction, Rejected, layout_from_flat,
                                       plan_from_dict, plan_json)

__all__ = ["Plan", "PlanError", "layout_from_flat", "plan", "plan_from_dict", "plan_json"]

SHOWN_SLOWER = 6  # of the losers that fit, one per combination of degrees
SHOWN_TOO_BIG = 3
SHOWN_FREE = 3  # faster ones that fixed degrees rule out
SEARCHED = (*WORLD_AXES, "microbatch_size")


def plan(model: ModelSpec, *, training: TrainingSpec, cluster: ClusterSpec, request: ParallelRequest, headroom: float,
         allow_tp_across_nodes: bool, num_nodes: int, mfu_convention: AttentionConvention = "causal",
         clock: Callable[[], float] = time.perf_counter) -> Plan:
    """The fastest legal layout whose heaviest stage fits. Raises PlanError with every reason if there is none.

    `num_nodes` are the nodes that train (spares are not counted); `cluster` gives their shape and links.
    """
    started = clock()
    question = Question(model=model, training=training, cluster=cluster, request=request, num_nodes=num_nodes,
                        allow_tp_across_nodes=allow_tp_across_nodes)
    problems = request_problems(question)
    if problems:
        raise PlanError([_with_crossing_cost(p, question, headroom=headroom) for p in problems])
    found = candidates(question)
    if not found.layouts:
        raise PlanError(found.problems or (_no_world(question),))
    priced = _price_all(question, found.layouts, headroom=headroom, convention=mfu_convention)
    fitting = [p for p in priced if p.fits]
    if not fitting:
        raise PlanError(_too_big(question, priced, headroom=headroom))
    winner = min(fitting, key=_rank)
    free = _free_choice(question, headroom=headroom, convention=mfu_convention) if _fixes(request) else priced
    return Plan(
        job=_job(question, headroom=headroom),
        layout=winner.layout,
        predicted=winner.predicted,
        memory=tuple(stage_memory(model, winner.layout, training=training, stage=s, device=cluster.device)
                     for s in range(winner.layout.dims.pp)),
        communication=winner.transfers,
        candidates=len(free),
        rejected=_rejected(winner, priced) + _not_asked_for(winner, free, request=request),
        search_s=clock() - started,
        refused=found.refused,
    )


def _price_all(question: Question, layouts: tuple, *, headroom: float, convention: AttentionConvention) -> list[Priced]:
    return [price(question.model, layout, training=question.training, cluster=question.cluster, headroom=headroom,
                  convention=convention) for layout in layouts]


def _rank(priced: Priced) -> tuple[float, float]:
    """Faster first; of equally fast ones the smaller."""
    return priced.predicted.step_time_s, priced.predicted.memory_gib


def _job(question: Question, *, headroom: float) -> PlannedJob:
    training, cluster = question.training, question.cluster
    return PlannedJob(model=question.model.name, num_params=num_params(question.model), cluster=cluster.name,
                      num_nodes=question.num_nodes, gpus_per_node=cluster.gpus_per_node, gpu=cluster.gpu,
                      seq_len=training.seq_len, global_batch_size=training.global_batch_size,
                      param_dtype=training.param_dtype, headroom=headroom)


# ------------------------------------------------------------------ why the others lost
def _fixes(request: ParallelRequest) -> dict[str, int]:
    """Degrees that the user fixed."""
    return {name: value for name in SEARCHED if (value := getattr(request, name)) != "auto"}


def _free_choice(question: Question, *, headroom: float, convention: AttentionConvention) -> list[Priced]:
    """Every layout that would be legal had the user fixed no degree."""
    request = dataclasses.replace(question.request, **dict.fromkeys(SEARCHED, "auto"))
    layouts = candidates(dataclasses.replace(question, request=request)).layouts
    return _price_all(question, layouts, headroom=headroom, convention=convention)


def _not_asked_for(winner: Priced, free: list[Priced], *, request: ParallelRequest) -> tuple[Rejected, ...]:
    """What the fixed degrees cost: the fastest layouts that they rule out."""
    best: dict[ParallelDims, Priced] = {}
    for one in sorted((one for one in free if one.fits and _rank(one) < _rank(winner)), key=_rank):
        best.setdefault(one.layout.dims, one)
    return tuple(_reject(one, _ruled_out(one, winner, request=request)) for one in list(best.values())[:SHOWN_FREE])


def _ruled_out(one: Priced, winner: Priced, *, request: ParallelRequest) -> str:
    faster = winner.predicted.step_time_s / one.predicted.step_time_s - 1
    has = {name: getattr(one.layout.dims, name) for name in WORLD_AXES}
    has["microbatch_size"] = one.layout.microbatch_size
    against = [f"{name}={value}" for name, value in _fixes(request).items() if has[name] != value]
    return f"{faster:.1%} faster, but the request fixes {', '.join(against)}"


def _rejected(winner: Priced, priced: list[Priced]) -> tuple[Rejected, ...]:
    """The best losers, one per combination of degrees (where there is but one: per microbatch): those that fit,
    then those that do not."""
    several = len({one.layout.dims for one in priced}) > 1
    best: dict[tuple, Priced] = {}
    for one in sorted(priced, key=_rank):
        key = one.layout.dims if several else one.layout
        best.setdefault((key, one.fits), one)
    losers = [one for (key, _), one in best.items() if key not in (winner.layout, winner.layout.dims)]
    slower = [one for one in losers if one.fits][:SHOWN_SLOWER]
    too_big = [one for one in losers if not one.fits][:SHOWN_TOO_BIG]
    return tuple(_reject(one, _reason(one, winner)) for one in slower + too_big)


def _reject(one: Priced, reason: str) -> Rejected:
    return Rejected(layout=one.layout, fits=one.fits, step_time_s=one.predicted.step_time_s,
                    memory_gib=one.predicted.memory_gib, reason=reason)


def _reason(loser: Priced, winner: Priced) -> str:
    mine, best = loser.predicted, winner.predicted
    if not loser.fits:
        return (f"too big by {_gib(mine.memory_gib - mine.memory_limit_gib)} on stage {mine.memory_stage}: "
                f"{_gib(mine.memory_limit_gib)} are allowed")
    slower = mine.step_time_s / best.step_time_s - 1
    if slower < 5e-4:
        return f"as fast, but needs {_gib(mine.memory_gib)} instead of {_gib(best.memory_gib)}"
    others = _cost_parts(winner, best)
    grown = {name: value - others.get(name, 0.0) for name, value in _cost_parts(loser, mine).items()}
    name = max(grown, key=grown.__getitem__)
    return f"{slower:.1%} slower: {name} +{_ms(grown[name])}"


def _cost_parts(priced: Priced, predicted: Prediction) -> dict[str, float]:
    """Seconds of a step by what they are spent on."""
    parts = {"compute": predicted.compute_s, "pipeline bubble": predicted.bubble_s, "optimizer": predicted.optimizer_s}
    for transfer in priced.transfers:
        name = f"exposed {transfer.axis} communication"
        parts[name] = parts.get(name, 0.0) + transfer.exposed_s
    return parts


def _gib(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


# ------------------------------------------------------------------ refusals
def _no_world(question: Question) -> Problem:
    return Problem(where="parallel", value=None, message=f"no degrees multiply to the {question.world_size} ranks of "
                   f"{question.num_nodes} nodes; leave one of dp_replicate, dp_shard, tp, pp auto")


def _with_crossing_cost(problem: Problem, question: Question, *, headroom: float) -> Problem:
    """A tp refused for crossing nodes also says what it would have cost."""
    if problem.where != "parallel.tp" or "crosses nodes" not in problem.message:
        return problem
    fixed = {"training": question.training, "cluster": question.cluster, "headroom": headroom,
             "num_nodes": question.num_nodes, "clock": lambda: 0.0}
    try:
        crossing = plan(question.model, request=question.request, allow_tp_across_nodes=True, **fixed)
        inside = plan(question.model, request=dataclasses.replace(question.request, tp="auto"),
                      allow_tp_across_nodes=False, **fixed)
    except PlanError:
        return problem  # there is nothing to compare: one of the two is impossible for another reason
    slower = crossing.predicted.step_time_s / inside.predicted.step_time_s - 1
    cost = (f"predicted {_ms(crossing.predicted.step_time_s)} a step, {slower:+.0%} against "
            f"{_ms(inside.predicted.step_time_s)} with tp={inside.layout.dims.tp}")
    return dataclasses.replace(problem, message=f"{problem.message}; {cost}")


def _too_big(question: Question, priced: list[Priced], *, headroom: float) -> list[Problem]:
    """Nothing fits: the smallest layout, and what would make one fit."""
    smallest = min(priced, key=lambda one: one.predicted.memory_gib)
    predicted = smallest.predicted
    remedies = [f"{name} ({one.layout}, {_gib(one.predicted.memory_gib)})"
                for name, one in _levers(question, headroom=headroom)]
    gib = predicted.memory_gib / (1 - headroom)
    remedies.append(f"a GPU of at least {_gib(gib)}")
    return [Problem(where="memory", value=None, message=f"none of {len(priced)} legal layouts fits the "
                    f"{_gib(predicted.memory_limit_gib)} of {question.cluster.gpu} that memory.headroom={headroom:g} "
                    f"leaves; the smallest, {smallest.layout}, needs {_gib(predicted.memory_gib)} on stage "
                    f"{predicted.memory_stage}; what would fit: {'; '.join(remedies)}")]


def _levers(question: Question, *, headroom: float) -> list[tuple[str, Priced]]:
    """Changes to the request that make something fit, each with the smallest layout it allows."""
    trials = []
    if question.request.recompute != "full":
        request = dataclasses.replace(question.request, recompute="full")
        trials.append(("parallel.recompute=full", dataclasses.replace(question, request=request)))
    trials += [(f"cluster.num_nodes={nodes}", dataclasses.replace(question, num_nodes=nodes))
               for factor in (2, 4, 8, 16) if (nodes := question.num_nodes * factor)]
    found: list[tuple[str, Priced]] = []
    for name, trial in trials:
        layouts = candidates(trial).layouts if not request_problems(trial) else ()
        priced = _price_all(trial, layouts, headroom=headroom, convention="causal")
        best = min((one for one in priced if one.fits), key=lambda one: one.predicted.memory_gib, default=None)
        if best is not None:
            found.append((name, best))
            if name.startswith("cluster"):
                break  # the fewest nodes that do
    return found
