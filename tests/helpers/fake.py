"""What runs on a fake group, in a forked child; and the stored presets.

In the test's own process it would leave torch's caches filled: DTensor's rules hand on the mesh object that they met
first, and meshes of one shape are the same to them whatever the rank, so ranks that are forked later would all take
rank 0's slices.
"""
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import yaml

from jobs.spec.load import from_dict
from jobs.spec.model import ModelSpec

torch.set_num_threads(1)  # a child forked from a process whose OpenMP threads have run would wait for them for ever

MODELS = Path(__file__).parents[2] / "configs" / "models"


def in_child(function: Callable[..., Any], *args: Any, timeout_s: float = 600.0, **kwargs: Any) -> Any:
    """What the function returns or raises."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(send, function, args, kwargs))
    child.start()
    send.close()
    arrived = receive.poll(timeout_s)
    if not arrived:
        child.kill()
    error, value = receive.recv() if arrived else (TimeoutError(f"no answer within {timeout_s} s"), None)
    child.join()
    if error is not None:
        raise error
    return value


def _answer(send: Connection, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
    # torch makes its thread pool anew behind a fork, when a thread first asks: two at once found none
    torch.set_num_threads(1)
    try:
        send.send((None, function(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001  the parent raises it
        send.send((error, None))


def preset(name: str) -> ModelSpec:
    """A model of configs/models, as it is stored."""
    path = MODELS / f"{name}.yaml"
    return from_dict(ModelSpec, yaml.safe_load(path.read_text()), origin=str(path))
