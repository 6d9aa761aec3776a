"""The planner's list of transfers is what the trainer sends for experts and for latent attention, in a real step.

Payloads of all_to_all depend on the routing, so of those only the number is compared.
"""
import collections
import dataclasses

import pytest

from jobs.spec.model import MlaSpec, ModelSpec, MoeSpec
from orchestrator.planner.communication import stage_transfers
from tests.distributed.test_planned_communication import communicate
from tests.helpers.planning import cpu
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, TRAINING, layout

pytestmark = pytest.mark.distributed

MOE = MoeSpec(num_experts=4, top_k=2, ffn_dim=32, first_layer=1)
SHARED = dataclasses.replace(MOE, num_shared_experts=1, balance="bias")
LATENT = {"num_kv_heads": TINY.num_heads, "mla": MlaSpec(kv_lora_rank=16, q_lora_rank=8, qk_nope_head_dim=8,
                                                         qk_rope_head_dim=4, v_head_dim=8)}

# degrees and the rest of the layout, and options of the model
CASES = {
    "ep2 in dp_shard2": (dict(dp_shard=2, ep=2), {"moe": MOE}),
    "ep2 in tp2, shared expert, bias": (dict(tp=2, ep=2), {"moe": SHARED}),
    "latent attention, tp2": (dict(tp=2), LATENT),
    "dropout behind the feed-forward, recompute selective": (dict(tp=2, recompute="selective"), {"dropout": 0.1}),
    "tied ends and learned positions are one unit": (
        dict(dp_replicate=2), {"tie_embeddings": True, "positions": "learned", "max_positions": TRAINING.seq_len}),
}
SLOW = {
    "dense and expert layers share a unit": (dict(dp_shard=2, tp=2, ep=2, layers_per_unit=2), {"moe": MOE}),
    "experts shared over tp where nothing else is": (dict(tp=2), {"moe": MOE}),  # whole weights, whatever zero_stage
    "experts not spread": (dict(dp_shard=2), {"moe": SHARED}),
    "ep2 in dp_shard2 × tp2": (dict(dp_shard=2, tp=2, ep=2), {"moe": MOE}),
    "ep4 in dp_shard2 × tp2": (dict(dp_shard=2, tp=2, ep=4), {"moe": SHARED}),
    "ep2, recompute full": (dict(dp_shard=2, ep=2, recompute="full"), {"moe": MOE}),
    "norms behind the feed-forward, recompute full": (dict(tp=2, recompute="full"), {"post_norms": True}),
    "experts without a shared one, ep2 in tp2, recompute full": (dict(tp=2, ep=2, recompute="full"), {"moe": MOE}),
    "shared expert, ep2 in tp2, recompute selective": (dict(tp=2, ep=2, recompute="selective"), {"moe": SHARED}),
    "ep2 × pp2": (dict(dp_shard=2, ep=2, pp=2), {"moe": MOE}),
    "latent attention, tp2 × dp_shard2": (dict(tp=2, dp_shard=2), LATENT),
    "latent attention, whole queries, tp2": (
        dict(tp=2), LATENT | {"mla": dataclasses.replace(LATENT["mla"], q_lora_rank=None)}),
    "latent attention and experts": (dict(dp_shard=2, tp=2, ep=4), LATENT | {"moe": SHARED}),
}


def check(arguments: dict, options: dict) -> None:
    model: ModelSpec = dataclasses.replace(TINY, **options)
    where = layout(model=model, **arguments)
    measured = run_ranks(communicate, world_size=where.dims.world_size, args=(where, model))
    for rank, seen in enumerate(measured):
        planned: collections.Counter[tuple[str, int]] = collections.Counter()
        for stage in where.stages(where.dims.coordinate(rank)["pp"]):
            for transfer in stage_transfers(model, where, training=TRAINING, cluster=cpu(1), stage=stage):
                planned[transfer.op, transfer.payload_bytes] += transfer.times
        assert of_routing(seen) == of_routing(planned), f"rank {rank}"
        assert {key: n for key, n in seen.items() if key[0] != "all_to_all"} == \
            {key: n for key, n in planned.items() if key[0] != "all_to_all"}, f"rank {rank}"


def of_routing(operations: dict[tuple[str, int], int]) -> int:
    return sum(n for (op, _), n in operations.items() if op == "all_to_all")


@pytest.mark.parametrize("case", CASES)
def test_the_plan_lists_what_experts_and_latents_send(case):
    check(*CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_the_plan_lists_what_combined_layouts_send(case):
    check(*SLOW[case])
