"""Every kind of decoder computes in every kind of layout what it computes on one rank: losses to 1e-5, gradient norms
to 1e-4, final parameters, over five steps in float32. Experts over ranks of their own: test_experts.py."""
import dataclasses

import pytest
import torch

from tests.helpers.models import DEEPSEEK3, GEMMA2, GPT, LLAMA3, MIXTURE
from tests.helpers.ranks import run_ranks
from tests.helpers.training import (LOSS_TOLERANCE, TINY, TRAINING, assert_matches_single_rank, build_model, job,
                                    layout, train_job)

pytestmark = pytest.mark.distributed

IZB = dict(schedule="interleaved_zero_bubble", virtual_stages=2, zero_stage=2)
ZBV = dict(schedule="zbv", virtual_stages=2, zero_stage=2)
QK_NORM = dataclasses.replace(TINY, qk_norm=True)
LATENT = dataclasses.replace(DEEPSEEK3, name="latent", moe=None)
UNCOMPRESSED = dataclasses.replace(LATENT, mla=dataclasses.replace(DEEPSEEK3.mla, q_lora_rank=None))
SURPLUS = dataclasses.replace(TRAINING, global_batch_size=7)

# what is special about the case → (layout, model)
FAST = {
    "GPT: dropout and biases under sequence parallelism": (dict(tp=2, microbatch_size=1), GPT),
    "GPT: dropout is told which sequences a later stage has": (dict(pp=2), GPT),
    "GPT: dropped weights are the same in every chunk of cp": (dict(cp=2), GPT),
    "GPT: dropout, whole tokens on both tp ranks": (dict(tp=2, sequence_parallel=False), GPT),
    "GPT: dropout drops the same when recomputed": (dict(recompute="full"), GPT),
    "Gemma 2: ZeRO-3 × tp": (dict(dp_shard=2, tp=2), GEMMA2),
    "MLA: latents gathered over tp": (dict(tp=2), LATENT),
    "norms of the rank's own heads, without sequence parallelism": (dict(tp=2, sequence_parallel=False), QK_NORM),
    "mixture: counts of a sequence that tp ranks share": (dict(tp=2, microbatch_size=1), MIXTURE),
}
SLOW = {
    "GPT: microbatches of one": (dict(microbatch_size=1), GPT),
    "GPT: two sequences over four tp ranks": (dict(tp=4, microbatch_size=2), GPT),
    "GPT: whole sequences on each tp rank": (dict(tp=2), GPT),
    "mixture: whole sequences on each tp rank": (dict(tp=2), MIXTURE),
    "mixture: sequences on cp and tp ranks": (dict(cp=2, tp=2, microbatch_size=1), MIXTURE),
    "GPT: dropout over replicas": (dict(dp_replicate=2), GPT),
    "GPT: dropout over shards, ZeRO-1": (dict(dp_shard=2, zero_stage=1), GPT),
    "GPT: recompute selective, tp": (dict(tp=2, recompute="selective"), GPT),
    "GPT: recompute full, no sequence parallelism": (dict(tp=2, sequence_parallel=False, recompute="full"), GPT),
    "GPT: Megatron's tp × pp × dp": (dict(tp=2, pp=2, dp_replicate=2, microbatch_size=1), GPT),
    "GPT: Megatron's interleaved stages": (dict(tp=2, pp=2, schedule="interleaved_1f1b", virtual_stages=2), GPT),
    "GPT: backward in two halves": (dict(pp=2, **IZB), GPT),
    "GPT: in a V, tied, recomputed": (dict(pp=2, recompute="full", **ZBV), GPT),
    "GPT: positions and dropout follow the chunks of cp and tp": (dict(cp=2, tp=2), GPT),
    "Llama 3: the four axes of its run, in pairs: tp × cp": (dict(tp=2, cp=2), LLAMA3),
    "Llama 3: pp × dp_shard": (dict(pp=2, dp_shard=2), LLAMA3),
    "Llama 3: tp × pp × dp_shard": (dict(tp=2, pp=2, dp_shard=2), LLAMA3),
    "Gemma 2: tp": (dict(tp=2), GEMMA2),
    "Gemma 2: no sequence parallelism": (dict(tp=2, sequence_parallel=False), GEMMA2),
    "Gemma 2: pp": (dict(pp=2), GEMMA2),
    "Gemma 2: windows and caps over cp": (dict(cp=2), GEMMA2),
    "Gemma 2: recompute selective": (dict(dp_shard=2, tp=2, recompute="selective"), GEMMA2),
    "MLA: without sequence parallelism": (dict(tp=2, sequence_parallel=False), LATENT),
    "MLA: queries not compressed": (dict(tp=2), UNCOMPRESSED),
    "MLA: queries not compressed, no sequence parallelism": (dict(tp=2, sequence_parallel=False), UNCOMPRESSED),
    "MLA: tp × dp_shard, recompute": (dict(tp=2, dp_shard=2, recompute="full"), LATENT),
    "MLA: keys and values of different sizes over cp": (dict(cp=2), LATENT),
    "MLA: the same, gathered": (dict(cp=2, cp_method="allgather"), LATENT),
    "MLA: cp × tp": (dict(cp=2, tp=2), LATENT),
    "MLA: cp × tp, gathered, no sequence parallelism": (dict(cp=2, tp=2, cp_method="allgather",
                                                             sequence_parallel=False), LATENT),
    "MLA: cp4, recompute full": (dict(cp=4, recompute="full"), LATENT),
    "DeepSeek-V3 over cp": (dict(cp=2), DEEPSEEK3),
    "GPT: dropout over chunks of cp, gathered": (dict(cp=2, cp_method="allgather"), GPT),
    "GPT: dropout, cp × dp_shard, recompute selective": (dict(cp=2, dp_shard=2, recompute="selective"), GPT),
    "GPT: dropout, cp × pp": (dict(cp=2, pp=2), GPT),
    "MLA: backward in two halves": (dict(pp=2, **IZB), LATENT),
    "norms of heads, tp × dp_shard": (dict(tp=2, dp_shard=2), QK_NORM),
}


@pytest.mark.parametrize("case", FAST)
def test_model_matches_single_rank(case, tmp_path):
    arguments, model = FAST[case]
    assert_matches_single_rank(tmp_path, layout(model=model, **arguments), model=model)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_every_model_matches_single_rank(case, tmp_path):
    arguments, model = SLOW[case]
    assert_matches_single_rank(tmp_path, layout(model=model, **arguments), model=model)


def test_dropout_with_empty_slots_matches_single_rank(tmp_path):
    where = layout(dp_shard=2, model=GPT, global_batch_size=SURPLUS.global_batch_size)
    assert_matches_single_rank(tmp_path, where, model=GPT, training=SURPLUS)


def test_dropout_changes_the_curve_and_from_step_to_step(tmp_path):
    """Else the parity above would be of nothing."""
    dropped = train_job(job(tmp_path, layout(model=GPT), model=GPT))
    for changes in (dict(dropout=0.0), dict(attention_dropout=0.0)):
        without = train_job(job(tmp_path, layout(model=GPT), model=dataclasses.replace(GPT, **changes)))
        differences = [abs(a - b) for a, b in zip(dropped.losses, without.losses)]
        assert min(differences) > LOSS_TOLERANCE and max(differences) > 100 * LOSS_TOLERANCE, (changes, differences)


def step_losses(spec) -> list[float]:
    """Of the same batch and weights at steps 1, 1 and 2."""
    parallel = build_model(spec)
    batch = torch.arange(8 * 16).view(8, 16) % 256
    return [parallel.forward_backward(batch, batch, step=step).item() for step in (1, 1, 2)]


def test_dropout_is_a_function_of_the_step(tmp_path):
    first, again, other = run_ranks(step_losses, world_size=1, args=(job(tmp_path, layout(model=GPT), model=GPT),))[0]
    assert first == again and abs(first - other) > 1e-4


@pytest.mark.parametrize("model, arguments", [(GPT, dict(tp=2)), (DEEPSEEK3, dict(dp_shard=2, ep=2)),
                                              (GEMMA2, dict(tp=2, dp_shard=2))], ids=["GPT", "DeepSeek-V3", "Gemma 2"])
def test_runs_are_deterministic_bit_for_bit(model, arguments, tmp_path):
    runs = [train_job(job(tmp_path, layout(model=model, **arguments), model=model)) for _ in range(2)]
    assert runs[0].losses == runs[1].losses
    assert runs[0].grad_norms == runs[1].grad_norms
