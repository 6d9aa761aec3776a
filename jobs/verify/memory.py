"""How much memory a rank's tensors need at most, and for what.

Used by jobs.verify. Counts storages as they come and go, real or fake; torch's own trackers refuse microbatches and
count foreach updates twice. What a kernel allocates inside itself is not a tensor and not seen.
"""
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jobs.mesh import local_of
from jobs.optim import Optimizer
from jobs.parallel.model import ParallelModel
from jobs.spec.verification import MEMORY, SHARED
from jobs.verify.collectives import group_name, tensors_of

# A new peak is looked at where it exceeds the last one looked at by this share: that is how exact the division is.
GRAIN = 1e-3
WEIGHT_AXES = ("dp_shard", "dp_replicate")  # collectives over them move weights and gradients


class PeakMemory(TorchDispatchMode):
    """Live storages in bytes, and their division by purpose when they were most."""

    def __init__(self, parallel: ParallelModel, optimizer: Optimizer, *, axes: dict[str, str]) -> None:
        super().__init__()
        self.parallel = parallel
        self._moving = {group for group, names in axes.items() if {*names.split(SHARED)} & {*WEIGHT_AXES}}
        self._live: dict[int, int] = {}
        self._watched: dict[int, weakref.ref] = {}
        self._moved: set[int] = set()  # by collectives of data parallelism
        self._now = self._peak = 0
        self._division = dict.fromkeys(MEMORY, 0)
        self._states = {_key(tensor) for tensor in optimizer.state}
        self._parameters: dict[int, int] = {}  # bytes by storage: under ZeRO-1 rows of whole weights
        for local in map(local_of, parallel.parameters.values()):
            self._parameters[_key(local)] = self._parameters.get(_key(local), 0) + local.numel() * local.element_size()
        self._parts = [p for part in parallel.model_parts for p in part.parameters()]
        self._sharded = [param for part in parallel.model_parts for param in _sharded_params(part)]
        # whole weights beside their masters, and the routers' state
        buffers = [buffer for part in parallel.model_parts for buffer in part.buffers()]
        self._weights = {_key(local_of(tensor)) for tensor in (*self._parts, *buffers)}
        for tensor in (*self._parts, *buffers, *parallel.parameters.values(), *optimizer.state):
            self._see(local_of(tensor))

    @property
    def peak_bytes(self) -> dict[str, int]:
        """By MEMORY. What is not accounted for, at most GRAIN of the whole, is activations."""
        rest = self._peak - sum(self._division.values())
        return self._division | {"activations": self._division["activations"] + rest}

    # -------------------------------------------------------------- watching
    def __enter__(self):
        resize = self._resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP frees and fills its units in place
            result = resize(storage, size)
            self._see_storage(storage)
            return result

        torch.UntypedStorage.resize_ = watched
        return super().__enter__()

    def __exit__(self, *error: Any):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func.namespace == "c10d" and group_name(args) in self._moving:
            self._moved.update(_key(tensor) for tensor in tensors_of(args))
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(local_of(tensor))
        return out

    def _see(self, tensor: Tensor) -> None:
        if tensor.device.type != "meta":
            self._see_storage(tensor.untyped_storage())

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is None:
            self._watched[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))
        if known != size:
            self._live[key] = size
            self._now += size - (known or 0)
            if self._now > self._peak:
                self._peak = self._now
                if self._peak > (1 + GRAIN) * sum(self._division.values()):
                    self._division = self._divide()

    def _forget(self, key: int) -> None:
        self._now -= self._live.pop(key)
        del self._watched[key]
        self._moved.discard(key)

    # -------------------------------------------------------------- dividing
    def _divide(self) -> dict[str, int]:
        found = dict.fromkeys(MEMORY, 0)
        gradients = {_key(local_of(grad)) for grad in self._gradients() if grad is not None}
        gathered = {_key(t) for param in self._sharded for t in param.all_gather_outputs}
        for key, size in self._live.items():
            if key in self._parameters:
                found["parameters"] += min(size, self._parameters[key])
                found["gathered"] += size - min(size, self._parameters[key])
            elif key in self._states:
                found["optimizer"] += size
            elif key in gradients:
                found["gradients"] += size
            elif key in self._weights or key in gathered or key in self._moved:
                found["gathered"] += size
            else:
                found["activations"] += size
        return found

    def _gradients(self) -> Iterator[Tensor | None]:
        yield from self.parallel.gradients.values()
        for parameter in (*self.parallel.parameters.values(), *self._parts):
            yield parameter.grad
        for param in self._sharded:
            yield param.unsharded_accumulated_grad
            yield param._unsharded_param.grad if hasattr(param, "_unsharded_param") else None
        if self.parallel.buckets is not None:
            yield from self.parallel.buckets.held_gradients()


def _sharded_params(part: nn.Module) -> Iterator[FSDPParam]:
    for module in part.modules():
        if isinstance(module, FSDPModule):
            for group in fully_shard.state(module)._fsdp_param_groups:
                yield from group.fsdp_params


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
