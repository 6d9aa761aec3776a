"""When there is no plan: every reason at once, each with what would help.

Called by the planner's entry before the search (wishes that no layout can meet) and after it (nothing fits).
"""
import dataclasses
import math

from jobs.spec import support
from jobs.spec.load import Problem
from jobs.spec.model import AttentionConvention
from jobs.spec.parallel import VIRTUAL_STAGES
from orchestrator.request import request_value_problems
from orchestrator.planner import pipeline_rules, rules
from orchestrator.planner.choices import node_counts
from orchestrator.planner.cost import Priced
from orchestrator.planner.question import WORLD_AXES, Question, divisors, listed
from orchestrator.planner.reasons import gib
from orchestrator.planner.search import Search
from orchestrator.planner.words import seconds

SIZES = {  # what must be at least 1, by the part of the question it is in
    "model": ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim"),
    "training": ("steps", "seq_len", "global_batch_size"),
    "cluster": ("num_nodes", "gpus_per_node"),
}
MOST = 10**9  # of any size: beyond it there is a unit wrong, and counting would take for ever
MOST_LAYERS = 4096  # every one is weighed for every split into stages: minutes beyond
MOST_RANKS = 2**21


def question_problems(question: Question) -> list[Problem]:
    """What is impossible about the question whatever the layout, all at once."""
    problems = _size_problems(question) + request_value_problems(question.request)
    if problems:
        return problems  # rules divide by these
    problems = rules.model_problems(question.model) + rules.sequence_problems(question)
    if question.trainable:
        problems += support.model_problems(question.model)
    fixed = _single_values(question)
    problems += _fixed_problems(question, fixed)
    degrees = {axis: fixed[axis] for axis in WORLD_AXES if axis in fixed}
    if "num_nodes" in fixed and fixed["num_nodes"] > question.num_nodes:
        problems.append(Problem(where="parallel.num_nodes", value=fixed["num_nodes"], message=f"is more than the "
                                f"{question.num_nodes} nodes that may train; try at most {question.num_nodes}"))
    elif degrees:
        problems += _world_problems(degrees, question, nodes=fixed.get("num_nodes"))
    return problems


def _size_problems(question: Question) -> list[Problem]:
    problems = []
    parts = {"model": question.model, "training": question.training, "cluster": question.cluster}
    sizes = [(f"{part}.{name}", getattr(parts[part], name)) for part, names in SIZES.items() for name in names]
    if question.model.moe is not None:
        sizes += [(f"model.moe.{name}", getattr(question.model.moe, name)) for name in ("num_experts", "top_k",
                                                                                        "ffn_dim")]
    if question.num_nodes < 1:
        sizes.append(("the nodes that may train", question.num_nodes))
    for where, value in sizes:
        if value < 1:
            problems.append(Problem(where=where, value=value, message="must be at least 1"))
        elif value > (most := MOST_LAYERS if where == "model.num_layers" else MOST):
            problems.append(Problem(where=where, value=value, message=f"is absurd; try at most {most:,}"))
    world = question.num_nodes * question.cluster.gpus_per_node
    if not problems and world > MOST_RANKS:
        problems.append(Problem(where="cluster.num_nodes", value=question.num_nodes, message=f"× gpus_per_node = "
                                                                                             f"{world} "
                                f"ranks; try at most {MOST_RANKS // question.cluster.gpus_per_node}"))
    for where, value in (("cluster.inter_node_gb_s", question.cluster.inter_node_gb_s),
                         ("cluster.intra_node_gb_s", question.cluster.link_gb_s),
                         ("cluster.memory_gib", question.cluster.gpu_memory_gib)):
        if not (value > 0 and math.isfinite(value)):
            problems.append(Problem(where=where, value=value, message="must be above 0"))
    return problems


def _single_values(question: Question) -> dict[str, int]:
    """Wishes that leave one value."""
    named = {name: question.request.options(name) for name in question.request.fixed()
             if name not in ("mesh_order", "layers_per_stage")}
    return {name: options[0] for name, options in named.items() if options is not None and len(options) == 1}


def _fixed_problems(question: Question, fixed: dict[str, int]) -> list[Problem]:
    """The rules of single axes, for those that are fixed."""
    request, problems = question.request, []
    for tp in request.options("tp") or ():
        problems += rules.tp_problems(tp, question) if len(request.options("tp") or ()) == 1 else []
    if "pp" in fixed:
        problems += pipeline_rules.pp_problems(fixed["pp"], question)
    if "cp" in fixed:
        problems += rules.cp_problems(fixed["cp"], fixed.get("tp", 1), question)
    if "ep" in fixed:
        problems += rules.ep_problems(fixed["ep"], question)
        if {"dp_shard", "cp", "tp"} <= set(fixed) and not rules.ep_problems(fixed["ep"], question):
            problems += rules.ep_group_problems(fixed["ep"], dp_shard=fixed["dp_shard"], cp=fixed["cp"], tp=fixed["tp"])
    if {"dp_shard", "tp"} <= set(fixed) and not problems:
        problems += rules.shard_problems(fixed["dp_shard"], fixed["tp"], question)
    if {"schedule", "zero_stage"} <= set(fixed) and fixed.get("dp_shard", 2) > 1:
        problems += pipeline_rules.zero_problems(fixed["schedule"], fixed["zero_stage"], fixed.get("pp", 2))
    problems += _pipeline_problems(question, fixed) + _batch_problems(question, fixed)
    return problems


def _pipeline_problems(question: Question, fixed: dict[str, int]) -> list[Problem]:
    problems, pp = [], fixed.get("pp")
    if pp is None or pipeline_rules.pp_problems(pp, question):
        return problems
    written = question.request.layers_per_stage
    virtual = fixed.get("virtual_stages", len(written) // pp if written != "auto" and len(written) % pp == 0 else None)
    if "schedule" in fixed:
        virtual = virtual or (VIRTUAL_STAGES[fixed["schedule"]][0] if pp > 1 else 1)
        problems += pipeline_rules.stages_problems(fixed["schedule"], virtual, pp, question)
    if written != "auto" and not problems:
        problems += pipeline_rules.split_problems(tuple(written), pp, virtual or 1, question)
    return problems


def _batch_problems(question: Question, fixed: dict[str, int]) -> list[Problem]:
    dp = _implied_dp(fixed, fixed.get("num_nodes", question.num_nodes) * question.cluster.gpus_per_node)
    if dp is None:
        return []
    size, batch = fixed.get("microbatch_size", 1), question.training.global_batch_size
    problems = rules.batch_problems(dp, size, question)
    if problems:
        return problems
    schedule, pp = fixed.get("schedule", "gpipe"), fixed.get("pp", 1)
    least = -(-batch // (dp * size))
    multiple = pipeline_rules.microbatch_multiple(schedule, pp)
    rounded = -(-least // multiple) * multiple if question.request.uneven_batch else least
    count = fixed.get("num_microbatches", rounded)
    if "microbatch_size" in fixed and "num_microbatches" in fixed:
        problems += rules.count_problems(count, rounded, dp, size, question)
    if "schedule" in fixed and not problems:
        problems += pipeline_rules.schedule_problems(schedule, count, pp, dp, question)
    return problems


def _implied_dp(fixed: dict[str, int], world: int) -> int | None:
    """dp, where the fixed degrees leave no choice of it."""
    if "dp_replicate" in fixed and "dp_shard" in fixed:
        return fixed["dp_replicate"] * fixed["dp_shard"]
    inner = math.prod(fixed.get(axis, 0) for axis in ("tp", "pp", "cp"))
    return world // inner if inner and world % inner == 0 else None


def _world_problems(fixed: dict[str, int], question: Question, *, nodes: int | None) -> list[Problem]:
    """Degrees that multiply to no number of nodes. With all of them fixed nodes are left idle only if the request
    says how many train: otherwise a degree is wrong."""
    most, product, per_node = nodes or question.num_nodes, math.prod(fixed.values()), question.cluster.gpus_per_node
    world = most * per_node
    named = " × ".join(f"{axis}={degree}" for axis, degree in fixed.items())
    here = f"{most} nodes × {per_node} GPUs = {world} ranks"
    last = max(fixed, key=lambda axis: fixed[axis])
    if len(fixed) == len(WORLD_AXES):
        if product == world:
            return []
        remedy = f", or parallel.num_nodes={product // per_node}" if product < world and product % per_node == 0 else ""
        return [Problem(where="parallel", value=None, message=f"{named} = {product} ranks, but the cluster has {here}; "
                        f"leave {last} auto, or change cluster.num_nodes{remedy}")]
    if any(n * per_node % product == 0 for n in node_counts(question)):
        return []
    others = product // fixed[last]
    legal = [d for d in divisors(world) if world % (others * d) == 0]
    remedy = f"try {last}={listed(legal)}" if legal else "leave one of them auto"
    total = f"{named} = {product}" if len(fixed) > 1 else named
    return [Problem(where="parallel", value=None, message=f"{total} does not divide {here}; {remedy}")]


# ------------------------------------------------------------------ what it would cost
def with_crossing_cost(problem: Problem, question: Question, *, headroom: float,
                       convention: AttentionConvention) -> Problem:
    """A tp refused for crossing nodes also says what it would have cost."""
    if problem.where != "parallel.tp" or "crosses nodes" not in problem.message:
        return problem

    def winner(asked: Question) -> Priced | None:
        return None if question_problems(asked) else next(
            Search(asked, headroom=headroom, convention=convention).ranked(), None)

    crossing = winner(dataclasses.replace(question, allow_tp_across_nodes=True))
    inside = winner(dataclasses.replace(question, request=dataclasses.replace(question.request, tp="auto")))
    if crossing is None or inside is None:
        return problem  # there is nothing to compare: one of the two is impossible for another reason
    slower = crossing.predicted.step_time_s / inside.predicted.step_time_s - 1
    cost = (f"predicted {seconds(crossing.predicted.step_time_s)} a step, {slower:+.0%} against "
            f"{seconds(inside.predicted.step_time_s)} with tp={inside.layout.dims.tp}")
    return dataclasses.replace(problem, message=f"{problem.message}; {cost}")


# ------------------------------------------------------------------ nothing legal, or nothing fits
def too_big(search: Search) -> list[Problem]:
    """The smallest layout, and what would make one fit; where nothing is legal, which rules forbid it."""
    question, smallest = search.question, search.smallest()
    if smallest is None:
        examples = search.space.ledger.examples
        broken = [examples["trainer"]] if "trainer" in examples else list(examples.values())
        return broken or [Problem(where="parallel", value=None, message=f"no degrees multiply to the "
                                  f"{question.world_size} ranks of {question.num_nodes} nodes as the request asks; "
                                  "leave "
                                  f"one of {', '.join(WORLD_AXES)} auto")]
    predicted, headroom = smallest.predicted, search.headroom
    remedies = [f"{name} ({one.layout}, {gib(one.predicted.memory_gib)})" for name, one in _levers(search)]
    remedies.append(f"a GPU of at least {gib(predicted.memory_gib / (1 - headroom))}")
    return [Problem(where="memory", value=None, message=f"none of {search.space.count()} legal layouts fits the "
                    f"{gib(predicted.memory_limit_gib)} of {question.cluster.gpu} that memory.headroom={headroom:g} "
                    f"leaves; the smallest, {smallest.layout}, needs {gib(predicted.memory_gib)} on pipeline rank "
                    f"{predicted.memory_pp_rank}; what would fit: {'; '.join(remedies)}")]


def _levers(search: Search) -> list[tuple[str, Priced]]:
    """Changes to the request that make something fit, each with the smallest layout it allows."""
    question = search.question
    trials = []
    if question.request.recompute not in ("full", "auto"):
        request = dataclasses.replace(question.request, recompute="full")
        trials.append(("parallel.recompute=full", dataclasses.replace(question, request=request)))
    free = dataclasses.replace(question.request, num_nodes="auto")
    trials += [(f"cluster.num_nodes={question.num_nodes * factor}",
                dataclasses.replace(question, num_nodes=question.num_nodes * factor, request=free))
               for factor in (2, 4, 8, 16, 32, 64)]
    found: list[tuple[str, Priced]] = []
    for name, trial in trials:
        if question_problems(trial):
            continue
        best = search.again(trial).smallest()
        if best is not None and best.fits:
            found.append((name, best))
            if name.startswith("cluster"):
                break  # the fewest nodes that do
    return found
