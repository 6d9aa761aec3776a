"""A model of the user's own on any layout: its plan table says what to split and where to cut, its code stays plain.

Called by jobs.train where `model.entrypoint` is given, in place of jobs.parallel.parallelize, in the same visible
order: tensor parallel → pipeline cut → recompute → data parallel → weights → schedule. The user's code runs on the meta
device only; the weights that it would have made are made one by one, and only the rank's shards are kept.
"""
import contextlib
import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jobs.own.build import OwnModelError
from jobs.own.chain import Known, read
from jobs.own.dropout import following
from jobs.own.recipe import Recipe
from jobs.own.split import Share, apply_styles
from jobs.own.table import sequence_parallel_problem, tp_problem
from jobs.parallel import complete, fill_weights, sequences_of
from jobs.parallel.model import ParallelModel, Ties
from jobs.parallel.pipeline import boundary_shapes
from jobs.parallel.recompute import apply_recompute
from jobs.spec.own_model import OwnModel
from jobs.spec.parallel import Layout
from jobs.spec.support import layout_problems
from jobs.spec.training import TrainingSpec

__all__ = ["OwnModelError", "flops_per_token", "parallelize_own"]


def parallelize_own(spec: OwnModel, *, mesh: DeviceMesh, layout: Layout, training: TrainingSpec, device: torch.device,
                    allocating: AbstractContextManager | None = None) -> ParallelModel:
    """This rank's parts, with initial weights; with none under `allocating`, the mode in which jobs.verify takes no
    memory. Raises OwnModelError where code, table or layout do not fit."""
    dims, parts, known = layout.dims, [], None
    for stage in layout.stages(mesh.get_local_rank("pp")):
        known = read(spec, seq_len=training.seq_len, seed=training.seed if allocating is None else None)
        _refuse(known, layout=layout, training=training)
        ties = Ties(names=known.table.ties, ends=known.tied_ends)
        if dims.tp > 1:
            apply_styles(known.model, known.table,
                         share=Share.of(mesh["tp"], sequence_parallel=layout.sequence_parallel))
        parts.append(_Cut(known, layout=layout, stage=stage, seq_len=training.seq_len, compiled=training.compile,
                          tp_rank=mesh.get_local_rank("tp")))
    splits_logits = dims.tp > 1 and known.table.head is not None
    shapes = boundary_shapes(hidden=known.chain.hidden, vocab_size=spec.vocab_size, layout=layout, training=training,
                             splits_logits=splits_logits)
    sequences = sequences_of(mesh, layout=layout, training=training, device=device, with_keys=known.draws is not None)
    parallel = complete(tuple(part.model for part in parts), mesh=mesh, expert_mesh=None, layout=layout,
                        units=[part.units(layout.layers_per_unit) for part in parts], training=training, device=device,
                        shapes=shapes, sequences=sequences, ties=ties, splits_logits=splits_logits,
                        allocating=allocating or contextlib.nullcontext())
    if allocating is None:
        _fill(parallel, known.recipe)
    parallel.refresh_weights()
    return parallel


def flops_per_token(spec: OwnModel, *, seq_len: int) -> float:
    """Forward and backward, counted: three times a forward's matmuls and convolutions, attention in full."""
    return 3 * read(spec, seq_len=seq_len).chain.forward_flops / seq_len


class _Cut:
    """One stage of the model: the user's module itself, without what other stages hold."""

    def __init__(self, known: Known, *, layout: Layout, stage: int, seq_len: int, tp_rank: int,
                 compiled: bool) -> None:
        self.model = model = known.model
        model.is_first, model.is_last = stage == 0, stage == layout.num_stages - 1
        blocks = [known.table.blocks[i] for i in layout.layers(stage)]
        before = known.chain.before if model.is_first else ()
        behind = known.chain.behind if model.is_last else ()
        if layout.num_stages > 1:
            held = (*before, *blocks, *behind)
            for path in {*known.chain.before, *known.table.blocks, *known.chain.behind} - {*held}:
                parent, _, name = path.rpartition(".")
                model.get_submodule(parent)._modules[name] = nn.Identity()  # numbers of other blocks stay
            model.forward = functools.partial(_run_chain, [model.get_submodule(path) for path in held])
        self.blocks = [model.get_submodule(path) for path in blocks]
        self.behind, before = _with_weights(model, behind), _with_weights(model, before)
        # what is needed again behind the blocks belongs to the last unit
        self.before = [module for module in before if not _weights([module]) & _weights(self.behind)]
        self._ends_apart = known.chain.broken is None and self.before == before
        with following(known.draws, model, self.blocks, seq_len=seq_len, first_block=layout.layers(stage).start,
                       rank=tp_rank, size=layout.dims.tp):
            apply_recompute(self.blocks, recompute=layout.recompute, compiled=compiled)

    def units(self, blocks_per_unit: int) -> list[list[nn.Module]]:
        """Modules that are gathered and reduced together, in the order of forward. The last unit is what follows the
        blocks; the model, for what the others leave, where that is more: all that is in no block where nothing is known
        of the order."""
        found = [self.blocks[i:i + blocks_per_unit] for i in range(0, len(self.blocks), blocks_per_unit)]
        left = _weights([self.model]) - _weights([*self.before, *self.blocks])
        last = self.behind if self._ends_apart and left == _weights(self.behind) else [self.model]
        return [*([self.before] if self.before else []), *found, last]


def _with_weights(model: nn.Module, paths: Iterable[str]) -> list[nn.Module]:
    return [module for path in paths if _weights([module := model.get_submodule(path)])]


def _weights(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    return {weight for module in modules for weight in module.parameters()}


def _run_chain(modules: list[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def _refuse(known: Known, *, layout: Layout, training: TrainingSpec) -> None:
    dims, table = layout.dims, known.table
    problems = [str(problem) for problem in layout_problems(layout)]
    for axis in ("cp", "ep"):
        if getattr(dims, axis) > 1:
            problems.append(f"parallel.{axis}: {getattr(dims, axis)} needs a seam in the model that a plan table does "
                            f"not give; set {axis}=1")
    if problem := tp_problem(known.model, table, tp=dims.tp):
        problems.append(f"parallel.tp: {dims.tp} {problem}")
    if dims.tp > 1 and layout.sequence_parallel and (problem := sequence_parallel_problem(known.model, table)):
        problems.append(f"parallel.sequence_parallel: true, but {problem}; set false, or complete the plan table")
    if dims.tp > 1 and layout.sequence_parallel and training.seq_len % dims.tp:
        problems.append(f"training.seq_len: {training.seq_len} is not divisible by tp={dims.tp}, as sequence_parallel "
                        "needs")
    if layout.num_stages > 1 and known.chain.broken:
        problems.append(f"parallel.pp: {dims.pp} cuts the model between blocks, but {known.chain.broken}; or set pp=1")
    if len(layout.layers_per_stage) != layout.num_stages or sum(layout.layers_per_stage) != len(table.blocks):
        problems.append(f"layers_per_stage: {layout.layers_per_stage} does not split {len(table.blocks)} blocks over "
                        f"{layout.num_stages} stages")
    if layout.slots < training.global_batch_size:
        problems.append(f"layout: {layout.slots} slots cannot hold global_batch_size={training.global_batch_size}")
    if problems:
        raise OwnModelError("\n".join(problems))


@torch.no_grad()
def _fill(parallel: ParallelModel, recipe: Recipe) -> None:
    """Parameters and buffers from the code's own initial values."""
    def box(name: str, shape: tuple[int, ...], *, sizes: tuple[int, ...], offsets: tuple[int, ...]) -> Tensor:
        found = recipe.value(name)
        for dim, (size, offset) in enumerate(zip(sizes, offsets)):
            found = found.narrow(dim, offset, size)
        return found

    fill_weights(parallel.parameters, source=box)
    for part in parallel.model_parts:
        for name, buffer in part.named_buffers():
            buffer.copy_(recipe.value(name))
