"""Initial weights without the model: what the user's code does to make each of them, repeated for one at a time.

Used by jobs.own.build, which runs that code once, on meta, and by jobs.own to fill a rank's shards. So no rank ever
holds more than its shards, one whole parameter and what that is made from. Each draw of random numbers is seeded by
(seed, number of the draw): a parameter's values do not depend on which others a rank makes, nor on the layout.
"""
import contextlib
import hashlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True, slots=True)
class _Ref:
    """A view of a storage that is not there."""

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Ref":
        return cls(tensor.untyped_storage()._cdata, tensor.dtype, tuple(tensor.shape), tensor.stride(),
                   tensor.storage_offset())

    def real(self, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storages[self.key], self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Step:
    func: Any
    args: tuple
    kwargs: dict[str, Any]
    out: Any  # of _Refs
    made: frozenset[int]  # storages that it makes
    read: frozenset[int]
    seed: str | None  # of its random numbers


class _Hidden(TorchFunctionMode):
    """torch.nn.init leaves tensors on meta as they are: nobody is told that these are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return False if func == torch.Tensor.is_meta.__get__ else func(*args, **(kwargs or {}))


class Recipe(TorchDispatchMode):
    """Entered around the user's code: what it makes is on meta, and how it was made is noted. Tensors that are given as
    numbers (torch.tensor, numpy, files) are real, and stay so until they meet one that is not. `seed`: None where first
    values will not be asked for; then torch.nn.init may skip much of its work."""

    def __init__(self, *, seed: int | None) -> None:
        super().__init__()
        self._seed, self._draws = seed, 0
        self._steps: list[_Step] = []
        self._by_storage: dict[int, list[int]] = defaultdict(list)  # steps that make it or write to it
        self._kept: list[Any] = []  # storages stay, so that their addresses stay theirs
        self._named: dict[str, _Ref | Tensor] = {}

    def __enter__(self) -> "Recipe":
        self._hidden = contextlib.nullcontext() if self._seed is None else _Hidden()
        self._hidden.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hidden.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_meta = [tensor for tensor in given if _is_meta(tensor)]
        if given and not on_meta:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._made(_Ref.of(args[0])).item()  # the code goes on by a value, so that is made now
        kwargs = dict(kwargs or {})
        written = [leaf for formal, actual in zip(func._schema.arguments, args)
                   if formal.alias_info is not None and formal.alias_info.is_write
                   for leaf in tree_leaves(actual) if isinstance(leaf, Tensor)]
        generator = kwargs.pop("generator", None)
        seed = self._next_seed(generator) if torch.Tag.nondeterministic_seeded in func.tags else None
        device = {"device": "meta"} if any(one.name == "device" for one in func._schema.arguments) else {}
        # what would be written to a real tensor is not there: torch says so
        shadow = tree_map(lambda leaf: _on_meta(leaf) if all(map(_is_meta, written)) else leaf, (args, kwargs))
        out = func(*shadow[0], **(shadow[1] | device))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        read = frozenset(_Ref.of(tensor).key for tensor in on_meta)
        new = frozenset(_Ref.of(tensor).key for tensor in made) - read
        if new or written:
            self._kept += [tensor.untyped_storage() for tensor in made]
            step = _Step(func, *tree_map(_noted, (args, kwargs | ({"device": "cpu"} if device else {}))),
                         tree_map(_noted, out), new, read, seed)
            for key in new | {_Ref.of(tensor).key for tensor in written}:
                self._by_storage[key].append(len(self._steps))
            self._steps.append(step)
        return out

    def name(self, model: nn.Module) -> None:
        """To be called once the model is there: its parameters and buffers can be asked for by name, and are on meta,
        all of them."""
        moved: dict[Tensor, nn.Parameter] = {}  # one parameter of several modules stays one
        for path, module in model.named_modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    self._named.setdefault(f"{path}.{name}".lstrip("."), _noted(tensor.detach()))
                    if not _is_meta(tensor) and held is module._buffers:
                        held[name] = _on_meta(tensor)
                    elif not _is_meta(tensor):
                        held[name] = moved.setdefault(tensor, nn.Parameter(_on_meta(tensor.detach()),
                                                                           requires_grad=tensor.requires_grad))

    def value(self, name: str) -> Tensor:
        """The first value of a parameter or buffer, whole, on the CPU."""
        wanted = self._named[name]
        return wanted if isinstance(wanted, Tensor) else self._made(wanted)

    def _made(self, wanted: _Ref) -> Tensor:
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=()), torch.no_grad():
            for index in sorted(self._needed(wanted.key)):
                self._repeat(self._steps[index], storages)
        return wanted.real(storages)

    def _needed(self, key: int) -> set[int]:
        """Steps on which the storage's final value depends."""
        found: set[int] = set()
        open_ends = [(key, len(self._steps))]
        while open_ends:
            key, before = open_ends.pop()
            for index in self._by_storage[key]:
                if index < before and index not in found:
                    found.add(index)
                    open_ends += [(read, index) for read in self._steps[index].read]
        return found

    def _repeat(self, step: _Step, storages: dict[int, torch.UntypedStorage]) -> None:
        args, kwargs = tree_map(lambda leaf: leaf.real(storages) if isinstance(leaf, _Ref) else leaf,
                                (step.args, step.kwargs))
        if step.seed is not None:
            torch.manual_seed(int.from_bytes(hashlib.sha256(step.seed.encode()).digest()[:8], "little") >> 1)
        out = step.func(*args, **kwargs)
        for noted, real in zip(tree_leaves(step.out), tree_leaves(out), strict=True):
            if isinstance(noted, _Ref) and noted.key in step.made:
                if real.stride() != noted.stride:  # kernels need not agree with meta on the order
                    real = torch.empty_strided(noted.size, noted.stride, dtype=noted.dtype).copy_(real)
                storages[noted.key] = real.untyped_storage()

    def _next_seed(self, generator: torch.Generator | None) -> str:
        self._draws += 1
        return f"{self._seed if generator is None else generator.initial_seed()}:{self._draws}"


def _on_meta(leaf: Any) -> Any:
    real = isinstance(leaf, Tensor) and not _is_meta(leaf)
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta") if real else leaf


def _noted(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _Ref.of(leaf) if _is_meta(leaf) else leaf.detach().clone()


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"
