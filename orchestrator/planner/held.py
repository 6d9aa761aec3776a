"""What a pipeline rank holds of the microbatches in flight: activations, gradients that wait for the second half of a
backward, logits.

Called by memory, for every candidate. How many microbatches there are is in scenes, what one layer keeps of one in
activations. It knows nothing of states and of data parallelism.
"""
import functools
from typing import NamedTuple

from jobs.spec.job import Device
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout, ParallelDims, Recompute
from jobs.spec.training import DTYPE_BYTES, TrainingSpec
from orchestrator.planner.activations import (block_activation_bytes, block_shape, keys_width, queries_width,
                                              waiting_gradient_bytes)
from orchestrator.planner.software import OURS, Software
from orchestrator.planner.weights import stage_kinds


class Held(NamedTuple):
    """Of one microbatch, by stage of the rank: activations that the forward keeps for the backward, and gradients that
    its first half hands to the second. And what the backward holds of one block beside its activations."""

    each: tuple[float, ...]
    waiting: tuple[float, ...]
    again: float


def held(model: ModelSpec, layout: Layout, *, training: TrainingSpec, rank: int, device: Device,
         software: Software) -> Held:
    """Of pipeline rank `rank`."""
    dims = layout.dims
    alike = Layout(dims=ParallelDims(tp=dims.tp, pp=dims.pp), microbatch_size=layout.microbatch_size,
                   num_microbatches=1, layers_per_stage=layout.layers_per_stage,
                   schedule=layout.schedule, virtual_stages=layout.virtual_stages, recompute=layout.recompute,
                   sequence_parallel=layout.sequence_parallel)
    seq_len, element = training.seq_len // dims.cp, DTYPE_BYTES[training.param_dtype]
    found = _held(model, alike, seq_len=seq_len, rank=rank, device=device, element=element, software=software)
    if dims.cp > 1 and software == OURS:
        attending = _attending_bytes(model, layout, tokens=seq_len * layout.microbatch_size, element=element)
        found = found._replace(again=max(found.again, attending))
    return found


def _attending_bytes(model: ModelSpec, layout: Layout, *, tokens: int, element: int) -> int:
    """Of the backward of one layer's attention over cp. Gathered: keys and values of all ranks, the float32 sums of
    their gradients, and the message in which these go home. In a ring: a rank's keys that arrive and leave, sums here,
    arriving and leaving, and what a kernel gives to add. And the float32 gradient of its queries."""
    keys = tokens * keys_width(model) // layout.dims.tp
    queries = tokens * queries_width(model) // layout.dims.tp
    if layout.cp_method == "ring":
        return (12 + 3 * element) * keys + (4 + element) * queries
    return (8 + element) * keys * layout.dims.cp + 4 * queries


@functools.lru_cache(maxsize=16384)  # asked for many layouts that differ in data parallelism alone
def _held(model: ModelSpec, layout: Layout, *, seq_len: int, element: int, rank: int, device: Device,
          software: Software) -> Held:
    dims = layout.dims
    hidden = element * seq_len * layout.microbatch_size * model.dim
    hidden /= dims.tp if layout.sequence_parallel else 1
    again = 0.0
    each, waiting = [], []  # of one microbatch, by stage: activations, and gradients that wait for a second half
    for stage in layout.stages(rank):
        blocks = gradients = 0.0
        for layer, count in stage_kinds(model, layout, stage):
            per_block, whole, outputs = _block_bytes(
                model, layer, microbatch_size=layout.microbatch_size, seq_len=seq_len, element=element, device=device,
                recompute=layout.recompute, tp=dims.tp, sequence_parallel=layout.sequence_parallel, software=software)
            blocks += count * per_block
            gradients += count * outputs
            again = max(again, whole - per_block)  # the block being recomputed
        # What a pipeline stage received and what it sent on are both kept until the backward; the last stage
        # keeps the inputs of the final norm and of the output projection.
        ends = stage == layout.num_stages - 1 or (layout.num_stages > 1 and not software.frees_outputs)
        each.append(blocks + (2 * hidden if ends else hidden))
        if stage == layout.num_stages - 1:  # of the final norm and the logits; and the gathered input of these
            tokens = element * seq_len * layout.microbatch_size
            gradients += hidden + tokens * (model.vocab_size / dims.tp + (model.dim if dims.tp > 1 else 0))
        waiting.append(gradients if stage > 0 and software == OURS else 0.0)  # all of the first stage's is second half
    if software == OURS and layout.sequence_parallel and dims.tp > 1:
        # Whole for a moment, and one block's: the gradient of its output, its input, and the gradient of that.
        again += 3 * hidden * dims.tp
    return Held(tuple(each), tuple(waiting), again)


@functools.lru_cache(maxsize=16384)
def _block_bytes(model: ModelSpec, layer: int, *, microbatch_size: int, seq_len: int, element: int, device: Device,
                 recompute: Recompute, tp: int, sequence_parallel: bool,
                 software: Software) -> tuple[float, float, float]:
    """What one layer keeps of a microbatch, what it holds while it is recomputed, and its outputs' gradients. Asked for
    every layout."""
    shape = block_shape(model, microbatch_size=microbatch_size, seq_len=seq_len, element_bytes=element, device=device,
                        layer=layer, software=software)
    split = {"tp": tp, "sequence_parallel": sequence_parallel}
    kept = block_activation_bytes(shape, recompute=recompute, **split)
    whole = block_activation_bytes(shape, recompute="none", **split) if recompute != "none" else kept
    return kept, whole, waiting_gradient_bytes(shape, **split)


class Logits(NamedTuple):
    """Of one microbatch."""

    kept: int  # from its forward to its backward
    most: int  # beside these, at the loss
    behind: int  # in all, when the projection's weights get their gradient


def logits_held(model: ModelSpec, layout: Layout, *, training: TrainingSpec, software: Software) -> Logits:
    """Logits as the projection gave them, float32 probabilities and their gradient, and the gradient cast back: 12
    bytes in either precision; a fused loss needs the first two. A pipeline still holds the logits when the loss needs
    most, probabilities and two gradients of them: 14. A cap keeps its hyperbolic tangent, too."""
    element = DTYPE_BYTES[training.param_dtype]
    each = training.seq_len // layout.dims.cp * layout.microbatch_size * model.vocab_size // layout.dims.tp
    kept = element + 4 + (0 if model.output_softcap is None else element)
    holds = layout.dims.pp > 1 and software == OURS
    at_work = 4 if holds and layout.dims.tp == 1 else element if element < 4 else 0
    return Logits(each * kept, 0 if software.fused_loss else each * (4 + at_work), each * element * (2 if holds else 1))
