"""A committed checkpoint, of any layout, as a folder that Hugging Face's `transformers` loads.

Run by hand, or by the command line in a process of its own: `python -m jobs.export RUN_DIR STEP FOLDER`. One tensor
at a time is in memory, or one file's worth. Needs no process group and no GPU.
"""
import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from jobs.checkpoint.raw import CheckpointCorrupt, RawReader
from jobs.hub_config import hub_config
from jobs.safetensors import SafetensorsError, write_folder
from jobs.spec.job import JobSpec
from jobs.spec.load import from_dict
from jobs.spec.own_model import OwnModel
from jobs.spec.rundir import RunDir
from jobs.spec.training import DType
from jobs.weights import hub_problems, to_hub

MODEL = "model."  # begins the names of weights in a checkpoint


def export(run: RunDir, *, step: int, folder: Path, dtype: DType = "float32") -> None:
    """Write weights and config.json of the checkpoint of `step`. Raises CheckpointCorrupt, and SafetensorsError for a
    model that has no counterpart there."""
    job = _job_of(run)
    if isinstance(job.model, OwnModel):
        raise SafetensorsError(f"model.entrypoint: {job.model.entrypoint!r} is a model of your own, of which Hugging "
                               "Face has no counterpart; read the checkpoint's shards under your own names")
    if problems := hub_problems(job.model):
        raise SafetensorsError("; ".join(problems))
    reader = RawReader(run.checkpoint(step), step=step)
    metadata = reader.read_metadata()
    weights = ((name, tensor.to(getattr(torch, dtype))) for name, tensor in _weights(reader, metadata))
    write_folder(folder, to_hub(weights, spec=job.model))
    config = hub_config(job.model, seq_len=job.training.seq_len, dtype=dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _weights(reader: RawReader, metadata: Metadata) -> Iterator[tuple[str, Tensor]]:
    """Whole weights, one by one."""
    for name, described in metadata.state_dict_metadata.items():
        if not name.startswith(MODEL):
            continue
        tensor = torch.empty(described.size, dtype=described.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: tensor}, metadata, True)
        reader.read_data(planner.create_local_plan(), planner)
        yield name.removeprefix(MODEL), tensor


def _job_of(run: RunDir) -> JobSpec:
    """Of the newest attempt: the model is the same in all."""
    path = max(run.path.glob("attempts/*/job.json"), key=lambda path: int(path.parent.name), default=None)
    if path is None:
        raise SafetensorsError(f"{run.path}: holds no attempts/N/job.json; is it a run directory?")
    return from_dict(JobSpec, json.loads(path.read_text()), origin=str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("step", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    try:
        export(RunDir(args.run_dir), step=args.step, folder=args.folder, dtype=args.dtype)
    except (SafetensorsError, CheckpointCorrupt) as error:
        sys.exit(f"export: {error}")


if __name__ == "__main__":
    main()
