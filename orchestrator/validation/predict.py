"""Rows → predictions: step time and memory of each row from its layout, beside what was measured.

Called by orchestrator.validation. What a row leaves open is settled first, without a look at what it measured.
"""
from dataclasses import dataclass

from jobs.spec.model import ModelSpec
from orchestrator.config import MemorySpec
from orchestrator.planner.cost import recomputed_flops
from orchestrator.validation.settle import least_memory_gib, memory_gib, settle, step_s
from orchestrator.validation.setup import Setup
from orchestrator.validation.table import Row, convention_of, measured_step_s

GIB_PER_GB = 1e9 / 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """One row beside its measurement. `refused` says why there is no prediction."""

    row: Row
    mixture: bool = False  # of experts
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
    return tuple(Predicted(row=row, mixture=row.moe == "True", refused=case) if isinstance(case, str)
                 else _predicted(row, *case) for row, case in zip(rows, settle(rows)))


def _predicted(row: Row, model: ModelSpec, setup: Setup) -> Predicted:
    training = setup.training
    limit_gib = setup.cluster.gpu_memory_gib * (1 - MemorySpec().headroom)
    return Predicted(row=row, mixture=model.moe is not None,
                     job=(row.model, training.global_batch_size, training.seq_len, row.gpu, row.n_gpus),
                     predicted_step_time_s=step_s(model, setup), measured_step_time_s=measured_s(row, model, setup),
                     predicted_memory_gib=memory_gib(model, setup), fits=least_memory_gib(model, setup) <= limit_gib)


def measured_s(row: Row, model: ModelSpec, setup: Setup) -> float | None:
    """Seconds of a step as the row states them; its hardware FLOPs count what the setup recomputes."""
    layout, training = setup.layout, setup.training
    again = recomputed_flops(model, layout, seq_len=training.seq_len, convention=convention_of(row),
                             software=setup.software)
    return measured_step_s(row, model=model, seq_len=training.seq_len,
                           recomputed_per_token=again * setup.recomputed_share,
                           global_batch_size=training.global_batch_size, world_size=layout.dims.world_size)
