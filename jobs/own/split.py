"""Tensor parallelism of an own model: what the styles of its plan table do to its modules.

Called by jobs.own on a model built on the meta device. Parameters become DTensors, for FSDP, clipping and
checkpoints; the user's forward sees this rank's shard as a plain tensor, so it needs no parallel code: a module that
infers how many heads or channels it has from the width of what it gets works unchanged.

Collectives over tp, per microbatch; E = the tensor that enters or leaves, whole:

    style                  sequence_parallel                      without
    column, split, head    forward all_gather E                   forward –
    (where it enters)      backward reduce_scatter E              backward all_reduce E
    row, vocab             forward reduce_scatter E               forward all_reduce E
    (where it leaves)      backward all_gather E                  backward –
    loss behind a head     all_reduce 4·tokens (max), 8·tokens (sum, target)           the same
    once per step          all_reduce of the gradients of `shared` and of biases behind `row`; under sequence
                           parallelism also of `sequence`
"""
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from jobs.mesh import local_of
from jobs.own.table import Style, Table, split_dimensions
from jobs.parallel.boundary import Boundary


def apply_styles(model: nn.Module, table: Table, *, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split `model` (on meta) over the 1-D mesh `tp`, in place; jobs.own.table.tp_problem says whether it can be."""
    boundary = Boundary(mesh.get_group(), sequence_parallel=sequence_parallel)
    splits = tuple(f"{path}." for path, style in table.styles.items() if style == "split")
    for path, module in list(model.named_modules()):
        style = table.styles.get(path)
        _distribute(module, style, mesh=mesh, sequence_parallel=sequence_parallel)
        if style in ("column", "head", "split") and not path.startswith(splits):
            module.register_forward_pre_hook(boundary.entering)
        if style == "row":
            module.register_forward_hook(lambda module, args, output: boundary.leave(output))
        if style == "vocab":
            _look_up_own_rows(module, boundary=boundary)
        if style in ("channels", "split") and getattr(module, "groups", 1) > 1:
            module.groups //= mesh.size()


def _distribute(module: nn.Module, style: Style | None, *, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Make the module's own parameters DTensors, and what its forward sees of them the local shard."""
    own = dict(module.named_parameters(recurse=False))
    if not own:
        return
    dimensions = split_dimensions(module, style) if style else {}
    for name, parameter in own.items():
        shape = list(parameter.shape)
        placement = Replicate()
        if name in dimensions:
            shape[dimensions[name]] //= mesh.size()
            placement = Shard(dimensions[name])
        local = torch.empty(shape, dtype=parameter.dtype, device="meta")
        module.register_parameter(name, nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False)))
    # of partial sums only one rank adds the bias
    once = {"bias"} if style == "row" else set()
    seen = {name: _seen(name, counted=name not in once or mesh.get_local_rank() == 0) for name in own}
    kind = type(module)
    module.__class__ = type(f"Local{kind.__name__}", (kind,), seen | {"forward": _forward(kind)})
    if style == "shared" or (style == "sequence" and sequence_parallel):
        module.partial_gradients = tuple(own)
    elif once & own.keys():
        module.partial_gradients = tuple(once)


def _seen(name: str, *, counted: bool) -> property:
    """In the module's own forward the shard; for everybody else (FSDP) the parameter."""
    def local(module: nn.Module) -> Tensor:
        if not module.__dict__.get("_computes"):
            return module._parameters[name]
        shard = local_of(module._parameters[name])
        return shard if counted else shard * 0.0

    return property(local)


def _forward(plain: type[nn.Module]) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module.__dict__["_computes"] = True
        try:
            return plain.forward(module, *args, **kwargs)
        finally:
            module.__dict__["_computes"] = False

    return forward


def _look_up_own_rows(embedding: nn.Embedding, *, boundary: Boundary) -> None:
    """Rows of the vocabulary are split; other ranks' tokens look up zero."""
    plain = embedding.forward

    def forward(tokens: Tensor) -> Tensor:
        held = local_of(embedding.weight).shape[0]
        rows = tokens - boundary.group.rank() * held
        elsewhere = (rows < 0) | (rows >= held)
        return boundary.leave(plain(rows.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0.0))

    embedding.forward = forward
