"""Every stage of ZeRO, replicas and their combination compute what one rank computes, whatever the units and however
often gradients are reduced; and each stage really holds what its name says."""
import dataclasses
import math

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

from jobs.mesh import local_of
from jobs.spec.counts import num_params
from jobs.spec.job import FaultSpec
from tests.helpers.ranks import run_ranks
from tests.helpers.training import (TINY, TRAINING, assert_matches_single_rank, build_model, job, layout,
                                    train_job)

pytestmark = pytest.mark.distributed

TIED = dataclasses.replace(TINY, tie_embeddings=True)
# FSDP gathers the embedding, which is used first, when a forward begins.
EMBEDDING = TINY.vocab_size * TINY.dim / num_params(TINY)
UNEVEN = dataclasses.replace(TINY, ffn_dim=70)  # rows that no shard count here divides

# what is special about the case → (layout, model)
FAST = {
    "replicas": (dict(dp_replicate=2), TINY),
    "ZeRO-1": (dict(dp_shard=2, zero_stage=1), TINY),
    "ZeRO-2": (dict(dp_shard=2, zero_stage=2), TINY),
    "ZeRO-3": (dict(dp_shard=2, zero_stage=3), TINY),
    "ZeRO-1, tied, uneven rows": (dict(dp_shard=3, zero_stage=1, microbatch_size=1),
                                  dataclasses.replace(UNEVEN, tie_embeddings=True)),
    "ZeRO-2, reduced every microbatch": (dict(dp_shard=2, zero_stage=2, reduce_every_microbatch=True), TINY),
    "ZeRO-3, reduced every microbatch": (dict(dp_shard=2, reduce_every_microbatch=True), TINY),
}
SLOW = {
    "replicas, tied": (dict(dp_replicate=2), TIED),
    "replicas, units of three layers": (dict(dp_replicate=2, layers_per_unit=3), TINY),
    "ZeRO-1, units of two layers": (dict(dp_shard=2, zero_stage=1, layers_per_unit=2), TINY),
    "ZeRO-2, units of two layers": (dict(dp_shard=2, zero_stage=2, layers_per_unit=2), TINY),
    "ZeRO-3, units of three layers": (dict(dp_shard=2, zero_stage=3, layers_per_unit=3), TINY),
    "ZeRO-3, one unit of all layers, tied": (dict(dp_shard=2, zero_stage=3, layers_per_unit=4), TIED),
    "ZeRO-3, units of two layers, recompute full": (dict(dp_shard=2, layers_per_unit=2, recompute="full"), TINY),
    "ZeRO-2, reduced every microbatch, tied, uneven rows": (dict(
        dp_shard=3, zero_stage=2, microbatch_size=1, reduce_every_microbatch=True),
        dataclasses.replace(UNEVEN, tie_embeddings=True)),
    "ZeRO-1 and replicas": (dict(dp_shard=2, dp_replicate=2, zero_stage=1), TINY),
    "ZeRO-2 and replicas": (dict(dp_shard=2, dp_replicate=2, zero_stage=2), TINY),
    "ZeRO-3 and replicas": (dict(dp_shard=2, dp_replicate=2, zero_stage=3), TINY),
    "ZeRO-2 and replicas, reduced every microbatch": (dict(dp_shard=2, dp_replicate=2, zero_stage=2, microbatch_size=1,
                                                           reduce_every_microbatch=True), TINY),
    "ZeRO-2 and tp, reduced every microbatch": (dict(dp_shard=2, tp=2, zero_stage=2, reduce_every_microbatch=True),
                                                TINY),
    "ZeRO-3 and replicas, reduced every microbatch": (dict(dp_shard=2, dp_replicate=2, microbatch_size=1,
                                                           reduce_every_microbatch=True), TINY),
    "ZeRO-1, one microbatch": (dict(dp_shard=2, zero_stage=1, microbatch_size=4), TINY),
    "ZeRO-1 over a rank without rows": (dict(dp_shard=4, zero_stage=1, microbatch_size=1),
                                        dataclasses.replace(TINY, dim=9, head_dim=8)),
    "ZeRO-1 and tp": (dict(dp_shard=2, tp=2, zero_stage=1), TINY),
    "ZeRO-1 and tp, uneven rows": (dict(dp_shard=2, tp=2, zero_stage=1),
                                   dataclasses.replace(TINY, ffn_dim=66, dim=36, head_dim=8)),
    "ZeRO-1, replicas and tp, tied": (dict(dp_shard=2, dp_replicate=2, tp=2, zero_stage=1), TIED),
    "ZeRO-1 and pp, tied": (dict(dp_shard=2, pp=2, zero_stage=1), TIED),
    "ZeRO-1, pp and tp, tied": (dict(dp_shard=2, pp=2, tp=2, zero_stage=1), TIED),
    "ZeRO-2 and pp, reduced every microbatch": (dict(dp_shard=2, pp=2, zero_stage=2, reduce_every_microbatch=True),
                                                TINY),
    "ZeRO-3 and pp, reduced every microbatch": (dict(dp_shard=2, pp=2, reduce_every_microbatch=True), TINY),
    "ZeRO-2 and interleaved pp, reduced every microbatch": (dict(
        dp_shard=2, pp=2, schedule="interleaved_1f1b", virtual_stages=2, zero_stage=2, reduce_every_microbatch=True),
        TIED),
    "ZeRO-2 and zero-bubble pp, recompute full, reduced every microbatch": (dict(
        dp_shard=2, pp=2, schedule="interleaved_zero_bubble", virtual_stages=2, zero_stage=2, recompute="full",
        reduce_every_microbatch=True), TINY),
    "ZeRO-3 and interleaved pp, reduced every microbatch": (dict(
        dp_shard=2, pp=2, schedule="interleaved_1f1b", virtual_stages=2, reduce_every_microbatch=True), TINY),
    "ZeRO-2 and zero-bubble pp, reduced every microbatch": (dict(
        dp_shard=2, pp=2, schedule="zbv", virtual_stages=2, zero_stage=2, reduce_every_microbatch=True), TIED),
    "ZeRO-3, units of two layers and pp": (dict(dp_shard=2, pp=2, layers_per_unit=2), TINY),
    "replicas and pp, tied": (dict(dp_replicate=2, pp=2), TIED),
}


@pytest.mark.parametrize("case", FAST)
def test_zero_matches_single_rank(case, tmp_path):
    arguments, model = FAST[case]
    assert_matches_single_rank(tmp_path, layout(model=model, **arguments), model=model)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_zero_combined_matches_single_rank(case, tmp_path):
    arguments, model = SLOW[case]
    assert_matches_single_rank(tmp_path, layout(model=model, **arguments), model=model)


# ------------------------------------------------------------------ what each stage holds
def held_elements(spec) -> dict[str, int]:
    """Elements of this rank: weights and gradients when the second microbatch begins, and what the optimizer
    updates."""
    parallel = build_model(spec)
    model, seen = parallel.model_parts[0], []
    model.embedding.register_forward_pre_hook(lambda *_: seen.append(now(parallel, model)))
    tokens = torch.zeros(spec.layout.microbatch_size * spec.layout.num_microbatches, TRAINING.seq_len,
                         dtype=torch.int64)
    parallel.forward_backward(tokens, tokens)
    return seen[1] | {"updated": sum(local_of(p).numel() for p in parallel.parameters.values())}


def now(parallel, model) -> dict[str, int]:
    weights = sum(local_of(p).numel() for p in model.parameters())
    gradients = held_bytes(parallel) // 4
    if isinstance(model, FSDPModule):  # weights that are gathered, and whole gradients, are not parameters
        groups = [group for state in fully_shard.state(model)._state_ctx.all_states
                  for group in state._fsdp_param_groups]
        whole = [p for group in groups for p in group.fsdp_params]
        gathered = [p for group in groups if group.is_unsharded for p in group.fsdp_params]
        sharded = sum(p._sharded_param_data.numel() for p in whole)
        weights = sharded + sum(p._unsharded_param.numel() for p in gathered)
        gradients = sum(local_of(p.sharded_param.grad).numel() for p in whole if p.sharded_param.grad is not None)
        gradients += sum(p._unsharded_param.numel() for p in whole if hasattr(p, "_unsharded_param")
                         and (p.unsharded_accumulated_grad is not None or p._unsharded_param.grad is not None))
    return {"weights": weights, "gradients": gradients}


# As parts of the whole model, between the first and the second microbatch: weights (float32 shards and what is
# gathered), gradients, and what the optimizer updates.
HELD = {
    "replicas": (dict(dp_replicate=2), 1.0, 1.0, 1.0),
    "ZeRO-1": (dict(dp_shard=2, zero_stage=1), 1.0, 1.0, 0.5),
    "ZeRO-2": (dict(dp_shard=2, zero_stage=2), 1.0, 1.0, 0.5),
    "ZeRO-3": (dict(dp_shard=2), 0.5 + EMBEDDING, 1.0, 0.5),
    "ZeRO-2, reduced every microbatch": (dict(dp_shard=2, zero_stage=2, reduce_every_microbatch=True), 1.0, 0.5, 0.5),
    "ZeRO-3, reduced every microbatch": (dict(dp_shard=2, reduce_every_microbatch=True), 0.5 + EMBEDDING, 0.5, 0.5),
}


@pytest.mark.parametrize("case", HELD)
def test_each_stage_holds_what_it_says(case, tmp_path):
    arguments, weights, gradients, updated = HELD[case]
    total = num_params(TINY)
    for held in run_ranks(held_elements, world_size=2, args=(job(tmp_path, layout(**arguments)),)):
        assert held == {"weights": weights * total, "gradients": gradients * total, "updated": updated * total}


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [1, 2])
def test_whole_gradients_are_there_once(zero, param_dtype, tmp_path):
    """At every moment of the backward passes: the message in which they will be reduced is their sum."""
    training = dataclasses.replace(TRAINING, param_dtype=param_dtype)
    spec = job(tmp_path, layout(dp_shard=2, layers_per_unit=TINY.num_layers, zero_stage=zero), training=training)
    for found in run_ranks(gradient_bytes_amid_backward, world_size=2, args=(spec,)):
        assert found == pytest.approx(4 * num_params(TINY), rel=0.01)


def gradient_bytes_amid_backward(spec) -> int:
    """The most that this rank holds when a weight's gradient has arrived."""
    parallel = build_model(spec)
    model, found = parallel.model_parts[0], []
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda _: found.append(held_bytes(parallel)))
    tokens = torch.zeros(spec.layout.microbatch_size * spec.layout.num_microbatches, TRAINING.seq_len,
                         dtype=torch.int64)
    parallel.forward_backward(tokens, tokens)
    return max(found)


def held_bytes(parallel) -> int:
    """Of gradients that weights and buckets hold, which may have their storage in common."""
    held = [local_of(p.grad) for p in parallel.model_parts[0].parameters() if p.grad is not None]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in
                held + (parallel.buckets.held_gradients() if parallel.buckets is not None else [])}
    return sum(storage.nbytes() for storage in storages.values())


DAMAGED = {
    "replicas with masters": (dict(dp_replicate=2), "bfloat16"),
    "ZeRO-1": (dict(dp_shard=2, zero_stage=1), "float32"),
    "ZeRO-2, reduced every microbatch": (dict(dp_shard=2, zero_stage=2, reduce_every_microbatch=True), "float32"),
    "ZeRO-3": (dict(dp_shard=2), "float32"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_one_ranks_broken_numbers_reach_the_loss(case, tmp_path):
    """And nothing else happens: that rank starts no collective of its own."""
    arguments, param_dtype = DAMAGED[case]
    spec = job(tmp_path, layout(**arguments), training=dataclasses.replace(TRAINING, param_dtype=param_dtype))
    losses = train_job(dataclasses.replace(spec, faults=(FaultSpec(attempt=1, step=3, rank=1, kind="nan"),))).losses
    assert [math.isnan(loss) for loss in losses] == [False, False, True, True, True]
