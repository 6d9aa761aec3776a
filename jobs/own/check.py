"""Whether a plan table tells the truth: each kind of block, split over pretended tp ranks, computes what it computes
whole.

Called by jobs.own.measure, so before anything is submitted. On the CPU, with short sequences and random weights
(initial ones may be zero and hide everything). The ranks are threads that meet wherever a tensor enters or leaves a
split. What is found: rows of a fused weight in another order than the table says, a module that is split and should not
be, and tokens that are mixed where each rank has its own only. Gradients are not looked at.
"""
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import Placement

from jobs.own.build import OwnModelError, told
from jobs.own.chain import Known, read
from jobs.own.split import Share, apply_styles
from jobs.spec.own_model import OwnModel

LARGEST = 2**28  # parameters of a block that is checked: it is held three times
SHORT = 64  # tokens, about
TOLERANCE = 1e-3  # of the largest change that the block makes; rounding is a thousandth of it, a wrong order all


def table_problem(spec: OwnModel, *, seq_len: int, tp: int, sequence_parallel: bool) -> str | None:
    """What differs; None where nothing does, and of blocks that take more than one tensor or are too large."""
    short = min(seq_len, max(1, SHORT // tp) * tp)
    try:
        whole = read(spec, seq_len=short)
    except OwnModelError:  # not made for short sequences
        short = seq_len
        whole = read(spec, seq_len=short)
    meeting = _Meeting(tp, shares_tokens=sequence_parallel)
    split = [read(spec, seq_len=short) for _ in range(tp)]
    placements: dict[nn.Parameter, Placement] = {}
    for rank, known in enumerate(split):
        def wrap(local: Tensor, placement: Placement) -> nn.Parameter:
            made = nn.Parameter(local)
            placements[made] = placement
            return made

        apply_styles(known.model, known.table, share=Share(rank=rank, size=tp, wrap=wrap, boundary=_Crossing(
            meeting, rank=rank)))
    seen = set()
    for path in whole.table.blocks:
        block = whole.model.get_submodule(path)
        alike = tuple((name, type(module), tuple(tuple(p.shape) for p in module.parameters(recurse=False)))
                      for name, module in block.named_modules())
        if alike not in seen and sum(p.numel() for p in block.parameters()) <= LARGEST:
            seen.add(alike)
            if problem := _block_problem(path, whole, split, placements, meeting, seq_len=short):
                return f"{path}, split over tp={tp}, {problem}"
    return None


def _block_problem(path: str, whole: Known, split: list[Known], placements: dict[nn.Parameter, Placement],
                   meeting: "_Meeting", *, seq_len: int) -> str | None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, seq_len, *whole.chain.hidden, generator=generator)
    values = {name: _random(p, generator) for name, p in whole.model.get_submodule(path).named_parameters()}
    tp = len(split)
    try:
        with torch.no_grad():
            wanted = _filled(path, whole, values)(x)
    except Exception:  # it takes something else
        return None
    for rank, known in enumerate(split):
        own = {name: _part(values[name], placements[p], rank=rank, size=tp)
               for name, p in known.model.get_submodule(path).named_parameters()}
        _filled(path, known, own)
    given = x.chunk(tp, dim=1) if meeting.shares_tokens else [x] * tp

    def run(rank: int) -> Tensor:
        try:
            with torch.no_grad():
                return split[rank].model.get_submodule(path)(given[rank])
        except Exception:
            meeting.barrier.abort()  # the others must not wait
            raise

    with ThreadPoolExecutor(tp) as threads:
        ranks = [threads.submit(run, rank) for rank in range(tp)]
    errors = [error for rank in ranks if (error := rank.exception()) is not None]
    if errors:
        first = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return f"raised {told(first)}"
    outs = [rank.result() for rank in ranks]
    found = torch.cat(outs, dim=1) if meeting.shares_tokens else outs[0]
    if found.shape != wanted.shape:
        return f"gives {list(found.shape)} and not {list(wanted.shape)}"
    change = wanted - x if wanted.shape == x.shape else wanted
    error = ((found - wanted).abs().max() / change.abs().max()).item()
    if not error > TOLERANCE:  # nor where random weights give no number
        return None
    return (f"computes something else than whole: it differs by {error:.1%}; rows of a fused weight must lie head by "
            "head, and tokens may be mixed inside of splits only")


def _random(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Of a size that keeps activations near one."""
    if parameter.ndim < 2:
        return 0.5 + torch.rand(parameter.shape, generator=generator)
    return torch.randn(parameter.shape, generator=generator) * (parameter.shape[0] / parameter.numel()) ** 0.5


def _part(value: Tensor, placement: Placement, *, rank: int, size: int) -> Tensor:
    return value.chunk(size, dim=placement.dim)[rank] if placement.is_shard() else value


def _filled(path: str, known: Known, values: dict[str, Tensor]) -> nn.Module:
    """The block with these parameters and the buffers that the code makes."""
    block = known.model.get_submodule(path)
    for name, module in block.named_modules():
        inside = f"{name}." if name else ""
        for own in module._parameters:
            if module._parameters[own] is not None:
                module._parameters[own] = nn.Parameter(values[inside + own])
        for own, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[own] = known.recipe.value(f"{path}.{inside}{own}").clone()
    return block


class _Meeting:
    """Where the threads hand tensors to one another."""

    def __init__(self, size: int, *, shares_tokens: bool) -> None:
        self.shares_tokens = shares_tokens  # between splits, as under sequence parallelism
        self.barrier = threading.Barrier(size, timeout=600.0)
        self.given: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x
        self.barrier.wait()
        everything = list(self.given)
        self.barrier.wait()
        return everything


class _Crossing:
    """jobs.parallel.boundary.Boundary among threads, for sequences of one."""

    def __init__(self, meeting: _Meeting, *, rank: int) -> None:
        self.meeting, self.rank, self.sequence_parallel = meeting, rank, meeting.shares_tokens

    def enter(self, x: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim=1) if self.sequence_parallel else x

    def leave(self, x: Tensor) -> Tensor:
        parts = self.meeting.exchange(self.rank, x)
        total = sum(parts[1:], start=parts[0])
        return total.chunk(len(parts), dim=1)[self.rank] if self.sequence_parallel else total
