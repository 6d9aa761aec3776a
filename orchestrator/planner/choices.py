"""The values of one field that are worth trying: what the user asked for, else all that can make a difference.

Called by the space, which combines them. Legality is that of rules.py and pipeline_rules.py.
"""
import functools
from typing import Any

from jobs.spec.parallel import MESH_ORDER, VIRTUAL_STAGES, Schedule
from orchestrator.request import CHOICES
from orchestrator.planner import pipeline_rules, rules
from orchestrator.planner.question import Question, divisors

# Orders that keep tp, and around it cp, on neighbouring GPUs: what is outermost tolerates the slowest link.
ORDERS = (MESH_ORDER, ("pp", "dp_replicate", "dp_shard", "cp", "tp"), ("dp_replicate", "dp_shard", "pp", "cp", "tp"))
UNITS = (1, 2, 4)  # layers that FSDP gathers together
MOST_VIRTUAL_STAGES = 16
MOST_TOKENS = 65536  # of one microbatch on one rank: with more no matmul is fuller
LEAST_CHUNK = {"cuda": 128, "cpu": 8}  # tokens of one of the two chunks of the sequence that a cp rank holds
# The value that stands for all where a choice makes no difference comes first.
DEFAULT_FIRST = {"zero_stage": (3, 2, 1), "reduce_every_microbatch": (False, True)}


def node_counts(question: Question) -> tuple[int, ...]:
    """How many of the nodes to train on: all, or the largest multiples of what pipelines and tp × cp groups come in."""
    asked = question.request.options("num_nodes")
    if asked is not None:
        return tuple(n for n in asked if n <= question.num_nodes)
    steps = [2 ** k for k in range(question.num_nodes.bit_length())]
    return tuple(sorted({question.num_nodes // step * step for step in steps}, reverse=True))


def degrees(question: Question, axis: str, *, most: int) -> list[int]:
    """Of one axis, among at most `most` ranks."""
    asked = question.request.options(axis)
    return [d for d in divisors(most) if asked is None or d in asked]


def cps(question: Question, *, tp: int, world: int) -> list[int]:
    """Without a wish none that leaves attention less than a tile: such a chunk computes no faster than a whole
    one."""
    found = degrees(question, "cp", most=world // tp)
    if question.request.options("cp") is not None:
        return found
    least = LEAST_CHUNK[question.cluster.device]
    return [cp for cp in found if cp == 1 or question.training.seq_len >= 2 * cp * least]


def orders(question: Question) -> tuple[tuple[str, ...], ...]:
    asked = question.request.mesh_order
    return ORDERS if asked == "auto" else (tuple(asked),)


def experts_together(order: tuple[str, ...]) -> bool:
    """ep is carved out of dp_shard × cp × tp, which must then be neighbours."""
    return order[-3:] == ("dp_shard", "cp", "tp")


def microbatch_sizes(question: Question, *, dp: int, cp: int) -> tuple[int, ...]:
    asked = question.request.options("microbatch_size")
    if asked is not None:
        return asked
    training = question.training
    most = max(1, MOST_TOKENS * cp // training.seq_len)
    return tuple(size for size in _sizes(training.global_batch_size, dp, question.request.uneven_batch)
                 if size <= most)


@functools.lru_cache(maxsize=4096)
def _sizes(batch: int, dp: int, uneven: bool) -> tuple[int, ...]:
    """Microbatch sizes worth trying: of those that need as many microbatches, the smallest."""
    share = -(-batch // dp)
    if not uneven:
        return tuple(divisors(batch // dp)) if batch % dp == 0 else ()
    sizes = {*divisors(share), *(2 ** k for k in range(share.bit_length()))}
    smallest: dict[int, int] = {}
    for size in sorted(sizes):
        smallest.setdefault(-(-batch // (dp * size)), size)
    return tuple(smallest.values())


def virtual_stages(question: Question, *, schedule: Schedule, pp: int) -> tuple[int, ...]:
    least, most = VIRTUAL_STAGES[schedule] if pp > 1 else (1, 1)
    asked = question.request.options("virtual_stages")
    if asked is not None:
        return asked
    layers = question.model.num_layers
    top = min(most or MOST_VIRTUAL_STAGES, MOST_VIRTUAL_STAGES, layers // pp)
    # even chunks, with the ends as layers or without; powers of two; one layer per stage
    return tuple(v for v in range(least, top + 1) if most or v & (v - 1) == 0 or layers % (pp * v) == 0
                 or (layers + 2) % (pp * v) == 0 or v == layers // pp) or (least,)


def counts(question: Question, *, schedule: Schedule, pp: int, least: int) -> tuple[int, ...]:
    asked = question.request.options("num_microbatches")
    if asked is not None:
        return asked
    return (rounded(least, schedule, pp) if question.request.uneven_batch else least,)


def rounded(least: int, schedule: Schedule, pp: int) -> int:
    multiple = pipeline_rules.microbatch_multiple(schedule, pp)
    return -(-least // multiple) * multiple


def sequence_splits(question: Question, *, tp: int, cp: int) -> tuple[bool, ...]:
    """Sequence parallelism saves memory at the same bytes: without a wish, wherever the sequence divides."""
    asked = question.request.options("sequence_parallel")
    if rules.needs_sequence_parallel(question.model, tp=tp):
        asked = (True,)
    divides = question.training.seq_len % ((2 * cp if cp > 1 else 1) * tp) == 0
    if tp == 1:
        return (asked or (True,))[:1]
    if asked is None:
        return (divides,)
    return tuple(split for split in asked if divides or not split)


def options(question: Question, name: str) -> tuple[Any, ...]:
    """Of a field with few values."""
    asked = question.request.options(name)
    return DEFAULT_FIRST.get(name, CHOICES[name]) if asked is None else asked
