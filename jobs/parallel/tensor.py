"""Tensor parallelism: heads, FFN columns and vocabulary split over the `tp` axis, Megatron's f and g
(arXiv:1909.08053, sequence parallelism: arXiv:2205.05198).

Called by jobs.parallel on a model built on the meta device. Parameters become DTensors, because FSDP,
clipping and checkpoints need their global shape; the forward runs on local shards, because DTensor
dispatch costs more than the arithmetic of a small layer (2.1–2.4× the step time on CPU).

Collectives over tp, per microbatch; A = microbatch_size·seq_len·dim·bytes(param_dtype); a latent attention (MLA)
gathers its latents instead of A: for L in q_lora_rank (or A, if queries are not compressed), kv_lora_rank and
qk_rope_head_dim, A_L = A·L/dim:

    when                               sequence_parallel        without
    forward, each attention and ffn    all_gather A (in)        all_reduce A (out)
                                       reduce_scatter A (out)
    backward, each attention and ffn   all_gather A (out)       all_reduce A (in, hidden)
                                       all_gather A (in again, hidden)
                                       reduce_scatter A (in, hidden)
    forward, each MLA                  all_gather each A_L      all_reduce A (out)
                                       reduce_scatter A (out)
    backward, each MLA                 all_gather A (out)       all_reduce each A_L (hidden)
                                       reduce_scatter each A_L (hidden)
    shared experts                     as an ffn                –
    embedding, forward / backward      reduce_scatter A / all_gather A     all_reduce A / –
    output, forward / backward         all_gather A / reduce_scatter A     – / all_reduce A; backward hidden
    loss, forward                      all_reduce 4·tokens (max), 8·tokens (sum, target)   the same
    once per step                      all_reduce of the replicated weights' gradients, 4·numel/fsdp: norms, biases
                                       behind attention and ffn, learned positions, routers, MLA's way down to its
                                       latents; without sequence parallelism: qk_norm alone
    recompute=full                     the forward's collectives of each layer once more, and no other "in again"

What is hidden runs behind the matmuls of the same map's backward (jobs.parallel.columns); the rotary key of an MLA, and
where a pipeline schedule splits the backward all of it, has none to hide behind. "In again": attention and ffn keep the
rank's own tokens of their input and not the gathered ones, (1 − 1/tp)·A less each per microbatch in flight. Latents and
the output's input are kept: the former are small, the latter are needed at once.

Routed experts are not split over tp: each tp rank dispatches its own tokens (jobs.parallel.expert).
"""
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from jobs.model.attention import Attention
from jobs.model.latent import LatentAttention
from jobs.model.layers import FeedForward, Norm
from jobs.model.moe import MoE, Router
from jobs.model.transformer import PositionEmbedding, Transformer
from jobs.parallel.boundary import Boundary
from jobs.parallel.columns import column_parallel
from jobs.parallel.vocab import VocabParallelEmbedding


# ------------------------------------------------------------------ modules on local shards
class LocalLinear(nn.Linear):
    """Linear layer of a DTensor weight, computed on the local shard."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to_local(), None if self.bias is None else self.bias.to_local())


class ColumnParallelLinear(nn.Linear):
    """Weight split by output features; its input enters tensor parallelism here."""

    boundary: Boundary

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel(x, self, boundary=self.boundary)[0]


class ColumnParallelAttention(Attention):
    boundary: Boundary
    regather: bool

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return column_parallel(x, self.wq, self.wk, self.wv, boundary=self.boundary, regather=self.regather)


class ColumnParallelFeedForward(FeedForward):
    boundary: Boundary
    regather: bool

    def project(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        maps = (self.up,) if self.gate is None else (self.gate, self.up)
        *gate, up = column_parallel(x, *maps, boundary=self.boundary, regather=self.regather)
        return (gate[0] if gate else None), up


class RowParallelLinear(nn.Linear):
    """Weight split by input features: partial sums, added up where they leave; the bias is added once, behind."""

    boundary: Boundary

    def forward(self, x: Tensor) -> Tensor:
        out = self.boundary.leave(F.linear(x, self.weight.to_local()))
        return out if self.bias is None else out + self.bias.to_local()


class LocalNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight.to_local(), None if self.bias is None else self.bias.to_local())


class LocalPositions(PositionEmbedding):
    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, self.weight.to_local())


class LocalRouter(Router):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.route(x, self.weight.to_local())


# ------------------------------------------------------------------ splitting a model
def apply_tensor_parallel(model: Transformer, *, mesh: DeviceMesh, sequence_parallel: bool, regather: bool) -> None:
    """Split `model` (on meta) over the 1-D mesh `tp`, in place; see jobs.parallel.fit for what must divide.
    `regather`: gather a layer's inputs again in the backward; pointless where the layer is recomputed."""
    split = _Split(mesh, sequence_parallel=sequence_parallel, regather=regather)
    for layer in model.layers.values():
        if isinstance(layer.attention, LatentAttention):
            split.latent_attention(layer.attention)
        else:
            split.attention(layer.attention)
        layer.attention.kind = replace(layer.attention.kind, head_share=mesh.get_local_rank())
        if isinstance(layer.ffn, MoE):
            split.replicated(layer.ffn, "router", kind=LocalRouter)
        ffn = layer.ffn.shared if isinstance(layer.ffn, MoE) else layer.ffn
        if ffn is not None:
            split.feed_forward(ffn)
        for name in ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm"):
            split.replicated(layer, name, kind=LocalNorm)
    split.replicated(model, "position_embedding", kind=LocalPositions)
    split.replicated(model, "norm", kind=LocalNorm)
    if model.embedding is not None:
        split.module(model, "embedding", kind=VocabParallelEmbedding, weight=Shard(0)).boundary = split.boundary
    if model.output is not None:
        split.columns(model, "output", kind=ColumnParallelLinear)
    if sequence_parallel:
        model.places.split = mesh.size()
        model.places.tokens = own_tokens(model.places.tokens, rank=mesh.get_local_rank(), size=mesh.size())


class _Split:
    """How each kind of module is split over one tp group."""

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool, regather: bool) -> None:
        self.mesh = mesh
        self.regather = regather
        self.sequence_parallel = sequence_parallel
        self.boundary = Boundary(mesh.get_group(), sequence_parallel=sequence_parallel)

    def attention(self, attention: Attention) -> None:
        self.entered(attention, "wq", "wk", "wv", kind=ColumnParallelAttention)
        self.rows(attention, "wo")
        for name in ("q_norm", "k_norm"):  # of the rank's own heads
            self.replicated(attention, name, kind=LocalNorm, partial=True)

    def latent_attention(self, attention: LatentAttention) -> None:
        # The way down works on the rank's own tokens; the latents, much smaller than x, are what is gathered.
        for name in ("wq_a", "wkv_a"):
            self.replicated(attention, name, kind=LocalLinear)
        for name in ("q_norm", "kv_norm"):
            self.replicated(attention, name, kind=LocalNorm)
        self.columns(attention, "wq", "wkv_b", kind=ColumnParallelLinear)
        attention.shared_key.register_forward_pre_hook(self.boundary.entering)
        self.rows(attention, "wo")

    def feed_forward(self, ffn: FeedForward) -> None:
        self.entered(ffn, "gate", "up", kind=ColumnParallelFeedForward)
        self.rows(ffn, "down")

    def entered(self, parent: nn.Module, *names: str, kind: type) -> None:
        """A module whose first maps, `names`, take its input together."""
        self.columns(parent, *names, kind=LocalLinear)
        parent.__class__ = kind
        parent.boundary, parent.regather = self.boundary, self.regather

    def columns(self, parent: nn.Module, *names: str, kind: type) -> None:
        for name in names:
            module = self.module(parent, name, kind=kind, weight=Shard(0), bias=Shard(0))
            if module is not None:
                module.boundary = self.boundary

    def rows(self, parent: nn.Module, name: str) -> None:
        module = self.module(parent, name, kind=RowParallelLinear, weight=Shard(1), bias=Replicate())
        module.boundary = self.boundary
        if self.sequence_parallel and module.bias is not None:
            module.partial_gradients = ("bias",)

    def replicated(self, parent: nn.Module, name: str, *, kind: type, partial: bool = False) -> None:
        """`partial`: each rank's gradient is an addend even without sequence parallelism."""
        module = self.module(parent, name, kind=kind, weight=Replicate(), bias=Replicate())
        if module is not None and (partial or self.sequence_parallel):
            module.partial_gradients = tuple(name for name, _ in module.named_parameters(recurse=False))

    def module(self, parent: nn.Module, name: str, *, kind: type, weight: Placement,
               bias: Placement | None = None) -> nn.Module | None:
        """Make parent.name compute on local shards, and its parameters DTensors. The class is changed in place, as
        fully_shard does: sizes, eps and hooks of the module stay what the model file made them."""
        module = getattr(parent, name)
        if module is None:
            return None
        module.__class__ = kind
        module.weight = self._distributed(module.weight, weight)
        # a router's bias is a buffer: state, not a parameter
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            module.bias = self._distributed(module.bias, bias)
        return module

    def _distributed(self, parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
        shape = list(parameter.shape)
        if placement.is_shard():
            shape[placement.dim] //= self.mesh.size()
        local = torch.empty(shape, dtype=parameter.dtype, device="meta")
        return nn.Parameter(DTensor.from_local(local, self.mesh, [placement], run_check=False))


Where = Callable[[int, int, torch.device], tuple[Tensor, Tensor]]  # Places.tokens


def own_tokens(whole: Where, *, rank: int, size: int) -> Where:
    """Places.tokens under sequence parallelism: the rank's share of the flattened tokens."""

    def tokens(batch: int, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        rows, positions = whole(batch, seq_len * size, device)
        return tuple(t.reshape(size, batch, seq_len)[rank] for t in (rows, positions))

    return tokens


# ------------------------------------------------------------------ once per step
def partial_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Replicated parameters whose gradient on each tp rank is one addend of the whole."""
    return [module._parameters[name] for module in model.modules() for name in getattr(module, "partial_gradients", ())]


def reduce_partial_gradients(grads: list[Tensor], *, group: dist.ProcessGroup) -> None:
    """Add up the addends, after data parallelism has reduced: one all-reduce for all of them, because with a small
    message per norm the latency of 2·layers+1 all-reduces would be paid instead."""
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([g.numel() for g in grads])):
        grad.copy_(total.view_as(grad))
