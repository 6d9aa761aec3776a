"""bfloat16 forward and backward with float32 master weights, in every kind of layout: close to float32, and
the same in all layouts within bfloat16's resolution."""
import dataclasses
import functools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from jobs.verify.collectives import CollectiveLog
from tests.helpers.communication import sent
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, TRAINING, Outcome, build_model, job, layout, train_job

pytestmark = pytest.mark.distributed

RESOLUTION = 2.0**-8  # of bfloat16, relative
MANY = 64  # microbatches
BF16 = dataclasses.replace(TRAINING, param_dtype="bfloat16")
TIED = dataclasses.replace(TINY, tie_embeddings=True)

CASES = {
    "one rank": dict(),
    "tp2": dict(tp=2),
    "dp_replicate2": dict(dp_replicate=2),
    "tp2 × dp_shard2": dict(tp=2, dp_shard=2),
    "pp2": dict(pp=2),
    "ZeRO-1": dict(dp_shard=2, zero_stage=1),
    "ZeRO-1 in a V, whose weight gradients go round autograd's hooks": dict(dp_shard=2, pp=2, zero_stage=1,
                                                                            schedule="zbv", virtual_stages=2),
    "cp2": dict(cp=2),
    "cp2, gathered keys": dict(cp=2, cp_method="allgather"),
    "pp2 × tp2 without sequence parallelism": dict(pp=2, tp=2, sequence_parallel=False),
}


@functools.cache
def float32() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return train_job(job(Path(folder), layout(), model=TIED))


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_follows_float32(case, tmp_path):
    found = train_job(job(tmp_path, layout(**CASES[case]), model=TIED, training=BF16))
    assert found.losses == pytest.approx(float32().losses, rel=2 * RESOLUTION)
    assert found.losses != pytest.approx(float32().losses, rel=1e-6)  # it is not float32 after all


def dtypes(spec) -> tuple[set, set]:
    """Of parameters and of gradients after a backward pass."""
    parallel = build_model(spec)
    batch = torch.randint(0, 256, (spec.training.global_batch_size, spec.training.seq_len))
    parallel.forward_backward(batch, batch)
    parameters = list(parallel.parameters.values())
    return {str(p.dtype) for p in parameters}, {str(grad.dtype) for grad in parallel.gradients.values()}


SHARDED = {
    "replicas": dict(dp_replicate=2),
    "ZeRO-1": dict(dp_shard=2, zero_stage=1),
    "ZeRO-2": dict(dp_shard=2, zero_stage=2),
    "ZeRO-3": dict(dp_shard=2),
    "ZeRO-3, reduced every microbatch": dict(dp_shard=2, reduce_every_microbatch=True),
    "ZeRO-1 and replicas": dict(dp_shard=2, dp_replicate=2, zero_stage=1),
    "ZeRO-3 and replicas": dict(dp_shard=2, dp_replicate=2),
}


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["one rank", *SHARDED])
def test_master_weights_and_their_gradients_are_float32(case, reduce_dtype, tmp_path):
    training = dataclasses.replace(BF16, reduce_dtype=reduce_dtype)
    spec = job(tmp_path, layout(**SHARDED.get(case, {})), training=training)
    found = run_ranks(dtypes, world_size=spec.world_size, args=(spec,))
    assert found == [({"torch.float32"}, {"torch.float32"})] * spec.world_size


def reduced_bytes(spec) -> int:
    """What is sent for the sums of gradients in one step."""
    parallel = build_model(spec)
    batch = torch.zeros(spec.layout.microbatch_size * spec.layout.num_microbatches, 16, dtype=torch.int64)
    with CollectiveLog() as log:
        parallel.forward_backward(batch, batch)
    return sum(size * times for (op, size), times in sent(log.collectives()).items()
               if op in ("all_reduce", "reduce_scatter"))


@pytest.mark.parametrize("case", SHARDED)
def test_gradients_are_reduced_in_the_precision_that_is_asked_for(case, tmp_path):
    spec = job(tmp_path, layout(**SHARDED[case]), model=TIED)
    half = dataclasses.replace(spec, training=dataclasses.replace(TRAINING, reduce_dtype="bfloat16"))
    wide, narrow = (run_ranks(reduced_bytes, world_size=spec.world_size, args=(one,))[0] for one in (spec, half))
    assert wide == 2 * narrow > 0
    found = train_job(half).losses
    assert found == pytest.approx(float32().losses, rel=RESOLUTION)
    assert found != pytest.approx(float32().losses, rel=1e-6)


def largest_sum_error(spec) -> float:
    """Between the gradient of many microbatches of one sequence and that of one microbatch of all of this rank's."""
    share = MANY // spec.layout.dims.dp
    batch = torch.randint(0, 256, (MANY, spec.training.seq_len), generator=torch.Generator().manual_seed(0))
    mine = batch[dist.get_rank() * share:][:share]
    grads = []
    for size in (1, share):
        where = dataclasses.replace(spec.layout, microbatch_size=size, num_microbatches=share // size)
        parallel = build_model(dataclasses.replace(spec, layout=where))
        parallel.forward_backward(mine, mine)
        grads.append(dict(parallel.gradients))
    errors = [(grads[0][name] - g).norm() / g.norm() for name, g in grads[1].items()]
    return max(errors).item()


@pytest.mark.parametrize("case", ["one rank", *SHARDED])
def test_microbatches_are_summed_in_float32(case, tmp_path):
    """Each addend is rounded once; were the sum rounded with each of them, it would be three times as far off."""
    training = dataclasses.replace(BF16, global_batch_size=MANY)
    spec = job(tmp_path, layout(global_batch_size=MANY, **SHARDED.get(case, {})), training=training)
    assert max(run_ranks(largest_sum_error, world_size=spec.world_size, args=(spec,))) < RESOLUTION
