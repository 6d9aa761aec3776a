"""Validation: the loss on data that is not trained on, by forward passes alone.

Built by jobs.train, called by the trainer. The batches are the same ones every time, so that two figures differ by the
weights alone; they are laid out over ranks as a step's are. Knows nothing of reports.
"""
from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh

from jobs.loader import Loader
from jobs.mesh import LOSS_AXES, all_reduce
from jobs.parallel.model import ParallelModel


class Validation:
    """`loader` gives this rank's share of `batches` global batches of `tokens` tokens each; None where the rank's
    stages need none."""

    def __init__(self, parallel: ParallelModel, *, loader: Loader | None, mesh: DeviceMesh, interval_steps: int,
                 batches: int, tokens: int, device: torch.device) -> None:
        self.parallel = parallel
        self.loader = loader
        self.mesh = mesh
        self.interval_steps = interval_steps
        self.batches = batches
        self.tokens = batches * tokens
        self.device = device

    def is_due(self, step: int, *, final_step: int) -> bool:
        return step % self.interval_steps == 0 or step == final_step

    def loss(self, *, alive: Callable[[], None]) -> float:
        """Mean over all tokens of the batches, as a step's loss is; zero on ranks without the last stage. `alive` is
        called before each batch. Every rank must take part."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for cursor in range(self.batches):
            alive()
            batch = None if self.loader is None else self.loader.batch(cursor)
            total += self.parallel.evaluate(batch and batch.inputs, batch and batch.targets,
                                            documents=batch and batch.documents)
        axes = LOSS_AXES if self.parallel.holds_last else ()
        return all_reduce(total, mesh=self.mesh, axes=axes).item() / self.batches
