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
from jobs.parallel import ParallelModel, parallelize
from jobs.recorder import Recorder
from jobs.spec.job import JobSpec
from jobs.spec.load import from_dict
from jobs.spec.parallel import cp_chunks
from jobs.spec.rundir import RunDir
from jobs.trainer import CheckpointPlan, Trainer
from jobs.weights import HubWeights


def main(job: JobSpec, *, recorder: Recorder) -> None:
    """Train to the job's last step. Raises whatever went wrong; the caller reports it and ends the process."""
    recorder.progress(job.resume_step or 0, "start")
    with runtime.process_group(job.device, timeout_s=job.dist_timeout_s, seed=job.training.seed) as device:
        mesh = build_mesh(job.layout.dims, device=device)
        parallel = parallelize(job.model, mesh=mesh, layout=job.layout, training=job.training, device=device,
                               weights=first_weights(job))
        trainer = build_trainer(job, parallel=parallel, mesh=mesh, recorder=recorder, device=device)
        trainer.resume(job.resume_step)
        trainer.run()


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
    meter = RateMeter.of(job.model, seq_len=training.seq_len, global_batch_size=training.global_batch_size,
                         world_size=job.world_size, peak_tflops=job.peak_tflops, convention=job.mfu_convention)
    plan = CheckpointPlan(run_dir=RunDir(Path(job.run_dir)), interval_steps=job.checkpoint.interval_steps,
                          layout=job.layout.flat())
    loader = build_loader(job, mesh=mesh, device=device) if parallel.holds_first or parallel.holds_last else None
    return Trainer(parallel, optimizer=optimizer, loader=loader, mesh=mesh, state=state, plan=plan, recorder=recorder,
                   faults=job.faults, meter=meter, mfu_convention=job.mfu_convention, final_step=training.steps,
                   device=device)


def build_loader(job: JobSpec, *, mesh: DeviceMesh, device: torch.device) -> Loader:
    """The loader of this rank's data-parallel share of the slots."""
    layout, training = job.layout, job.training
    share = layout.microbatch_size * layout.num_microbatches
    here, cp = coordinate(mesh), layout.dims.cp
    first = share * layout.dims.dp_index(here)
    return Loader(Path(job.tokens_path), seq_len=training.seq_len, vocab_size=job.model.vocab_size,
                  global_batch_size=training.global_batch_size, seed=training.seed,
                  slots=range(first, first + share), device=device,
                  **({"chunks": cp_chunks(cp, here["cp"]), "num_chunks": 2 * cp} if cp > 1 else {}))


if __name__ == "__main__":
    spec = from_dict(JobSpec, json.loads(Path(sys.argv[1]).read_text()), origin=sys.argv[1])
    main(spec, recorder=Recorder.from_environment(attempt=spec.attempt))
