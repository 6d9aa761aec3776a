"""Train one rank: from a JobSpec to the last step.

Called by the fork server in a process that has the torchrun environment, or by hand:
`torchrun --nproc-per-node N -m jobs.train JOB.json`. The only file of the ranks that sees JobSpec whole.
"""
import json
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from jobs import runtime
from jobs.checkpoint import TrainingState
from jobs.loader import Loader
from jobs.mesh import build_mesh, coordinate
from jobs.metrics import RateMeter
from jobs.optim import Optimizer
from jobs.own import flops_per_token, parallelize_own
from jobs.parallel import parallelize
from jobs.parallel.model import ParallelModel
from jobs.recorder import Recorder
from jobs.spec.counts import model_flops_per_token
from jobs.spec.job import JobSpec
from jobs.spec.load import SpecError, from_dict
from jobs.spec.model import AttentionConvention
from jobs.spec.own_model import OwnModel
from jobs.spec.parallel import cp_chunks
from jobs.spec.rundir import RunDir
from jobs.spec.support import compile_problems
from jobs.spec.training import DataSpec
from jobs.trainer import CheckpointPlan, Trainer
from jobs.validation import Validation
from jobs.weights import HubWeights


def main(job: JobSpec, *, recorder: Recorder) -> None:
    """Train to the job's last step. Raises whatever went wrong; the caller reports it and ends the process."""
    recorder.progress(job.resume_step or 0, "start")
    with runtime.process_group(job.device, timeout_s=job.dist_timeout_s, seed=job.training.seed) as device:
        mesh = build_mesh(job.layout.dims, device=device)
        parallel = build_parallel(job, mesh=mesh, device=device)
        runtime.limit_waiting(timeout_s=job.dist_timeout_s)
        trainer = build_trainer(job, parallel=parallel, mesh=mesh, recorder=recorder, device=device)
        trainer.resume(job.resume_step)
        trainer.run()


def build_parallel(job: JobSpec, *, mesh: DeviceMesh, device: torch.device) -> ParallelModel:
    """This rank's part of the model: of ours, or of one of the user's own."""
    where = {"mesh": mesh, "layout": job.layout, "training": job.training, "device": device}
    if isinstance(job.model, OwnModel):
        return parallelize_own(job.model, **where)
    if job.training.compile and (problems := compile_problems(job.layout)):
        raise SpecError(problems)
    return parallelize(job.model, **where, weights=first_weights(job))


def first_weights(job: JobSpec) -> HubWeights | None:
    """What a run starts from where it is not random; a checkpoint that is resumed has weights of its own."""
    folder = job.training.initial_weights
    return HubWeights(Path(folder), spec=job.model) if folder and job.resume_step is None else None


def build_trainer(job: JobSpec, *, parallel: ParallelModel, mesh: DeviceMesh, recorder: Recorder,
                  device: torch.device) -> Trainer:
    """Give each part of the trainer what it needs of the job, and no more."""
    training = job.training
    optimizer = Optimizer(parallel.parameters.items(), spec=training.optimizer, total_steps=training.steps, mesh=mesh,
                          copies=parallel.copies)
    state = TrainingState(parallel.parameters | parallel.buffers, optimizer, rank=recorder.rank, device=device,
                          copies=parallel.copies, aliases=parallel.aliases)
    meter, convention = build_meter(job)
    plan = CheckpointPlan(run_dir=RunDir(Path(job.run_dir)), interval_steps=job.checkpoint.interval_steps,
                          layout=job.layout.flat())
    loader = build_loader(job, job.data, parallel=parallel, device=device)
    validation = build_validation(job, parallel=parallel, device=device)
    return Trainer(parallel, optimizer=optimizer, loader=loader, validation=validation, mesh=mesh, state=state,
                   plan=plan, recorder=recorder, faults=job.faults, meter=meter, mfu_convention=convention,
                   final_step=training.steps, device=device)


def build_meter(job: JobSpec) -> tuple[RateMeter, AttentionConvention]:
    """What turns step times into rates, and how attention is counted in them: as it is computed, where the model is the
    user's own."""
    training, own = job.training, isinstance(job.model, OwnModel)
    convention = "full" if own else job.mfu_convention
    flops = flops_per_token(job.model, seq_len=training.seq_len) if own else \
        model_flops_per_token(job.model, seq_len=training.seq_len, convention=convention)
    return RateMeter(tokens=training.global_batch_size * training.seq_len, world_size=job.world_size,
                     flops_per_token=flops, peak_tflops=job.peak_tflops), convention


def build_validation(job: JobSpec, *, parallel: ParallelModel, device: torch.device) -> Validation | None:
    """None where the run has none."""
    training, spec = job.training, job.training.validation
    if spec is None:
        return None
    loader = build_loader(job, spec.data, parallel=parallel, device=device, num_batches=spec.batches)
    return Validation(parallel, loader=loader, mesh=parallel.mesh, interval_steps=spec.interval_steps,
                      batches=spec.batches, tokens=training.global_batch_size * training.seq_len, device=device)


def build_loader(job: JobSpec, data: DataSpec, *, parallel: ParallelModel, device: torch.device,
                 num_batches: int | None = None) -> Loader | None:
    """The loader of this rank's data-parallel share of the slots; None where its stages need nothing of them."""
    if not (parallel.holds_first or parallel.holds_last or data.document_mask):
        return None
    layout, training = job.layout, job.training
    share = layout.microbatch_size * layout.num_microbatches
    here, cp = coordinate(parallel.mesh), layout.dims.cp
    first = share * layout.dims.dp_index(here)
    return Loader(data, seq_len=training.seq_len, vocab_size=job.model.vocab_size,
                  global_batch_size=training.global_batch_size, seed=training.seed, num_batches=num_batches,
                  slots=range(first, first + share), device=device,
                  **({"chunks": cp_chunks(cp, here["cp"]), "num_chunks": 2 * cp} if cp > 1 else {}))


if __name__ == "__main__":
    spec = from_dict(JobSpec, json.loads(Path(sys.argv[1]).read_text()), origin=sys.argv[1])
    main(spec, recorder=Recorder.from_environment(attempt=spec.attempt))
