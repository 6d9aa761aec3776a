"""A message as one JSON line, and back: what the channel, the pipes of ranks and the history are written in.

The key `event` of a line is its dataclass's name in snake_case, so a reader knows what it holds. Which messages
there are is said in events and control; how lines are cut from a stream, in lines.
"""
import functools
import json
import re
from typing import Any

from jobs.spec.load import from_dict, to_dict


@functools.cache
def kind_of(cls: type) -> str:
    """StepReport → step_report"""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()


def to_wire(message: Any) -> dict[str, Any]:
    """Dataclass → JSON-able data; `event` names its class."""
    return {"event": kind_of(type(message))} | to_dict(message)


def from_wire(data: dict[str, Any], union: Any, *, origin: str = "message") -> Any:
    """The inverse of to_wire for the classes of `union`. Raises SpecError or ValueError."""
    classes = _classes(union)
    fields = dict(data)
    name = fields.pop("event", None)
    if not isinstance(name, str) or name not in classes:
        raise ValueError(f"{origin}: unknown event {name!r}; known: {', '.join(sorted(classes))}")
    return from_dict(classes[name], fields, origin=origin)


@functools.cache
def _classes(union: Any) -> dict[str, type]:
    return {kind_of(cls): cls for cls in union.__args__}


def encode(message: Any) -> bytes:
    """Dataclass → one JSON line."""
    return json.dumps(to_wire(message)).encode() + b"\n"


def decode(line: bytes | str, union: Any, *, origin: str = "message") -> Any:
    """One JSON line → the dataclass of `union` that it names. Raises SpecError or ValueError."""
    try:
        data = json.loads(line)
    except RecursionError:
        raise ValueError(f"{origin}: nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError(f"{origin}: is not a JSON object")
    return from_wire(data, union, origin=origin)
