"""Sharded checkpoints without collectives: each rank writes its shards, the supervisor commits.

Called by the trainer. Planning which rank holds which chunk, and which chunks a differently sharded tensor
needs, is torch.distributed.checkpoint's; the files are jobs.checkpoint.raw's. `manifest.json` is written by
the supervisor; a folder without one is not a checkpoint.
"""
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from jobs.checkpoint.raw import FORMAT, CheckpointCorrupt, RawReader, RawWriter, ShardIndex
from jobs.mesh import is_owner, local_of
from jobs.optim import Optimizer
from jobs.spec.reports import ShardFile

__all__ = ["CheckpointCorrupt", "Progress", "TrainingState", "load", "save"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where training stands, beside the tensors."""

    step: int = 0  # updates completed
    data_cursor: int = 0  # the next batch to read


class TrainingState:
    """The tensors of model, optimizer and random generators under their checkpoint names."""

    def __init__(self, parameters: dict[str, nn.Parameter], optimizer: Optimizer, *, rank: int, device: torch.device,
                 copies: frozenset[str], aliases: dict[str, str]) -> None:
        self.parameters = parameters
        self.optimizer = optimizer
        self.rank = rank
        self.device = device
        self._copies = copies  # parameters that another rank saves
        self._aliases = aliases  # name of a copy → of its original, which this rank holds too: saved once

    def tensors(self) -> dict[str, Tensor]:
        """`model.norm.weight`, `optim.norm.weight.exp_avg`, …; to be written to in place."""
        return {name: t for name, t in self._everything().items() if not name.startswith(_prefixes(self._aliases))}

    def _everything(self) -> dict[str, Tensor]:
        named = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        return named | {f"optim.{name}": t for name, t in self.optimizer.named_state().items()}

    def repeat_aliases(self) -> None:
        """To be called when `tensors` have been filled: the copies on this rank are filled from their originals."""
        everything = self._everything()
        for alias, original in self._aliases.items():
            for name, tensor in everything.items():
                if name.startswith(_prefixes([alias])):
                    local_of(tensor).copy_(local_of(everything[name.replace(alias, original)]))

    def owned(self) -> dict[str, Tensor]:
        """What this rank writes: of tensors that several ranks hold, coordinate 0 of each replicated axis writes.
        That is known without asking anybody."""
        return {name: t for name, t in self.tensors().items()
                if is_owner(t) and not name.startswith(_prefixes(self._copies))}

    def random(self) -> dict[str, Tensor]:
        """Generator states: this rank's own, meaningful to the same layout only."""
        states = {f"random.{self.rank:05d}.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states[f"random.{self.rank:05d}.cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def set_random(self, states: dict[str, Tensor]) -> None:
        for name, state in states.items():
            torch.set_rng_state(state) if name.endswith(".cpu") else torch.cuda.set_rng_state(state, self.device)


def _prefixes(parameters: Iterable[str]) -> tuple[str, ...]:
    """Of everything that is kept for these parameters."""
    return tuple(prefix for name in parameters for prefix in (f"model.{name}", f"optim.{name}."))


def save(folder: Path, state: TrainingState, *, progress: Progress, layout: dict[str, Any]) -> tuple[ShardFile, ...]:
    """Write and sync this rank's part into `folder`; waits for no other rank. Returns the files to report."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = state.owned() | state.random()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, None, True)
    writer = RawWriter(folder, rank=state.rank)
    chunks = writer.write_data(planner.create_local_plan(), planner)
    index = ShardIndex(format=FORMAT, step=progress.step, data_cursor=progress.data_cursor, rank=state.rank,
                       layout=layout, chunks=chunks)
    return (writer.file, writer.write_index(index))


def load(folder: Path, state: TrainingState, *, step: int, layout: dict[str, Any]) -> Progress:
    """Fill this rank's state from a committed checkpoint of any layout. Raises CheckpointCorrupt."""
    reader = RawReader(folder, step=step)
    tensors, random = state.tensors(), state.random()
    metadata = reader.read_metadata(wanted=tensors.keys() | random.keys())
    # Random states belong to ranks: they mean something to the same ranks only.
    same_layout = all(index.layout == layout for index in reader.indices)
    random = {name: t for name, t in random.items() if same_layout and name in metadata.state_dict_metadata}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    wanted = tensors | random
    reader.require(wanted)
    planner.set_up_planner(wanted, metadata, True)
    reader.read_data(planner.create_local_plan(), planner)
    state.repeat_aliases()
    state.set_random(random)
    return Progress(step=reader.indices[0].step, data_cursor=reader.indices[0].data_cursor)
