"""One rank of one contender of tests.benchmarks.peers, under the Python that has it: builds it, then does as many steps
as each line of its stdin says and answers with one line of JSON.

Every contender trains the same decoder from the same weights on the same batches (of our loader; those of others are
read before), accumulates, clips, updates with fused AdamW and reports its mean loss, which therefore is the same.
"""
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from jobs.loader import Loader
from jobs.optim import learning_rate
from jobs.runtime import BACKENDS
from jobs.spec.job import JobSpec
from jobs.spec.load import from_dict
from tests.benchmarks.decoder import adamw, decoder, forget_peak, peak_bytes, split_by_dtensor

Turn = Callable[[int], float]  # steps to do → mean loss of the last
BATCHES = 64  # read before: more than a benchmark trains on


class _Steps:
    """What the loops of all peers have in common: batches, learning rate, loss."""

    def __init__(self, spec: JobSpec) -> None:
        layout, training = spec.layout, spec.training
        self.spec, self.done = spec, 0
        share = layout.microbatch_size * layout.num_microbatches
        first = share * (int(os.environ["RANK"]) // layout.dims.tp)
        loader = Loader(spec.data, seq_len=training.seq_len, vocab_size=spec.model.vocab_size,
                        global_batch_size=training.global_batch_size, seed=training.seed,
                        slots=range(first, first + share), device=torch.device("cpu"))
        batches = [loader.batch(cursor) for cursor in range(BATCHES)]
        loader.close()
        size = layout.microbatch_size
        self._microbatches = [list(zip(b.inputs.split(size), b.targets.split(size), strict=True)) for b in batches]

    def begin(self, optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, Tensor]]:
        """The next step's microbatches; sets its learning rate."""
        self.done += 1
        rate = learning_rate(self.done, spec=self.spec.training.optimizer, total_steps=self.spec.training.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return self._microbatches[(self.done - 1) % BATCHES]


def _loss(model: nn.Module, tokens: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), wanted.flatten())


def _over_ranks(loss: Tensor) -> float:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def _loop(spec: JobSpec, model: nn.Module, optimizer: torch.optim.Optimizer, *, backward: Callable[[Tensor], None],
          clip: Callable[[], None], unsynced: Callable[[], contextlib.AbstractContextManager]) -> Turn:
    """Steps of a peer whose optimizer is torch's; `unsynced`: within it gradients are not reduced."""
    steps = _Steps(spec)

    def turn(count: int) -> float:
        for _ in range(count):
            microbatches, total = steps.begin(optimizer), torch.zeros(())
            for i, (tokens, wanted) in enumerate(microbatches):
                with unsynced() if i < len(microbatches) - 1 else contextlib.nullcontext():
                    loss = _loss(model, tokens, wanted) / len(microbatches)
                    backward(loss)
                total += loss.detach()
            clip()
            optimizer.step()
            optimizer.zero_grad()
        return _over_ranks(total)

    return turn


def ours(spec: JobSpec) -> Turn:
    from tests.benchmarks import core

    dist.init_process_group(BACKENDS["cpu"])
    run = core.ours(spec)

    def turn(count: int) -> float:
        run(count)
        return run.reports[-1].loss if run.reports[-1:] and hasattr(run.reports[-1], "loss") else 0.0

    return turn


def fabric(spec: JobSpec) -> Turn:
    """Lightning Fabric: its DDP strategy for replicas, its ModelParallelStrategy (FSDP2 and DTensor) for the rest."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    dims = spec.layout.dims

    def parallelize(model, mesh):
        if dims.tp > 1:
            split_by_dtensor(model, mesh["tensor_parallel"])
        if dims.dp_shard > 1:
            for layer in model.layers.values():
                fully_shard(layer, mesh=mesh["data_parallel"])
            fully_shard(model, mesh=mesh["data_parallel"])
        return model

    whole = dims.dp_shard == dims.tp == 1
    strategy = DDPStrategy(process_group_backend="gloo") if whole else ModelParallelStrategy(
        parallelize_fn=parallelize, data_parallel_size=dims.dp_shard, tensor_parallel_size=dims.tp,
        process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", devices=dims.world_size, strategy=strategy)
    fabric.launch()
    model = fabric.setup(decoder(spec))
    optimizer = fabric.setup_optimizers(adamw(spec, model))
    return _loop(spec, model, optimizer, backward=fabric.backward,
                 clip=lambda: fabric.clip_gradients(model, optimizer, max_norm=spec.training.optimizer.max_grad_norm),
                 unsynced=lambda: fabric.no_backward_sync(model))


def accelerate(spec: JobSpec) -> Turn:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = decoder(spec)
    model, optimizer = accelerator.prepare(model, adamw(spec, model))
    return _loop(spec, model, optimizer, backward=accelerator.backward, unsynced=lambda: accelerator.no_sync(model),
                 clip=lambda: accelerator.clip_grad_norm_(model.parameters(), spec.training.optimizer.max_grad_norm))


def deepspeed(spec: JobSpec) -> Turn:
    """DeepSpeed's ZeRO stages; 0 for replicas."""
    import deepspeed

    layout = spec.layout
    deepspeed.init_distributed(dist_backend="gloo")
    model = decoder(spec)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=adamw(spec, model), config={
        "train_micro_batch_size_per_gpu": layout.microbatch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "gradient_clipping": spec.training.optimizer.max_grad_norm,
        "zero_optimization": {"stage": layout.zero_stage if layout.dims.dp_shard > 1 else 0},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False})
    steps = _Steps(spec)

    def turn(count: int) -> float:
        for _ in range(count):
            microbatches, total = steps.begin(optimizer), torch.zeros(())
            for tokens, wanted in microbatches:
                loss = _loss(engine, tokens, wanted)
                engine.backward(loss)
                engine.step()
                total += loss.detach() / len(microbatches)
        return _over_ranks(total)

    return turn


# what → (modules to import before its memory is measured, builder)
CONTENDERS = {
    "ours": (("tests.benchmarks.core",), ours),
    "Lightning Fabric": (("lightning_fabric", "torch.distributed.fsdp"), fabric),
    "Accelerate": (("accelerate",), accelerate),
    "DeepSpeed": (("deepspeed",), deepspeed),
}


def main(job_file: str, name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    torch.set_num_threads(1)
    spec = from_dict(JobSpec, json.loads(Path(job_file).read_text()), origin=job_file)
    modules, build = CONTENDERS[name]
    for module in modules:
        importlib.import_module(module)
    before = forget_peak()
    turn = build(spec)
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = turn(int(line))
        dist.barrier()
        print(json.dumps({"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - cpu_start,
                          "loss": loss, "peak_bytes": peak_bytes(before)}),
              file=answers, flush=True)
    os._exit(0)  # nothing a library does at its end is measured


if __name__ == "__main__":
    main(*sys.argv[1:])
