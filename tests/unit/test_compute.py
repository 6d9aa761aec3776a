"""Compute by shape: tiles, memory-bound matmuls, launches, attention fused and not, recomputation."""
import dataclasses

import pytest

from jobs.spec.counts import layer_matmul_params
from orchestrator.planner import constants
from orchestrator.planner.chip import chip_of, matmul_s, optimizer_s, tiled_s
from orchestrator.planner.compute import Shape, head_times, layer_times, shape_of
from orchestrator.planner.software import OURS
from tests.helpers.planning import LLAMA3_8B, LLAMA3_70B, SMALL, cpu, h100, layout_of, training

BF16 = training(global_batch_size=8, seq_len=8192, param_dtype="bfloat16")
CHIP = chip_of(h100(1), training=BF16, software=OURS)


def shape(**changes) -> Shape:
    usual = {"tokens": 8192, "seq_len": 8192, "tp": 1, "ep": 1, "sequence_split": 1, "recompute": "none"}
    return Shape(**usual | changes)


def times(model=LLAMA3_8B, *, chip=CHIP, software=OURS, **changes):
    return layer_times(model, 0, shape=shape(**changes), chip=chip, software=software)


def rate(m, n, k):
    return 2.0 * m * n * k / tiled_s(m, n, k, flops=CHIP.matmul_flops, multiprocessors=132) / CHIP.matmul_flops


def test_a_large_matmul_comes_near_the_sustained_rate_and_never_above():
    assert 0.9 < rate(16384, 16896, 16384) <= 1.0


def test_one_tile_more_than_a_round_costs_a_whole_round():
    full, spilled = (tiled_s(256 * 132, n, 65536, flops=CHIP.matmul_flops, multiprocessors=132) for n in (128, 129))
    assert spilled / full == pytest.approx(1.5, abs=0.6) and spilled > 1.4 * full


# k → least and most share of the sustained rate: the shorter the sum, the more its beginning and end weigh
SHORT_SUMS = [(128, 0.1, 0.4), (512, 0.4, 0.7), (2048, 0.75, 0.92), (16384, 0.95, 1.0)]


@pytest.mark.parametrize("k,least,most", SHORT_SUMS)
def test_short_sums_are_slower(k, least, most):
    assert least < rate(16384, 16896, k) < most


def test_a_thin_matmul_is_bound_by_memory():
    seconds = matmul_s(1, 16384, 16384, flops=CHIP.matmul_flops, chip=CHIP)
    assert seconds >= 2 * 16384**2 / CHIP.memory_bytes_s


def test_tensor_parallel_divides_a_layer_by_less_than_tp():
    whole, split = times(LLAMA3_70B), times(LLAMA3_70B, tp=8, sequence_split=8)
    assert 5.0 < whole.forward_s / split.forward_s < 8.0


def test_smaller_microbatches_are_less_efficient():
    per_token = [times(tokens=tokens, tp=8).forward_s / tokens for tokens in (512, 2048, 8192)]
    assert per_token[0] > per_token[1] > per_token[2]


def test_launches_bound_a_tiny_layer_on_a_gpu_and_add_up_on_a_cpu():
    tiny = times(SMALL, tokens=64, seq_len=64)
    assert tiny.forward_s == constants.BLOCK_KERNELS["eager"] * constants.LAUNCH_S["cuda"]
    chip = chip_of(cpu(1), training=training(global_batch_size=1), software=OURS)
    slow = layer_times(SMALL, 0, shape=shape(tokens=64, seq_len=64), chip=chip, software=OURS)
    faster = layer_times(SMALL, 0, shape=shape(tokens=32, seq_len=64), chip=chip, software=OURS)
    launches = constants.BLOCK_KERNELS["eager"] * constants.LAUNCH_S["cpu"]
    assert slow.forward_s - launches == pytest.approx(2 * (faster.forward_s - launches), rel=1e-6)


# recompute, software → what is repeated before the backward, in forwards
AGAIN = [("none", {}, 0.0, 0.0), ("full", {}, 1.0, 1.0), ("selective", {}, 0.01, 0.1),
         ("selective", {"selective": "all but matmuls"}, 0.05, 0.3),
         ("selective", {"selective": "all but matmuls", "selective_share": 0.5}, 0.4, 0.7),  # and every second matmul
         ("selective", {"selective": "attention"}, 0.0, 0.0),  # a fused kernel saves nothing
         ("selective", {"selective": "attention", "flash_attention": False}, 0.1, 0.8)]


@pytest.mark.parametrize("recompute,software,least,most", AGAIN)
def test_recomputation_repeats_what_it_says(recompute, software, least, most):
    found = times(recompute=recompute, software=dataclasses.replace(OURS, **software))
    assert least <= found.again_s / found.forward_s <= most
    assert found.backward_s == found.inputs_s + found.weights_s + found.again_s


def test_unfused_attention_computes_the_masked_half_and_moves_the_scores():
    fused = times().attention_s
    unfused = times(software=dataclasses.replace(OURS, flash_attention=False)).attention_s
    scores = 8192 * 8192 * LLAMA3_8B.num_heads
    moved_s = constants.UNFUSED_SCORE_BYTES * scores / CHIP.memory_bytes_s
    rate = CHIP.half_flops * constants.UNFUSED_MATMUL
    # whole rows of scores, not the causal half
    assert unfused == pytest.approx(moved_s + 4 * scores * LLAMA3_8B.head_size / rate)
    rate = CHIP.half_flops * CHIP.attention * constants.FLASH_FORWARD
    assert fused == pytest.approx(2 * scores * LLAMA3_8B.head_size / rate)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dropped_attention_weights_cost_what_writing_scores_out_does(device):
    dropping = dataclasses.replace(LLAMA3_8B, attention_dropout=0.1)
    chip = CHIP._replace(device=device)
    fused, dropped = (layer_times(model, 0, shape=shape(), chip=chip, software=OURS).attention_s
                      for model in (LLAMA3_8B, dropping))
    if device == "cpu":
        assert dropped == pytest.approx(constants.DROPPED_ATTENTION[0] * fused)
    else:
        unfused = times(software=dataclasses.replace(OURS, flash_attention=False)).attention_s
        assert 2 * fused < dropped <= 1.01 * unfused  # twice the bytes of half the scores


def test_a_ring_puts_attention_together_block_after_block():
    """Of the ranks of a ring each adds as many float32 outputs as there are blocks; gathered keys are one block."""
    whole, ring = (times(tokens=4096, blocks=blocks) for blocks in (1, 4))
    assert ring.attention_s == whole.attention_s
    moved_s = 4 * 8 * 4 * 4096 * LLAMA3_8B.num_heads * LLAMA3_8B.head_size / CHIP.memory_bytes_s
    assert ring.forward_s - whole.forward_s == pytest.approx(moved_s)
    for method, blocks in (("ring", 2), ("allgather", 1)):
        assert shape_of(layout_of(LLAMA3_8B, dims={"cp": 2}, cp_method=method), seq_len=8192).blocks == blocks


def test_attention_grows_with_the_square_of_the_sequence():
    short, long = (times(tokens=8192, seq_len=s).attention_s for s in (8192, 32768))
    assert long == pytest.approx(4 * short)


def test_a_window_bounds_attention():
    local = dataclasses.replace(LLAMA3_8B, sliding_window=1024, global_every=2)
    near, far = (layer_times(local, layer, shape=shape(), chip=CHIP, software=OURS).attention_s for layer in (0, 1))
    assert near / far == pytest.approx((1024 - 1024**2 / 16384) / 4096)


def test_fp8_speeds_up_linear_maps_and_leaves_attention_alone():
    software = dataclasses.replace(OURS, matmul_dtype="float8", fused_kernels=True)
    chip = chip_of(h100(1), training=BF16, software=software)
    wide, narrow = times(software=dataclasses.replace(software, matmul_dtype=None)), times(chip=chip, software=software)
    assert 1.3 < wide.weights_s / narrow.weights_s < 2.2
    assert narrow.attention_s == wide.attention_s


def test_a_head_costs_what_its_vocabulary_weighs():
    small, large = (head_times(dataclasses.replace(LLAMA3_8B, vocab_size=v), shape=shape(), chip=CHIP).forward_s
                    for v in (16384, 131072))
    assert large == pytest.approx(8 * small, rel=0.1)


def test_every_expert_of_a_rank_is_launched_by_itself():
    from jobs.spec.model import MoeSpec
    model = dataclasses.replace(SMALL, moe=MoeSpec(num_experts=16, top_k=2, ffn_dim=64))
    kernels = constants.BLOCK_KERNELS["eager"] + constants.ROUTING_KERNELS
    for ep in (1, 8):
        tiny = times(model, tokens=64, seq_len=64, ep=ep)
        launched = kernels + constants.EXPERT_KERNELS["plain"] * 16 / ep
        assert tiny.forward_s == pytest.approx(launched * constants.LAUNCH_S["cuda"])


def test_gradients_are_summed_per_microbatch_unless_the_matmul_does():
    plain, fused = (times(software=dataclasses.replace(OURS, sums_in_matmul=flag)).weights_s for flag in (False, True))
    weights = layer_matmul_params(LLAMA3_8B)
    assert plain - fused == pytest.approx((2 + 2 * 4) * weights / CHIP.memory_bytes_s)


def test_experts_split_what_ep_ranks_hold():
    """Eight experts on one rank or on eight: the same tokens in all, so the same work per rank."""
    from jobs.spec.model import MoeSpec
    model = dataclasses.replace(LLAMA3_8B, moe=MoeSpec(num_experts=8, top_k=2, ffn_dim=14336))
    alone, shared = times(model), times(model, ep=8)
    assert shared.forward_s == pytest.approx(alone.forward_s, rel=0.15)
    # one rank adds up the gradients of eight experts, eight ranks those of one each
    assert shared.weights_s < alone.weights_s


def test_the_optimizer_is_bound_by_memory():
    assert optimizer_s(1e9, chip=CHIP) == pytest.approx(40e9 / CHIP.memory_bytes_s)


def test_a_shape_is_what_one_rank_sees():
    layout = layout_of(LLAMA3_8B, dims={"tp": 4, "cp": 2}, microbatch_size=2)
    found = shape_of(layout, seq_len=8192)
    assert (found.tokens, found.tp, found.sequence_split) == (8192, 4, 4)
