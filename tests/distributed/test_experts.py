"""Experts spread over ranks compute what one rank computes: losses, gradient norms, final parameters and balance
(the router's bias is compared with the parameters), and every token goes to the same experts in every layout."""
import collections
import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

from jobs.mesh import coordinate
from jobs.model.moe import MoE
from jobs.parallel.expert import build_expert_mesh
from jobs.spec.parallel import ParallelDims
from tests.helpers.models import DEEPSEEK3, MIXTURE
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.helpers.training import (TRAINING, ListRecorder, assert_matches_single_rank, build_model, build_trainer,
                                    commit, job, layout, train_here, train_job)

pytestmark = pytest.mark.distributed

IZB = dict(schedule="interleaved_zero_bubble", virtual_stages=2)
DUALPIPEV = dict(schedule="dualpipev", virtual_stages=2)
TP_OUTSIDE = ("dp_replicate", "pp", "tp", "dp_shard", "cp")  # ep's ranks are then others

# what is special about the case → (layout, model)
FAST = {
    "ep2 of dp_shard2": (dict(dp_shard=2, ep=2), DEEPSEEK3),
    "no ep: experts sharded over tp, too": (dict(tp=2), DEEPSEEK3),
    "ep2 of tp2": (dict(tp=2, ep=2), MIXTURE),
    "ep2 in dp_shard2 × tp2": (dict(dp_shard=2, tp=2, ep=2), MIXTURE),
    "DeepSeek-V3: pp × ep × ZeRO-1, no tp": (dict(pp=2, dp_shard=2, ep=2, zero_stage=1), DEEPSEEK3),
}
SLOW = {
    "no ep: dp_shard2": (dict(dp_shard=2), MIXTURE),
    "no ep: replicas": (dict(dp_replicate=2), DEEPSEEK3),
    "no ep: pp2": (dict(pp=2), DEEPSEEK3),
    "no ep: dp_shard2 × tp2, ZeRO-1": (dict(dp_shard=2, tp=2, zero_stage=1), DEEPSEEK3),
    "ep2 of dp_shard2, loss": (dict(dp_shard=2, ep=2), MIXTURE),
    "ep2 of dp_shard2, ZeRO-1": (dict(dp_shard=2, ep=2, zero_stage=1), MIXTURE),
    "ep2 of dp_shard2, ZeRO-2": (dict(dp_shard=2, ep=2, zero_stage=2), DEEPSEEK3),
    "ep2 of dp_shard4": (dict(dp_shard=4, ep=2, microbatch_size=1), DEEPSEEK3),
    "ep2 of dp_shard4, ZeRO-1": (dict(dp_shard=4, ep=2, microbatch_size=1, zero_stage=1), DEEPSEEK3),
    "ep4 of dp_shard4": (dict(dp_shard=4, ep=4, microbatch_size=1), MIXTURE),
    "ep4 of dp_shard2 × tp2": (dict(dp_shard=2, tp=2, ep=4), DEEPSEEK3),
    "ep2 in dp_shard2 × tp2, bias": (dict(dp_shard=2, tp=2, ep=2), DEEPSEEK3),
    "ep2 in dp_shard2 × tp2, tp outside": (dict(dp_shard=2, tp=2, ep=2, order=TP_OUTSIDE), MIXTURE),
    "ep2 in dp_shard2 × tp2, ZeRO-1": (dict(dp_shard=2, tp=2, ep=2, zero_stage=1), MIXTURE),
    "ep2 of cp2": (dict(cp=2, ep=2), MIXTURE),
    "ep2 in cp2 × tp2": (dict(cp=2, tp=2, ep=2), DEEPSEEK3),
    "ep4 of cp2 × tp2": (dict(cp=2, tp=2, ep=4), MIXTURE),
    "ep4 of dp_shard2 × cp2": (dict(dp_shard=2, cp=2, ep=4), MIXTURE),
    "ep8 of dp_shard2 × cp2 × tp2": (dict(dp_shard=2, cp=2, tp=2, ep=8), DEEPSEEK3),
    "ep4 in dp_shard2 × cp2 × tp2, ZeRO-1": (dict(dp_shard=2, cp=2, tp=2, ep=4, zero_stage=1), MIXTURE),
    "ep2 and replicas": (dict(dp_replicate=2, dp_shard=2, ep=2, microbatch_size=1), DEEPSEEK3),
    "ep2 and replicas, ZeRO-1": (dict(dp_replicate=2, dp_shard=2, ep=2, microbatch_size=1, zero_stage=1), MIXTURE),
    "pp2 × ep2": (dict(pp=2, dp_shard=2, ep=2), MIXTURE),
    "pp2 × ep2 of tp2": (dict(pp=2, tp=2, ep=2), DEEPSEEK3),
    "pp2 × ep2 in dp_shard2 × tp2": (dict(pp=2, dp_shard=2, tp=2, ep=2), DEEPSEEK3),
    "pp2 × ep2, backward in two halves": (dict(pp=2, dp_shard=2, ep=2, zero_stage=1, **IZB), DEEPSEEK3),
    "pp2 × ep2, backward in two halves, loss": (dict(pp=2, dp_shard=2, ep=2, zero_stage=2, **IZB), MIXTURE),
    "pp2 × ep2, DualPipe's V": (dict(pp=2, dp_shard=2, ep=2, zero_stage=1, microbatch_size=1, **DUALPIPEV), DEEPSEEK3),
    "recompute full counts once": (dict(dp_shard=2, ep=2, recompute="full"), DEEPSEEK3),
    "recompute selective": (dict(dp_shard=2, ep=2, recompute="selective"), MIXTURE),
    "recompute selective in dp_shard2 × tp2": (dict(dp_shard=2, tp=2, ep=2, recompute="selective"), DEEPSEEK3),
    "recompute full, backward in two halves": (dict(pp=2, dp_shard=2, ep=2, zero_stage=1, recompute="full", **IZB),
                                               MIXTURE),
    "units of two layers": (dict(dp_shard=2, ep=2, layers_per_unit=2), DEEPSEEK3),
    "gradients reduced with every microbatch": (dict(dp_shard=2, ep=2, reduce_every_microbatch=True), MIXTURE),
    "three experts on four ranks": (dict(dp_shard=4, microbatch_size=1), dataclasses.replace(
        MIXTURE, moe=dataclasses.replace(MIXTURE.moe, num_experts=3))),
    "ZeRO-1, rows of experts sharded: two experts each on four ranks": (
        dict(dp_shard=4, tp=2, ep=2, microbatch_size=1, zero_stage=1), MIXTURE),
    "ZeRO-1, one expert each on two ranks": (dict(dp_shard=8, ep=4, microbatch_size=1, zero_stage=1), MIXTURE),
    "ZeRO-1, rows of three experts on four ranks": (dict(dp_shard=4, microbatch_size=1, zero_stage=1),
                                                    dataclasses.replace(MIXTURE, moe=dataclasses.replace(
                                                        MIXTURE.moe, num_experts=3))),
    "rows of experts sharded: two experts each on four ranks": (dict(dp_shard=4, tp=2, ep=2, microbatch_size=1),
                                                                MIXTURE),
}


@pytest.mark.parametrize("case", FAST)
def test_experts_match_single_rank(case, tmp_path):
    arguments, model = FAST[case]
    assert_matches_single_rank(tmp_path, layout(model=model, **arguments), model=model)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_experts_match_single_rank_everywhere(case, tmp_path):
    arguments, model = SLOW[case]
    assert_matches_single_rank(tmp_path, layout(model=model, **arguments), model=model)


EMPTY = {"dp_shard2, ep2": dict(dp_shard=2, ep=2), "pp2": dict(pp=2), "cp2 × tp2, ep2": dict(cp=2, tp=2, ep=2),
         "recompute full": dict(recompute="full")}


@pytest.mark.parametrize("case", [next(iter(EMPTY)), *(pytest.param(case, marks=pytest.mark.slow)
                                                       for case in list(EMPTY)[1:])])
@pytest.mark.parametrize("model", [DEEPSEEK3, MIXTURE], ids=["bias", "loss"])
def test_empty_slots_are_not_in_the_balance(model, case, tmp_path):
    training = dataclasses.replace(TRAINING, global_batch_size=7)
    where = layout(model=model, global_batch_size=7, **EMPTY[case])
    assert where.slots == 8
    assert_matches_single_rank(tmp_path, where, model=model, training=training)


# ------------------------------------------------------------------ routing
ROUTED = {
    "dp_shard2, ep2": dict(dp_shard=2, ep=2),
    "tp2, ep2": dict(tp=2, ep=2),
    "cp2, ep2": dict(cp=2, ep=2),
    "pp2": dict(pp=2),
    "replicas, microbatches of one": dict(dp_replicate=2, microbatch_size=1),
    "dp_shard2 × tp2, ep4": dict(dp_shard=2, tp=2, ep=4),
}
Choice = tuple[int, int, int, int]  # step, layer, sequence of the global batch, position


def chosen_experts(spec) -> dict[Choice, list[int]]:
    """Of this rank's tokens in three steps."""
    trainer = build_trainer(spec, recorder=ListRecorder(rank=dist.get_rank(), attempt=1))
    where = spec.layout
    first = where.dims.dp_index(coordinate(trainer.mesh)) * where.microbatch_size * where.num_microbatches
    seen: dict[Choice, list[int]] = {}
    microbatches, chosen = collections.Counter(), {}

    def routed(layer: int, tokens) -> None:
        begin = first + microbatches[step, layer] * where.microbatch_size
        microbatches[step, layer] += 1
        rows, positions = tokens.rows.flatten().tolist(), tokens.positions.flatten().tolist()
        for row, position, experts in zip(rows, positions, chosen[layer].tolist(), strict=True):
            seen[step, layer, begin + row, position] = sorted(experts)

    for part in trainer.parallel.model_parts:
        for name, layer in part.layers.items():
            if isinstance(layer.ffn, MoE):
                number = int(name)
                layer.ffn.router.register_forward_hook(
                    lambda _, __, out, number=number: chosen.update({number: out[1]}))
                layer.ffn.register_forward_hook(lambda _, args, __, number=number: routed(number, args[1]))
    for step in (1, 2, 3):
        trainer._step(step)
    return seen


def routing(arguments, model, tmp_path) -> dict[Choice, list[int]]:
    spec = job(tmp_path, layout(model=model, **arguments), model=model)
    return {token: experts for of_rank in run_ranks(chosen_experts, world_size=spec.world_size, args=(spec,))
            for token, experts in of_rank.items()}


@pytest.mark.parametrize("model", [DEEPSEEK3, pytest.param(MIXTURE, marks=pytest.mark.slow)], ids=["bias", "loss"])
def test_every_token_goes_to_the_same_experts_in_every_layout(model, tmp_path):
    wanted = routing({}, model, tmp_path)
    layers = [layer for layer in range(model.num_layers) if model.is_moe(layer)]
    assert set(wanted) == set(itertools.product((1, 2, 3), layers, range(8), range(16)))
    assert len({tuple(choice) for choice in wanted.values()}) > 5
    for name, arguments in ROUTED.items():
        assert routing(arguments, model, tmp_path) == wanted, name


# ------------------------------------------------------------------ balance and state
def test_both_kinds_of_balance_act(tmp_path):
    """Else their parity would be of nothing."""
    for model in (DEEPSEEK3, MIXTURE):
        without = dataclasses.replace(model, moe=dataclasses.replace(model.moe, balance="none"))
        losses = [train_job(job(tmp_path, layout(model=m), model=m)).losses for m in (model, without)]
        assert abs(losses[0][-1] - losses[1][-1]) > 1e-5


JOURNEY = [dict(dp_shard=2, ep=2), dict(tp=2, ep=2), dict(), dict(pp=2, dp_shard=2, ep=2, zero_stage=1),
           dict(dp_shard=2, tp=2, ep=4)]


@pytest.mark.parametrize("model", [DEEPSEEK3, pytest.param(MIXTURE, marks=pytest.mark.slow)], ids=["bias", "loss"])
def test_a_run_goes_on_in_any_layout(model, tmp_path):
    """Experts, their optimizer state and the router's bias are resharded at every step."""
    training = dataclasses.replace(TRAINING, steps=len(JOURNEY))
    whole = train_job(job(tmp_path / "whole", layout(model=model), model=model, training=training))
    losses = []
    for step, degrees in enumerate(JOURNEY, start=1):
        spec = job(tmp_path, layout(model=model, **degrees), model=model, training=training, interval_steps=1,
                   resume_step=step - 1 or None)
        results = run_ranks(train_here, world_size=spec.world_size, args=(spec,), kwargs={"stop_before": step + 1})
        reports = [report for of_rank in results for report in of_rank]
        commit(tmp_path, [r for r in reports if hasattr(r, "files")], step=step)
        losses += [r.loss for r in reports if hasattr(r, "loss")]
    assert losses == pytest.approx(whole.losses, abs=1e-5, rel=0)


BF16 = dataclasses.replace(TRAINING, param_dtype="bfloat16")


@pytest.mark.parametrize("arguments", [dict(), dict(dp_shard=2, ep=2), dict(tp=2, ep=2), dict(tp=2)],
                         ids=["one rank", "dp_shard2, ep2", "tp2, ep2", "tp2"])
def test_bfloat16_experts_follow_float32(arguments, tmp_path):
    exact = train_job(job(tmp_path, layout(model=DEEPSEEK3), model=DEEPSEEK3)).losses
    found = train_job(job(tmp_path, layout(model=DEEPSEEK3, **arguments), model=DEEPSEEK3, training=BF16)).losses
    assert found == pytest.approx(exact, rel=2 * 2.0**-8)
    assert found != pytest.approx(exact, rel=1e-6)


REFUSED = {
    "ep of a dense model": (dict(ep=2), dict(moe=None), 1, "ep: 2, but model.moe is none"),
    "ep that its ranks do not hold": (dict(dp_shard=3, ep=2), {}, 3, r"ep: 2 does not divide dp_shard·cp·tp=3"),
    "ep that does not divide the experts": (dict(dp_shard=3, ep=3), {}, 3, "ep: 3 does not divide model.moe.num_exp"),
    "tp ranks without tokens of their own": (dict(tp=2, sequence_parallel=False), {}, 2, "set it to true"),
    "tp that splits the shared experts unevenly": (dict(tp=4), dict(num_heads=4), 4, "num_shared_experts·ffn_dim=18"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case, tmp_path):
    arguments, changes, world_size, message = REFUSED[case]
    model = dataclasses.replace(DEEPSEEK3, moe=dataclasses.replace(DEEPSEEK3.moe, ffn_dim=18))
    model = dataclasses.replace(model, **changes)
    with pytest.raises(RanksFailed, match=message):
        where = layout(model=model, **arguments)
        run_ranks(build_model, world_size=world_size, args=(job(tmp_path, where, model=model),))


def test_every_dimension_of_ep_is_innermost():
    """`ep` takes the ranks whose links are fastest; see jobs.parallel.expert."""

    def mine():
        dims = ParallelDims(dp_shard=2, tp=2, ep=2)
        mesh = build_expert_mesh(dims, device=torch.device("cpu"))
        return mesh["ep"].mesh.tolist(), mesh["expert_fsdp"].mesh.tolist()

    assert run_ranks(mine, world_size=4) == [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
