"""The learning rate's curve, who decays, and clipping on one rank."""
import dataclasses
import math

import pytest
import torch
import torch.nn as nn

from jobs.mesh import build_mesh
from jobs.optim import Optimizer, learning_rate
from jobs.spec.parallel import ParallelDims
from jobs.spec.training import OptimizerSpec
from tests.helpers.ranks import run_ranks

SPEC = OptimizerSpec(lr=1.0, min_lr_ratio=0.1, warmup_steps=4, weight_decay=0.5, max_grad_norm=1.0)

CURVE = {  # step → learning rate of 12 steps
    1: 0.25, 2: 0.5, 4: 1.0,  # linear up to lr
    8: 0.55,  # half of the cosine
    12: 0.1,  # min_lr_ratio·lr at the last step
    20: 0.1,  # and never below
}


@pytest.mark.parametrize("step", CURVE)
def test_learning_rate_warms_up_and_decays(step):
    assert learning_rate(step, spec=SPEC, total_steps=12) == pytest.approx(CURVE[step])


WSD = dataclasses.replace(SPEC, lr_schedule="wsd", decay_fraction=0.25)
STABLE = {  # step → learning rate of 12 steps, of which the last three fall
    2: 0.5, 4: 1.0, 5: 1.0, 9: 1.0,
    10: 0.7, 11: 0.4, 12: 0.1,
    20: 0.1,
}


@pytest.mark.parametrize("step", STABLE)
def test_wsd_is_stable_until_it_falls(step):
    assert learning_rate(step, spec=WSD, total_steps=12) == pytest.approx(STABLE[step])


def test_wsd_falls_only_after_the_warm_up():
    spec = dataclasses.replace(WSD, decay_fraction=1.0)
    assert learning_rate(4, spec=spec, total_steps=12) == 1.0
    assert learning_rate(8, spec=spec, total_steps=12) == pytest.approx(0.55)


def test_without_warm_up_the_first_step_is_already_on_the_cosine():
    spec = OptimizerSpec(lr=1.0, warmup_steps=0, min_lr_ratio=0.0)
    assert learning_rate(1, spec=spec, total_steps=2) == pytest.approx(0.5)
    assert learning_rate(1, spec=spec, total_steps=1) == 0.0


def one_update(gradient_scale: float, spec: OptimizerSpec) -> tuple[list, list, float, dict]:
    """Before and after one update at full learning rate of a matrix and a vector."""
    mesh = build_mesh(ParallelDims(), device=torch.device("cpu"))
    parameters = {"matrix": nn.Parameter(torch.full((2, 2), 3.0)), "vector": nn.Parameter(torch.full((2,), 3.0))}
    optimizer = Optimizer(parameters.items(), spec=spec, total_steps=10**9, mesh=mesh, copies=frozenset())
    gradients = {name: torch.full_like(p, gradient_scale) for name, p in parameters.items()}
    norm, lr = optimizer.step(4, gradients)
    assert not gradients  # dropped
    state = {name: t.flatten().tolist() for name, t in optimizer.named_state().items()}
    return [p.flatten().tolist() for p in parameters.values()], [lr], norm.item(), state


def test_only_matrices_decay():
    (matrix, vector), (lr,), _, _ = run_ranks(one_update, world_size=1, args=(0.0, SPEC))[0]
    assert lr == 1.0
    assert matrix == pytest.approx([3.0 * (1 - lr * SPEC.weight_decay)] * 4)
    assert vector == [3.0, 3.0]


@pytest.mark.parametrize("scale, applied", [(10.0, 1 / math.sqrt(6)), (0.01, 0.01)])
def test_gradients_are_clipped_to_the_norm_and_never_raised(scale, applied):
    _, _, norm, state = run_ranks(one_update, world_size=1, args=(scale, SPEC))[0]
    assert norm == pytest.approx(scale * math.sqrt(6), rel=1e-5)  # of six elements, before clipping
    assert state["matrix.exp_avg"] == pytest.approx([(1 - SPEC.beta1) * applied] * 4, rel=1e-4)
    assert state["vector.exp_avg_sq"] == pytest.approx([(1 - SPEC.beta2) * applied**2] * 2, rel=1e-4)
    assert state["matrix.step"] == [1.0]


def test_an_update_is_adamws():
    spec = OptimizerSpec(lr=0.1, warmup_steps=0, min_lr_ratio=1.0, weight_decay=0.0, max_grad_norm=1e9)
    (matrix, _), (lr,), _, _ = run_ranks(one_update, world_size=1, args=(2.0, spec))[0]
    assert matrix == pytest.approx([3.0 - lr] * 4)  # the first Adam step is lr·sign(gradient)
