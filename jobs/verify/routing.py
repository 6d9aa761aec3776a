"""Even routing for a step without values: of every count the trainer waits for, the value that an even load gives.

Where tokens go decides the shapes of what experts get, so a count cannot be left unknown. This mode, outside of
FakeTensorMode, answers the operations that make counts (jobs.model.moe.occurrences, their exchange) with even ones and
carries them through whatever arithmetic follows, so that the trainer's own `.tolist()` finds them.
"""
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten


class EvenRouting(TorchDispatchMode):
    """Known values of fake tensors, by tensor; int64 and as small as counts are."""

    def __init__(self) -> None:
        super().__init__()
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.scatter_add_.default and args[0].dtype == torch.int64:
            return self._count(args[0], chosen=args[2])
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped(func, args, kwargs)
        if func.namespace == "c10d":
            return self._exchange(func, args, kwargs)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if not tensors or not all(t in self._known for t in tensors):
            return func(*args, **kwargs)
        known = self._known.get
        with _disable_current_modes():
            values = func(*tree_map_only(Tensor, known, args), **tree_map_only(Tensor, known, kwargs))
        if not isinstance(values, Tensor | list | tuple):
            return values  # .item()
        outs = func(*args, **kwargs)
        for out, value in zip(tree_flatten(outs)[0], tree_flatten(values)[0], strict=True):
            self._known[out] = value
        return outs

    def _count(self, counts: Tensor, *, chosen: Tensor) -> Tensor:
        with _disable_current_modes():
            each, surplus = divmod(chosen.numel(), len(counts))
            self._known[counts] = each + (torch.arange(len(counts)) < surplus)
        return counts

    def _exchange(self, func, args: tuple, kwargs: dict):
        out = func(*args, **kwargs)
        tensors = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
        if func.overloadpacket.__name__ == "alltoall_base_" and tensors[1] in self._known:
            self._known[tensors[0]] = self._known[tensors[1]]  # every rank sends what this one sends
        return out


def _grouped(func, args: tuple, kwargs: dict) -> Tensor:
    """The CPU's kernel multiplies float32, too; only what knows its shapes without values insists on bfloat16."""
    first, second = (torch.empty_like(t, dtype=torch.bfloat16) for t in args[:2])
    return args[0].new_empty(func(first, second, *args[2:], **kwargs).shape)
