"""An own trainer: a Hugging Face Accelerate script. Run by orc with the Python that has accelerate:

    command: [/path/to/venv/bin/python, configs/examples/accelerate_trainer.py, --folder, /shared/checkpoints]

Accelerate finds its ranks in the environment that every rank is given. `report` is orc's; where it cannot be imported
the script runs all the same.
"""
import argparse
from pathlib import Path

import torch
import torch.nn as nn
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

try:
    from jobs import report
except ImportError:
    report = None

FEATURES, BATCH = 16, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    inputs = torch.randn(BATCH * args.steps * accelerator.num_processes, FEATURES)
    data = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(data, batch_size=BATCH))
    done = resume(accelerator, args.folder)
    for step, (x, y) in enumerate(accelerator.skip_first_batches(batches, done), start=done + 1):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        if report is not None:
            report.step(step, loss=mean, tokens=BATCH * accelerator.num_processes)
        if step % args.save_every == 0:
            accelerator.save_state(str(args.folder / f"step-{step}.partial"))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (args.folder / f"step-{step}.partial").rename(args.folder / f"step-{step}")
                if report is not None:
                    report.checkpoint(step)
            accelerator.wait_for_everyone()
        if step == args.steps:
            accelerator.print(f"final loss {mean:.10f}")
    accelerator.end_training()


def resume(accelerator: Accelerator, folder: Path) -> int:
    """Load the newest whole checkpoint; the step it holds, 0 without one."""
    found = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*") if path.name[5:].isdigit())
    if not found:
        return 0
    accelerator.load_state(str(folder / f"step-{found[-1]}"))
    return found[-1]


if __name__ == "__main__":
    main()
