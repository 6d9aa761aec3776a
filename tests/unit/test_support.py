"""Options of a model that contradict each other, or would silently do nothing, are refused with the remedy."""
import dataclasses

import pytest

from jobs.spec.model import MlaSpec, MoeSpec
from jobs.spec.support import model_problems
from tests.helpers.models import ALL, DEEPSEEK3, LLAMA3

MLA = MlaSpec(kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
MOE = MoeSpec(num_experts=6, top_k=2, ffn_dim=8)

# changes of a Llama → the message
REFUSED = [
    (dict(dropout=1.0), "model.dropout: 1.0 is not a probability below 1"),
    (dict(attention_dropout=1.5), "model.attention_dropout: 1.5 is not a probability below 1"),
    (dict(sliding_window=8), "model.global_every: 1 makes every layer global"),
    (dict(norm="layernorm", norm_offset=True), "model.norm_offset: True is without effect on layernorm"),
    (dict(mla=MLA, positions="learned", max_positions=8), "model.positions: 'learned' does not go with model.mla"),
    (dict(mla=MLA, qk_norm=True), "model.qk_norm: True is without effect on model.mla"),
    (dict(mla=dataclasses.replace(MLA, qk_rope_head_dim=3)), "model.mla.qk_rope_head_dim: 3 is odd"),
    (dict(moe=dataclasses.replace(MOE, num_groups=4)), "model.moe.num_groups: 4 does not divide"),
    (dict(moe=dataclasses.replace(MOE, top_k=7)), "model.moe.top_k: 7 is not between 1 and the 6 experts"),
    (dict(moe=dataclasses.replace(MOE, num_groups=3, top_k=3)), "model.moe.top_k: 3 is not between 1 and the 2"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[message.split(":")[0] for _, message in REFUSED])
def test_a_contradiction_is_refused(changes, message):
    problems = [str(problem) for problem in model_problems(dataclasses.replace(LLAMA3, **changes))]
    assert len(problems) == 1 and message in problems[0]


def test_all_contradictions_at_once():
    model = dataclasses.replace(DEEPSEEK3, dropout=-0.1, qk_norm=True, sliding_window=4)
    assert len(model_problems(model)) == 3


@pytest.mark.parametrize("name", ALL)
def test_the_systems_of_the_field_are_trained(name):
    assert model_problems(ALL[name]) == []
