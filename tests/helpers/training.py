"""A tiny JobSpec, and running it on forked ranks: what the distributed tests have in common."""
import collections
import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from jobs import train
from jobs.mesh import build_mesh
from jobs.parallel.model import ParallelModel
from jobs.recorder import Recorder
from jobs.runtime import seed_everything
from jobs.spec.job import JobSpec
from jobs.spec.load import to_dict
from jobs.spec.model import ModelSpec
from jobs.spec.own_model import OwnModel
from jobs.spec.parallel import AXES, Layout, ParallelDims, split_layers
from jobs.spec.reports import RankReport, ShardReport, StepReport
from jobs.spec.rundir import RunDir
from jobs.spec.training import CheckpointSpec, DataSpec, OptimizerSpec, TrainingSpec
from jobs.spec.wire import decode, encode
from jobs.trainer import Trainer
from orchestrator.supervision.commit import commit as commit_reports
from tests.helpers import device
from tests.helpers.ranks import run_ranks, tokens_file

TINY = ModelSpec(name="tiny", vocab_size=256, dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=64,
                 init_std=0.05)
TRAINING = TrainingSpec(steps=5, seq_len=16, global_batch_size=8,
                        optimizer=OptimizerSpec(lr=1e-2, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5, eps=1e-4))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of a run on several ranks: what the reporting rank said of each step, and the shards of all ranks."""

    losses: list[float]
    grad_norms: list[float]
    shards: list[ShardReport]

    @classmethod
    def of(cls, reports_by_rank: list[list]) -> "Outcome":
        reports = [report for of_rank in reports_by_rank for report in of_rank]
        steps = [report for report in reports if isinstance(report, StepReport)]
        return cls(losses=[r.loss for r in steps], grad_norms=[r.grad_norm for r in steps],
                   shards=[report for report in reports if isinstance(report, ShardReport)])


class ListRecorder(Recorder):
    """Keeps the reports instead of sending them; in a file, too, where the rank is to be killed."""

    def __init__(self, *, rank: int, attempt: int, folder: Path | None = None) -> None:
        super().__init__(None, attempt=attempt, rank=rank)
        self.reports: list = []
        self._file = None if folder is None else (folder / f"reports-{rank}.jsonl").open("ab", buffering=0)

    def report(self, message) -> None:
        self.reports.append(message)
        if self._file is not None:
            self._file.write(encode(message))


def read_reports(folder: Path, *, rank: int) -> list:
    """What a ListRecorder wrote before its rank was killed."""
    return [decode(line, RankReport) for line in (folder / f"reports-{rank}.jsonl").read_bytes().splitlines()]


def layout(*, model: ModelSpec = TINY, global_batch_size: int = TRAINING.global_batch_size, microbatch_size: int = 2,
           virtual_stages: int = 1, layers_per_stage: tuple[int, ...] | None = None, **rest) -> Layout:
    """Degrees and fields of a layout → a Layout whose slots hold the batch exactly, or with the smallest surplus."""
    dims = ParallelDims(**{axis: rest.pop(axis) for axis in (*AXES, "order") if axis in rest})
    return Layout(dims=dims, microbatch_size=microbatch_size,
                  num_microbatches=-(-global_batch_size // (microbatch_size * dims.dp)),
                  layers_per_stage=layers_per_stage or split_layers(model.num_layers, dims.pp * virtual_stages),
                  virtual_stages=virtual_stages, **rest)


def job(run_dir: Path, where: Layout, *, model: ModelSpec = TINY, training: TrainingSpec = TRAINING,
        interval_steps: int = 1000, resume_step: int | None = None, attempt: int = 1,
        data: DataSpec | None = None) -> JobSpec:
    return JobSpec(run="test", attempt=attempt, run_dir=str(run_dir), device=device.kind(),
                   world_size=where.dims.world_size,
                   model=model, layout=where, training=training, data=data or DataSpec(path=str(tokens_file())),
                   checkpoint=CheckpointSpec(interval_steps=interval_steps), resume_step=resume_step, peak_tflops=0.02)


def train_job(spec: JobSpec) -> Outcome:
    """Run the whole job on forked ranks."""
    return Outcome.of(run_ranks(train_here, world_size=spec.world_size, args=(spec,)))


LOSS_TOLERANCE = 1e-5
GRAD_NORM_TOLERANCE = 1e-4
# Of every final parameter, which five updates have moved by up to 2e-2. Adam divides a gradient by its own size: with
# its usual eps of 1e-8 rounding (1e-9 in a gradient of 1e-8) would come out as a part of lr. With TRAINING's eps of
# 1e-4, below most gradients here, what comes out is rounding of the parameters: 1e-7 to 3e-7 on every kind of layout.
PARAMETER_TOLERANCE = 2e-6


_REFERENCES: dict[str, tuple[Outcome, dict[str, torch.Tensor]]] = {}  # an own model's arguments have no hash


def reference(model: ModelSpec | OwnModel, training: TrainingSpec, *,
              num_layers: int | None = None) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """The run on one rank, whole batches at once, and its final parameters. `num_layers`: of an own model."""
    key = json.dumps([device.kind(), to_dict(model), to_dict(training)])
    if key not in _REFERENCES:
        where = layout(global_batch_size=training.global_batch_size, microbatch_size=training.global_batch_size,
                       layers_per_stage=(num_layers or model.num_layers,))
        with tempfile.TemporaryDirectory() as folder:
            spec = job(Path(folder), where, model=model, training=training)
            _REFERENCES[key] = train_job(spec), final_parameters(spec)
    return _REFERENCES[key]


def assert_matches_single_rank(run_dir: Path, where: Layout, *, model: ModelSpec | OwnModel = TINY,
                               training: TrainingSpec = TRAINING) -> None:
    """Train on forked ranks; losses, gradient norms and final parameters are those of one rank, within tolerance."""
    spec = job(run_dir, where, model=model, training=training)
    found = train_job(spec)
    assert_same_run(found, final_parameters(spec), *reference(model, training, num_layers=sum(where.layers_per_stage)))


def assert_same_run(found: Outcome, gathered: dict[str, torch.Tensor], wanted: Outcome,
                    parameters: dict[str, torch.Tensor]) -> None:
    """Losses, gradient norms and final parameters of two runs are the same, within tolerance."""
    assert found.losses == pytest.approx(wanted.losses, abs=LOSS_TOLERANCE, rel=0)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, abs=GRAD_NORM_TOLERANCE, rel=0)
    assert gathered.keys() == parameters.keys()
    errors = {name: (gathered[name] - value).abs().max().item() for name, value in parameters.items()}
    assert max(errors.values()) < PARAMETER_TOLERANCE, errors


def final_parameters(spec: JobSpec) -> dict[str, torch.Tensor]:
    """Put together from the shards that all ranks wrote after the last step; each element exactly once."""
    folder = RunDir(Path(spec.run_dir)).checkpoint_in_progress(spec.training.steps, spec.attempt)
    whole, covered = {}, collections.Counter()
    for index in sorted(folder.glob("rank-*.json")):
        data = index.with_suffix(".bin").read_bytes()
        for chunk in json.loads(index.read_text())["chunks"]:
            name = chunk["tensor"]
            if name.startswith("model.") and chunk["num_bytes"]:
                start = chunk["byte_offset"]
                piece = np.frombuffer(data[start:start + chunk["num_bytes"]], np.float32).reshape(chunk["sizes"])
                into = whole.setdefault(name, np.full(chunk["shape"], np.nan, np.float32))
                into[tuple(slice(o, o + n) for o, n in zip(chunk["offsets"], chunk["sizes"]))] = piece
                covered[name] += piece.size
    assert all(covered[name] == value.size for name, value in whole.items()), covered
    return {name: torch.from_numpy(value) for name, value in whole.items()}


def train_here(spec: JobSpec, *, stop_before: int | None = None, reports_to: Path | None = None) -> list:
    """In a rank whose group exists already: what jobs.train.main does inside it. Returns the reports.
    `stop_before` leaves the loop before that step, as if the rank had been killed there."""
    seed_everything(spec.training.seed)
    recorder = ListRecorder(rank=dist.get_rank(), attempt=spec.attempt, folder=reports_to)
    trainer = build_trainer(spec, recorder=recorder)
    trainer.resume(spec.resume_step)
    if stop_before is not None:
        trainer.final_step = stop_before - 1
    trainer.run()
    return recorder.reports


def build_model(spec: JobSpec) -> ParallelModel:
    """In a rank: its part of the job's model."""
    mesh = build_mesh(spec.layout.dims, device=device.rank_device())
    return train.build_parallel(spec, mesh=mesh, device=device.rank_device())


def build_trainer(spec: JobSpec, *, recorder: Recorder) -> Trainer:
    """In a rank: its trainer, ready to run."""
    parallel = build_model(spec)
    return train.build_trainer(spec, parallel=parallel, mesh=parallel.mesh, recorder=recorder,
                               device=device.rank_device())


def commit(run_dir: Path, shards: list[ShardReport], *, step: int, attempt: int = 1) -> Path:
    """The supervisor commits what the ranks have reported."""
    reports = tuple(shard for shard in shards if shard.step == step)
    assert reports, f"no rank has reported a shard of step {step}"
    spec = JobSpec(run="test", attempt=attempt, run_dir=str(run_dir), device="cpu", world_size=len(reports),
                   checkpoint=CheckpointSpec(), resume_step=None, peak_tflops=1.0)
    commit_reports(RunDir(run_dir), spec, reports)
    return RunDir(run_dir).checkpoint(step)
