"""Our trainer beside plain torch on the same ranks, model and batch: tokens/s and peak memory per layout.

    python -m tests.benchmarks.core [--rounds 15] [--steps 4] [--only TEXT]

Ours is the whole trainer (loader, metrics, fault hooks, reports); the others are the loops one would write by hand, on
the same decoder, with tokens already in memory. All contenders of a layout are alive in the same ranks and take turns,
a few steps each, so that a noisy neighbour slows all of them; what counts is the median of the ratios of neighbouring
turns. Beside it the same of the CPU time of one rank, which others on the machine disturb less. Peak memory is of a run
of its own: anonymous memory above that of the freshly forked rank.
"""
import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from jobs.optim import learning_rate
from jobs.runtime import keep_memory
from jobs.spec.job import JobSpec
from jobs.spec.reports import StepReport
from tests.benchmarks.decoder import MODEL, TRAINING, decoder, forget_peak, peak_bytes, split_by_dtensor
from tests.helpers.ranks import run_ranks
from tests.helpers.training import ListRecorder, build_trainer, job, layout

Turn = Callable[[int], None]  # number of steps


# ------------------------------------------------------------------ ours
def ours(spec: JobSpec) -> Turn:
    keep_memory()  # as jobs.train does; what shares this process with ours gains as much
    recorder = ListRecorder(rank=dist.get_rank(), attempt=1)
    trainer = build_trainer(spec, recorder=recorder)

    def turn(steps: int) -> None:
        trainer.final_step = trainer.progress.step + steps
        trainer.plan = replace(trainer.plan, interval_steps=10**9)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # its lines are written, not shown
            while trainer.progress.step < trainer.final_step:
                trainer._step(trainer.progress.step + 1)

    turn.reports = recorder.reports
    return turn


# ------------------------------------------------------------------ by hand
def loop(spec: JobSpec, model: nn.Module, *, dp: int, optimizer: type = torch.optim.AdamW, **options) -> Turn:
    """Forward, backward, clip, update, as one would write it; `dp` ranks share the batch."""
    adamw = spec.training.optimizer
    optimizer = optimizer(model.parameters(), lr=adamw.lr, betas=(adamw.beta1, adamw.beta2), fused=True,
                          weight_decay=adamw.weight_decay, **options)
    rows, size = spec.training.global_batch_size // dp, spec.layout.microbatch_size
    tokens = torch.randint(0, spec.model.vocab_size, (rows, spec.training.seq_len + 1))
    state = {"step": 0}

    def turn(steps: int) -> None:
        for _ in range(steps):
            state["step"] += 1
            for i in range(0, rows, size):
                microbatch = tokens[i:i + size]
                last = i + size >= rows
                if isinstance(model, DistributedDataParallel):
                    model.require_backward_grad_sync = last
                elif hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(last)
                logits = model(microbatch[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), microbatch[:, 1:].flatten()) * size / rows
                loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), adamw.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(state["step"], spec=adamw, total_steps=spec.training.steps)
            optimizer.step()
            optimizer.zero_grad()
            loss.item(), getattr(norm, "full_tensor", lambda: norm)().item()  # to be reported, as ours does

    return turn


def by_hand(spec: JobSpec) -> Turn:
    return loop(spec, decoder(spec), dp=1)


def ddp(spec: JobSpec) -> Turn:
    return loop(spec, DistributedDataParallel(decoder(spec)), dp=dist.get_world_size())


def ddp_zero1(spec: JobSpec) -> Turn:
    return loop(spec, DistributedDataParallel(decoder(spec)), dp=dist.get_world_size(),
                optimizer=ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)


def fsdp2(spec: JobSpec) -> Turn:
    model, reshard = decoder(spec), spec.layout.reshard_after_forward
    for layer in model.layers.values():
        fully_shard(layer, reshard_after_forward=reshard)
    return loop(spec, fully_shard(model, reshard_after_forward=reshard), dp=dist.get_world_size())


def dtensor_tp(spec: JobSpec) -> Turn:
    model = decoder(spec)
    split_by_dtensor(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return loop(spec, model, dp=1)


# what → (layout, contenders beside ours)
LAYOUTS = {
    "one rank": (dict(), {"loop by hand": by_hand}),
    # all layers in one unit: DDP's buckets of 25 MB, too, are larger than this model
    "dp_replicate2": (dict(dp_replicate=2, layers_per_unit=4), {"DDP": ddp}),
    "dp_replicate2, accumulating": (dict(dp_replicate=2, layers_per_unit=4, microbatch_size=2), {"DDP": ddp}),
    "dp_shard2, ZeRO-1": (dict(dp_shard=2, zero_stage=1),
                          {"DDP + ZeroRedundancyOptimizer": ddp_zero1, "DDP": ddp}),
    "dp_shard2, ZeRO-2": (dict(dp_shard=2, zero_stage=2), {"FSDP2": fsdp2}),
    "dp_shard2, ZeRO-3": (dict(dp_shard=2), {"FSDP2": fsdp2}),
    "tp2": (dict(tp=2, microbatch_size=8), {"DTensor TP": dtensor_tp}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    seconds: list[float]  # of each turn
    cpu_s: list[float]  # of this rank, all threads
    waiting: float | None = None  # share of the step that data took, ours only


def take_turns(spec: JobSpec, contenders: dict[str, Callable[[JobSpec], Turn]], rounds: int,
               steps: int) -> dict[str, Measured]:
    turns = {name: build(spec) for name, build in contenders.items()}
    seconds, cpu_s = ({name: [] for name in turns} for _ in range(2))
    for number in range(rounds + 2):  # the first two warm up
        for name, turn in turns.items():
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            turn(steps)
            dist.barrier()
            if number > 1:
                seconds[name].append(time.perf_counter() - start)
                cpu_s[name].append(time.process_time() - cpu_start)
    reports = [report for turn in turns.values() for report in getattr(turn, "reports", ())
               if isinstance(report, StepReport) and report.step > 2 * steps]
    waiting = sum(r.data_s for r in reports) / sum(r.step_time_s for r in reports) if reports else None
    return {name: Measured(seconds=seconds[name], cpu_s=cpu_s[name], waiting=waiting) for name in turns}


def ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def peak_alone(spec: JobSpec, build: Callable[[JobSpec], Turn]) -> int:
    """Of this rank, over a few steps, above a freshly forked one."""
    before = forget_peak()
    build(spec)(4)
    return peak_bytes(before)


def measure(name: str, folder: Path, *, rounds: int, steps: int) -> None:
    arguments, others = LAYOUTS[name]
    where = layout(**{"model": MODEL, "microbatch_size": 8 // max(1, arguments.get("dp_shard", 1),
                                                                  arguments.get("dp_replicate", 1)), **arguments})
    spec, contenders = job(folder, where, model=MODEL, training=TRAINING), {"ours": ours, **others}
    world_size = where.dims.world_size
    measured = run_ranks(take_turns, world_size=world_size, args=(spec, contenders, rounds, steps))[0]
    tokens = TRAINING.seq_len * TRAINING.global_batch_size * steps
    for contender, build in contenders.items():
        mine, theirs = measured["ours"], measured[contender]
        beside = f"data {100 * mine.waiting:.2f}%"
        if contender != "ours":
            beside = f"ours × {ratio(theirs.seconds, mine.seconds):.3f}, CPU × {ratio(theirs.cpu_s, mine.cpu_s):.3f}"
        peak = max(run_ranks(peak_alone, world_size=world_size, args=(spec, build)))
        print(f"{name:28}  {contender:30}  {tokens / statistics.median(theirs.seconds):8,.0f} tokens/s   {beside:28}  "
              f"peak {peak / 2**20:6.1f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="of each contender per round")
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in LAYOUTS:
            if asked.only in name:
                measure(name, Path(folder), rounds=asked.rounds, steps=asked.steps)


if __name__ == "__main__":
    main()
