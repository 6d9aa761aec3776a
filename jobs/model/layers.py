"""The small parts of a layer: norms, feed-forward blocks, dropout.

Built by jobs.model.transformer and jobs.model.moe. They know one token at a time, so it does not matter to
them which tokens, or how many of the hidden units, a rank holds.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from jobs.model.places import Tokens, dropped
from jobs.spec.model import ModelSpec


class Norm(nn.Module):
    """RMSNorm (arXiv:1910.07467) or LayerNorm (arXiv:1607.06450) over the last dimension; with `offset` RMSNorm
    scales by 1 + weight (Gemma). LayerNorm has a bias, RMSNorm none."""

    def __init__(self, size: int, *, spec: ModelSpec, rms: bool | None = None) -> None:
        super().__init__()
        self.size = (size,)
        self.eps = spec.norm_eps
        self.rms = spec.norm == "rmsnorm" if rms is None else rms
        self.offset = spec.norm_offset and self.rms
        self.weight = nn.Parameter(torch.zeros(size) if self.offset else torch.ones(size))
        self.bias = None if self.rms else nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight, self.bias)

    def normalize(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.rms:
            return F.layer_norm(x, self.size, weight, bias, self.eps)
        if not self.offset:
            return F.rms_norm(x, self.size, weight, self.eps)
        # bfloat16 cannot tell 1 + a small weight from 1
        return F.rms_norm(x.float(), self.size, 1 + weight.float(), self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """[batch, seq, dim] → the same. swiglu, geglu (arXiv:2002.05202): down(act(gate(x)) · up(x));
    gelu: down(gelu(up(x))). GELU is the tanh form, as in GPT-2, Megatron-LM and Gemma."""

    def __init__(self, spec: ModelSpec, *, ffn_dim: int, bias: bool) -> None:
        super().__init__()
        self.kind = spec.ffn
        self.gate = nn.Linear(spec.dim, ffn_dim, bias=bias) if is_gated(spec) else None
        self.up = nn.Linear(spec.dim, ffn_dim, bias=bias)
        self.down = nn.Linear(ffn_dim, spec.dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(*self.project(x))

    def project(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """→ gate and up, [batch, seq, ffn_dim] each. One method, so that a split model may compute them together."""
        return (None if self.gate is None else self.gate(x)), self.up(x)

    def finish(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """The rest. One method, so that it may be computed again in the backward."""
        return self.down(activate(gate, up, kind=self.kind))


def is_gated(spec: ModelSpec) -> bool:
    return spec.ffn != "gelu"


def activate(gate: Tensor | None, up: Tensor, *, kind: str) -> Tensor:
    """What lies between the first and the last matrix of a feed-forward block."""
    if kind == "swiglu":
        return F.silu(gate) * up
    if kind == "geglu":
        return F.gelu(gate, approximate="tanh") * up
    return F.gelu(up, approximate="tanh")


class Dropout(nn.Module):
    """Dropout whose mask is a function of (token, site, unit): the same in every layout, and when recomputed.

    torch's own generator would give each rank, and each order of microbatches, other numbers. Without keys
    (evaluation, generation) nothing is dropped.
    """

    def __init__(self, p: float, *, site: int) -> None:
        super().__init__()
        self.p = p
        self.site = site  # one number per place in the model

    def forward(self, x: Tensor, tokens: Tokens | None) -> Tensor:
        if self.p == 0 or tokens is None or tokens.keys is None:
            return x
        gone = dropped(tokens.keys, site=self.site, size=x.shape[-1], p=self.p)
        return x.masked_fill(gone, 0.0).mul_(1 / (1 - self.p))
