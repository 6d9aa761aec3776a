"""What if: the same question with more GPUs, a larger model, longer sequences, a slower network, another batch.

Called by the page. The planner answers each variation in full; per family the fastest layout that fits is
kept, or the reason why there is none. Crossovers, where another family takes over, are read off the result.
"""
import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jobs.spec.counts import num_params
from jobs.spec.model import ModelSpec
from orchestrator.planner.cost import Priced
from orchestrator.planner.page.asked import Asked
from orchestrator.planner.page.families import FAMILIES, groups, wishes_of
from orchestrator.planner.plan import Plan
from orchestrator.planner.question import divisors


MICROBATCH_SIZES = [1, 2, 4, 8]
EXPERT_DEGREES = {1, 8, 64}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    question: str
    unit: str  # what is varied
    vary: Callable[[Asked, float], tuple[Asked, str] | None]  # factor → varied question and its value's label
    factors: tuple[float, ...]


def what_ifs(asked: Asked, plan: Plan) -> list[dict[str, Any]]:
    """One entry per sweep: labels, and per family and label what the best layout costs. Details that no question
    is about are as in the plan, which makes each of the many searches short."""
    layout = plan.layout
    free = asked.without_wishes().in_detail_like(layout).wishing(
        recompute=asked.question.request.recompute, schedule=sorted({layout.schedule, "1f1b"}),
        virtual_stages=sorted({layout.virtual_stages, 1}), zero_stage=sorted({layout.zero_stage, 3}),
        microbatch_size=sorted({*MICROBATCH_SIZES, layout.microbatch_size}),
        ep=sorted({*EXPERT_DEGREES, layout.dims.ep}))
    return [_answer(sweep, free) for sweep in SWEEPS]


def _answer(sweep: Sweep, asked: Asked) -> dict[str, Any]:
    labels, columns, now = [], [], 0
    for factor in sweep.factors:
        varied = sweep.vary(asked, factor)
        if varied is None or varied[1] in labels:
            continue
        now = len(labels) if factor == 1 else now
        labels.append(varied[1])
        columns.append(_best_per_family(varied[0]))
    series = [[column[family] for column in columns] for family in range(len(FAMILIES))]
    best = [_best(column) for column in columns]
    return {"question": sweep.question, "unit": sweep.unit, "labels": labels, "now": now,
            "series": series, "best": best, "crossovers": crossovers(labels, best)}


def _best_per_family(asked: Asked) -> list[dict[str, Any]]:
    """Per family {layout, tokens/s/GPU, step, MFU, memory}, or {why} it is impossible. One search for all of them."""
    free = asked.wishing(num_nodes=asked.question.num_nodes)
    search = free.search()
    firsts = {} if isinstance(search, str) else search.best(0, groups=groups())[1]
    return [_figures(firsts[one.name]) if one.name in firsts else {"why": _why_none(free, family)}
            for family, one in enumerate(FAMILIES)]


def _why_none(asked: Asked, family: int) -> str:
    degrees = divisors(asked.question.world_size)[1:]
    if not degrees and family:
        return "there is but one GPU"
    search = asked.wishing(**wishes_of(family, degrees=degrees)).search()
    if isinstance(search, str):
        return _short(search)
    smallest = search.smallest()
    if smallest is None:
        refused = search.space.ledger.refusals()
        return _short(refused[0].example) if refused else "no such layout is legal"
    mine = smallest.predicted
    needed = f"{mine.memory_gib:,.0f}" if mine.memory_gib >= 100 else f"{mine.memory_gib:.3g}"
    return f"does not fit: the smallest needs {needed} of {mine.memory_limit_gib:.3g} GiB"


def _short(problem: str) -> str:
    """What is wrong, without the remedy: there is no room for it, and the question was hypothetical."""
    return problem.partition("; try ")[0].partition("; leave ")[0]


def _figures(one: Priced) -> dict[str, Any]:
    predicted = one.predicted
    rounded = {name: float(f"{getattr(predicted, name):.4g}")
               for name in ("tokens_per_s_per_gpu", "step_time_s", "mfu", "memory_gib")}
    return rounded | {"layout": str(one.layout)}


def _best(column: list[dict[str, Any]]) -> int | None:
    possible = [family for family, entry in enumerate(column) if "why" not in entry]
    return min(possible, key=lambda family: column[family]["step_time_s"], default=None)


def crossovers(labels: list[str], best: list[int | None]) -> str:
    """Where the best family changes, in words."""
    if not labels:
        return ""

    def named(family: int | None) -> str:
        return "nothing fits" if family is None else FAMILIES[family].name

    parts, start = [], 0
    for i in range(1, len(labels) + 1):
        if i == len(labels) or best[i] != best[start]:
            last = labels[i - 1]
            span = labels[start] if start == i - 1 else f"{labels[start]}–{last}"
            parts.append(f"{span}: {named(best[start])}")
            start = i
    return f"{named(best[0])} throughout" if len(parts) == 1 else " · ".join(parts)


# ------------------------------------------------------------------ what is varied
def _nodes(asked: Asked, factor: float) -> tuple[Asked, str] | None:
    nodes = round(asked.question.num_nodes * factor)
    if nodes < 1:
        return None
    cluster = dataclasses.replace(asked.question.cluster, num_nodes=nodes)
    return (asked.varied(cluster=cluster, num_nodes=nodes), f"{nodes * cluster.gpus_per_node:,}")


def _model(asked: Asked, factor: float) -> tuple[Asked, str] | None:
    model = scaled(asked.question.model, factor)
    if model is None:
        return None
    count = num_params(model)
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, ""))
    unit, name = next((unit, name) for unit, name in units if count >= unit)
    return asked.varied(model=model), f"{count / unit:.3g} {name}".strip()


def scaled(model: ModelSpec, factor: float) -> ModelSpec | None:
    """About `factor` times the parameters of the blocks, depth and width growing together as far as heads stay
    whole: width by a power of two, depth by the rest. The size of a head and the vocabulary stay. None where
    not a layer would be left."""
    width = 2.0 ** round(math.log2(factor) / 3)
    if model.num_kv_heads * width % 1:
        width = 1.0  # too few heads to be halved
    layers = round(model.num_layers * factor / width ** 2)
    if layers < 1:
        return None
    moe = model.moe and dataclasses.replace(model.moe, ffn_dim=round(model.moe.ffn_dim * width),
                                            first_layer=min(model.moe.first_layer, layers - 1))
    return dataclasses.replace(model, num_layers=layers, num_heads=round(model.num_heads * width),
                               num_kv_heads=round(model.num_kv_heads * width), dim=round(model.dim * width),
                               ffn_dim=round(model.ffn_dim * width), moe=moe)


def _sequence(asked: Asked, factor: float) -> tuple[Asked, str] | None:
    """Longer sequences at the same tokens per step, so that the work stays comparable."""
    seq_len, batch = asked.question.training.seq_len * factor, asked.question.training.global_batch_size / factor
    if seq_len < 1 or batch < 1 or seq_len % 1 or batch % 1:
        return None
    training = dataclasses.replace(asked.question.training, seq_len=int(seq_len), global_batch_size=int(batch))
    return asked.varied(training=training), _thousands(int(seq_len))


def _link(asked: Asked, factor: float) -> tuple[Asked, str] | None:
    if asked.question.num_nodes == 1:
        return None
    rate = asked.question.cluster.inter_node_gb_s * factor
    cluster = dataclasses.replace(asked.question.cluster, inter_node_gb_s=rate)
    return asked.varied(cluster=cluster), f"{rate:.3g}"


def _batch(asked: Asked, factor: float) -> tuple[Asked, str] | None:
    batch = asked.question.training.global_batch_size * factor
    if batch < 1 or batch % 1:
        return None
    training = dataclasses.replace(asked.question.training, global_batch_size=int(batch))
    return asked.varied(training=training), f"{int(batch):,}"


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"


def _memory(asked: Asked, factor: float) -> tuple[Asked, str] | None:
    gib = asked.question.cluster.gpu_memory_gib * factor
    cluster = dataclasses.replace(asked.question.cluster, memory_gib=gib)
    return asked.varied(cluster=cluster), f"{gib:.3g}"


SWEEPS = (
    Sweep(question="Where does data parallelism alone end?", unit="GPUs, at the same global batch", vary=_nodes,
          factors=(1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)),
    Sweep(question="How large before the model must be split?", unit="parameters; depth and width scaled", vary=_model,
          factors=(1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)),
    Sweep(question="Where does context parallelism start to pay?", unit="tokens per sequence, as many per step",
          vary=_sequence, factors=(1 / 4, 1 / 2, 1, 2, 4, 8, 16, 32)),
    Sweep(question="When does a pipeline beat ZeRO?", unit="GB/s per GPU between nodes", vary=_link,
          factors=(1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)),
    Sweep(question="What does a smaller batch cost?", unit="sequences per step", vary=_batch,
          factors=(1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)),
    Sweep(question="What would more memory buy?", unit="GiB per GPU", vary=_memory,
          factors=(1 / 4, 1 / 2, 3 / 4, 1, 1.5, 2, 4)),
)
