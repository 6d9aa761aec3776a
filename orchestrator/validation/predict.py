"""Rows → predictions: step time and memory of each row from its layout, beside what was measured.

Called by orchestrator.validation. Rows that leave recomputation open are settled together: the rows of one job (same
model and batch in one table) ran under one setting, the least with which all of them fit their GPUs.
"""
import dataclasses
from collections import defaultdict
from dataclasses import dataclass

from jobs.spec.model import ModelSpec
from orchestrator.config import MemorySpec
from orchestrator.planner.cost import heaviest, price, recomputed_flops
from orchestrator.validation.model import NotPriced, gated_tables, model_of
from orchestrator.validation.setup import Setup, setup_of
from orchestrator.validation.table import Row, convention_of, measured_step_s

GIB_PER_GB = 1e9 / 2**30
LEAST_FIRST = ("none", "selective", "full")
USABLE_MEMORY = 0.97  # of a GPU, beside the context


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """One row beside its measurement. `refused` says why there is no prediction."""

    row: Row
    job: tuple | None = None  # what must be equal for two rows to be layouts of the same job
    predicted_step_time_s: float | None = None
    measured_step_time_s: float | None = None
    predicted_memory_gib: float | None = None
    fits: bool | None = None
    refused: str | None = None

    @property
    def ape(self) -> float | None:
        """Absolute error of the step time, as a share of the measured one."""
        if self.predicted_step_time_s is None or self.measured_step_time_s is None:
            return None
        return abs(self.predicted_step_time_s / self.measured_step_time_s - 1)


def predict(rows: tuple[Row, ...]) -> tuple[Predicted, ...]:
    """One Predicted per row, in order."""
    gated = gated_tables(rows)
    cases: dict[int, tuple[ModelSpec, Setup]] = {}
    refused: dict[int, str] = {}
    for i, row in enumerate(rows):
        try:
            model = model_of(row, gated_table=row.group in gated)
            cases[i] = model, setup_of(row, model=model)
        except NotPriced as reason:
            refused[i] = str(reason)
    cases = {i: (model, _settle_sharding(rows[i], model, setup)) for i, (model, setup) in cases.items()}
    cases = _settle_recompute(rows, cases)
    cases = {i: (model, _settle_microbatch(rows[i], model, setup)) for i, (model, setup) in cases.items()}
    return tuple(Predicted(row=row, refused=refused[i]) if i in refused else _predicted(row, *cases[i])
                 for i, row in enumerate(rows))


def _settle_recompute(rows: tuple[Row, ...], cases: dict[int, tuple[ModelSpec, Setup]]) -> dict:
    """Recomputation of the rows that do not state theirs; and of those whose selection of operations would not fit:
    they select layers, most of them."""
    for i, (model, setup) in list(cases.items()):
        if (setup.layout.recompute == "selective" and setup.software.selective_keeps_matmuls
                and _memory_gib(model, setup) > _usable_gib(setup)):
            cases[i] = model, _with_recompute(setup, "full")
    jobs: dict[tuple, list[int]] = defaultdict(list)
    for i, (_, setup) in cases.items():
        if not setup.states_recompute:
            jobs[rows[i].group, rows[i].model, setup.training.global_batch_size, rows[i].gpu].append(i)
    settled = dict(cases)
    for members in jobs.values():
        for how in _choices(cases[members[0]][1]):
            trial = {i: (cases[i][0], _with_recompute(cases[i][1], how)) for i in members}
            settled |= trial
            if all(_memory_gib(model, setup) <= _usable_gib(setup) for model, setup in trial.values()):
                break
    return settled


def _settle_sharding(row: Row, model: ModelSpec, setup: Setup) -> Setup:
    """Of a row that states no ZeRO stage, has no pipeline, and whose whole weights would not fit: it sharded them."""
    full = _with_recompute(setup, "full")
    stated = row.zero_stage is not None or setup.layout.dims.pp > 1 or not setup.software.flash_attention
    if stated or _memory_gib(model, full) <= _usable_gib(setup):
        return setup
    dims = dataclasses.replace(setup.layout.dims, dp_replicate=1, dp_shard=setup.layout.dims.dp)
    return dataclasses.replace(setup, layout=dataclasses.replace(setup.layout, dims=dims, zero_stage=3))


def _choices(setup: Setup) -> tuple[str, ...]:
    """How a trainer could recompute, least first. Selective recompute came with sequence parallelism in 2022, to
    trainers that interleave; the kernels of 2021 without interleaving had all or nothing."""
    old = not setup.software.flash_attention
    return ("none", "full") if old and setup.layout.virtual_stages == 1 else LEAST_FIRST


def _settle_microbatch(row: Row, model: ModelSpec, setup: Setup) -> Setup:
    """Of a row that does not state its microbatch: the fastest that fits, as its authors will have chosen it."""
    if row.mbs is not None:
        return setup
    share = setup.layout.num_microbatches * setup.layout.microbatch_size
    trials = []
    for size in (1, 2, 4, 8, 16):
        m, rest = divmod(share, size)
        pp, interleaved = setup.layout.dims.pp, setup.layout.virtual_stages > 1
        if rest or (interleaved and m % max(1, m // pp)) or (pp > 1 and m < pp):
            continue
        layout = dataclasses.replace(setup.layout, microbatch_size=size, num_microbatches=m)
        trial = dataclasses.replace(setup, layout=layout)
        if size == 1 or _memory_gib(model, trial) <= _usable_gib(setup):
            trials.append((_step_s(model, trial), size, trial))
    return min(trials, key=lambda one: one[:2])[2] if trials else setup


def _step_s(model: ModelSpec, setup: Setup) -> float:
    return price(model, setup.layout, training=setup.training, cluster=setup.cluster, headroom=0.0, convention="full",
                 software=setup.software).predicted.step_time_s


def _with_recompute(setup: Setup, how: str) -> Setup:
    """Old trainers run sequence parallelism with selective recompute and not without it."""
    layout = dataclasses.replace(setup.layout, recompute=how)
    if not setup.software.flash_attention:
        layout = dataclasses.replace(layout, sequence_parallel=layout.dims.tp > 1 and how == "selective")
    return dataclasses.replace(setup, layout=layout)


def _memory_gib(model: ModelSpec, setup: Setup) -> float:
    return heaviest(model, setup.layout, training=setup.training, cluster=setup.cluster,
                    software=setup.software).total_gib


def _usable_gib(setup: Setup) -> float:
    return USABLE_MEMORY * setup.cluster.gpu_memory_gib


def _predicted(row: Row, model: ModelSpec, setup: Setup) -> Predicted:
    layout, training = setup.layout, setup.training
    convention = convention_of(row)
    priced = price(model, layout, training=training, cluster=setup.cluster, headroom=MemorySpec().headroom,
                   convention=convention, software=setup.software)
    again = recomputed_flops(model, layout, seq_len=training.seq_len, convention=convention, software=setup.software)
    measured = measured_step_s(row, model=model, seq_len=training.seq_len, recomputed_per_token=again,
                               global_batch_size=training.global_batch_size, world_size=layout.dims.world_size)
    return Predicted(row=row, job=(row.model, training.global_batch_size, training.seq_len, row.gpu, row.n_gpus),
                     predicted_step_time_s=priced.predicted.step_time_s, measured_step_time_s=measured,
                     predicted_memory_gib=priced.predicted.memory_gib, fits=priced.fits)
