"""One stage of a pipeline: torch's, holding no more than it must, and reducing gradients as data parallelism needs it.

Built by jobs.parallel.pipeline, run by a schedule of torch.distributed.pipelining: the overridden methods are what that
calls, in its order. Knows no schedule.
"""
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward

from jobs.parallel.buckets import Buckets


class Stage(PipelineStage):
    """A stage whose weight gradients are reported and reduced as data parallelism needs it, and which holds what is
    received from when it is received until it has been used: torch's keeps a buffer for every microbatch of a step, in
    both directions, for ever."""

    def __init__(self, *args: Any, buckets: Buckets | None, part: int, reduce_every_microbatch: bool,
                 **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buckets = buckets
        self._part = part  # of this rank's
        self._reduce_every_microbatch = reduce_every_microbatch

    def _setup_forward_recv_info(self, num_microbatches, has_backward):
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for microbatch in range(num_microbatches):
            _drop(self.args_recv_info[microbatch])

    def _create_grad_recv_info(self, act_send_info):
        return _drop(super()._create_grad_recv_info(act_send_info))

    def get_fwd_recv_ops(self, fwd_chunk_id):
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id):
        self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id):
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        _drop(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id):
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        _drop(self.grad_recv_info[bwd_chunk_id])
        return received

    def _allocate(self, messages) -> None:
        for one in messages:
            if not one.is_root_arg:
                one.buffer = torch.empty(one.tensor_meta.shape, dtype=one.tensor_meta.dtype, device=self.device)

    def forward_one_chunk(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            self.fwd_cache.clear()  # has been sent on, and no backward will ask for it
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
        for tensor in self.backward_state.get(bwd_chunk_id, ((),))[0]:
            tensor.grad = None  # has been handed on; the second half would hold it until it runs

    def backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward=False):
        if isinstance(self.submod, FSDPModule):
            return self._sharded_backward(is_last=last_backward, **bwd_kwargs)
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if self._buckets is not None:
            for weight in self.submod.parameters() if backward_type == "weight" else ():
                self._buckets.accumulated(weight)  # torch adds to .grad itself: no autograd hook has run
            if backward_type != "input":
                self._buckets.backward_done(self._part)
        return result

    def _sharded_backward(self, *, is_last: bool, stage_output: Any, output_grads: Any, input_values: Any) -> tuple:
        """A whole one, which is all that zero_stage=3 trains with. torch would reduce all units behind the last; here
        each is reduced when that leaves it. Weights stay gathered: other microbatches still need them."""
        self.submod.set_is_last_backward(False)
        self.submod.set_reshard_after_backward(False)
        self.submod.set_requires_gradient_sync(is_last or self._reduce_every_microbatch)
        return stage_backward(stage_output, output_grads, input_values), None


def _drop(messages):
    for one in messages:
        one.buffer = None
    return messages
