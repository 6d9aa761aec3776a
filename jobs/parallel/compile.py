"""torch.compile, layer by layer: one compilation serves all layers that are alike.

Called by jobs.parallel behind recompute, which is compiled along, and before data parallelism, whose hooks stay
outside. Attention that decides on the host which blocks there are (jobs.model.chunked, jobs.parallel.context) stays
outside, too: each layer is then compiled in two parts.
"""
from collections.abc import Iterable

import torch
import torch.nn as nn


def apply_compile(layers: Iterable[nn.Module]) -> None:
    """Compile every layer's forward, and with it its backward, in place. Nothing is compiled before the first step."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward)
