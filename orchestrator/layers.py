"""The sources of a config as layers of flat values: run file, included files, command line.

Called by orchestrator.load. Every value keeps the place it was written at, so that a refusal can name it.
Knows the names of the included sections and which fields are text, and nothing else of a config's meaning.
"""
import dataclasses
import json
import os
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jobs.spec.load import Problem, suggest
from orchestrator.config import RunConfig

INCLUDED = {"model": "models", "cluster": "clusters", "policy": "policies"}  # section → folder of configs/
_KEY = re.compile(r"\w[\w-]*(\.\w[\w-]*)*")
# On a command line no alias has an anchor, nothing is a tag or a comment, and a mapping has braces.
_TEXT = re.compile(r"[*&!#]|[^{\[\"'].*(:(\s|$)|\s#)")
_NOTHING = ("null", "~", "")
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of values: flat leaves with the place each was written at."""

    leaves: dict[str, Any]  # dotted path → value
    origins: dict[str, str]  # dotted path → "file:line"


def read_yaml(path: Path, problems: list[Problem], prefix: str = "") -> Layer:
    try:
        node, data = parse_yaml(path)
    except ValueError as error:
        problems.append(Problem(where=prefix or "file", value=str(path), message=f"cannot be read: {error}"))
        return Layer({}, {})
    leaves = _flatten(_as_written(data, node, _kinds_of(prefix)), prefix)
    lines = _lines(node, prefix)
    return Layer(leaves, {key: f"{path}:{lines.get(key, 1)}" for key in leaves})


def parse_yaml(path: Path) -> tuple[Any, dict[str, Any]]:
    """A YAML's node, which knows the lines, and its mapping. Aliases are expanded up to OmegaConf's bound, a key that
    is given twice is refused. Raises ValueError with one line."""
    try:
        text = read_text(path)
        node = yaml.compose(text)
        data = OmegaConf.to_container(OmegaConf.create(text), resolve=False) if node is not None else {}
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{error.problem or first_line(error)}{line}") from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(first_line(error)) from error
    if not isinstance(data, dict):
        raise ValueError("it is not a mapping of keys to values")
    return node, typing.cast(dict[str, Any], data)


def read_text(path: Path, *, limit_kib: int = 256) -> str:
    """Of a plain file that is no larger than a person, or `orc` itself, writes: a device or a pipe may never end.
    Raises OSError, ValueError."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a plain file")
    with path.open("rb") as file:
        data = file.read(limit_kib * 1024 + 1)
    if len(data) > limit_kib * 1024:
        raise ValueError(f"it is larger than {limit_kib:,} KiB")
    return data.decode()


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _flatten(data: dict, prefix: str) -> dict[str, Any]:
    """Nested mappings → dotted leaves; lists and empty mappings are leaves."""
    leaves = {}
    for key, value in data.items():
        where = f"{prefix}.{key}" if prefix else str(key)
        leaves |= _flatten(value, where) if isinstance(value, dict) and value else {where: value}
    return leaves


def _lines(node: Any, prefix: str) -> dict[str, int]:
    lines = {}
    for name, (key, value) in _fields(node).items() if isinstance(node, yaml.MappingNode) else ():
        where = f"{prefix}.{name}" if prefix else str(name)
        lines[where] = key.start_mark.line + 1
        lines |= _lines(value, where)
    return lines


def _fields(mapping: yaml.MappingNode) -> dict[str, tuple[Any, Any]]:
    """Key → its node and its value's, those that `<<` merges among them."""
    found: dict[str, tuple[Any, Any]] = {}
    for key, value in mapping.value:
        if key.tag == "tag:yaml.org,2002:merge":
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                found = _fields(merged) | found
        else:
            found[key.value] = key, value
    return found


def parse_overrides(overrides: list[str] | tuple[str, ...], problems: list[Problem]) -> Layer:
    leaves = {}
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals or not _KEY.fullmatch(key):
            problems.append(Problem(where="command line", value=item, message="is not key=value, e.g. parallel.tp=2"))
            continue
        try:
            kinds = _kinds_of(key)
            is_text = _TEXT.match(value) or (value not in _NOTHING and value[0] not in "\"'{[" and _are_text(kinds))
            typed = json.dumps(value) if is_text else value
            data = typing.cast(dict, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={typed}"])))["value"]
            leaves |= _flatten({key: _as_written(data, yaml.compose(typed), kinds)}, "")
        except (ValueError, AttributeError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
            problems.append(Problem(where=key, value=item, message=f"cannot be parsed: {first_line(error)}",
                                    origin="command line"))
    return Layer(leaves, dict.fromkeys(leaves, "command line"))


def _as_written(data: Any, node: Any, kinds: tuple[Any, ...]) -> Any:
    """A text field's value as it was typed: there `yes`, `1e3` and `1_000` are names, and no truth and no number."""
    if isinstance(data, dict) and isinstance(node, yaml.MappingNode):
        nodes = {key: inner for key, (_, inner) in _fields(node).items()}
        return {key: _as_written(value, nodes.get(key), _below(kinds, key)) for key, value in data.items()}
    if isinstance(data, list) and isinstance(node, yaml.SequenceNode):
        of_items = _below(kinds)
        return [_as_written(item, inner, of_items) for item, inner in zip(data, node.value)]
    misread = isinstance(node, yaml.ScalarNode) and data is not None and not isinstance(data, str)
    return node.value if misread and _are_text(kinds) else data


def _kinds_of(path: str) -> tuple[Any, ...]:
    """The types that the value at a dotted path of a run may have; none: it is not known."""
    kinds: tuple[Any, ...] = (RunConfig,)
    for name in path.split(".") if path else ():
        kinds = _below(kinds, name)
    return kinds


def _below(kinds: tuple[Any, ...], name: Any = None) -> tuple[Any, ...]:
    """Of a dataclass's field, or of a list's or mapping's items."""
    found: list[Any] = []
    for kind in kinds:
        if dataclasses.is_dataclass(kind):
            hint = typing.get_type_hints(kind).get(name)
            found += typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint] if hint is not None else []
        elif (origin := typing.get_origin(kind)) in (list, tuple, dict):
            found.append(typing.get_args(kind)[1 if origin is dict else 0])
    return tuple(found)


def _are_text(kinds: tuple[Any, ...]) -> bool:
    """Text or nothing; one of several words is text, too."""
    plain = {word for kind in kinds for word in (
        map(type, typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else [kind])}
    return str in plain and plain <= {str, type(None)}


def choose_includes(base: Layer, command_line: Layer, problems: list[Problem]) -> dict[str, tuple[str, str]]:
    """Section → (file name, origin), and takes those entries out of the layers."""
    chosen = {}
    for layer in (base, command_line):
        for section in INCLUDED:
            for key in (section, f"{section}.include"):
                if key not in layer.leaves:
                    continue
                value = layer.leaves.pop(key)
                if isinstance(value, str):
                    chosen[section] = (value, layer.origins[key])
                elif value is None:
                    chosen.pop(section, None)
                else:
                    problems.append(Problem(where=key, value=value, message="must be the name of a file; quote one "
                                            "that YAML takes for something else", origin=layer.origins[key]))
    return chosen


def included_layer(run_file: Path, section: str, name: tuple[str, str], problems: list[Problem]) -> list[Layer]:
    value, origin = name
    # a name: of the run file's own configs first, then of those that come with orc
    folders = [configs / INCLUDED[section] for configs in (run_file.resolve().parent.parent, CONFIGS)]
    if value.endswith((".yaml", ".yml")):
        candidates = [run_file.parent / value]
    else:
        candidates = [folder / f"{value}.yaml" for folder in folders]
    for candidate in candidates:
        if os.path.isfile(candidate):  # unlike Path.is_file, False for a name that no file system takes
            return [read_yaml(candidate, problems, section)]
    known = sorted({p.stem for folder in folders for p in folder.glob("*.yaml")})
    problems.append(Problem(where=section, value=value, message=f"has no file; {suggest(value, known)}", origin=origin))
    return []
