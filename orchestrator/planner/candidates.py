"""Every legal layout for a world and a global batch, and the rules that make a layout legal.

Called by the search. Each rule gives value, origin and remedy; the same rules refuse what a user fixed
and what the enumeration proposes. Knows nothing of memory or time.
"""
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jobs.spec.load import Problem
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout, ParallelDims, split_layers
from jobs.spec.training import TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.config import Degree, ParallelRequest
from orchestrator.planner.plan import Refusal

WORLD_AXES = ("dp_replicate", "dp_shard", "tp", "pp")  # searched; cp and ep are fixed to 1 in this version


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """All that a rule may look at."""

    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    request: ParallelRequest
    num_nodes: int
    allow_tp_across_nodes: bool

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.cluster.gpus_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    layouts: tuple[Layout, ...]
    refused: tuple[Refusal, ...]
    problems: tuple[Problem, ...]  # one example per broken rule


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


# ------------------------------------------------------------------ rules
def tp_problems(tp: int, question: Question) -> list[Problem]:
    """Why this tp cannot be computed, or must not be placed."""
    legal = [d for d in divisors(question.model.num_heads) if not any(True for _ in _tp_messages(d, question))]
    remedy = f"try {_list(legal)}" if legal else "no tp is legal"
    return [Problem(where="parallel.tp", value=tp, message=f"{message}; {remedy}")
            for message in _tp_messages(tp, question)]


def _tp_messages(tp: int, question: Question) -> Iterator[str]:
    model, training = question.model, question.training
    split = {"model.num_heads": model.num_heads, "model.num_kv_heads": model.num_kv_heads,
             "model.ffn_dim": model.ffn_dim, "model.vocab_size": model.vocab_size}
    if question.request.sequence_parallel:
        split["training.seq_len"] = training.seq_len
    for name, size in split.items():
        if size % tp:
            reason = " under sequence parallelism" if name == "training.seq_len" else ""
            yield f"does not divide {name}={size}{reason}"
    cluster = question.cluster
    if cluster.gpus_per_node % tp and not question.allow_tp_across_nodes:
        permit = "placement.allow_tp_across_nodes=true permits it"
        if tp < cluster.gpus_per_node:
            yield f"does not divide cluster.gpus_per_node={cluster.gpus_per_node}: some groups would span nodes ({permit})"
        else:
            yield (f"crosses nodes of cluster.gpus_per_node={cluster.gpus_per_node}, {cluster.link_gb_s:g} GB/s inside "
                   f"and {cluster.inter_node_gb_s:g} GB/s per GPU between them ({permit})")


def pp_problems(pp: int, question: Question) -> list[Problem]:
    layers = question.model.num_layers
    if pp <= layers:
        return []
    return [Problem(where="parallel.pp", value=pp, message=f"is above model.num_layers={layers}: a stage would be "
                                                           f"empty; try at most {layers}")]


def shard_problems(dp_shard: int, tp: int, question: Question) -> list[Problem]:
    """FSDP2 shards the first dimension of every parameter: beyond its size ranks hold nothing but padding."""
    model = question.model
    rows = {"model.num_kv_heads·head_dim/tp": model.num_kv_heads * model.head_size // tp, "model.dim": model.dim,
            "model.vocab_size/tp": model.vocab_size // tp, "model.ffn_dim/tp": model.ffn_dim // tp}
    name, smallest = min(rows.items(), key=lambda item: item[1])
    if dp_shard <= smallest:
        return []
    return [Problem(where="parallel.dp_shard", value=dp_shard, message=f"is above {name}={smallest}, the rows of the "
                    f"smallest weight; try at most {smallest} and the rest as dp_replicate")]


def batch_problems(dp: int, microbatch_size: int, question: Question) -> list[Problem]:
    batch, rows = question.training.global_batch_size, dp * microbatch_size
    if batch % rows == 0:
        return []
    below, above = batch // rows * rows, -(-batch // rows) * rows
    nearest = f"{below} or {above}" if below else f"{above}"
    with_dp = max((d for d in divisors(batch) if d * microbatch_size <= batch and d <= dp
                   and batch % (d * microbatch_size) == 0), default=None)
    remedy = f"try {nearest}" + (f", or dp={with_dp}" if with_dp else "")
    what = "is below" if not below else "is not a multiple of"
    return [Problem(where="training.global_batch_size", value=batch,
                    message=f"{what} dp × microbatch_size = {dp} × {microbatch_size} = {rows}; {remedy}")]


def schedule_problems(num_microbatches: int, pp: int, dp: int, question: Question) -> list[Problem]:
    if num_microbatches >= pp:
        return []
    return [Problem(where="parallel.pp", value=pp, message=f"needs at least as many microbatches for 1f1b, but "
                    f"global_batch_size={question.training.global_batch_size} over dp={dp} leaves "
                    f"{num_microbatches}; try pp={num_microbatches}, a smaller microbatch or dp, or "
                    f"global_batch_size={question.training.global_batch_size * pp // max(1, num_microbatches)}")]


def request_problems(question: Question) -> list[Problem]:
    """What is impossible about the fixed values alone, all at once."""
    request, world = question.request, question.world_size
    problems = _model_problems(question.model)
    for axis in ("cp", "ep"):
        if getattr(request, axis) not in (1, "auto"):
            problems.append(Problem(where=f"parallel.{axis}", value=getattr(request, axis),
                                    message="is not trained yet by this version; leave it at 1"))
    fixed = {axis: getattr(request, axis) for axis in WORLD_AXES if getattr(request, axis) != "auto"}
    degrees = fixed | ({} if request.microbatch_size == "auto" else {"microbatch_size": request.microbatch_size})
    if min(degrees.values(), default=1) < 1:
        return problems + [Problem(where=f"parallel.{name}", value=degree, message="must be at least 1")
                           for name, degree in degrees.items() if degree < 1]
    if "tp" in fixed:
        problems += tp_problems(fixed["tp"], question)
    if "pp" in fixed:
        problems += pp_problems(fixed["pp"], question)
    if "dp_shard" in fixed and "tp" in fixed and not problems:
        problems += shard_problems(fixed["dp_shard"], fixed["tp"], question)
    problems += _world_problems(fixed, question)
    dp = _implied_dp(fixed, world)
    if dp is not None:
        problems += batch_problems(dp, 1 if request.microbatch_size == "auto" else request.microbatch_size, question)
    return problems


def _model_problems(model: ModelSpec) -> list[Problem]:
    """Heads that no layout can compute."""
    problems = []
    if model.head_dim is None and model.dim % model.num_heads:
        problems.append(Problem(where="model.num_heads", value=model.num_heads, message=f"does not divide model.dim="
                                f"{model.dim}; try {_list(divisors(model.dim))}, or set model.head_dim"))
    elif model.head_size % 2:
        problems.append(Problem(where="model.head_dim", value=model.head_size, message="is odd, but rotary positions "
                                f"turn pairs; try {model.head_size + 1}"))
    if model.num_heads % model.num_kv_heads:
        problems.append(Problem(where="model.num_kv_heads", value=model.num_kv_heads, message="does not divide "
                                f"model.num_heads={model.num_heads}; try {_list(divisors(model.num_heads))}"))
    return problems


def _world_problems(fixed: dict[str, int], question: Question) -> list[Problem]:
    world, product = question.world_size, math.prod(fixed.values())
    named = " × ".join(f"{axis}={degree}" for axis, degree in fixed.items())
    here = f"{question.num_nodes} nodes × {question.cluster.gpus_per_node} GPUs = {world} ranks"
    if len(fixed) == len(WORLD_AXES) and product != world:
        last = max(fixed, key=lambda axis: fixed[axis])
        return [Problem(where="parallel", value=None, message=f"{named} = {product} ranks, but the cluster has {here}; "
                                                              f"leave {last} auto, or change cluster.num_nodes")]
    if world % product:
        culprit = max(fixed, key=lambda axis: fixed[axis])
        others = product // fixed[culprit]
        legal = [d for d in divisors(world) if world % (others * d) == 0]
        remedy = f"try {culprit}={_list(legal)}" if legal else "leave one of them auto"
        return [Problem(where="parallel", value=None, message=f"{named} = {product} does not divide {here}; {remedy}")]
    return []


def _implied_dp(fixed: dict[str, int], world: int) -> int | None:
    """dp, where the fixed degrees leave no choice of it."""
    if "dp_replicate" in fixed and "dp_shard" in fixed:
        return fixed["dp_replicate"] * fixed["dp_shard"]
    if "tp" in fixed and "pp" in fixed and world % (fixed["tp"] * fixed["pp"]) == 0:
        return world // (fixed["tp"] * fixed["pp"])
    return None


# ------------------------------------------------------------------ enumeration
def candidates(question: Question) -> Candidates:
    """All legal layouts, and what was refused by which rule."""
    layouts: list[Layout] = []
    ledger = _Ledger()
    for dims in _dims(question, ledger):
        layouts += _batchings(dims, question, ledger)
    return Candidates(layouts=tuple(layouts), refused=ledger.refusals(), problems=tuple(ledger.examples.values()))


class _Ledger:
    """Counts refused layouts per rule and keeps the first problem of each."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, Problem] = {}

    def refuse(self, rule: str, problems: list[Problem]) -> bool:
        if problems:
            self.counts[rule] = self.counts.get(rule, 0) + 1
            self.examples.setdefault(rule, problems[0])
        return bool(problems)

    def refusals(self) -> tuple[Refusal, ...]:
        return tuple(Refusal(rule=rule, count=count, example=str(self.examples[rule]))
                     for rule, count in sorted(self.counts.items(), key=lambda item: -item[1]))


def _dims(question: Question, ledger: _Ledger) -> Iterator[ParallelDims]:
    """Degrees whose product is the world, tp and pp legal."""
    request, world = question.request, question.world_size
    tp_of = _remember(lambda tp: tp_problems(tp, question))
    for tp in _choices(request.tp, divisors(world)):
        for pp in _choices(request.pp, divisors(world // tp)):
            for dp_shard in _choices(request.dp_shard, divisors(world // (tp * pp))):
                dp_replicate, rest = divmod(world, tp * pp * dp_shard)
                if rest or request.dp_replicate not in ("auto", dp_replicate):
                    continue  # not of this world: the request asks for something else
                if (ledger.refuse("tp", tp_of(tp)) or ledger.refuse("pp", pp_problems(pp, question))
                        or ledger.refuse("dp_shard", shard_problems(dp_shard, tp, question))):
                    continue
                yield ParallelDims(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, pp=pp)


def _batchings(dims: ParallelDims, question: Question, ledger: _Ledger) -> Iterator[Layout]:
    request, batch = question.request, question.training.global_batch_size
    if ledger.refuse("global_batch_size", batch_problems(dims.dp, 1, question)):
        return
    share = batch // dims.dp
    layers = split_layers(question.model.num_layers, dims.pp)
    for size in (divisors(share) if request.microbatch_size == "auto" else [request.microbatch_size]):
        if ledger.refuse("microbatch_size", batch_problems(dims.dp, size, question)):
            continue
        if ledger.refuse("num_microbatches", schedule_problems(share // size, dims.pp, dims.dp, question)):
            continue
        yield Layout(dims=dims, microbatch_size=size, num_microbatches=share // size, layers_per_stage=layers,
                     sequence_parallel=request.sequence_parallel, schedule=request.schedule,
                     recompute=request.recompute, zero_stage=request.zero_stage, layers_per_unit=request.layers_per_unit)


def _choices(wanted: Degree, legal: list[int]) -> list[int]:
    return legal if wanted == "auto" else [d for d in legal if d == wanted]


def _remember(rule: Callable[[int], list[Problem]]) -> Callable[[int], list[Problem]]:
    known: dict[int, list[Problem]] = {}

    def remembered(value: int) -> list[Problem]:
        if value not in known:
            known[value] = rule(value)
        return known[value]

    return remembered


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")
