"""What compute hides of a stage's communication: rules of overlap, one at a time."""
import dataclasses

import pytest

from orchestrator.planner.communication import INPUTS_AGAIN
from orchestrator.planner.chip import chip_of
from orchestrator.planner.compute import shape_of
from orchestrator.planner.software import OURS
from orchestrator.planner.stages import compute_times, stage_cost
from tests.helpers.planning import LLAMA3_8B, h100, layout_of, training

BF16 = training(global_batch_size=8, seq_len=8192, param_dtype="bfloat16")


def cost_of(*, software=OURS, cluster=None, stage=0, **layout):
    spec, cluster = layout_of(LLAMA3_8B, **layout), cluster or h100(1)
    chip, shape = chip_of(cluster, training=BF16, software=software), shape_of(spec, seq_len=8192)
    found = stage_cost(LLAMA3_8B, spec, training=BF16, cluster=cluster, stage=stage, shape=shape, chip=chip,
                       software=software)
    return found, compute_times(LLAMA3_8B, spec, stage=stage, shape=shape, chip=chip, software=software)


def exposed(found, *, axis: str, phase: str, op: str) -> tuple[float, float]:
    """Seconds that wait, and seconds in all."""
    chosen = [one for one in found.transfers
              if (one.axis, one.phase, one.op) == (axis, phase, op) and one.what != INPUTS_AGAIN]
    return sum(one.exposed_s for one in chosen), sum(one.seconds for one in chosen)


# layout → the share of tp's reductions in the backward that nothing hides, at least and at most
INPUT_GRADIENTS = [({}, 0.1, 0.3),  # the few columns of queries, keys and values take less than their reduction
                   ({"sequence_parallel": False}, 0.25, 0.45),  # of twice the bytes
                   ({"recompute": "full"}, 0.4, 0.55),  # what is repeated has no weights' gradient beside it
                   ({"dims": {"tp": 4, "pp": 2}, "schedule": "interleaved_zero_bubble", "num_microbatches": 4}, 1, 1)]


@pytest.mark.parametrize("layout,least,most", INPUT_GRADIENTS)
def test_input_gradients_are_reduced_behind_the_weights_gradients(layout, least, most):
    found, _ = cost_of(**({"dims": {"tp": 8}} | layout))
    op = "reduce_scatter" if layout.get("sequence_parallel", True) else "all_reduce"
    waits_s, all_s = exposed(found, axis="tp", phase="backward", op=op)
    assert least <= waits_s / all_s <= most
    for phase, other in (("forward", op), ("backward", "all_gather")):
        waits_s, all_s = exposed(found, axis="tp", phase=phase, op=other)
        assert waits_s == all_s  # the next matmul needs it


@pytest.mark.parametrize("link_gb_s", [5.0, 450.0])
def test_inputs_are_gathered_again_behind_their_gradients(link_gb_s):
    found, _ = cost_of(dims={"tp": 8}, cluster=h100(1, intra_node_gb_s=link_gb_s))
    again = next(one for one in found.transfers if one.what == INPUTS_AGAIN)
    _, reductions_s = exposed(found, axis="tp", phase="backward", op="reduce_scatter")
    assert again.times == 2 * LLAMA3_8B.num_layers  # attention and ffn of one microbatch
    assert 0 <= again.exposed_s < again.seconds < reductions_s
    split, _ = cost_of(dims={"tp": 4, "pp": 2}, schedule="interleaved_zero_bubble", num_microbatches=4)
    assert all(one.exposed_s == one.seconds for one in split.transfers if one.what == INPUTS_AGAIN)
    recomputed, _ = cost_of(dims={"tp": 8}, recompute="full")
    assert not [one for one in recomputed.transfers if one.what == INPUTS_AGAIN]


def test_a_slow_link_hides_as_much_as_the_matmuls_take():
    slow = h100(1, intra_node_gb_s=5.0)
    found, times = cost_of(dims={"tp": 8}, cluster=slow)
    waits_s, all_s = exposed(found, axis="tp", phase="backward", op="reduce_scatter")
    assert all_s - waits_s == pytest.approx(sum(seconds for _, seconds in times.entries))
    assert 2 * LLAMA3_8B.num_layers + 1 == pytest.approx(sum(states for states, _ in times.entries))


def test_a_trainer_without_overlap_waits_for_everything():
    plain = dataclasses.replace(OURS, overlaps_input_gradients=False, overlaps_data_parallel=False)
    found, _ = cost_of(dims={"tp": 2, "dp_shard": 4}, software=plain)
    assert all(one.exposed_s == one.seconds for one in found.transfers)
    ours, _ = cost_of(dims={"tp": 2, "dp_shard": 4})
    assert ours.exposed_s + ours.tail_s < 0.7 * (found.exposed_s + found.tail_s)
