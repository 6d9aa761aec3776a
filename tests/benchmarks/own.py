"""Step times of an own model beside their prediction, on this machine's CPU.

    python -m tests.benchmarks.own [--steps 12]

The machine is calibrated without it, anew before each layout, because others may be at work: the rate of a large matmul
by running one, and what everything else moves per second by a decoder of ours on one rank, as that at which the
planner's prediction is what it takes. With these, and configs/clusters/local.yaml's links, each layout of the docs' own
model is predicted and run. What counts is the fastest of the steps: others only ever add to one. Ranks are at most two;
more would share the cores. Printed per layout: both rates, measured and predicted times, and their ratio.
"""
import argparse
import contextlib
import dataclasses
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from jobs.own.measure import measure
from jobs.spec.job import JobSpec
from jobs.spec.model import ModelSpec
from jobs.spec.own_model import OwnModel
from jobs.spec.parallel import split_layers
from jobs.spec.training import TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.planner.constants import SUSTAINED_MATMUL
from orchestrator.planner.own_cost import price
from orchestrator.planner.own_memory import OwnQuestion
from tests.helpers.fake import in_child
from tests.helpers.planning import cpu, plan_for
from tests.helpers.ranks import run_ranks
from tests.helpers.training import ListRecorder, build_trainer, job, layout

DECODER = ModelSpec(name="decoder", vocab_size=256, dim=256, num_layers=6, num_heads=8, num_kv_heads=8, ffn_dim=1024)
MIXER = OwnModel(name="mixer", entrypoint="configs.examples.mixer:build", vocab_size=256,
                 arguments={"dim": 256, "depth": 6, "head_dim": 32})
TRAINING = TrainingSpec(steps=10**6, seq_len=128, global_batch_size=8)
LAYOUTS = {
    "one rank": dict(microbatch_size=8),
    "one rank, four microbatches": dict(microbatch_size=2),
    "one rank, recompute full": dict(microbatch_size=8, recompute="full"),
    "dp_replicate2": dict(dp_replicate=2, microbatch_size=4),
    "dp_shard2, ZeRO-3": dict(dp_shard=2, microbatch_size=4),
    "tp2": dict(tp=2, microbatch_size=8),
    "tp2, whole sequences between splits": dict(tp=2, microbatch_size=8, sequence_parallel=False),
    "pp2": dict(pp=2, microbatch_size=2),
}


def fastest_step(spec: JobSpec, steps: int) -> float:
    """On a rank: seconds of the fastest step behind the first two, which set things up."""
    trainer = build_trainer(spec, recorder=ListRecorder(rank=dist.get_rank(), attempt=1))
    trainer.plan = dataclasses.replace(trainer.plan, interval_steps=10**9)
    took = []
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for step in range(1, steps + 3):
            start = time.perf_counter()
            trainer._step(step)
            took.append(time.perf_counter() - start)
    return min(took[2:])


def measured_s(model: ModelSpec | OwnModel, fields: dict, *, steps: int) -> float:
    """Of the slowest rank."""
    where = layout(layers_per_stage=split_layers(6, fields.get("pp", 1)), **fields)
    with tempfile.TemporaryDirectory() as folder:
        spec = job(Path(folder), where, model=model, training=TRAINING)
        return max(run_ranks(fastest_step, world_size=where.dims.world_size, args=(spec, steps)))


def matmul_tflops(size: int = 1024) -> float:
    """On a rank."""
    a, took = torch.randn(size, size), []
    for _ in range(12):
        start = time.perf_counter()
        torch.mm(a, a)
        took.append(time.perf_counter() - start)
    return 2e-12 * size**3 / min(took)


def calibrated(steps: int, *, ranks: int) -> ClusterSpec:
    """This machine, as a matmul and the decoder of ours find it."""
    sustained = run_ranks(matmul_tflops, world_size=1)[0]
    peak = sustained / (cpu(1, 1).matmul_ceiling * SUSTAINED_MATMUL["float32"])
    cluster = cpu(1, ranks, peak_tflops=peak)
    wanted, low, high = measured_s(DECODER, dict(microbatch_size=8), steps=steps), 0.1, 1000.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        alone = dataclasses.replace(cluster, gpus_per_node=1, memory_bandwidth_gb_s=middle)
        predicted = plan_for(DECODER, alone, TRAINING, microbatch_size=8, recompute="none").predicted.step_time_s
        low, high = (middle, high) if predicted > wanted else (low, middle)
    return dataclasses.replace(cluster, memory_bandwidth_gb_s=middle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    profile = in_child(measure, MIXER, seq_len=TRAINING.seq_len, degrees=(1, 2))
    print(f"{'':38}{'GFLOP/s':>8}{'GB/s':>6}{'measured':>10}{'predicted':>11}{'ratio':>7}")
    for name, fields in LAYOUTS.items():
        where = layout(layers_per_stage=split_layers(6, fields.get("pp", 1)), **fields)
        question = OwnQuestion(model=MIXER, profile=profile, training=TRAINING, headroom=0.1,
                               cluster=calibrated(steps, ranks=where.dims.world_size))
        predicted, took = price(question, where).predicted.step_time_s, measured_s(MIXER, fields, steps=steps)
        rates = f"{1e3 * question.cluster.peak_tflops:>8.1f}{question.cluster.memory_bandwidth_gb_s:>6.1f}"
        print(f"{name:38}{rates}{1e3 * took:>7.1f} ms{1e3 * predicted:>8.1f} ms{predicted / took:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
