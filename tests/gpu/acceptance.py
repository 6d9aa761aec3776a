"""The acceptance of one GPU: `orc run` with a kill in the middle, then the loop written by hand, then the verdict.

Started by acceptance.sh. Uses the product's own commands and reads the run's history, as a person would.
"""
import argparse
import dataclasses
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

from jobs.spec.events import AttemptStarted, Event
from jobs.spec.hardware import GPUS
from jobs.spec.load import to_dict
from jobs.spec.model import ModelSpec
from jobs.spec.reports import StepReport
from jobs.spec.rundir import RunDir
from orchestrator.monitoring.history import read_history
from tests.gpu.by_hand import Task

STEPS, INTERVAL, KILLED_BEFORE = 24, 8, 21
RESUMED_FROM = (KILLED_BEFORE - 1) // INTERVAL * INTERVAL
WARM_UP = 3  # steps of an attempt that compile and tune
SAME_LOSS = 2e-2  # relative, of steps that both attempts have done: bfloat16, and kernels that add in any order
# Llama 3.2's 1B with output weights of its own and a smaller vocabulary: 1.04 billion parameters
BILLION = Task(model=ModelSpec(name="billion", vocab_size=16384, dim=2048, num_layers=16, num_heads=32, num_kv_heads=8,
                               ffn_dim=8192, rope_theta=500000.0), seq_len=4096, microbatch_size=4, num_microbatches=2)
TINY = Task(model=ModelSpec(name="tiny", vocab_size=256, dim=64, num_layers=2, num_heads=4, num_kv_heads=2,
                            ffn_dim=128), seq_len=64, microbatch_size=2, num_microbatches=2)


class Refused(Exception):
    """Why this machine, or what it has done, is not accepted."""


def main() -> int:
    arguments = _arguments()
    task = dataclasses.replace(TINY if arguments.tiny else BILLION, device=arguments.device)
    folder = Path(tempfile.mkdtemp(prefix="orc-acceptance-"))
    try:
        gpu = "cpu" if arguments.device == "cpu" else arguments.gpu or _gpu_here()
        steps = _train(task, gpu=gpu, folder=folder)
        theirs = task.tokens / statistics.median(_by_hand(task, folder=folder))
    except Refused as reason:
        print(f"acceptance: {reason}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder)
    ours, mfu = (statistics.median(getattr(s, name) for s in steps) for name in ("tokens_per_s", "mfu"))
    print(f"\n{'':20}{'tokens/s':>12}{'MFU':>8}   ({steps[0].mfu_convention} attention, {gpu})")
    print(f"{'orc':20}{ours:12,.0f}{mfu:8.1%}   peak memory {steps[-1].peak_memory_bytes / 2**30:.1f} GiB")
    print(f"{'written by hand':20}{theirs:12,.0f}{mfu * theirs / ours:8.1%}   orc is {ours / theirs:.3f} of it")
    print("accepted: trained, killed, resumed")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="acceptance.sh")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpu", choices=sorted(set(GPUS) - {"cpu"}), help="whose peak MFU is of; guessed if not given")
    parser.add_argument("--tiny", action="store_true", help="a toy instead of a billion parameters")
    return parser.parse_args()


def _gpu_here() -> str:
    """The row of the GPU table that is meant by the driver's name of the first GPU."""
    if not torch.cuda.is_available():
        raise Refused(f"torch {torch.__version__} finds no GPU here; --device cpu --tiny tries the script without one")
    name = torch.cuda.get_device_name(0)
    for gpu in sorted(GPUS, key=len, reverse=True):  # gb200 before b200
        if gpu.partition("-")[0].upper() in name.upper().replace(" ", ""):
            return gpu
    raise Refused(f"{name} is no row of the GPU table; name the nearest with --gpu: {', '.join(sorted(GPUS))}")


# ------------------------------------------------------------------ ours
def _train(task: Task, *, gpu: str, folder: Path) -> list[StepReport]:
    """The run, killed and resumed; its steps behind the warm-up. Raises Refused."""
    path = folder / "acceptance.yaml"
    path.write_text(yaml.safe_dump(_run_config(task, gpu=gpu, root=folder)))
    _checked([sys.executable, "-m", "orchestrator.cli", "run", str(path)], what="orc run")
    history, _ = read_history(RunDir(folder / "acceptance").events)
    steps = _verdict(history)
    begins = {a: min(s.step for s in steps if s.attempt == a) for a in (1, 2)}
    return [s for s in steps if s.step >= begins[s.attempt] + WARM_UP]


def _run_config(task: Task, *, gpu: str, root: Path) -> dict:
    return {
        "run": "acceptance", "root": str(root), "policy": "default",
        "model": to_dict(task.model),
        "cluster": {"include": "local", "name": "acceptance", "num_nodes": 1, "gpus_per_node": 1, "gpu": gpu},
        "data": {"path": "${python_stdlib:}", "pattern": "**/*.py", "exclude": ["test", "tests", "site-packages"]},
        "training": {"steps": STEPS, "seq_len": task.seq_len, "param_dtype": "bfloat16", "compile": True,
                     "global_batch_size": task.microbatch_size * task.num_microbatches,
                     "optimizer": {"lr": 3e-4, "warmup_steps": 4}},
        "parallel": {"microbatch_size": task.microbatch_size, "recompute": "full"},
        "checkpoint": {"interval_steps": INTERVAL, "keep": 1},
        "faults": [{"attempt": 1, "step": KILLED_BEFORE, "rank": 0, "kind": "sigkill"}],
        "wandb": {"mode": "disabled"},
    }


def _verdict(history: list[Event]) -> list[StepReport]:
    """All steps, if they are as they should be. Raises Refused."""
    attempts = [e for e in history if isinstance(e, AttemptStarted)]
    steps = [e for e in history if isinstance(e, StepReport)]
    resumed = [a.resume_step for a in attempts]
    if resumed != [None, RESUMED_FROM]:
        raise Refused(f"attempts resumed from {resumed}; a kill before step {KILLED_BEFORE} should give "
                      f"{[None, RESUMED_FROM]}")
    done = [[s.step for s in steps if s.attempt == a] for a in (1, 2)]
    if done != [list(range(1, KILLED_BEFORE)), list(range(RESUMED_FROM + 1, STEPS + 1))]:
        raise Refused(f"steps {done} were done by the two attempts")
    first, second = ({s.step: s.loss for s in steps if s.attempt == a} for a in (1, 2))
    for step in sorted(first.keys() & second.keys()):
        if not abs(first[step] - second[step]) <= SAME_LOSS * first[step]:
            raise Refused(f"step {step} has loss {first[step]} before the kill and {second[step]} after the resume")
    if not all(math.isfinite(s.loss) for s in steps) or second[STEPS] > first[1] - 0.1:
        raise Refused(f"nothing was learned: loss {first[1]} → {second[STEPS]}")
    return steps


# ------------------------------------------------------------------ by hand
def _by_hand(task: Task, *, folder: Path) -> list[float]:
    """Seconds of the steps behind the warm-up; in a process of its own, whose memory is its own."""
    path = folder / "task.json"
    path.write_text(json.dumps(to_dict(task)))
    out = _checked([sys.executable, "-m", "tests.gpu.by_hand", str(path), str(WARM_UP + 12)], what="the loop by hand",
                   capture=True)
    return json.loads(out)[WARM_UP:]


def _checked(command: list[str], *, what: str, capture: bool = False) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True, env=dict(os.environ))
    if done.returncode != 0:
        raise Refused(f"{what} ended with code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
