"""One rank's report in a forked child, where the fake group and the fake tensors stay; and the stored presets."""
import json
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import yaml

from jobs.spec.job import JobSpec
from jobs.spec.load import from_dict, to_dict
from jobs.spec.model import ModelSpec
from jobs.spec.verification import RankReport
from jobs.verify import verify

MODELS = Path(__file__).parents[2] / "configs" / "models"


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
