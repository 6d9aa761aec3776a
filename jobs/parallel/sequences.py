"""What the model is told of each sequence beside its tokens: random keys, weights, where its documents begin.

Called by jobs.parallel on every rank of a pipeline, which all compute the same: nothing has to be sent along
with the activations. The keys depend on (seed, step, slot) alone, never on the layout.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from jobs.model.places import document_starts, sequence_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """The data-parallel share of the step's slots that this rank computes."""

    slots: range
    global_batch_size: int  # slots from here on hold no sample
    seed: int
    with_keys: bool  # the model drops out
    with_weights: bool  # the model balances experts
    device: torch.device

    def at(self, step: int | None, *, documents: Tensor | None = None) -> dict[str, Tensor]:
        """Arguments of the model's forward by name, [len(slots), …] each; those only that it needs. Where no `step` is
        computed, nothing is dropped out and experts are not balanced."""
        slots = torch.arange(self.slots.start, self.slots.stop, device=self.device)
        found = {}
        if self.with_keys and step is not None:
            found["keys"] = sequence_keys(slots, seed=self.seed, step=step)
        if self.with_weights and step is not None:
            found["weights"] = (slots < self.global_batch_size).float() / self.global_batch_size
        if documents is not None:
            starts = document_starts(documents)  # stays on the host; pinned, copying it waits for nothing
            found["starts"] = starts.pin_memory() if self.device.type == "cuda" else starts
        return found
