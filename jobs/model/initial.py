"""Initial weights, a function of (seed, parameter name) alone.

Called by jobs.parallel for the slices that a rank holds: whoever asks, and whichever rows are asked for, the
values are the same, so a model's weights do not depend on its layout.
"""
import hashlib
import math

import torch
from torch import Tensor

from jobs.spec.model import ModelSpec

# Rows of a weight that share one random generator: small enough that a rank which holds a slice draws
# little more than its own rows, large enough that seeding costs nothing.
INIT_ROWS = 256

# Projections into the residual stream
RESIDUAL = ("attention.wo.weight", "ffn.down.weight", "ffn.shared.down.weight", "ffn.experts.down")


def initial_slice(name: str, shape: tuple[int, ...], *, sizes: tuple[int, ...], offsets: tuple[int, ...],
                  spec: ModelSpec, seed: int) -> Tensor:
    """The box of `sizes` at `offsets` of a parameter's initial value: float32 on the CPU."""
    if len(shape) == 3:  # one matrix per expert: rows of one tall matrix
        flat = (shape[0] * shape[1], shape[2])
        matrices = [initial_slice(name, flat, sizes=sizes[1:], offsets=(i * shape[1] + offsets[1], offsets[2]),
                                  spec=spec, seed=seed) for i in range(offsets[0], offsets[0] + sizes[0])]
        return torch.stack(matrices)
    values = initial_rows(name, shape, rows=range(offsets[0], offsets[0] + sizes[0]), spec=spec, seed=seed)
    for dim in range(1, len(shape)):
        values = values.narrow(dim, offsets[dim], sizes[dim])
    return values


def initial_rows(name: str, shape: tuple[int, ...], *, rows: range, spec: ModelSpec, seed: int) -> Tensor:
    """Rows of a parameter's initial value: float32 on the CPU, [len(rows), *shape[1:]].

    Norms scale by one and biases are zero. Matrices are normal with init_std, the projections into the residual
    stream divided by √(2·num_layers) (GPT-2).
    """
    if len(shape) == 1:
        scales = name.endswith("norm.weight") and not spec.norm_offset
        return torch.ones(len(rows)) if scales else torch.zeros(len(rows))
    std = spec.init_std
    if name.endswith(RESIDUAL):
        std /= math.sqrt(2 * spec.num_layers)
    out = torch.empty(len(rows), *shape[1:])
    for block in range(rows.start // INIT_ROWS, -(-rows.stop // INIT_ROWS)):
        first = block * INIT_ROWS
        stop = min(first + INIT_ROWS, shape[0])
        values = torch.empty(stop - first, *shape[1:]).normal_(std=std, generator=_generator(seed, name, block))
        low, high = max(first, rows.start), min(stop, rows.stop)
        out[low - rows.start:high - rows.start] = values[low - first:high - first]
    return out


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}:{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
