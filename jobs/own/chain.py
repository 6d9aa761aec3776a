"""An own model read: built, its table resolved, and what a forward does, seen from outside: which modules it calls one
after the other, what passes between blocks, how many FLOPs. All on the meta device: no memory, no values.

Called by jobs.own and jobs.own.measure. A model whose forward does nothing but call its parts, each with what the one
before gave, can be cut between any two of them: that is what a pipeline needs, and it is checked here, not believed.
"""
import contextlib
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from jobs.own.build import OwnModelError, build, told
from jobs.own.dropout import Draws, replace_dropout
from jobs.own.recipe import Recipe
from jobs.own.table import Table, resolve
from jobs.spec.own_model import OwnModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """One forward of one sequence."""

    before: tuple[str, ...]  # what the model itself calls before the blocks, and behind them, in order
    behind: tuple[str, ...]
    broken: str | None  # why the forward is more than this chain; None: it is the chain
    hidden: tuple[int, ...]  # shape behind a block, without batch and sequence
    forward_flops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """An own model, and all that its code and one forward tell."""

    model: nn.Module  # on meta
    table: Table
    chain: Chain
    recipe: Recipe
    draws: Draws | None  # None: it drops nothing

    @property
    def tied_ends(self) -> tuple[str, ...]:
        """Parameters that what lies before the blocks shares with what lies behind them, by their first name."""
        before, behind = ({p for path in paths for p in self.model.get_submodule(path).parameters()}
                          for paths in (self.chain.before, self.chain.behind))
        return tuple(name for name, parameter in self.model.named_parameters() if parameter in before & behind)


def read(spec: OwnModel, *, seq_len: int, seed: int | None = None) -> Known:
    """`seed`: of the first weights, where they are needed. Raises OwnModelError."""
    model, raw, recipe = build(spec, seq_len=seq_len, seed=seed)
    table, draws = resolve(raw, model), replace_dropout(model)
    return Known(model=model, table=table, recipe=recipe, draws=draws,
                 chain=trace(model, table, seq_len=seq_len, vocab_size=spec.vocab_size))


@dataclass(slots=True)
class _Call:
    path: str
    inputs: tuple
    plain: bool  # one tensor in
    output: Any = None


def trace(model: nn.Module, table: Table, *, seq_len: int, vocab_size: int) -> Chain:
    """`model` is on meta. Raises OwnModelError if its forward does not take token ids [batch, seq] to logits."""
    tokens = torch.zeros(1, seq_len, dtype=torch.int64, device="meta")
    kept = _versions(model)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter, _Seen(model, table, counter) as seen, \
                torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), _listening(model, table) as calls:
            logits = model(tokens)
        written = _written_again(model, tokens, kept)
    except Exception as error:
        raise OwnModelError(f"model.entrypoint: forward of token ids [1, {seq_len}] raised {told(error)}") from error
    if written:
        raise OwnModelError(f"model.entrypoint: the forward writes to buffer {', '.join(written[:4])}; running values "
                            "would depend on the layout and are in no checkpoint; leave them out")
    if seen.apart:
        raise OwnModelError(f"model.entrypoint: the forward uses {seen.apart} while that block is not called; ranks "
                            "have a block's weights while it is; put what it computes into its own forward")
    if seen.drawn:
        raise OwnModelError(f"model.entrypoint: the forward draws random numbers, {seen.drawn}; they would depend on "
                            "the layout; use nn.Dropout modules (what attention weighs cannot be dropped)")
    if not isinstance(logits, Tensor) or tuple(logits.shape) != (1, seq_len, vocab_size):
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise OwnModelError(f"model.entrypoint: forward of token ids [1, {seq_len}] gave {shape}, not logits "
                            f"[1, {seq_len}, model.vocab_size={vocab_size}]")
    behind = {tuple(call.output.shape[2:]) for call in calls if call.path in table.blocks
              and isinstance(call.output, Tensor)}
    broken = _broken(model, table, calls, tokens=tokens, logits=logits) or seen.borrowed
    if broken is None and len(behind) != 1:
        broken = f"blocks give different shapes, {sorted(behind)}"
    paths, first, last = [call.path for call in calls], table.blocks[0], table.blocks[-1]
    return Chain(before=() if broken else tuple(paths[:paths.index(first)]), broken=broken,
                 behind=() if broken else tuple(paths[paths.index(last) + 1:]), hidden=min(behind, default=()),
                 forward_flops=float(counter.get_total_flops()))


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Of every buffer what changes when it is written to, or replaced."""
    return {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}


def _written_again(model: nn.Module, tokens: Tensor, kept: dict) -> list[str]:
    """Buffers that every forward writes. One that the first alone writes is a cache, the same on every rank."""
    if (once := _versions(model)) == kept:
        return []
    with torch.no_grad():
        model(tokens)
    return [name for name, version in _versions(model).items() if version != once.get(name)]


class _Seen(TorchDispatchMode):
    """Where in the user's code a random number is drawn first, and a weight is used while what it belongs to is not
    called: of a block's, and of a module's beside the blocks."""

    def __init__(self, model: nn.Module, table: Table, counter: FlopCounterMode) -> None:
        super().__init__()
        self.drawn: str | None = None
        self.apart: str | None = None
        self.borrowed: str | None = None
        self._called = counter.mod_tracker.parents  # names of modules that are running, below the model's own
        self._in_blocks = tuple(f"{block}." for block in table.blocks)
        self._homes: dict[nn.Parameter, dict[str, str]] = {}  # the largest modules without a block that hold it → name
        for name, weight in model.named_parameters(remove_duplicate=False):
            ends = [i for i, letter in enumerate(name) if letter == "."]
            home = next((name[:i] for i in ends if not any(b.startswith(name[:i + 1]) for b in table.blocks)), None)
            if home is not None:
                self._homes.setdefault(weight, {})[f"{type(model).__name__}.{home}"] = name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags and self.drawn is None:
            self.drawn = f"{func._schema.name} {_place()}"
        for one in tree_leaves(args):
            homes = self._homes.get(one) if isinstance(one, nn.Parameter) else None
            if homes and not homes.keys() & self._called:
                name = next(iter(homes.values()))
                if name.startswith(self._in_blocks):
                    self.apart = self.apart or f"{name} {_place()}"
                else:
                    self.borrowed = self.borrowed or f"{name} is used while its module is not called, {_place()}"
        return func(*args, **kwargs or {})


def _place() -> str:
    """The line of the user's code that is running."""
    frames = [frame for frame in traceback.extract_stack() if f"{os.sep}torch{os.sep}" not in frame.filename]
    where = [frame for frame in frames if frame.filename != __file__][-1]
    return f"at {where.filename}:{where.lineno} in {where.name}"


@contextlib.contextmanager
def _listening(model: nn.Module, table: Table) -> Iterator[list[_Call]]:
    """Note what the model calls. Containers that hold blocks are looked through: their forward is part of the chain."""
    calls: list[_Call] = []
    depth, handles = [0], []

    def before(path: str):
        def hook(module, args, kwargs):
            if depth[0] == 0:
                plain = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
                calls.append(_Call(path=path, inputs=args, plain=plain))
            depth[0] += 1
        return hook

    def behind(module, args, output):
        depth[0] -= 1
        if depth[0] == 0:
            calls[-1].output = output

    for path, module in model.named_modules():
        if path and not any(block.startswith(f"{path}.") for block in table.blocks):
            handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
            handles.append(module.register_forward_hook(behind))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _broken(model: nn.Module, table: Table, calls: list[_Call], *, tokens: Tensor, logits: Tensor) -> str | None:
    """Where the forward is more than a chain."""
    paths = [call.path for call in calls]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        return f"{twice} is called more than once"
    if part := next(((path, whole) for path in paths for whole in paths if path.startswith(f"{whole}.")), None):
        return f"{part[0]} is called by itself, and is a part of {part[1]}"
    if tuple(path for path in paths if path in table.blocks) != table.blocks:
        return "the blocks are not called in the order of the model, each once"
    at = [i for i, path in enumerate(paths) if path in table.blocks]
    if at != list(range(at[0], at[0] + len(at))):
        return "something is called between two blocks"
    given: Tensor = tokens
    for call, before in zip(calls, ["the token ids", *paths]):
        if not call.plain or call.inputs[0] is not given:
            return f"{call.path} gets something else than {before}'s output; put what lies between into a module"
        given = call.output
    if given is not logits:
        return f"the model gives something else than the output of {paths[-1]}; put what lies behind into a module"
    inside = tuple(f"{path}." for path in paths)
    alone = next((name for name, _ in model.named_parameters() if not name.startswith(inside)), None)
    return alone and f"the parameter {alone} belongs to none of the modules that the forward calls"
