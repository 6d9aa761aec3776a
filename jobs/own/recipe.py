"""Initial weights without the model: what the user's code does to make each of them, repeated for one at a time.

Used by jobs.own.build, which runs that code once, on meta, and by jobs.own to fill a rank's shards. So no rank ever
holds more than its shards, one whole parameter and what that is made from. Each draw of random numbers is seeded by
(seed, number of the draw), or from the generator that the code gives it: a parameter's values do not depend on which
others a rank makes, nor on the layout.
"""
import hashlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map


_UNSET = {getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty",
                                                     "new_empty_strided")}


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
    """What of a tensor is no operation, and would show that it is on meta."""

    def __init__(self, recipe: "Recipe") -> None:
        super().__init__()
        self._recipe = recipe

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == Tensor.is_meta.__get__ and self._recipe.fills:  # torch.nn.init leaves those as they are
            return False
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and _is_meta(args[0]):
            found = func(self._recipe.real(args[0]), *args[1:], **(kwargs or {}))
            if isinstance(found, np.ndarray):
                found.flags.writeable = False  # a copy: what is written there would be lost
            return found
        if func == Tensor.data.__set__ and _is_meta(args[0]) != _is_meta(args[1]):
            held, given = args
            args = (held, torch.empty(given.shape, dtype=given.dtype).copy_(given.detach()) if _is_meta(held)
                    else self._recipe.real(given))
        return func(*args, **(kwargs or {}))


class Recipe(TorchDispatchMode):
    """Entered around the user's code: what it makes is on meta, and how it was made is noted. Tensors that are given as
    numbers (torch.tensor, numpy, files) are real, and stay so until they meet one that is not; what is asked of values
    is made at once. `seed`: None where first values will not be asked for; then torch.nn.init may skip much work."""

    def __init__(self, *, seed: int | None) -> None:
        super().__init__()
        self.fills = seed is not None
        self._seed, self._draws = seed, 0
        self._steps: list[_Step] = []
        self._by_storage: dict[int, list[int]] = defaultdict(list)  # steps that make it or write to it
        self._kept: list[Any] = []  # storages stay, so that their addresses stay theirs
        self._named: dict[str, _Ref | Tensor] = {}

    def __enter__(self) -> "Recipe":
        self._hidden = _Hidden(self)
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
            return self.real(args[0]).item()  # the code goes on by a value, so that is made now
        kwargs = dict(kwargs or {})
        written = [leaf for formal, actual in zip(func._schema.arguments, args)
                   if formal.alias_info is not None and formal.alias_info.is_write
                   for leaf in tree_leaves(actual) if isinstance(leaf, Tensor)]
        if not all(map(_is_meta, written)):  # a real tensor stays one
            return self._now(func, args, kwargs)
        generator = kwargs.pop("generator", None)
        seed = self._next_seed(generator) if torch.Tag.nondeterministic_seeded in func.tags else None
        device = {"device": "meta"} if any(one.name == "device" for one in func._schema.arguments) else {}
        shadow = tree_map(_on_meta, (args, kwargs))
        try:
            out = func(*shadow[0], **(shadow[1] | device))
        except NotImplementedError:  # the shape depends on values
            if written:
                raise
            return self._now(func, args, kwargs)
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
        all of them, each element at a place of its own in the usual order."""
        moved: dict[Tensor, nn.Parameter] = {}  # one parameter of several modules stays one
        for path, module in model.named_modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    self._named.setdefault(f"{path}.{name}".lstrip("."), _noted(tensor.detach()))
                    if _is_meta(tensor) and tensor.is_contiguous():
                        continue
                    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    held[name] = plain if held is module._buffers else moved.setdefault(tensor, nn.Parameter(plain))

    def digest(self) -> str:
        """Of the numbers that the user's code gave, and torch did not make."""
        found = hashlib.sha256()
        for leaf in tree_leaves([(step.args, step.kwargs, step.seed) for step in self._steps]
                                + [*self._named.values()]):
            if isinstance(leaf, str):
                found.update(leaf.encode())
            elif isinstance(leaf, (float, Tensor)):
                found.update(torch.as_tensor(leaf).flatten().contiguous().view(torch.uint8).numpy())
        return found.hexdigest()

    def value(self, name: str) -> Tensor:
        """The first value of a parameter or buffer, whole, on the CPU."""
        wanted = self._named[name]
        return wanted if isinstance(wanted, Tensor) else self._made(wanted)

    def real(self, leaf: Any) -> Any:
        """A tensor as it is now, with its values; anything else as it is."""
        return self._made(_Ref.of(leaf)) if isinstance(leaf, Tensor) and _is_meta(leaf) else leaf

    def _now(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map(self.real, (args, kwargs))
        return func(*args, **kwargs)

    def _made(self, wanted: _Ref) -> Tensor:
        storages: dict[int, torch.UntypedStorage] = {}
        with _disable_current_modes(), torch.random.fork_rng(devices=()), torch.no_grad():
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
        if step.func.overloadpacket in _UNSET:
            out.zero_()  # what lies there is not the same on every rank
        for noted, real in zip(tree_leaves(step.out), tree_leaves(out), strict=True):
            if isinstance(noted, _Ref) and noted.key in step.made:
                if real.stride() != noted.stride:  # kernels need not agree with meta on the order
                    real = torch.empty_strided(noted.size, noted.stride, dtype=noted.dtype).copy_(real)
                storages[noted.key] = real.untyped_storage()

    def _next_seed(self, generator: torch.Generator | None) -> str:
        if generator is not None:  # moved on by each draw, so that two of one seed give the same numbers
            drawn = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
            return f"of a generator: {drawn.item()}"
        self._draws += 1
        return f"{self._seed}:{self._draws}"


def _on_meta(leaf: Any) -> Any:
    real = isinstance(leaf, Tensor) and not _is_meta(leaf)
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta") if real else leaf


def _noted(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _Ref.of(leaf) if _is_meta(leaf) else leaf.detach().clone()


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"
