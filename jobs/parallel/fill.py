"""Memory for a rank's shards, and their first values.

Called by jobs.parallel and jobs.own on parts that are split and still on the meta device. Knows neither model nor
layout: what a weight is made of is its source's to say.
"""
from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

COPY = " (copy)"  # ends the name of a parameter whose original another stage of the same rank holds


def allocated(tensor: Tensor, *, device: torch.device, param_dtype: torch.dtype) -> Tensor:
    """Memory on the device for a parameter (in param_dtype) or a buffer on meta."""
    dtype = param_dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device, dtype=dtype, memory_format=torch.contiguous_format)
    local = torch.empty_like(tensor.to_local(), device=device, dtype=dtype, memory_format=torch.contiguous_format)
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
                              stride=tensor.stride())


@torch.no_grad()
def fill_weights(parameters: dict[str, Tensor], *, source: Callable[..., Tensor]) -> None:
    """Give this rank's shards their first values. `source`: (name, global shape, sizes=, offsets=) → that box of it."""
    for name, parameter in parameters.items():
        local, sizes, offsets = parameter, parameter.shape, (0,) * parameter.ndim
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh,
                                                                   parameter.placements)
        if local.numel() == 0:
            continue  # fewer rows than ranks
        local.copy_(source(name.removesuffix(COPY), tuple(parameter.shape), sizes=tuple(sizes), offsets=tuple(offsets)))
