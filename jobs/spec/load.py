"""Strict conversion between frozen dataclasses and plain JSON data.

Used for everything that crosses a process: job specs, channel messages, history lines. Unknown keys,
missing fields and wrong types are all reported at once; nothing is coerced silently. (YAML configs
pass through OmegaConf first, see orchestrator.config; this is the fast path for the wire.)
"""
import dataclasses
import difflib
import functools
import types
import typing
from enum import Enum
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")
_PLAIN = frozenset({str, int, float, bool, type(None)})  # JSON as they are


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong with an input: which value, where it came from, and what to do."""

    where: str  # dotted path, e.g. "parallel.tp"
    value: Any
    message: str  # what is wrong and the remedy
    origin: str = ""  # file:line, "command line", ...

    def __str__(self) -> str:
        origin = f"  ({self.origin})" if self.origin else ""
        value = "" if self.value is None else f"{brief(self.value)} "
        where = self.where if self.where.isprintable() and len(self.where) <= 200 else brief(self.where)
        return f"{where}: {value}{self.message}{origin}"

    @classmethod
    def told(cls, line: str, *, where: str) -> "Problem":
        """As another process has printed it; `where`: of a line that does not say where."""
        said, colon, message = line.partition(": ")
        return cls(where=said if colon else where, value=None, message=message if colon else line)


def brief(value: Any, *, most: int = 200) -> str:
    """A value as an error quotes it: one line, and no longer than a person reads."""
    try:
        text = repr(value)
    except (ValueError, RecursionError) as error:  # an integer of more digits than Python prints; a bottomless list
        return f"({type(value).__name__}: {error})"[:most]
    return text if len(text) <= most else f"{text[:most // 2]} … {text[-most // 4:]}"


class SpecError(ValueError):
    """An input was refused. `problems` holds every reason, not only the first."""

    def __init__(self, problems: list[Problem] | tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(p) for p in problems))
        self.problems = tuple(problems)


def to_dict(obj: Any) -> Any:
    """Dataclass → JSON-able data (tuples become lists, enums their values)."""
    if type(obj) in _PLAIN:  # first, and names looked up once: ranks do this several times in every step
        return obj
    if dataclasses.is_dataclass(obj):
        return {name: to_dict(getattr(obj, name)) for name in _fields(type(obj))}
    if isinstance(obj, Enum):
        return obj.value
    if isinstance(obj, dict):
        return {k: to_dict(v) for k, v in obj.items()}
    if isinstance(obj, list | tuple):
        return [to_dict(v) for v in obj]
    return obj


def from_dict(cls: type[T], data: Any, *, origin: str = "") -> T:
    """JSON data → `cls` (a dataclass). Raises SpecError naming every problem."""
    problems: list[Problem] = []
    value = _convert(cls, data, "", problems)
    if problems:
        raise SpecError([dataclasses.replace(p, origin=origin) for p in problems])
    return value


def suggest(word: str, known: typing.Iterable[str]) -> str:
    """`did you mean 'x'?` or the list of valid words: the remedy half of an unknown-name error."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(map(str, known))}"


@functools.cache
def _fields(cls: type) -> dict[str, dataclasses.Field]:
    return {f.name: f for f in dataclasses.fields(cls)}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _convert(tp: Any, data: Any, where: str, problems: list[Problem]) -> Any:
    if tp is type(data) and tp in _PLAIN:  # first: an agent reads several of these in every step
        return data
    if dataclasses.is_dataclass(tp):
        return _convert_dataclass(tp, data, where, problems)
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if origin in (Union, types.UnionType):
        return _convert_union(args, data, where, problems)
    if origin is Literal:
        if data in args:
            return data
        problems.append(Problem(where=where, value=data, message=f"is not one of {', '.join(map(str, args))}"))
        return None
    if origin in (list, tuple):
        if not isinstance(data, list | tuple):
            problems.append(Problem(where=where, value=data, message="is not a list"))
            return None
        if origin is tuple and args[-1] is not Ellipsis:
            if len(data) != len(args):
                problems.append(Problem(where=where, value=data, message=f"needs exactly {len(args)} items"))
                return None
            return tuple(_convert(a, v, f"{where}[{i}]", problems) for i, (a, v) in enumerate(zip(args, data)))
        return origin(_convert(args[0], v, f"{where}[{i}]", problems) for i, v in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            problems.append(Problem(where=where, value=data, message="is not a mapping"))
            return None
        key = int if args[0] is int else str  # JSON object keys are strings
        return {key(k): _convert(args[1], v, f"{where}.{k}", problems) for k, v in data.items()}
    return _convert_scalar(tp, data, where, problems)


def _convert_dataclass(cls: Any, data: Any, where: str, problems: list[Problem]) -> Any:
    if not isinstance(data, dict):
        problems.append(Problem(where=where, value=data, message=f"is not a mapping ({cls.__name__} expected)"))
        return None
    fields = _fields(cls)
    prefix = f"{where}." if where else ""
    before = len(problems)
    for key in data:
        if key not in fields:
            problems.append(Problem(where=f"{prefix}{key}", value=None, message=f"unknown key; {suggest(key, fields)}"))
    values = {}
    hints = _hints(cls)
    for name, field in fields.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], f"{prefix}{name}", problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(Problem(where=f"{prefix}{name}", value=None, message="is missing"))
    return cls(**values) if len(problems) == before else None


def _convert_union(args: tuple[Any, ...], data: Any, where: str, problems: list[Problem]) -> Any:
    if data is None and type(None) in args:
        return None
    attempts: list[Problem] = []
    for arg in args:
        if arg is type(None):
            continue
        tried: list[Problem] = []
        value = _convert(arg, data, where, tried)
        if not tried:
            return value
        attempts += tried
    problems.extend(attempts)
    return None


def _convert_scalar(tp: Any, data: Any, where: str, problems: list[Problem]) -> Any:
    if tp is Any:
        return data
    if isinstance(tp, type) and issubclass(tp, Enum):
        return _convert(Literal[tuple(m.value for m in tp)], data, where, problems) and tp(data)
    if tp is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(data, tp) and not (tp in (int, float) and isinstance(data, bool)):
        return data
    problems.append(Problem(where=where, value=data, message=f"is not of type {tp.__name__}"))
    return None
