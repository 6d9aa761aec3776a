"""One GPU trains what the CPU trains, in float32 and in bfloat16, compiled too; and goes on from a checkpoint."""
import dataclasses

import pytest

from tests.helpers import device
from tests.helpers.models import ALL
from tests.helpers.training import TINY, TRAINING, Outcome, commit, job, layout, run_ranks, train_here, train_job

BF16 = dataclasses.replace(TRAINING, param_dtype="bfloat16")
RESOLUTION = 2.0**-8  # of bfloat16, relative
ACROSS_DEVICES = 1e-4  # of losses in float32: sums in another order, and no tensor cores (TF32 stays off)


@pytest.fixture
def on_cpu(monkeypatch):
    """Run something on the CPU in the middle of a test on CUDA."""

    def run(spec) -> Outcome:
        with monkeypatch.context() as patch:
            patch.setenv(device.VARIABLE, "cpu")
            return train_job(dataclasses.replace(spec, device="cpu"))

    return run


@pytest.mark.parametrize("model", ALL.values(), ids=ALL)
def test_a_gpu_computes_what_the_cpu_computes(model, on_cpu, tmp_path):
    spec = job(tmp_path / "gpu", layout(model=model), model=model)
    wanted = on_cpu(dataclasses.replace(spec, run_dir=str(tmp_path / "cpu")))
    found = train_job(spec)
    assert found.losses == pytest.approx(wanted.losses, abs=ACROSS_DEVICES, rel=0)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, abs=10 * ACROSS_DEVICES, rel=0)


# 16-bit kernels want heads and widths of multiples of 8: flash attention, grouped matmul, FlexAttention from 16 on
WIDE = {name: dataclasses.replace(model, dim=64, head_dim=16) if model.mla is None else model
        for name, model in ALL.items()}


@pytest.mark.parametrize("recompute, compiled", [("none", False), ("full", False), ("full", True)])
@pytest.mark.parametrize("name", WIDE)
def test_bfloat16_on_a_gpu_follows_float32(name, recompute, compiled, on_cpu, tmp_path):
    model = WIDE[name]
    wanted = on_cpu(job(tmp_path / "cpu", layout(model=model), model=model))
    found = train_job(job(tmp_path / "gpu", layout(model=model, recompute=recompute), model=model,
                          training=dataclasses.replace(BF16, compile=compiled)), timeout_s=300.0)
    assert found.losses == pytest.approx(wanted.losses, rel=2 * RESOLUTION)


def test_a_gpu_goes_on_from_a_checkpoint(tmp_path):
    whole = train_job(job(tmp_path / "whole", layout(), model=TINY, training=BF16))
    spec = job(tmp_path / "cut", layout(), model=TINY, training=BF16, interval_steps=2)
    first = Outcome.of(run_ranks(train_here, world_size=1, args=(spec,), kwargs={"stop_before": 4}))
    commit(tmp_path / "cut", first.shards, step=2)  # step 3 is lost
    second = train_job(dataclasses.replace(spec, resume_step=2, attempt=2))
    assert first.losses[:2] + second.losses == pytest.approx(whole.losses, rel=RESOLUTION)
