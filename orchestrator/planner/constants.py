"""The few constants of the cost model that no data sheet gives, each with the rows it was fitted on.

Read by compute, communication and cost. Everything else is a count, a shape, or a figure of jobs.spec.hardware.
Rows are named by their group in the table of published runs; `orc validate` prints fitted and unfitted groups apart.
"""

# Fitted together (python -m tests.benchmarks.refit), on the least mean |log(predicted/measured)|, groups weighing
# alike: SUSTAINED_MATMUL (16 and 8 bits), TILE_OVERHEAD_S, FLASH_FORWARD, UNFUSED_SCORE_BYTES, MEMORY_EFFICIENCY,
# BACKWARD_TRAFFIC, EAGER_TRAFFIC, KERNEL_RAMP_S, PORTS_OF_2021, and jobs.spec.hardware's
# portable_attention. The others are measurements or counts, with their source beside them.
FITTED_GROUPS = ("vtrain-multi-18.4b", "megatron21-t1", "megatron21-t2", "foundry-a100_80gb", "mcore-llama3",
                 "fms-fsdp", "torchtitan")

# ------------------------------------------------------------------ matmuls
# Share of the best measured GEMM (GpuSpec.matmul_efficiency) that large matmuls sustain in a training step: they run
# back to back and at the power limit. 16 bits: all groups; float8: mcore-llama3
# and torchtitan, and float4 is taken to be like it; float32 is for CPUs, whose table entry is a measured GEMM, and is
# not fitted.
SUSTAINED_MATMUL = {"float32": 0.70, "bfloat16": 0.92, "float16": 0.92, "float8": 0.97, "float4": 0.97}
# A round of output tiles is begun and ended once, however short its k: so faster chips need longer k. All groups.
TILE_OVERHEAD_S = 5.6e-6

# ------------------------------------------------------------------ attention
# Fused attention under the causal mask against the sustained matmul rate of 16 bits, forward and backward: the rows of
# foundry-a100_80gb with sequences of 8k to 64k. Kernels alone do better (FlashAttention-2 190 of 271 TFLOP/s on A100,
# arXiv:2307.08691).
FLASH_FORWARD = 0.46
FLASH_BACKWARD_RATE = 0.85  # of the forward's: 170 against 200 TFLOP/s on A100, arXiv:2307.08691
FLASH_BACKWARD = FLASH_BACKWARD_RATE * FLASH_FORWARD
FLASH_BACKWARD_FLOPS = 2.5  # it computes the scores again: 5 matmuls against the forward's 2
# Forward and backward of attention that drops weights, in chunks, against the fused kernel's, on CPU: measured with 8
# heads of 64 over 1,024 and 2,048 tokens.
DROPPED_ATTENTION = (4.0, 2.6)
# Unfused: bytes per score and head moved by scale, mask, softmax and dropout in 16 bits, forward; backward as much.
# megatron21-t1 and vtrain-multi-18.4b.
UNFUSED_SCORE_BYTES = 10.8
UNFUSED_MATMUL = 0.55  # batched matmuls over a head's 64–128 channels, against the sustained rate

# ------------------------------------------------------------------ memory-bound kernels
MEMORY_EFFICIENCY = 0.80  # of the published bandwidth, streaming; all groups
BACKWARD_TRAFFIC = 1.74  # of memory-bound kernels, against the forward's; all groups
EAGER_TRAFFIC = 1.33  # of kernels that are not fused, against the passes counted in compute; foundry-a100_80gb
CAST_BYTES = 5.0  # per element of a linear map's input under fp8: read, write, and its transpose for the backward
ADAM_TRAFFIC_BYTES = 40  # per parameter: clip (read, scale), read weight, gradient, m, v, write weight, m, v

# ------------------------------------------------------------------ launches
# Kernels of one block, and what starting one costs: on a GPU they hide while the kernels are longer.
BLOCK_KERNELS = {"eager": 30, "fused": 14}  # forward; the backward has twice as many
# Router, counts, sorting of the tokens and back; and per expert of a rank both its matmuls, with the casts before them.
ROUTING_KERNELS = 40
EXPERT_KERNELS = {"plain": 2, "cast": 4}
LAUNCH_S = {"cuda": 6e-6, "cpu": 20e-6}
# A kernel fills the chip and empties it again, whatever its size: what a small microbatch pays. All groups.
KERNEL_RAMP_S = 3e-6
STEP_OVERHEAD_S = {"cuda": 0.010, "cpu": 0.0}  # data, logging, loss scale, clipping: host work between steps

# ------------------------------------------------------------------ links
# Bus bandwidth of large collectives over the link's published rate: 8×A100 235/300, 8×H200 368/450 with rings
# (482/450 with NVLS); between nodes gathers of 2×8 H200 at 1 GiB 321/400, of 2×8 H100 182/200, all-reduces of 4×8 B200
# 362/400.
INTRA_NODE_EFFICIENCY = 0.80
INTER_NODE_EFFICIENCY = 0.80
# A message from one rank to one other uses one channel, not all rings.
SEND_EFFICIENCY = 0.60
# Network ports of a node that one collective of 2021's NCCL kept busy: the one row of vtrain-multi-18.4b with tp across
# nodes, and the ZeRO-3 rows of megatron21-t2. Later ones use a port per rank.
PORTS_OF_2021 = 1.7

# ------------------------------------------------------------------ overlap
OVERLAP_SLOWDOWN = 1.126  # both sides of an overlap, as Galvatron profiles it
HIDDEN_TENSOR_PARALLEL = 0.6  # of tp's time, where the trainer overlaps it
HIDDEN_EXPERTS = 0.8  # of ep's time, where the trainer overlaps it
