"""What the planner says an own model sends and holds is what its ranks send and hold: bytes of each operation in a real
step to 2%, peak memory as `orc verify` counts it to 10%."""
import collections
import dataclasses
from pathlib import Path

import pytest
import torch

from jobs.mesh import build_mesh, local_of
from jobs.own import parallelize_own
from jobs.own.measure import measure
from jobs.spec.own_model import OwnModel
from jobs.spec.parallel import Layout, split_layers
from jobs.verify import verify
from jobs.verify.collectives import CollectiveLog
from orchestrator.planner.own_cost import price, stage_transfers
from orchestrator.planner.own_memory import OwnQuestion, stage_memory
from tests.helpers.communication import sent
from tests.helpers.fake import in_child
from tests.helpers.planning import cpu
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TRAINING, job, layout

pytestmark = pytest.mark.distributed

MODEL = OwnModel(name="mixer", entrypoint="configs.examples.mixer:build", vocab_size=256,
                 arguments={"dim": 32, "depth": 4, "head_dim": 8})
TIED = OwnModel(name="tied", entrypoint="tests.helpers.own_models:tied", vocab_size=256)  # and with dropout
CASES = {
    "tp2": dict(tp=2),
    "tp2 without sequence parallelism": dict(tp=2, sequence_parallel=False),
    "dp_shard2": dict(dp_shard=2),
    "dp_shard2 × dp_replicate2, ZeRO-1": dict(dp_shard=2, dp_replicate=2, zero_stage=1),
    "pp2": dict(pp=2),
}
SLOW = {
    "tp2, recompute full": dict(tp=2, recompute="full"),
    "tp2, recompute selective": dict(tp=2, recompute="selective"),
    "dp_shard2, ZeRO-2": dict(dp_shard=2, zero_stage=2),
    "dp_replicate2 × dp_shard2": dict(dp_replicate=2, dp_shard=2),
    "dp_shard2, units of two blocks": dict(dp_shard=2, layers_per_unit=2),
    "pp2 × dp_shard2": dict(pp=2, dp_shard=2),
    "tp2 × dp_shard2": dict(tp=2, dp_shard=2),
    "tp2 × pp2, recompute full, whole sequences": dict(tp=2, pp=2, recompute="full", sequence_parallel=False),
}


TIES = {
    "dp_shard2": dict(dp_shard=2),
    "pp2 × dp_shard2": dict(pp=2, dp_shard=2),
    "tp2": dict(tp=2, sequence_parallel=False),
    "pp2 in a V": dict(pp=2, schedule="zbv", virtual_stages=2, zero_stage=2),
}


def communicate(where: Layout, model: OwnModel) -> tuple[dict[str, float], int]:
    """Bytes that this rank sends in its second step, by operation; and parameters that it holds."""
    device = torch.device("cpu")
    mesh = build_mesh(where.dims, device=device)
    parallel = parallelize_own(model, mesh=mesh, layout=where, training=TRAINING, device=device)
    tokens = torch.zeros(where.microbatch_size * where.num_microbatches, TRAINING.seq_len, dtype=torch.int64)
    parallel.forward_backward(tokens, tokens)
    parallel.refresh_weights()
    with CollectiveLog() as log:
        parallel.forward_backward(tokens, tokens)
        parallel.refresh_weights()
    found: collections.Counter[str] = collections.Counter()
    for (op, size), times in sent(log.collectives()).items():
        found[op] += size * times
    return dict(found), sum(local_of(p).numel() for p in parallel.parameters.values())


def check(fields: dict, model: OwnModel = MODEL) -> None:
    where = layout(layers_per_stage=split_layers(4, fields.get("pp", 1) * fields.get("virtual_stages", 1)), **fields)
    profile = in_child(measure, model, seq_len=TRAINING.seq_len, degrees=(1, where.dims.tp))
    question = OwnQuestion(model=model, profile=profile, training=TRAINING, headroom=0.1,
                           cluster=cpu(where.dims.world_size))
    assert price(question, where).predicted.step_time_s > 0
    ranks = run_ranks(communicate, world_size=where.dims.world_size, args=(where, model))
    for rank, (seen, params) in enumerate(ranks):
        pp_rank = where.dims.coordinate(rank)["pp"]
        planned: collections.Counter[str] = collections.Counter()
        for transfer in (one for stage in where.stages(pp_rank) for one in stage_transfers(question, where, stage)):
            planned[transfer.op] += transfer.payload_bytes * transfer.times
        assert seen == pytest.approx(dict(planned), rel=0.02), f"rank {rank}"
        assert 4 * params == pytest.approx(stage_memory(question, where, pp_rank).parameters_bytes, rel=0.02)


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_what_is_planned_is_sent(fields: dict) -> None:
    check(fields)


@pytest.mark.parametrize("fields", TIES.values(), ids=TIES)
def test_what_is_planned_for_a_matrix_at_both_ends_is_sent_and_held(fields: dict) -> None:
    check(fields, TIED)


@pytest.mark.slow
@pytest.mark.parametrize("fields", SLOW.values(), ids=SLOW)
def test_what_is_planned_is_sent_elsewhere(fields: dict) -> None:
    check(fields)


# Larger than the others, so that activations and weights are what counts. Selective recompute keeps less than planned.
WIDE = dataclasses.replace(MODEL, arguments={"dim": 256, "depth": 6, "head_dim": 32})
LONG = dataclasses.replace(TRAINING, seq_len=256, global_batch_size=16)
MEMORY = {
    "one rank": dict(),
    "dp_shard4, ZeRO-1": dict(dp_shard=4, zero_stage=1),
    "dp_shard4, ZeRO-3": dict(dp_shard=4),
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "tp2 × pp2 × dp_shard2": dict(tp=2, pp=2, dp_shard=2),
    "dp_shard2, recompute full": dict(dp_shard=2, recompute="full"),
    "dp_shard2, recompute selective": dict(dp_shard=2, recompute="selective"),
}


DROPPING = dataclasses.replace(TIED, arguments={"dim": 256, "depth": 6})
HELD = {**{name: (WIDE, fields) for name, fields in MEMORY.items()},
        "dropout and a tied matrix, one rank": (DROPPING, dict()),
        "dropout and a tied matrix, tp2 × pp2": (DROPPING, dict(tp=2, pp=2, sequence_parallel=False))}


@pytest.mark.parametrize("model, fields", HELD.values(), ids=HELD)
def test_what_is_planned_is_held(tmp_path: Path, model: OwnModel, fields: dict) -> None:
    where = layout(layers_per_stage=split_layers(6, fields.get("pp", 1)), global_batch_size=16, **fields)
    question = OwnQuestion(model=model, training=LONG, cluster=cpu(where.dims.world_size), headroom=0.1,
                           profile=in_child(measure, model, seq_len=LONG.seq_len, degrees=(1, where.dims.tp)))
    spec = job(tmp_path, where, model=model, training=LONG)
    for rank in {0, where.dims.world_size - 1}:
        held = in_child(verify, spec, rank=rank)
        planned = stage_memory(question, where, where.dims.coordinate(rank)["pp"])
        assert planned.total_bytes == pytest.approx(held.total_bytes, rel=0.10), held.peak_bytes
