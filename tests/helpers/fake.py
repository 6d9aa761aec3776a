"""What runs on a fake group, in a forked child; and the stored presets.

In the test's own process it would leave torch's caches filled: DTensor's rules hand on the mesh object that they met
first, and meshes of one shape are the same to them whatever the rank, so ranks that are forked later would all take
rank 0's slices.
"""
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

from jobs.spec.job import JobSpec
from jobs.spec.load import from_dict, to_dict
from jobs.spec.model import ModelSpec
from jobs.spec.verification import RankReport
from jobs.verify import verify

MODELS = Path(__file__).parents[2] / "configs" / "models"


def in_child(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the function returns or raises."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as child:
        return child.submit(function, *args, **kwargs).result(600.0)


def verify_in_child(job: JobSpec, *, rank: int, timeout_s: float = 600.0) -> RankReport:
    """Raises AssertionError with what the child raised."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_verify, args=(job, rank, send))
    child.start()
    send.close()
    arrived = receive.poll(timeout_s)
    kind, answer = receive.recv() if arrived else ("error", f"no report within {timeout_s} s")
    if not arrived:
        child.kill()
    child.join()
    assert kind == "report", answer
    return from_dict(RankReport, json.loads(answer))


def _verify(job: JobSpec, rank: int, send: Connection) -> None:
    try:
        send.send(("report", json.dumps(to_dict(verify(job, rank=rank)))))
    except BaseException as error:  # noqa: BLE001  the parent tells it
        send.send(("error", f"{type(error).__name__}: {error}"))


def preset(name: str) -> ModelSpec:
    """A model of configs/models, as it is stored."""
    path = MODELS / f"{name}.yaml"
    return from_dict(ModelSpec, yaml.safe_load(path.read_text()), origin=str(path))
