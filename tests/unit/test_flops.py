"""Parameter and FLOP counts against published figures."""
import pytest

from jobs.spec.counts import model_flops_per_token, num_params
from tests.helpers.planning import LLAMA3_8B, LLAMA3_70B, LLAMA3_405B

PARAMS = [(LLAMA3_8B, 8.03e9), (LLAMA3_70B, 70.6e9), (LLAMA3_405B, 405.9e9)]

# Printed (rounded) by one publisher under two conventions, seq_len 8192 on H100:
# model, tokens/s/GPU, TFLOP/s/GPU, convention
PRINTED_TFLOPS = [
    (LLAMA3_8B, 13812, 800, "full"),
    (LLAMA3_70B, 1621, 780, "full"),
    (LLAMA3_405B, 315, 834, "full"),
    (LLAMA3_8B, 14451, 744, "causal"),
    (LLAMA3_70B, 1602, 719, "causal"),
    (LLAMA3_405B, 292, 737, "causal"),
]


@pytest.mark.parametrize("model,published", PARAMS, ids=lambda v: getattr(v, "name", v))
def test_parameters_match_the_published_count(model, published):
    assert num_params(model) == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize("model,tokens_per_s,tflops,convention", PRINTED_TFLOPS)
def test_printed_tflops_follow_from_printed_tokens(model, tokens_per_s, tflops, convention):
    computed = tokens_per_s * model_flops_per_token(model, seq_len=8192, convention=convention) / 1e12
    assert computed == pytest.approx(tflops, rel=0.01)


@pytest.mark.parametrize("model,tokens_per_s,tflops,convention", PRINTED_TFLOPS)
def test_the_other_convention_does_not_reproduce_them(model, tokens_per_s, tflops, convention):
    other = "causal" if convention == "full" else "full"
    computed = tokens_per_s * model_flops_per_token(model, seq_len=8192, convention=other) / 1e12
    assert computed != pytest.approx(tflops, rel=0.03)
