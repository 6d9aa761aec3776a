"""Every layout computes what one rank computes: losses to 1e-5, gradient norms to 1e-4 and final parameters, in float32
over five steps. The tolerances are the issue's and are never loosened to pass. Here: every axis alone, every pair and
triple of axes; schedules, ZeRO stages, context parallelism and experts have tables of their own beside this one."""
import dataclasses
import math

import pytest

from jobs.spec.training import OptimizerSpec
from tests.helpers.training import (LOSS_TOLERANCE, TINY, TRAINING, assert_matches_single_rank, final_parameters, job,
                                    layout, reference, train_job)

pytestmark = pytest.mark.distributed

TP_OUTERMOST = ("tp", "pp", "dp_replicate", "dp_shard", "cp")  # any order with dp_replicate outside dp_shard will do
CP_OUTERMOST = ("cp", "dp_replicate", "pp", "dp_shard", "tp")
TIED = dict(tie_embeddings=True)

# what is special about the case → (layout, changes of the model, changes of the training); the reference is the same
# model and training on one rank
FAST = {
    # one axis
    "tp2": (dict(tp=2), {}, {}),
    "pp2": (dict(pp=2), {}, {}),
    "dp_shard2": (dict(dp_shard=2), {}, {}),
    "dp_replicate2": (dict(dp_replicate=2), {}, {}),
    "cp2": (dict(cp=2), {}, {}),
    # no axis
    "microbatches of one": (dict(microbatch_size=1), {}, {}),
    "recompute full": (dict(recompute="full"), {}, {}),
    "recompute selective": (dict(recompute="selective"), {}, {}),
    # an axis and what it may trip over
    "tp2: whole sequences between layers": (dict(tp=2, sequence_parallel=False), {}, {}),
    "tp2: one embedding, split by vocabulary, at both ends": (dict(tp=2), TIED, {}),
    "pp2: one embedding on two stages": (dict(pp=2), TIED, {}),
    "dp_shard2: one embedding, in the unit that is not dropped": (dict(dp_shard=2), TIED, {}),
    "dp_shard3: rows that do not divide": (dict(dp_shard=3, microbatch_size=1), dict(ffn_dim=70), {}),
    "dp_shard4: a rank without rows of the norms": (dict(dp_shard=4, microbatch_size=1), dict(dim=9, head_dim=8), {}),
    "dp_shard2: surplus slots weigh nothing": (dict(dp_shard=2, microbatch_size=2, global_batch_size=7), {},
                                               dict(global_batch_size=7)),
    "tp2: z-loss and a surplus slot": (dict(tp=2, global_batch_size=7), {}, dict(global_batch_size=7, z_loss=0.1)),
    # the demo's three dimensions
    "tp2 × pp2 × dp_shard2": (dict(tp=2, pp=2, dp_shard=2), {}, {}),
}
SLOW = {
    "pp4: uneven stages": (dict(pp=4), dict(num_layers=6, **TIED), {}),
    "pp4: stages of the embedding alone and of the output alone": (dict(pp=4, layers_per_stage=(0, 3, 1, 0)), {}, {}),
    "tp2: recompute full": (dict(tp=2, recompute="full"), {}, {}),
    "tp2: recompute selective": (dict(tp=2, recompute="selective"), {}, {}),
    "tp2: recompute selective, kept matmuls are not summed in place": (
        dict(tp=2, sequence_parallel=False, recompute="selective"), {}, {}),
    "dp_shard2: recompute full": (dict(dp_shard=2, recompute="full"), {}, {}),
    "dp_shard2: recompute selective": (dict(dp_shard=2, recompute="selective"), {}, {}),
    "pp2: recompute full": (dict(pp=2, recompute="full"), {}, {}),
    "pp2: recompute selective": (dict(pp=2, recompute="selective"), {}, {}),
    # pairs
    "dp_replicate2 × dp_shard2": (dict(dp_replicate=2, dp_shard=2), {}, {}),
    "dp_replicate2 × cp2": (dict(dp_replicate=2, cp=2), {}, {}),
    "dp_replicate2 × tp2": (dict(dp_replicate=2, tp=2, microbatch_size=1), {}, {}),
    "dp_replicate2 × pp2": (dict(dp_replicate=2, pp=2), {}, {}),
    "dp_shard2 × cp2": (dict(dp_shard=2, cp=2), {}, {}),
    "dp_shard2 × tp2": (dict(dp_shard=2, tp=2), {}, {}),
    "dp_shard2 × tp2: rows that do not divide": (dict(dp_shard=2, tp=2), dict(ffn_dim=66, dim=36, head_dim=8), {}),
    "dp_shard2 × pp2": (dict(dp_shard=2, pp=2), {}, {}),
    "cp2 × tp2": (dict(cp=2, tp=2), {}, {}),
    "cp2 × pp2": (dict(cp=2, pp=2), {}, {}),
    "tp2 × pp2": (dict(tp=2, pp=2), {}, {}),
    "tp2 × pp2: whole sequences between stages": (dict(tp=2, pp=2, sequence_parallel=False), {}, {}),
    # triples
    "dp_replicate2 × dp_shard2 × cp2": (dict(dp_replicate=2, dp_shard=2, cp=2), {}, {}),
    "dp_replicate2 × dp_shard2 × tp2": (dict(dp_replicate=2, dp_shard=2, tp=2), {}, {}),
    "dp_replicate2 × dp_shard2 × pp2": (dict(dp_replicate=2, dp_shard=2, pp=2, microbatch_size=1), {}, {}),
    "dp_replicate2 × cp2 × tp2": (dict(dp_replicate=2, cp=2, tp=2), {}, {}),
    "dp_replicate2 × cp2 × pp2": (dict(dp_replicate=2, cp=2, pp=2), {}, {}),
    "dp_replicate2 × tp2 × pp2": (dict(dp_replicate=2, tp=2, pp=2), {}, {}),
    "dp_shard2 × cp2 × tp2": (dict(dp_shard=2, cp=2, tp=2), {}, {}),
    "dp_shard2 × cp2 × pp2": (dict(dp_shard=2, cp=2, pp=2), {}, {}),
    "dp_shard2 × tp2 × pp2: one embedding": (dict(dp_shard=2, tp=2, pp=2), TIED, {}),
    "dp_shard2 × tp2 × pp2: tp outermost": (dict(dp_shard=2, tp=2, pp=2, order=TP_OUTERMOST), {}, {}),
    "dp_replicate2 × dp_shard2 × cp2: cp outermost": (dict(dp_replicate=2, dp_shard=2, cp=2, order=CP_OUTERMOST), {},
                                                      {}),
    "cp2 × tp2 × pp2": (dict(cp=2, tp=2, pp=2), {}, {}),
    "pp2: a surplus slot in the last microbatch": (dict(pp=2, global_batch_size=7), {}, dict(global_batch_size=7)),
    "cp2 × dp_replicate2, surplus slots": (dict(cp=2, dp_replicate=2, global_batch_size=5), {},
                                           dict(global_batch_size=5)),
    "dp_shard4 × tp2, surplus slots": (dict(dp_shard=4, tp=2, microbatch_size=1, global_batch_size=7), {},
                                       dict(global_batch_size=7)),
}


def check(case: tuple[dict, dict, dict], run_dir) -> None:
    arguments, model_changes, training_changes = case
    model = dataclasses.replace(TINY, **model_changes)
    assert_matches_single_rank(run_dir, layout(model=model, **arguments), model=model,
                               training=dataclasses.replace(TRAINING, **training_changes))


@pytest.mark.parametrize("case", FAST)
def test_layout_matches_single_rank(case, tmp_path):
    check(FAST[case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_combined_layout_matches_single_rank(case, tmp_path):
    check(SLOW[case], tmp_path)


def test_reference_learns_and_clips():
    """The comparison above would be empty if nothing were learned, or if clipping never acted."""
    single, _ = reference(TINY, TRAINING)
    assert len(single.losses) == TRAINING.steps
    assert single.losses[-1] < single.losses[0] - 0.1
    assert min(single.grad_norms) > TRAINING.optimizer.max_grad_norm


def test_a_wrong_seed_does_not_match():
    (other, theirs), (ours, mine) = reference(TINY, dataclasses.replace(TRAINING, seed=1)), reference(TINY, TRAINING)
    assert other.losses != pytest.approx(ours.losses, abs=LOSS_TOLERANCE, rel=0)
    assert all((theirs[name] - mine[name]).abs().max() > 1e-3 for name in mine)


DETERMINISTIC = {
    "one rank": dict(),
    "tp2 × dp_shard2": dict(tp=2, dp_shard=2),
    "replicas": dict(dp_replicate=2),
    "ZeRO-1": dict(dp_shard=2, zero_stage=1),
    "cp2": dict(cp=2),
    "a V": dict(pp=2, schedule="zbv", virtual_stages=2),
}


@pytest.mark.parametrize("case", DETERMINISTIC)
def test_runs_are_deterministic_bit_for_bit(case, tmp_path):
    spec = job(tmp_path, layout(**DETERMINISTIC[case]))
    (first, before), (second, after) = [(train_job(spec), final_parameters(spec)) for _ in range(2)]
    assert first.losses == second.losses
    assert first.grad_norms == second.grad_norms
    assert all(before[name].equal(after[name]) for name in before)


def test_the_z_loss_counts(tmp_path):
    plain, with_z = (reference(TINY, dataclasses.replace(TRAINING, z_loss=z))[0].losses for z in (0.0, 0.1))
    # of logits near zero the normaliser is the size of the vocabulary
    assert with_z[0] - plain[0] == pytest.approx(0.1 * math.log(TINY.vocab_size)**2, rel=0.1)
    assert with_z[-1] - plain[-1] < 0.9 * (with_z[0] - plain[0])  # and it is trained down


def test_every_optimizer_setting_reaches_the_update(tmp_path):
    base = reference(TINY, TRAINING)[0].losses
    for change in (dict(lr=2e-2), dict(warmup_steps=0), dict(weight_decay=0.0), dict(max_grad_norm=1e9),
                   dict(beta1=0.5), dict(beta2=0.5), dict(min_lr_ratio=0.9), dict(eps=1e-2), dict(lr_schedule="wsd"),
                   dict(lr_schedule="wsd", decay_fraction=0.5)):
        optimizer = dataclasses.replace(TRAINING.optimizer, **change)
        assert isinstance(optimizer, OptimizerSpec)
        found = reference(TINY, dataclasses.replace(TRAINING, optimizer=optimizer))[0].losses
        assert max(abs(a - b) for a, b in zip(found, base)) > 1e-6, change
