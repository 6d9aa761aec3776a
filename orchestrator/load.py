"""load: one YAML, its included files and the command line's overrides → RunConfig, checked as a whole.

Called by the CLI. Every problem is reported at once, each with value, origin and remedy. OmegaConf
does the typing and the interpolation, leaf by leaf, so that one wrong value does not hide the next.
"""
import dataclasses
import difflib
import sysconfig
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jobs.spec.load import Problem, SpecError, suggest
from jobs.spec.model import ModelSpec
from jobs.spec.training import DataSpec, TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.config import RunConfig, check

INCLUDED = {"model": "models", "cluster": "clusters", "policy": "policies"}  # section → folder of configs/
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def load(path: Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """YAML file + dotlist → RunConfig. Raises SpecError with every problem found."""
    if not OmegaConf.has_resolver("python_stdlib"):
        OmegaConf.register_resolver("python_stdlib", lambda: sysconfig.get_paths()["stdlib"])
    problems: list[Problem] = []
    base = _read_yaml(path, problems)
    command_line = _parse_overrides(overrides, problems)
    sections = _choose_includes(base, command_line, problems)
    layers: list[_Layer] = []
    for section, name in sections.items():
        layers += _included_layer(path, section, name, problems)
    layers += [base, command_line]
    _raise_any(problems)

    config = _merge(layers, problems)
    _raise_any(problems)
    run_config = _instantiate(config, layers, problems)
    if run_config is not None:
        problems += check(run_config)
        problems = [dataclasses.replace(p, origin=p.origin or _origin_of(p.where, layers)) for p in problems]
    _raise_any(problems)
    assert run_config is not None
    return run_config


# ------------------------------------------------------------------ layers of YAML
@dataclass(frozen=True, slots=True)
class _Layer:
    """One source of values: flat leaves with the place each was written at."""

    leaves: dict[str, Any]  # dotted path → value
    origins: dict[str, str]  # dotted path → "file:line"


def _read_yaml(path: Path, problems: list[Problem], prefix: str = "") -> _Layer:
    try:
        text = path.read_text()
        node = yaml.compose(text)
        data = OmegaConf.to_container(OmegaConf.create(text), resolve=False) if node is not None else {}
    except (OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        problems.append(Problem(where=prefix or "file", value=str(path), message=f"cannot be read: {error}"))
        return _Layer({}, {})
    if not isinstance(data, dict):
        problems.append(Problem(where=prefix or "file", value=str(path), message="is not a mapping of keys to values"))
        return _Layer({}, {})
    leaves = _flatten(data, prefix)
    lines = _lines(node, prefix)
    return _Layer(leaves, {key: f"{path}:{lines.get(key, 1)}" for key in leaves})


def _flatten(data: dict, prefix: str) -> dict[str, Any]:
    """Nested mappings → dotted leaves; lists and empty mappings are leaves."""
    leaves = {}
    for key, value in data.items():
        where = f"{prefix}.{key}" if prefix else str(key)
        leaves |= _flatten(value, where) if isinstance(value, dict) and value else {where: value}
    return leaves


def _lines(node: Any, prefix: str) -> dict[str, int]:
    lines = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else []:
        where = f"{prefix}.{key.value}" if prefix else str(key.value)
        lines[where] = key.start_mark.line + 1
        lines |= _lines(value, where)
    return lines


def _parse_overrides(overrides: list[str] | tuple[str, ...], problems: list[Problem]) -> _Layer:
    leaves = {}
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or not key:
            problems.append(Problem(where="command line", value=item, message="is not key=value, e.g. parallel.tp=2"))
            continue
        try:
            leaves |= _flatten(typing.cast(dict, OmegaConf.to_container(OmegaConf.from_dotlist([item]))), "")
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            problems.append(Problem(where=key, value=item, message=f"cannot be parsed: {error}", origin="command line"))
    return _Layer(leaves, dict.fromkeys(leaves, "command line"))


def _choose_includes(base: _Layer, command_line: _Layer, problems: list[Problem]) -> dict[str, tuple[str, str]]:
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
                    problems.append(Problem(where=key, value=value, message="must be the name of a file",
                                            origin=layer.origins[key]))
    return chosen


def _included_layer(run_file: Path, section: str, name: tuple[str, str], problems: list[Problem]) -> list[_Layer]:
    value, origin = name
    folder = INCLUDED[section]
    if value.endswith((".yaml", ".yml")):
        candidates = [run_file.parent / Path(value).expanduser()]
    else:  # a name: the run file's own configs first, then the ones that come with orc
        candidates = [run_file.resolve().parent.parent / folder / f"{value}.yaml", CONFIGS / folder / f"{value}.yaml"]
    for candidate in candidates:
        if candidate.is_file():
            return [_read_yaml(candidate, problems, section)]
    known = sorted({p.stem for c in candidates for p in c.parent.glob("*.yaml")})
    problems.append(Problem(where=section, value=value, message=f"has no file; {suggest(value, known)}", origin=origin))
    return []


# ------------------------------------------------------------------ typing
def _merge(layers: list[_Layer], problems: list[Problem]) -> DictConfig:
    """Leaf by leaf, so that one wrong value does not hide the next."""
    config = OmegaConf.structured(RunConfig)
    _writable(config)
    # a section without a default is absent until something is said about it
    for section, cls in (("model", ModelSpec), ("training", TrainingSpec), ("data", DataSpec), ("cluster", ClusterSpec)):
        if any(key.startswith(f"{section}.") for layer in layers for key in layer.leaves):
            config[section] = OmegaConf.structured(cls)
            _writable(config[section])
    for layer in layers:
        for key, value in layer.leaves.items():
            problem = _unknown_key(key) or _set(config, key, value)
            if problem:
                problems.append(dataclasses.replace(problem, origin=layer.origins[key]))
    return config


def _writable(node: Any) -> None:
    """Frozen dataclasses give read-only nodes; they are frozen again once built."""
    if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
        OmegaConf.set_readonly(node, False)
        for key in node:
            if not OmegaConf.is_missing(node, key):
                _writable(node._get_node(key))


def _set(config: DictConfig, key: str, value: Any) -> Problem | None:
    try:
        OmegaConf.update(config, key, value)
    except OmegaConfBaseException as error:
        # OmegaConf's message, with every choice where there are choices; only the first line is about this value
        return Problem(where=key, value=value, message=f"is refused: {str(error).splitlines()[0]}")
    return None


def _unknown_key(key: str) -> Problem | None:
    cls: Any = RunConfig
    parts = key.split(".")
    for i, part in enumerate(parts):
        if not dataclasses.is_dataclass(cls):
            return None  # inside a free-form mapping
        fields = {f.name for f in dataclasses.fields(cls)}
        if part not in fields:
            where = ".".join(parts[: i + 1])
            message = f"unknown key; {_suggest_key(part, fields, '.'.join(parts[:i]))}"
            return Problem(where=where, value=None, message=message)
        cls = _dataclass_in(typing.get_type_hints(cls)[part])
    return None


def _suggest_key(part: str, fields: set[str], prefix: str) -> str:
    """A close name here, else the same name elsewhere in the config, else all names here."""
    if not difflib.get_close_matches(part, fields, n=1, cutoff=0.6):
        elsewhere = [key for key in _all_keys(RunConfig) if key.rpartition(".")[2] == part]
        if elsewhere:
            return f"did you mean {elsewhere[0]!r}?"
    return suggest(part, sorted(fields))


def _all_keys(cls: Any, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in typing.get_type_hints(cls).items():
        keys.append(f"{prefix}{name}")
        inner = _dataclass_in(hint)
        keys += _all_keys(inner, f"{prefix}{name}.") if inner else []
    return keys


def _dataclass_in(hint: Any) -> Any:
    return next((tp for tp in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(tp)), None)


def _instantiate(config: DictConfig, layers: list[_Layer], problems: list[Problem]) -> RunConfig | None:
    missing = OmegaConf.missing_keys(config)
    for key in sorted(missing):
        problems.append(Problem(where=key, value=None, message="is missing; it has no default"))
    if missing:
        return None
    try:
        return typing.cast(RunConfig, OmegaConf.to_object(config))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "config"
        message = f"cannot be resolved: {str(error).splitlines()[0]}"
        problems.append(Problem(where=key, value=None, message=message, origin=_origin_of(key, layers)))
        return None


def _origin_of(key: str, layers: list[_Layer]) -> str:
    """Where `key` was written; of a list's item, where the list was."""
    key = key.partition("[")[0]
    return next((layer.origins[key] for layer in reversed(layers) if key in layer.origins), "")


def _raise_any(problems: list[Problem]) -> None:
    if problems:
        raise SpecError(problems)
