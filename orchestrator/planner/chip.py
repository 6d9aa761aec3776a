"""What one rank computes with, and how fast: matmuls by shape, kernels' launches, the optimizer's passes over memory.

Called by compute.py for layers, and by the cost model. A matmul runs at the chip's measured ceiling, less what its
tiles leave idle. It knows the chip; models and layouts are elsewhere.
"""
import functools
import math
from typing import NamedTuple

from jobs.spec.training import DTYPE_BYTES, TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.planner import constants
from orchestrator.planner.software import Software

# Output tiles that matmul libraries choose among, and their rate against the largest, which moves the least data.
TILES = ((256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.80))


class Chip(NamedTuple):
    """What one rank computes with."""

    device: str
    matmul_flops: float  # sustained, of linear maps
    half_flops: float  # sustained, of attention and of the output projection: never below 16 bits
    attention: float  # share of that for fused attention, against kernels written for the chip
    memory_bytes_s: float
    multiprocessors: int
    element: int  # bytes of an activation
    casts: bool  # linear maps in fp8 or fp4 cast their inputs


def chip_of(cluster: ClusterSpec, *, training: TrainingSpec, software: Software) -> Chip:
    """The rates of one rank of the cluster under this software."""
    dtype = software.matmul_dtype or training.param_dtype
    half = training.param_dtype if training.param_dtype == "float32" else "bfloat16"

    def sustained(name: str) -> float:
        return cluster.peak(name) * 1e12 * cluster.matmul_ceiling * constants.SUSTAINED_MATMUL[name]

    return Chip(device=cluster.device, matmul_flops=sustained(dtype), half_flops=sustained(half),
                attention=1.0 if software.tuned_attention else cluster.hardware.portable_attention,
                memory_bytes_s=cluster.hbm_gb_s * 1e9 * constants.MEMORY_EFFICIENCY,
                multiprocessors=cluster.hardware.multiprocessors, element=DTYPE_BYTES[training.param_dtype],
                casts=dtype in ("float8", "float4"))


def tiled_s(m: int, n: int, k: int, *, flops: float, multiprocessors: int) -> float:
    """Seconds of a matmul [m, k] × [k, n] at a sustained rate of `flops`: its output is cut into tiles, the last round
    of tiles leaves multiprocessors idle, the last tile of a side is not full, and each round starts and ends once."""
    best = math.inf
    for rows, columns, rate in TILES:
        for tile_m, tile_n in ((rows, columns), (columns, rows)):
            rounds = math.ceil(math.ceil(m / tile_m) * math.ceil(n / tile_n) / multiprocessors)
            tile_s = 2.0 * tile_m * tile_n * k * multiprocessors / (flops * rate)
            best = min(best, rounds * (tile_s + constants.TILE_OVERHEAD_S))
    return best


@functools.lru_cache(maxsize=65536)
def matmul_s(m: int, n: int, k: int, *, flops: float, chip: Chip) -> float:
    """Seconds of one matmul at a sustained rate of `flops`: bound by arithmetic or by memory."""
    moved_s = chip.element * (m * k + k * n + m * n) / chip.memory_bytes_s
    if chip.device == "cpu":
        return max(2.0 * m * n * k / flops, moved_s)
    return max(tiled_s(m, n, k, flops=flops, multiprocessors=chip.multiprocessors), moved_s)


def with_launches(seconds: float, *, kernels: float, chip: Chip) -> float:
    launches_s = kernels * constants.LAUNCH_S[chip.device]
    if chip.device == "cpu":
        return seconds + launches_s
    return max(seconds + kernels * constants.KERNEL_RAMP_S, launches_s)


def optimizer_s(params: float, *, chip: Chip) -> float:
    """AdamW over `params` parameters of this rank: bound by memory."""
    return params * constants.ADAM_TRAFFIC_BYTES / chip.memory_bytes_s
