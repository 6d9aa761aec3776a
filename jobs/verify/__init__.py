"""One rank of any world on one machine: the trainer's own model, layout and step, on tensors without data.

`python -m jobs.verify JOB.json RANK` (called by `orc verify`) prints a RankReport. What is real: every module, hook,
schedule and optimizer of jobs.parallel and jobs.optim. What is not: the other ranks (torch's `fake` group answers at
once), the values (FakeTensorMode), the routing (even: jobs.verify.routing), and on a machine without a GPU its
kernels (jobs.verify.kernels). What a kernel or NCCL allocates for itself is not seen.
"""
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining._utils import InferenceMode

from jobs.mesh import LOSS_AXES, all_reduce, build_mesh, coordinate, local_of
from jobs.model.rule import Rule
from jobs.optim import Optimizer
from jobs.own import parallelize_own
from jobs.parallel import parallelize
from jobs.parallel.model import ParallelModel
from jobs.parallel.pipeline import Pipeline
from jobs.pretended import pretended_rank
from jobs.spec.job import Device, JobSpec
from jobs.spec.model import ModelSpec
from jobs.spec.own_model import OwnModel
from jobs.spec.verification import LocalShape, RankReport
from jobs.verify.collectives import CollectiveLog, axes_of_groups
from jobs.verify.kernels import cuda_kernels
from jobs.verify.memory import PeakMemory
from jobs.verify.routing import EvenRouting

CPU = torch.device("cpu")  # fake tensors of a GPU need a torch that is built for it


def verify(job: JobSpec, *, rank: int) -> RankReport:
    """Build what this rank would build and run its first step. Raises what the trainer would raise: ValueError for a
    layout that it refuses, RuntimeError for shapes that do not fit."""
    start = time.monotonic()
    with pretended_rank(rank, world_size=job.world_size):
        mesh = build_mesh(job.layout.dims, device=CPU)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        what = {"mesh": mesh, "layout": job.layout, "training": job.training, "device": CPU, "allocating": mode}
        parallel = parallelize_own(job.model, **what) if isinstance(job.model, OwnModel) else \
            parallelize(job.model, **what, weights=_NoValues())
        optimizer = Optimizer(parallel.parameters.items(), spec=job.training.optimizer, total_steps=job.training.steps,
                              mesh=mesh, copies=parallel.copies)
        if isinstance(parallel.schedule, Pipeline):
            _without_votes(parallel.schedule)
        axes = axes_of_groups(mesh, parallel.expert_mesh)
        memory, log = PeakMemory(parallel, optimizer, axes=axes), CollectiveLog(axes)
        routing = EvenRouting() if isinstance(job.model, ModelSpec) and job.model.moe else contextlib.nullcontext()
        with kernels_of(job.device), whole_documents(), mode, routing, memory, log:
            step(job, parallel=parallel, optimizer=optimizer, mesh=mesh)
        here = coordinate(mesh)
        return RankReport(rank=rank, coordinate=here, stages=job.layout.stages(here["pp"]),
                          peak_bytes=memory.peak_bytes, collectives=log.collectives(), shapes=_shapes(parallel),
                          seconds=time.monotonic() - start)


def kernels_of(device: Device) -> contextlib.AbstractContextManager:
    return cuda_kernels() if device == "cuda" else contextlib.nullcontext()


def step(job: JobSpec, *, parallel: ParallelModel, optimizer: Optimizer, mesh: DeviceMesh) -> None:
    """As Trainer._step, without its clocks and reports."""
    layout = job.layout
    tokens = documents = None
    rows = layout.microbatch_size * layout.num_microbatches
    if parallel.holds_first or parallel.holds_last:
        tokens = torch.zeros(rows, job.training.seq_len // layout.dims.cp, dtype=torch.int64)
    if job.data is not None and job.data.document_mask:
        documents = torch.zeros(rows, job.training.seq_len, dtype=torch.int32)
    loss = parallel.forward_backward(tokens, tokens, documents=documents, step=1)
    if parallel.holds_last:
        all_reduce(loss, mesh=mesh, axes=LOSS_AXES)
    optimizer.step(1, parallel.gradients)
    parallel.refresh_weights()


@contextlib.contextmanager
def whole_documents() -> Iterator[None]:
    """Where documents are masked, which keys are met depends on their values, and there are none: every sequence is one
    document, which meets the most keys. The masks are made all the same."""
    of_values = Rule.lowest

    def lowest(rule: Rule, position: int) -> tuple[int, int]:
        return of_values(dataclasses.replace(rule, tokens=None), position)

    with patch.object(Rule, "lowest", lowest):
        yield


class _NoValues:
    """In the place of weights to start from."""

    def slice(self, name: str, shape: tuple[int, ...], *, sizes: tuple[int, ...], offsets: tuple[int, ...]) -> Tensor:
        return torch.empty(()).expand(sizes)


def _without_votes(pipeline: Pipeline) -> None:
    """Before its first step torch lets the stages vote whether shapes are static, by messages whose values nobody
    sends here. Ours always are."""

    def all_static(stages, *_args) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    pipeline.schedule._warmup_p2p = all_static


def _shapes(parallel: ParallelModel) -> tuple[LocalShape, ...]:
    return tuple(LocalShape(name=name, whole=tuple(p.shape), local=tuple(local_of(p).shape),
                            dtype=str(p.dtype).removeprefix("torch."))
                 for name, p in parallel.parameters.items())
