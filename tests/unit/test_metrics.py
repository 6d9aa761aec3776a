"""Rates follow from a step time and the counts shared with the planner."""
import resource

import pytest
import torch

from jobs.metrics import RateMeter, peak_memory_bytes
from jobs.spec.counts import model_flops_per_token
from jobs.spec.model import ModelSpec

MODEL = ModelSpec(name="small", vocab_size=64, dim=8, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=16)


def meter(convention: str = "causal") -> RateMeter:
    flops = model_flops_per_token(MODEL, seq_len=32, convention=convention)
    return RateMeter(tokens=4 * 32, world_size=8, flops_per_token=flops, peak_tflops=1e-6)


def test_rates_of_a_step():
    rates = meter().rates(0.5)
    assert rates.tokens_per_s == 4 * 32 / 0.5
    assert rates.tokens_per_s_per_gpu == rates.tokens_per_s / 8
    flops = model_flops_per_token(MODEL, seq_len=32, convention="causal") * rates.tokens_per_s_per_gpu
    assert rates.tflops_per_gpu == pytest.approx(flops / 1e12)
    assert rates.mfu == pytest.approx(flops / 1e6)


def test_full_attention_counts_twice_what_causal_counts():
    causal, full = (meter(convention=c).flops_per_token for c in ("causal", "full"))
    assert full - causal == 6 * MODEL.num_layers * MODEL.num_heads * MODEL.head_size * 32


def test_peak_memory_is_in_bytes():
    found = peak_memory_bytes(torch.device("cpu"))
    assert found == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 50 * 2**20 < found < 64 * 2**30  # torch alone is more than 50 MiB
