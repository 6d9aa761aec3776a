"""A training loop of a Llama decoder as one would write it by hand, in plain torch: what the acceptance compares with.

    python -m tests.gpu.by_hand TASK.json STEPS        prints the seconds of each step, as JSON

bfloat16 weights with float32 masters, recompute and torch.compile of each layer, fused AdamW, clipping. Nothing of
jobs.model or jobs.parallel is used.
"""
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jobs.spec.job import Device
from jobs.spec.load import from_dict
from jobs.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    model: ModelSpec
    seq_len: int
    microbatch_size: int
    num_microbatches: int
    device: Device = "cuda"

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.microbatch_size * self.num_microbatches * self.seq_len


class Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.size = spec.dim // spec.num_heads
        kv = spec.num_kv_heads * self.size
        self.norms = nn.ModuleList([nn.RMSNorm(spec.dim, eps=spec.norm_eps) for _ in range(2)])
        self.q, self.k, self.v, self.o = (nn.Linear(spec.dim, width, bias=False)
                                          for width in (spec.dim, kv, kv, spec.dim))
        self.gate, self.up = (nn.Linear(spec.dim, spec.ffn_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(spec.ffn_dim, spec.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (p(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = (self._turn(t, cos, sin) for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).flatten(-2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    @staticmethod
    def _turn(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = t.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(t.dtype)


class Decoder(nn.Module):
    def __init__(self, spec: ModelSpec, *, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self.layers = nn.ModuleList([Layer(spec) for _ in range(spec.num_layers)])
        self.norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.output = nn.Linear(spec.dim, spec.vocab_size, bias=False)
        size = spec.dim // spec.num_heads
        angles = torch.outer(torch.arange(seq_len), spec.rope_theta ** -(torch.arange(0, size, 2) / size))
        self.angles = angles.cos(), angles.sin()
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=spec.init_std)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, *self.angles)
        return self.output(self.norm(x))


def step_seconds(task: Task, *, steps: int) -> list[float]:
    device = torch.device(task.device)
    with torch.device(device):
        model = Decoder(task.model, seq_len=task.seq_len)
        tokens = torch.randint(0, task.model.vocab_size, (task.microbatch_size, task.seq_len + 1))
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.to(torch.bfloat16)
    for layer in model.layers:
        layer.forward = torch.compile(_recomputed(layer.forward))
    adamw = torch.optim.AdamW(masters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        for _ in range(task.num_microbatches):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / task.num_microbatches
            loss.backward()
            for master, p in zip(masters, model.parameters()):
                master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
                p.grad = None
        nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        adamw.step()
        adamw.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def _recomputed(forward):
    def run(*args: Tensor) -> Tensor:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    return run


if __name__ == "__main__":
    print(json.dumps(step_seconds(from_dict(Task, json.loads(Path(sys.argv[1]).read_text())), steps=int(sys.argv[2]))))
