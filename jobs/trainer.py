"""The loop of steps: data, forward and backward, update, report, checkpoint.

Built by jobs.train from ready-made parts. Side effects on the outside are reports (jobs.recorder) and
checkpoint files; it knows no mesh axis but those over which a loss is summed.
"""
import itertools
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from jobs import checkpoint, runtime
from jobs.checkpoint import Progress, TrainingState
from jobs.faults import strike
from jobs.loader import Loader
from jobs.mesh import LOSS_AXES, start_all_reduce
from jobs.metrics import RateMeter, peak_memory_bytes
from jobs.optim import Optimizer
from jobs.parallel.model import ParallelModel
from jobs.recorder import Recorder
from jobs.spec.job import FaultSpec
from jobs.spec.model import AttentionConvention
from jobs.spec.reports import ShardReport, StepReport, ValidationReport
from jobs.spec.rundir import RunDir
from jobs.validation import Validation


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """Of the parts of one step, in seconds; they add up to the step's wall time."""

    data_s: float
    forward_backward_s: float
    optimizer_s: float
    checkpoint_s: float

    @property
    def step_time_s(self) -> float:
        return self.data_s + self.forward_backward_s + self.optimizer_s + self.checkpoint_s


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPlan:
    """When and where to save."""

    run_dir: RunDir
    interval_steps: int
    layout: dict  # Layout.flat(), kept with the shards

    def is_due(self, step: int, *, final_step: int) -> bool:
        return step % self.interval_steps == 0 or step == final_step


class Trainer:
    """One rank's training, from `progress` to `final_step`. All ranks of the attempt run the same loop."""

    def __init__(self, parallel: ParallelModel, *, optimizer: Optimizer, loader: Loader | None,
                 validation: Validation | None, mesh: DeviceMesh, state: TrainingState, plan: CheckpointPlan,
                 recorder: Recorder, faults: tuple[FaultSpec, ...], meter: RateMeter,
                 mfu_convention: AttentionConvention, final_step: int, device: torch.device) -> None:
        self.parallel = parallel
        self.optimizer = optimizer
        self.loader = loader
        self.validation = validation
        self.mesh = mesh
        self.state = state
        self.plan = plan
        self.recorder = recorder
        self.faults = faults
        self.meter = meter
        self.mfu_convention = mfu_convention
        self.final_step = final_step
        self.device = device
        self.progress = Progress()
        self._stalled_s = 0.0  # by the checkpoint after the step before
        here = {axis: mesh.get_local_rank(axis) for axis in mesh.mesh_dim_names}
        # first rank of the last stage: the one that owns the loss
        self.is_reporter = parallel.holds_last and not any(n for axis, n in here.items() if axis != "pp")

    def resume(self, step: int | None) -> None:
        """Continue from the committed checkpoint of `step`; None starts from nothing."""
        if step is not None:
            folder = self.plan.run_dir.checkpoint(step)
            self.progress = checkpoint.load(folder, self.state, step=step, layout=self.plan.layout)
            self.parallel.refresh_weights()

    def run(self) -> None:
        """Train to the final step, saving on the way and at the end."""
        while self.progress.step < self.final_step:
            step = self.progress.step + 1
            # all that this rank holds, masters and what computes: the faulty rank alone can start no collective
            strike(self.faults, attempt=self.recorder.attempt, rank=self.recorder.rank, step=step,
                   recorder=self.recorder, parameters=itertools.chain(
                       self.optimizer.parameters.values(), *(part.parameters() for part in self.parallel.model_parts)))
            self._step(step)
            # before it is saved: who resumes from a checkpoint knows that its step has been validated
            if self.validation is not None and self.validation.is_due(step, final_step=self.final_step):
                self._validate()
            if self.plan.is_due(step, final_step=self.final_step):
                self._stalled_s = self._save()
        for loader in (self.loader, self.validation and self.validation.loader):
            if loader is not None:
                loader.close()

    def _step(self, step: int) -> None:
        start = time.perf_counter()
        self.recorder.progress(self.progress.step, "data")
        batch = None if self.loader is None else self.loader.batch(self.progress.data_cursor)
        after_data = time.perf_counter()
        self.recorder.progress(self.progress.step, "forward_backward")
        loss = self.parallel.forward_backward(batch and batch.inputs, batch and batch.targets, step=step,
                                              documents=batch and batch.documents)
        # behind the optimizer: a step must not wait for what only its report needs
        summed = start_all_reduce(loss, mesh=self.mesh, axes=LOSS_AXES if self.parallel.holds_last else ())
        runtime.synchronize(self.device)
        after_backward = time.perf_counter()
        self.recorder.progress(self.progress.step, "optimizer")
        norm, lr = self.optimizer.step(step, self.parallel.gradients)
        self.parallel.refresh_weights()
        loss = summed()
        runtime.synchronize(self.device)
        durations = Durations(data_s=after_data - start, forward_backward_s=after_backward - after_data,
                              optimizer_s=time.perf_counter() - after_backward, checkpoint_s=self._stalled_s)
        self._stalled_s = 0.0
        self.progress = replace(self.progress, step=step, data_cursor=self.progress.data_cursor + 1)
        if self.is_reporter:
            self._report(loss.item(), norm.item(), lr, durations)

    def _report(self, loss: float, grad_norm: float, lr: float, durations: Durations) -> None:
        rates = self.meter.rates(durations.step_time_s)
        report = StepReport(
            attempt=self.recorder.attempt, rank=self.recorder.rank, step=self.progress.step, t=time.time(), loss=loss,
            grad_norm=grad_norm, lr=lr, tokens=self.meter.tokens, step_time_s=durations.step_time_s,
            data_s=durations.data_s, forward_backward_s=durations.forward_backward_s,
            optimizer_s=durations.optimizer_s, checkpoint_s=durations.checkpoint_s, tokens_per_s=rates.tokens_per_s,
            tokens_per_s_per_gpu=rates.tokens_per_s_per_gpu, tflops_per_gpu=rates.tflops_per_gpu, mfu=rates.mfu,
            mfu_convention=self.mfu_convention, peak_memory_bytes=peak_memory_bytes(self.device))
        self.recorder.report(report)
        print(f"step {report.step}  loss {loss:.4f}  grad_norm {grad_norm:.3f}  lr {lr:.2e}  "
              f"{rates.tokens_per_s:,.0f} tokens/s  MFU {100 * rates.mfu:.1f}%", flush=True)

    def _validate(self) -> None:
        start = time.perf_counter()
        loss = self.validation.loss(alive=lambda: self.recorder.progress(self.progress.step, "validation"))
        if not self.is_reporter:
            return
        report = ValidationReport(attempt=self.recorder.attempt, rank=self.recorder.rank, step=self.progress.step,
                                  t=time.time(), loss=loss, tokens=self.validation.tokens,
                                  validation_s=time.perf_counter() - start)
        self.recorder.report(report)
        print(f"validation after step {report.step}  loss {loss:.4f}  {report.tokens:,} tokens in "
              f"{report.validation_s:.1f} s", flush=True)

    def _save(self) -> float:
        """Write this rank's shards and tell the supervisor, who commits. Returns the seconds it took."""
        start = time.perf_counter()
        self.recorder.progress(self.progress.step, "checkpoint")
        folder: Path = self.plan.run_dir.checkpoint_in_progress(self.progress.step, self.recorder.attempt)
        files = checkpoint.save(folder, self.state, progress=self.progress, layout=self.plan.layout)
        seconds = time.perf_counter() - start
        self.recorder.report(ShardReport(attempt=self.recorder.attempt, rank=self.recorder.rank,
                                         step=self.progress.step, t=time.time(), files=files,
                                         data_cursor=self.progress.data_cursor, save_s=seconds))
        return seconds
