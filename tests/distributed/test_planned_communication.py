"""The planner's list of transfers is what the trainer really sends: counted in a real step, per operation."""
import collections
import dataclasses

import pytest
import torch

from jobs.mesh import build_mesh
from jobs.parallel import parallelize
from jobs.verify.collectives import CollectiveLog
from orchestrator.planner.communication import stage_transfers
from tests.helpers.communication import sent
from tests.helpers.planning import cpu
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, TRAINING, layout

pytestmark = pytest.mark.distributed

# degrees and the rest of the layout, and whether the embedding is tied
CASES = {
    "tp2": (dict(tp=2), False),
    "tp2 without sequence parallelism": (dict(tp=2, sequence_parallel=False), False),
    "tp2 recompute full": (dict(tp=2, recompute="full"), False),
    "tp2 recompute selective": (dict(tp=2, recompute="selective"), False),
    "tp2 recompute full without sequence parallelism": (dict(tp=2, recompute="full", sequence_parallel=False), False),
    "dp_shard2": (dict(dp_shard=2), False),
    "dp_shard2 without resharding": (dict(dp_shard=2, zero_stage=2), False),
    "dp_shard2 tied": (dict(dp_shard=2), True),
    "dp_replicate2": (dict(dp_replicate=2), False),
    "pp2": (dict(pp=2), False),
    "pp2 tied": (dict(pp=2), True),
    "pp2 × dp_shard2, microbatches of one": (dict(pp=2, dp_shard=2, microbatch_size=1), False),
    "dp_replicate2 × dp_shard2": (dict(dp_replicate=2, dp_shard=2), False),
    "tp2 × dp_shard2": (dict(tp=2, dp_shard=2), False),
    "ZeRO-1": (dict(dp_shard=2, zero_stage=1), False),
    "cp2": (dict(cp=2), False),
    "cp2, gathered keys": (dict(cp=2, cp_method="allgather"), False),
    "zbv, tied": (dict(pp=2, schedule="zbv", virtual_stages=2), True),
}
SLOW = {
    "ZeRO-1 × dp_replicate2": (dict(dp_shard=2, dp_replicate=2, zero_stage=1), False),
    "ZeRO-1 × tp2": (dict(dp_shard=2, tp=2, zero_stage=1), False),
    "units of two layers": (dict(dp_shard=2, layers_per_unit=2), False),
    "one unit of all layers, ZeRO-2": (dict(dp_shard=2, zero_stage=2, layers_per_unit=4), False),
    "replicas, units of two layers": (dict(dp_replicate=2, layers_per_unit=2), False),
    "ZeRO-3, reduced every microbatch": (dict(dp_shard=2, reduce_every_microbatch=True), False),
    "ZeRO-2, reduced every microbatch": (dict(dp_shard=2, zero_stage=2, reduce_every_microbatch=True), False),
    "ZeRO-3 × pp2, reduced every microbatch": (dict(dp_shard=2, pp=2, reduce_every_microbatch=True), False),
    "cp4": (dict(cp=4), False),
    "cp2, recompute full": (dict(cp=2, recompute="full"), False),
    "cp2, gathered keys, recompute selective": (dict(cp=2, cp_method="allgather", recompute="selective"), False),
    "cp2 × tp2": (dict(cp=2, tp=2), False),
    "cp2 × dp_shard2": (dict(cp=2, dp_shard=2), False),
    "cp2 × pp2": (dict(cp=2, pp=2), False),
    "gpipe × dp_shard2": (dict(pp=2, dp_shard=2, schedule="gpipe"), False),
    "interleaved × dp_shard2": (dict(pp=2, dp_shard=2, schedule="interleaved_1f1b", virtual_stages=2), False),
    "interleaved, tied": (dict(pp=2, schedule="interleaved_1f1b", virtual_stages=2), True),
    "zero bubble × ZeRO-2": (dict(pp=2, dp_shard=2, zero_stage=2, schedule="interleaved_zero_bubble",
                                  virtual_stages=2), False),
    "zbv × ZeRO-1": (dict(pp=2, dp_shard=2, zero_stage=1, schedule="zbv", virtual_stages=2), False),
    "dualpipev × ZeRO-2": (dict(pp=2, dp_shard=2, zero_stage=2, microbatch_size=1, schedule="dualpipev",
                                virtual_stages=2), False),
}


def communicate(where, model) -> dict[tuple[str, int], int]:
    """What this rank sends in its second step: the first one also sets things up."""
    device = torch.device("cpu")
    mesh = build_mesh(where.dims, device=device)
    parallel = parallelize(model, mesh=mesh, layout=where, training=TRAINING, device=device)
    rows = where.microbatch_size * where.num_microbatches
    tokens = torch.zeros(rows, TRAINING.seq_len // where.dims.cp, dtype=torch.int64)
    parallel.forward_backward(tokens, tokens)
    parallel.refresh_weights()
    with CollectiveLog() as log:
        parallel.forward_backward(tokens, tokens)
        parallel.refresh_weights()
    return sent(log.collectives())


def check(arguments: dict, tied: bool) -> None:
    model = dataclasses.replace(TINY, tie_embeddings=tied)
    where = layout(model=model, **arguments)
    measured = run_ranks(communicate, world_size=where.dims.world_size, args=(where, model))
    for rank, seen in enumerate(measured):
        stages = where.stages(where.dims.coordinate(rank)["pp"])
        planned: collections.Counter[tuple[str, int]] = collections.Counter()
        for stage in stages:
            for transfer in stage_transfers(model, where, training=TRAINING, cluster=cpu(1), stage=stage):
                planned[transfer.op, transfer.payload_bytes] += transfer.times
        assert seen == dict(planned), f"rank {rank}, stages {stages}"


@pytest.mark.parametrize("case", CASES)
def test_the_plan_lists_what_the_trainer_sends(case):
    check(*CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_the_plan_lists_what_combined_layouts_send(case):
    check(*SLOW[case])
