"""assemble: config, layout and placement → JobSpec (for the ranks) and SlurmRequest (for Slurm). Pure.

Called by the CLI (the request) and by the supervisor (one JobSpec per attempt).
"""
import dataclasses
from pathlib import Path

from jobs.spec.job import JobSpec
from jobs.spec.parallel import Layout
from jobs.spec.rundir import RunDir
from jobs.spec.sources import VALIDATED, with_token_files
from jobs.spec.training import TrainingSpec
from orchestrator.config import RunConfig
from orchestrator.submission import SlurmRequest


def assemble_job(config: RunConfig, *, layout: Layout | None, world_size: int, run_dir: Path, attempt: int,
                 resume_step: int | None) -> JobSpec:
    """What the ranks of this attempt need to know. A `command:` has no layout: it plans for itself."""
    data = RunDir(run_dir).data
    dtype = config.training.param_dtype if config.training else "bfloat16"
    return JobSpec(
        run=config.run, attempt=attempt, run_dir=str(run_dir), device=config.cluster.device,
        world_size=world_size, model=config.model, layout=layout,
        training=_as_read(config.training, data), data=config.data and with_token_files(config.data, data),
        checkpoint=config.checkpoint, resume_step=resume_step, peak_tflops=config.cluster.peak(dtype),
        mfu_convention=config.mfu_convention,
        faults=tuple(fault for fault in config.faults if fault.attempt == attempt),
        command=tuple(config.command) if config.command else None, entrypoint=config.entrypoint,
        arguments=tuple(config.arguments), workdir=config.workdir,
        threads_per_rank=config.cluster.threads_per_rank)


def _as_read(training: TrainingSpec | None, folder: Path) -> TrainingSpec | None:
    """With the token files of what is validated on."""
    validation = training and training.validation
    if validation is None:
        return training
    data = with_token_files(validation.data, folder, at=VALIDATED)
    return dataclasses.replace(training, validation=dataclasses.replace(validation, data=data))


def assemble_request(config: RunConfig) -> SlurmRequest:
    """What to ask Slurm for."""
    cluster, slurm = config.cluster, config.cluster.slurm
    gres = slurm.gres or (None if cluster.device == "cpu" else f"gpu:{cluster.gpus_per_node}")
    return SlurmRequest(
        job_name=config.run, num_nodes=cluster.num_nodes, gres=gres, cpus_per_node=slurm.cpus_per_node,
        mem_gb=slurm.mem_gb, time_min=slurm.time_min, partition=slurm.partition, account=slurm.account, qos=slurm.qos,
        exclude=tuple(slurm.exclude), signal_lead_s=slurm.signal_lead_s, setup=tuple(slurm.setup),
        extra=dict(slurm.extra))
