"""Column-parallel linear maps of one input, with their communication behind their arithmetic (as Megatron-LM's linear
layers do it: arXiv:2205.05198, §4.2.2).

Used by jobs.parallel.tensor and vocab. The maps of one input (q, k and v; gate and up) are one autograd function: they
share the gather of their input, and in the backward

    started                                        behind it                      waited for
    all_gather of the input, if it was not kept    gradient of the input          before the weights' gradients
    reduce_scatter of the input's gradient         gradients of the weights       at the end
    (all_reduce without sequence parallelism)

On CUDA a collective can only run beside a matmul that was launched after it if it gets its multiprocessors first: it is
launched first here, and CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment makes the device keep that order (at the price
of less overlap for FSDP's gathers, so nothing here sets it).
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from jobs.mesh import local_of
from jobs.parallel.boundary import Boundary, start_gather
from jobs.parallel.collectives import reduce_scatter


def column_parallel(x: Tensor, *maps: nn.Linear, boundary: Boundary, regather: bool = False) -> tuple[Tensor, ...]:
    """Enter tensor parallelism with x, [batch, seq, dim] ([batch, seq/tp, dim] under sequence parallelism), and apply
    this rank's columns of each map: [batch, seq, columns/tp] each. `regather`: under sequence parallelism keep the
    rank's own tokens for the backward and not all of them."""
    weights = [local_of(one.weight) for one in maps]
    biases = [local_of(one.bias) for one in maps if getattr(one, "bias", None) is not None]  # all of them, or none
    return _Columns.apply(boundary, regather and boundary.sequence_parallel, len(weights), x, *weights, *biases)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, boundary, regather, num_maps, x, *parameters):
        whole = x
        if boundary.sequence_parallel:
            whole, work = start_gather(x, group=boundary.group)
            work.wait()
        weights, biases = parameters[:num_maps], parameters[num_maps:] or [None] * num_maps
        ctx.boundary, ctx.regather = boundary, regather
        ctx.save_for_backward(x if regather else whole, *weights)
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx, *grads):
        kept, *weights = ctx.saved_tensors
        of_input, *of_parameters = _wanted(ctx)
        of_weights, of_biases = of_parameters[:len(weights)], of_parameters[len(weights):]
        gathering = None
        if ctx.regather and any(of_weights):
            kept, gathering = start_gather(kept, group=ctx.boundary.group)
        rows = [grad.flatten(0, -2) for grad in grads]  # [batch·seq, columns/tp]
        grad_input = reduction = None
        if of_input:
            whole = torch.mm(rows[0], weights[0])
            for row, weight in zip(rows[1:], weights[1:], strict=True):
                whole.addmm_(row, weight)
            grad_input, reduction = _start_sum(whole.view(*grads[0].shape[:-1], -1), boundary=ctx.boundary)
        if gathering is not None:
            gathering.wait()
        tokens = kept.flatten(0, -2)
        grad_weights = [row.t().mm(tokens) if one else None for row, one in zip(rows, of_weights, strict=True)]
        grad_biases = [row.sum(dim=0) if one else None for row, one in zip(rows, of_biases)]
        if reduction is not None:
            reduction.wait()
        return None, None, None, grad_input, *grad_weights, *grad_biases


def _start_sum(grad: Tensor, *, boundary: Boundary):
    """Start summing the input's gradient over tp. Returns what it becomes, and the work to wait for."""
    if not boundary.sequence_parallel:
        return grad, dist.all_reduce(grad, group=boundary.group, async_op=True)
    out = grad.new_empty(grad.shape[0], grad.shape[1] // boundary.group.size(), *grad.shape[2:])
    return out, reduce_scatter(out, grad, group=boundary.group)


def _wanted(ctx) -> list[bool]:
    """For which of its tensors this backward is asked. Pipeline schedules that split the backward come twice, for the
    input and then for the weights: needs_input_grad, fixed in the forward, would compute and communicate all of it
    twice."""
    return [node is not None and (node.name().endswith("AccumulateGrad") or torch._C._will_engine_execute_node(node))
            for node, _ in ctx.next_functions]
