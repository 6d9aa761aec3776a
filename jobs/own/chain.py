"""What a forward of an own model does, seen from outside: which modules it calls one after the other, what passes
between blocks, how many FLOPs. Runs on the meta device: no memory, no values.

Called by jobs.own and jobs.own.measure. A model whose forward does nothing but call its parts, each with what the one
before gave, can be cut between any two of them: that is what a pipeline needs, and it is checked here, not believed.
"""
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from jobs.own.build import OwnModelError, told
from jobs.own.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """One forward of one sequence."""

    parts: tuple[str, ...]  # what the model itself calls, in order: before the blocks, the blocks, behind them
    broken: str | None  # why the forward is more than this chain; None: it is the chain
    hidden: tuple[int, ...]  # shape behind a block, without batch and sequence
    logits: int  # width of the output
    forward_flops: float


@dataclass(slots=True)
class _Call:
    path: str
    inputs: tuple
    plain: bool  # one tensor in
    output: Any = None


def trace(model: nn.Module, table: Table, *, seq_len: int, vocab_size: int) -> Chain:
    """`model` is on meta. Raises OwnModelError if its forward does not take token ids [batch, seq] to logits."""
    calls: list[_Call] = []
    handles = _listen(model, table, calls)
    tokens = torch.zeros(1, seq_len, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter, \
                torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            logits = model(tokens)
    except Exception as error:
        raise OwnModelError(f"model.entrypoint: forward of token ids [1, {seq_len}] raised {told(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(logits, Tensor) or tuple(logits.shape) != (1, seq_len, vocab_size):
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise OwnModelError(f"model.entrypoint: forward of token ids [1, {seq_len}] gave {shape}, not logits "
                            f"[1, {seq_len}, model.vocab_size={vocab_size}]")
    behind = {tuple(call.output.shape[2:]) for call in calls if call.path in table.blocks
              and isinstance(call.output, Tensor)}
    broken = _broken(model, table, calls, tokens=tokens, logits=logits)
    if broken is None and len(behind) != 1:
        broken = f"blocks give different shapes, {sorted(behind)}"
    return Chain(parts=tuple(call.path for call in calls), broken=broken, hidden=min(behind, default=()),
                 logits=vocab_size, forward_flops=float(counter.get_total_flops()))


def _listen(model: nn.Module, table: Table, calls: list[_Call]) -> list:
    """Note what the model calls. Containers that hold blocks are looked through: their forward is part of the chain."""
    depth = [0]
    handles = []

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
    return handles


def _broken(model: nn.Module, table: Table, calls: list[_Call], *, tokens: Tensor, logits: Tensor) -> str | None:
    """Where the forward is more than a chain."""
    paths = [call.path for call in calls]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        return f"{twice} is called more than once"
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
