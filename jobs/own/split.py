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
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from jobs.mesh import local_of
from jobs.own.table import Style, Table, split_dimensions
from jobs.parallel.boundary import Boundary


class Crossing(Protocol):
    """jobs.parallel.boundary.Boundary, or what stands for it."""

    sequence_parallel: bool

    def enter(self, x: Tensor) -> Tensor: ...
    def leave(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One of `size` tp ranks: `boundary`, where it meets the others; `wrap`: its part of a parameter, and how that lies
    in the whole → what the module is given."""

    rank: int
    size: int
    boundary: Crossing
    wrap: Callable[[Tensor, Placement], nn.Parameter]

    @classmethod
    def of(cls, mesh: DeviceMesh, *, sequence_parallel: bool) -> "Share":
        """This rank of the 1-D mesh `tp`."""
        def wrap(local: Tensor, placement: Placement) -> nn.Parameter:
            return nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))

        return cls(rank=mesh.get_local_rank(), size=mesh.size(), wrap=wrap,
                   boundary=Boundary(mesh.get_group(), sequence_parallel=sequence_parallel))


def apply_styles(model: nn.Module, table: Table, *, share: Share) -> None:
    """Split `model` (on meta) in place; jobs.own.table.tp_problem says whether it can be."""
    boundary = share.boundary
    splits = tuple(f"{path}." for path, style in table.styles.items() if style == "split")
    made: dict[nn.Parameter, nn.Parameter] = {}  # one parameter of several modules stays one
    kinds: dict[Any, type] = {}  # modules that are alike stay so: torch.compile compiles them once
    for path, module in list(model.named_modules()):
        style = table.styles.get(path)
        _distribute(module, style, share=share, made=made, kinds=kinds)
        if style in ("column", "head", "split") and not path.startswith(splits):
            module.register_forward_pre_hook(lambda module, args: (boundary.enter(args[0]), *args[1:]))
        if style == "row":
            module.register_forward_hook(lambda module, args, output: boundary.leave(output))
        if style == "vocab":
            _look_up_own_rows(module, share=share)
        if style in ("channels", "split") and getattr(module, "groups", 1) > 1:
            module.groups //= share.size


def _distribute(module: nn.Module, style: Style | None, *, share: Share, made: dict[nn.Parameter, nn.Parameter],
                kinds: dict[Any, type]) -> None:
    """Give the module its part of its own parameters, and its forward the plain tensors."""
    own = dict(module.named_parameters(recurse=False))
    if not own:
        return
    dimensions = split_dimensions(module, style) if style else {}
    for name, parameter in own.items():
        if parameter not in made:
            shape, dim = list(parameter.shape), dimensions.get(name)
            if dim is not None:
                shape[dim] //= share.size
            local = torch.empty(shape, dtype=parameter.dtype, device="meta")
            made[parameter] = share.wrap(local, Replicate() if dim is None else Shard(dim))
        module.register_parameter(name, made[parameter])
    # of partial sums only one rank adds the bias
    once = {"bias"} if style == "row" else set()
    seen = tuple((name, name not in once or share.rank == 0) for name in own)
    module.__class__ = kinds.setdefault((type(module), seen), _local_kind(type(module), seen))
    if style == "shared" or (style == "sequence" and share.boundary.sequence_parallel):
        module.partial_gradients = tuple(own)
    elif once & own.keys():
        module.partial_gradients = tuple(once)


def _local_kind(kind: type[nn.Module], seen: tuple[tuple[str, bool], ...]) -> type[nn.Module]:
    """`seen`: names of parameters, and whether they count on this rank."""
    return type(f"Local{kind.__name__}", (kind,), {"forward": _forward(kind), "computes": False} | {
        name: _seen(name, counted=counted) for name, counted in seen})


def _seen(name: str, *, counted: bool) -> property:
    """In the module's own forward the shard; for everybody else (FSDP) the parameter."""
    def local(module: nn.Module) -> Tensor:
        if not module.computes:
            return module._parameters[name]
        shard = local_of(module._parameters[name])
        return shard if counted else shard * 0.0

    return property(local)


def _forward(plain: type[nn.Module]) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module.computes = True
        try:
            return plain.forward(module, *args, **kwargs)
        finally:
            module.computes = False

    return forward


def _look_up_own_rows(embedding: nn.Embedding, *, share: Share) -> None:
    """Rows of the vocabulary are split; other ranks' tokens look up zero."""
    plain = embedding.forward

    def forward(tokens: Tensor) -> Tensor:
        held = local_of(embedding.weight).shape[0]
        rows = tokens - share.rank * held
        elsewhere = (rows < 0) | (rows >= held)
        return share.boundary.leave(plain(rows.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0.0))

    embedding.forward = forward
