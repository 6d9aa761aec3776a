"""What a table leaves open, settled: sharding, recomputation and microbatches of each row, so that it can be priced.

Called by predict, and by the refit of constants. Nothing here looks at what was measured: a row fits its GPUs, and of
what fits its authors took the fastest. Rows of 2021's trainers are settled together: the rows of one job (same model
and batch in one table) ran under one setting, the least with which all of them fit; later trainers recompute some
layers, as many as memory asks for.
"""
import dataclasses
from collections import defaultdict
from collections.abc import Callable

from jobs.spec.model import ModelSpec
from orchestrator.planner.cost import heaviest, price
from orchestrator.validation.model import NotPriced, gated_tables, model_of, usual_seq_len
from orchestrator.validation.setup import Setup, setup_of
from orchestrator.validation.table import Row

LEAST_FIRST = ("none", "selective", "full")
USABLE_MEMORY = 0.97  # of a GPU, beside the context

Case = tuple[ModelSpec, Setup]


def settle(rows: tuple[Row, ...]) -> tuple[Case | str, ...]:
    """Per row what to price, or why it cannot be."""
    gated = gated_tables(rows)
    found: list[Case | str] = []
    for row in rows:
        if not row.seq_len:
            row = dataclasses.replace(row, seq_len=usual_seq_len(row.model))
        try:
            model = model_of(row, gated_table=row.group in gated)
            found.append((model, _sharded(row, model, setup_of(row, model=model))))
        except NotPriced as reason:
            found.append(str(reason))
    cases = {i: one for i, one in enumerate(found) if not isinstance(one, str)}
    for i, (model, setup) in _with_settled_recompute(rows, cases).items():
        found[i] = model, _with_settled_microbatch(rows[i], model, setup)
    return tuple(found)


def step_s(model: ModelSpec, setup: Setup) -> float:
    """Seconds of a step. Of a setup that recomputes some layers, between that of none and that of all."""
    def seconds(one: Setup) -> float:
        return price(model, one.layout, training=one.training, cluster=one.cluster, headroom=0.0, convention="full",
                     software=one.software).predicted.step_time_s

    return _between(setup, seconds)


def memory_gib(model: ModelSpec, setup: Setup) -> float:
    """Of the heaviest rank."""
    return _between(setup, lambda one: heaviest(model, one.layout, training=one.training, cluster=one.cluster,
                                                software=one.software).total_gib)


def least_memory_gib(model: ModelSpec, setup: Setup) -> float:
    """As memory_gib, with everything recomputed where that is left open: what a planner could make of the row."""
    return memory_gib(model, setup if setup.states_recompute else
                      dataclasses.replace(_with_recompute(setup, "full"), recomputed_share=1.0))


def _between(setup: Setup, figure: Callable[[Setup], float]) -> float:
    share = setup.recomputed_share
    if share == 1.0:
        return figure(setup)
    return share * figure(setup) + (1 - share) * figure(_with_recompute(setup, setup.lighter))


def _with_settled_recompute(rows: tuple[Row, ...], cases: dict[int, Case]) -> dict[int, Case]:
    """Recomputation of the rows that do not state theirs; and of those whose selection of operations would not fit:
    they select layers."""
    settled, jobs = dict(cases), defaultdict(list)
    for i, (model, setup) in cases.items():
        if not setup.software.flash_attention and not setup.states_recompute:
            jobs[rows[i].group, rows[i].model, setup.training.global_batch_size, rows[i].gpu].append(i)
        elif not setup.states_recompute or (setup.layout.recompute == "selective"
                                            and setup.software.selective == "all but matmuls"):
            settled[i] = model, _least_recompute(model, setup)
    for members in jobs.values():
        for how in _choices(cases[members[0]][1]):
            trial = {i: (cases[i][0], _with_recompute(cases[i][1], how)) for i in members}
            settled |= trial
            if all(memory_gib(model, setup) <= _usable_gib(setup) for model, setup in trial.values()):
                break
    return settled


def _least_recompute(model: ModelSpec, setup: Setup) -> Setup:
    """Of a trainer that recomputes layer by layer: only as many layers as memory asks for."""
    kept_gib, limit_gib = memory_gib(model, setup), _usable_gib(setup)
    if kept_gib <= limit_gib:
        return setup
    full = _with_recompute(setup, "full")
    least_gib = memory_gib(model, full)
    share = min(1.0, (kept_gib - limit_gib) / max(kept_gib - least_gib, 1e-9))
    return dataclasses.replace(full, recomputed_share=share, lighter=setup.layout.recompute)


def _sharded(row: Row, model: ModelSpec, setup: Setup) -> Setup:
    """Of a row that states no ZeRO stage, has no pipeline, and whose whole weights would not fit: it sharded them."""
    full = _with_recompute(setup, "full")
    stated = row.zero_stage is not None or setup.layout.dims.pp > 1 or not setup.software.flash_attention
    if stated or memory_gib(model, full) <= _usable_gib(setup):
        return setup
    dims = dataclasses.replace(setup.layout.dims, dp_replicate=1, dp_shard=setup.layout.dims.dp)
    return dataclasses.replace(setup, layout=dataclasses.replace(setup.layout, dims=dims, zero_stage=3))


def _choices(setup: Setup) -> tuple[str, ...]:
    """How a trainer of 2021's kernels could recompute, least first. Selective recompute came with sequence parallelism
    in 2022, to trainers that interleave; without interleaving there was all or nothing."""
    return ("none", "full") if setup.layout.virtual_stages == 1 else LEAST_FIRST


def _with_settled_microbatch(row: Row, model: ModelSpec, setup: Setup) -> Setup:
    """Of a row that does not state its microbatch: as many as there are stages under FSDP, as torch's own pipelines do
    unless told; else the fastest that fits, as its authors will have chosen it."""
    if row.mbs is not None:
        return setup
    share = setup.layout.num_microbatches * setup.layout.microbatch_size
    trials = []
    for size in (1, 2, 4, 8, 16):
        m, rest = divmod(share, size)
        pp, interleaved = setup.layout.dims.pp, setup.layout.virtual_stages > 1
        by_stages = setup.layout.zero_stage == 3 and pp > 1 and share % setup.layout.num_stages == 0
        if by_stages and m != setup.layout.num_stages:
            continue
        if rest or (interleaved and m % max(1, m // pp)) or (pp > 1 and m < pp):
            continue
        layout = dataclasses.replace(setup.layout, microbatch_size=size, num_microbatches=m)
        trial = dataclasses.replace(setup, layout=layout)
        if size == 1 or memory_gib(model, trial) <= _usable_gib(setup):
            trials.append((step_s(model, trial), size, trial))
    return min(trials, key=lambda one: one[:2])[2] if trials else setup


def _with_recompute(setup: Setup, how: str) -> Setup:
    """Old trainers run sequence parallelism with selective recompute and not without it."""
    layout = dataclasses.replace(setup.layout, recompute=how)
    if not setup.software.flash_attention:
        layout = dataclasses.replace(layout, sequence_parallel=layout.dims.tp > 1 and how == "selective")
    return dataclasses.replace(setup, layout=layout)


def _usable_gib(setup: Setup) -> float:
    return USABLE_MEMORY * setup.cluster.gpu_memory_gib
