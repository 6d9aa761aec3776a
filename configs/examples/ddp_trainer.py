"""An own trainer: DDP as one writes it for torchrun, with checkpoints of its own. Run by orc as

    command: [python, -m, configs.examples.ddp_trainer, --steps, "40"]      # or
    entrypoint: configs.examples.ddp_trainer:main                           # in ranks that have torch already

The lines with `report` are all that it knows of orc, and without orc they do nothing; see
docs/bring_your_own_trainer.md.
"""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from jobs import report

FEATURES, BATCH = 16, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--validate-every", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("ORC_RUN_DIR", ".")) / "own-checkpoints")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(load(args.folder, model, optimizer) + 1, args.steps + 1):
        inputs, targets = batch(step, rank=dist.get_rank())
        loss = nn.functional.mse_loss(replica(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG)
        report.step(step, loss=loss.item(), tokens=BATCH * dist.get_world_size(), lr=1e-2)
        if step % args.validate_every == 0:
            report.validation(step, loss=validate(model), tokens=BATCH * dist.get_world_size())
        if step % args.save_every == 0:
            if dist.get_rank() == 0:
                save(args.folder, model, optimizer, step=step)
                report.checkpoint(step)
            dist.barrier()
        if step == args.steps and dist.get_rank() == 0:
            print(f"final loss {loss.item():.10f}")
    del replica  # before its group: the last to hold a group of gloo may wait, with Python's lock, for a thread of it
    dist.destroy_process_group()


def batch(step: int, *, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A function of step and rank, so that a resumed run sees what an uninterrupted one would have seen."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, FEATURES, generator=random)
    return inputs, inputs.sin().sum(dim=1, keepdim=True)


def validate(model: nn.Module) -> float:
    """The loss on step 0's batch, which is not trained on, over all ranks."""
    with torch.no_grad():
        inputs, targets = batch(0, rank=dist.get_rank())
        loss = nn.functional.mse_loss(model(inputs), targets)
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item()


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "partial.pt"
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    os.replace(partial, folder / "newest.pt")  # a process that is killed while it writes leaves the one before


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step that the newest checkpoint holds; 0 without one."""
    newest = folder / "newest.pt"
    if not newest.exists():
        return 0
    held = torch.load(newest, weights_only=True)
    model.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
    return held["step"]


if __name__ == "__main__":
    main()
