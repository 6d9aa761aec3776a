"""Software facts that change what a layout costs: precision of matmuls, kernels, what overlaps, how states are kept.

Read by the cost model. The planner plans for our own trainer, OURS; validation describes the trainers of published
runs in the same terms. It knows no layout and no hardware.
"""
from dataclasses import dataclass
from typing import Literal

MatmulDtype = Literal["float32", "bfloat16", "float16", "float8", "float4"]
# What selective recompute computes again: what lies between a feed-forward's matrices; everything but matmuls and fused
# attention (torchtitan); attention, of which a fused kernel leaves nothing (arXiv:2205.05198); and the feed-forward
# with it.
Selective = Literal["activations", "all but matmuls", "attention", "attention, feed-forward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """How a trainer computes. The defaults are our own trainer's."""

    matmul_dtype: MatmulDtype | None = None  # of the layers' linear maps; None: training.param_dtype
    flash_attention: bool = True  # False: the s×s scores go through memory, masked half and all
    tuned_attention: bool = False  # fused attention written for the chip (cuDNN's); False: FlashAttention-2
    fused_kernels: bool = False  # compiled or hand-fused: norms, rotary, gate and residuals in one pass each
    fused_loss: bool = False  # logits once in 16 bits and once in float32, gradients in place
    dropout: bool = False  # behind attention and feed-forward, with its masks kept
    selective: Selective = "activations"
    selective_share: float = 1.0  # of the matmuls whose outputs are kept, under "all but matmuls"
    regathers_inputs: bool = True  # sequence parallelism gathers the projections' inputs again in the backward
    # pipeline messages: each tp rank sends its part, and the receivers gather the whole (under sequence parallelism
    # parts are all there is, and nothing is gathered)
    scatters_messages: bool = False
    frees_outputs: bool = False  # what a pipeline stage has sent on is dropped (its values; the graph stays)
    # 16-bit weights and their gradients are kept whole beside float32 masters (Megatron, ZeRO-1 and 2);
    # False: the float32 masters are the parameters, and 16-bit copies exist while they are gathered (FSDP2)
    keeps_half_weights: bool = False
    gradient_bytes: int = 4  # per parameter, while they accumulate, where keeps_half_weights
    sums_in_matmul: bool = False  # the matmul of a weight's gradient adds to the sum itself (Megatron, since 2022)
    overlaps_data_parallel: bool = True  # gathers and reductions run behind the compute of other blocks
    # the gradient of a column-split map's input is reduced behind the gradients of its weights
    overlaps_input_gradients: bool = True
    overlaps_tensor_parallel: bool = False  # collectives of tp cut up and run behind the matmuls they feed
    overlaps_experts: bool = False  # all-to-all of one microbatch runs behind the compute of another
    # a token goes once to an island (node, NVLink domain) that has several of its experts, and is copied there
    dispatches_once: bool = False
    collectives_by_tensor: bool = False  # data parallelism sends every parameter by itself, not a block at once
    ports: float | None = None  # network ports of a node that one collective keeps busy at most; None: one per rank

    def __hash__(self) -> int:
        """Of a few fields: a search asks for it by the million, and equality still tells trainers apart."""
        return hash((self.matmul_dtype, self.fused_kernels, self.keeps_half_weights))


OURS = Software()
