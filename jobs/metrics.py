"""Rates of one step: tokens/s, TFLOP/s and MFU from the counts that the planner uses too.

Called by the trainer. MFU is model FLOPs (no recomputation) over peak, PaLM's definition (arXiv:2204.02311,
app. B); which attention is counted is always named.
"""
import resource
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RateMeter:
    """What turns a step time into rates; constant over an attempt."""

    tokens: int  # of one step, all ranks
    world_size: int
    flops_per_token: float
    peak_tflops: float  # of one rank

    def rates(self, step_time_s: float) -> Rates:
        tokens_per_s = self.tokens / step_time_s
        per_gpu = tokens_per_s / self.world_size
        tflops = per_gpu * self.flops_per_token / 1e12
        return Rates(tokens_per_s=tokens_per_s, tokens_per_s_per_gpu=per_gpu, tflops_per_gpu=tflops,
                     mfu=tflops / self.peak_tflops)


def peak_memory_bytes(device: torch.device) -> int:
    """High-water mark of this rank: the CUDA allocator's, or the process's resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
