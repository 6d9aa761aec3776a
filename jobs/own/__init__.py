"""A model of the user's own on any layout: its plan table says what to split and where to cut, its code stays plain.

Called by jobs.train where `model.entrypoint` is given, in place of jobs.parallel.parallelize, in the same visible
order: tensor parallel → pipeline cut → recompute → data parallel → weights → schedule. The user's code runs twice in
every rank: on the meta device for the shards, and on the CPU, seeded, for the weights that they are filled from: so
initial weights are what the code makes of the seed, on every layout.
"""
import contextlib
import functools
from contextlib import AbstractContextManager

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jobs.own.build import OwnModelError, build
from jobs.own.chain import Chain, trace
from jobs.own.split import apply_styles
from jobs.own.table import Table, resolve, sequence_parallel_problem, tp_problem
from jobs.parallel import ParallelModel, complete, fill_weights
from jobs.parallel.pipeline import boundary_shapes
from jobs.parallel.recompute import apply_recompute
from jobs.spec.own_model import OwnModel
from jobs.spec.parallel import Layout
from jobs.spec.support import layout_problems
from jobs.spec.training import TrainingSpec

__all__ = ["OwnModelError", "flops_per_token", "parallelize_own"]


class NoSequences:
    """An own model is told nothing of a sequence but its tokens."""

    def at(self, *args, **kwargs) -> dict[str, Tensor]:
        return {}


def parallelize_own(spec: OwnModel, *, mesh: DeviceMesh, layout: Layout, training: TrainingSpec, device: torch.device,
                    allocating: AbstractContextManager | None = None) -> ParallelModel:
    """This rank's parts, with initial weights; with none under `allocating`, the mode in which jobs.verify takes no
    memory. Raises OwnModelError where code, table or layout do not fit."""
    parts, chain, table = [], None, None
    for stage in layout.stages(mesh.get_local_rank("pp")):
        model, raw = build(spec, seq_len=training.seq_len, device="meta")
        table = resolve(raw, model)
        chain = trace(model, table, seq_len=training.seq_len, vocab_size=spec.vocab_size)
        _refuse(model, table, chain, layout=layout, training=training)
        if layout.dims.tp > 1:
            apply_styles(model, table, mesh=mesh["tp"], sequence_parallel=layout.sequence_parallel)
        parts.append(_Cut(model, table, chain, layout=layout, stage=stage))
    for part in parts:
        apply_recompute(part.blocks, recompute=layout.recompute, compiled=training.compile)
    splits_logits = layout.dims.tp > 1 and table.head is not None
    shapes = boundary_shapes(hidden=chain.hidden, vocab_size=spec.vocab_size, layout=layout, training=training,
                             splits_logits=splits_logits)
    parallel = complete(tuple(part.model for part in parts), mesh=mesh, expert_mesh=None, layout=layout,
                        units=[part.units(layout.layers_per_unit) for part in parts], training=training, device=device,
                        shapes=shapes, sequences=NoSequences(), tied=False, splits_logits=splits_logits,
                        allocating=allocating or contextlib.nullcontext())
    if allocating is None:
        _fill(parallel, spec, training=training)
    return parallel


def flops_per_token(spec: OwnModel, *, seq_len: int) -> float:
    """Forward and backward, counted: three times a forward's matmuls and convolutions, attention in full."""
    model, raw = build(spec, seq_len=seq_len, device="meta")
    return 3 * trace(model, resolve(raw, model), seq_len=seq_len, vocab_size=spec.vocab_size).forward_flops / seq_len


class _Cut:
    """One stage of the model: the user's module itself, without what other stages hold."""

    def __init__(self, model: nn.Module, table: Table, chain: Chain, *, layout: Layout, stage: int) -> None:
        blocks = [table.blocks[i] for i in layout.layers(stage)]
        self.model = model
        self.is_chain = chain.broken is None
        first, last = stage == 0, stage == layout.num_stages - 1
        start, stop = (chain.parts.index(table.blocks[0]), chain.parts.index(table.blocks[-1])) if self.is_chain \
            else (0, 0)
        before = chain.parts[:start] if first else ()
        behind = chain.parts[stop + 1:] if last else ()
        if layout.num_stages > 1:
            held = (*before, *blocks, *behind)
            for path in {*chain.parts} - {*held}:
                parent, _, name = path.rpartition(".")
                model.get_submodule(parent)._modules[name] = nn.Identity()  # numbers of other blocks stay
            model.forward = functools.partial(_run_chain, [model.get_submodule(path) for path in held])
        model.is_first, model.is_last = first, last
        self.blocks = [model.get_submodule(path) for path in blocks]
        self.before = [module for path in before if list((module := model.get_submodule(path)).parameters())]

    def units(self, blocks_per_unit: int) -> list[list[nn.Module]]:
        """Modules that are gathered and reduced together, in the order of forward. The last unit holds what the others
        leave, and all that is in no block where nothing is known of the order."""
        found = [self.blocks[i:i + blocks_per_unit] for i in range(0, len(self.blocks), blocks_per_unit)]
        return [*([self.before] if self.before else []), *found, [self.model]]


def _run_chain(modules: list[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def _refuse(model: nn.Module, table: Table, chain: Chain, *, layout: Layout, training: TrainingSpec) -> None:
    dims = layout.dims
    problems = [str(problem) for problem in layout_problems(layout)]
    for axis in ("cp", "ep"):
        if getattr(dims, axis) > 1:
            problems.append(f"parallel.{axis}: {getattr(dims, axis)} needs a seam in the model that a plan table does "
                            f"not give; set {axis}=1")
    if problem := tp_problem(model, table, tp=dims.tp):
        problems.append(f"parallel.tp: {dims.tp} {problem}")
    if dims.tp > 1 and layout.sequence_parallel and (problem := sequence_parallel_problem(model, table)):
        problems.append(f"parallel.sequence_parallel: true, but {problem}; set false, or complete the plan table")
    if dims.tp > 1 and layout.sequence_parallel and training.seq_len % dims.tp:
        problems.append(f"training.seq_len: {training.seq_len} is not divisible by tp={dims.tp}, as sequence_parallel "
                        "needs")
    if layout.num_stages > 1 and chain.broken:
        problems.append(f"parallel.pp: {dims.pp} cuts the model between blocks, but {chain.broken}; or set pp=1")
    if len(layout.layers_per_stage) != layout.num_stages or sum(layout.layers_per_stage) != len(table.blocks):
        problems.append(f"layers_per_stage: {layout.layers_per_stage} does not split {len(table.blocks)} blocks over "
                        f"{layout.num_stages} stages")
    if training.compile and dims.tp > 1:
        problems.append("training.compile: true, but what the code of an own model sees of its weights under tp is not "
                        "compiled; set false, or tp=1")
    if layout.slots < training.global_batch_size:
        problems.append(f"layout: {layout.slots} slots cannot hold global_batch_size={training.global_batch_size}")
    if problems:
        raise OwnModelError("\n".join(problems))


@torch.no_grad()
def _fill(parallel: ParallelModel, spec: OwnModel, *, training: TrainingSpec) -> None:
    """Parameters and buffers from the code's own initial values."""
    whole, _ = build(spec, seq_len=training.seq_len, device="cpu", seed=training.seed)
    weights, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())

    def box(name: str, shape: tuple[int, ...], *, sizes: tuple[int, ...], offsets: tuple[int, ...]) -> Tensor:
        found = weights[name].detach()
        if tuple(found.shape) != shape:
            raise OwnModelError(f"model.entrypoint: {name} has shape {list(found.shape)} on the CPU and {list(shape)} "
                                "on the meta device; build must give the same model every time")
        for dim, (size, offset) in enumerate(zip(sizes, offsets)):
            found = found.narrow(dim, offset, size)
        return found

    fill_weights(parallel.parameters, source=box)
    for part in parallel.model_parts:
        for name, buffer in part.named_buffers():
            buffer.copy_(buffers[name])
    parallel.refresh_weights()
