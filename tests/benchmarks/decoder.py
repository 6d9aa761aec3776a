"""What the benchmarks train: one small decoder in float32, its batch and its optimizer's settings; and how they measure
memory.

Imported by ours and by peers, some under a Python of their own: torch, numpy and the product's jobs only.
"""
import functools
from pathlib import Path

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               parallelize_module)

from jobs.model.initial import initial_slice
from jobs.model.transformer import Transformer
from jobs.parallel import fill_weights
from jobs.spec.job import JobSpec
from jobs.spec.model import ModelSpec
from jobs.spec.training import OptimizerSpec, TrainingSpec

MODEL = ModelSpec(name="bench", vocab_size=256, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=512)
TRAINING = TrainingSpec(steps=10**6, seq_len=128, global_batch_size=8, optimizer=OptimizerSpec(warmup_steps=10))


def decoder(spec: JobSpec) -> Transformer:
    """The whole model, with the weights that ours begins with."""
    model = Transformer(spec.model, layers=range(spec.model.num_layers), is_first=True, is_last=True)
    fill_weights(dict(model.named_parameters()),
                 source=functools.partial(initial_slice, spec=spec.model, seed=spec.training.seed))
    return model


def adamw(spec: JobSpec, model: nn.Module) -> torch.optim.AdamW:
    """Fused, as ours, and like ours without decay of 1-D parameters."""
    wanted = spec.training.optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": wanted.weight_decay},
              {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=wanted.lr, betas=(wanted.beta1, wanted.beta2), eps=wanted.eps, fused=True)


def forget_peak() -> int:
    """From now on this process's peak is measured anew. Returns its memory now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _kib("RssAnon") * 1024


def peak_bytes(before: int) -> int:
    """The largest memory since then above `before`. Without pages of files: which of a library's code has been touched
    is no need of who calls it, and neither is what importing it needed for a moment."""
    return (_kib("VmHWM") - _kib("RssFile") - _kib("RssShmem")) * 1024 - before


def _kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def split_by_dtensor(model: Transformer, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism as torch's own tutorial does it, in place."""
    model.places.split = mesh.size()  # attention sees this many times the tokens of the residual stream
    parallelize_module(model, mesh, {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(), "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})
    # attention's and ffn's further arguments (what is known of the tokens) are no tensors
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {
            "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(), "ffn": whole,
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            **{f"ffn.{name}": ColwiseParallel() for name in ("gate", "up")},
            "ffn.down": RowwiseParallel(output_layouts=Shard(1))})
