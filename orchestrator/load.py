"""load: one YAML, its included files and the command line's overrides → RunConfig, checked as a whole.

Called by the CLI. Every problem is reported at once, each with value, origin and remedy. OmegaConf
does the typing and the interpolation, leaf by leaf, so that one wrong value does not hide the next.
"""
import dataclasses
import difflib
import os
import sysconfig
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jobs.spec.load import Problem, SpecError, from_dict, suggest
from jobs.spec.model import MlaSpec, ModelSpec, MoeSpec
from jobs.spec.own_model import OwnModel
from jobs.spec.training import DataSpec, TrainingSpec, ValidationSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.config import RunConfig, check
from orchestrator.datasets import absolute_data, absolute_training
from orchestrator.layers import Layer, choose_includes, first_line, included_layer, parse_overrides, read_yaml



def read_stored(path: Path) -> RunConfig:
    """A run's own config.yaml, as it was resolved and checked when the run was made: nothing in it is interpolated
    or looked up again. Raises SpecError."""
    try:
        return from_dict(RunConfig, yaml.safe_load(path.read_text()), origin=str(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError([Problem(where="config", value=str(path),
                                 message=f"cannot be read: {first_line(error)}")]) from error


@dataclass(frozen=True, slots=True)
class Loaded:
    """A config with the places its values were written at."""

    config: RunConfig
    layers: tuple[Layer, ...]

    def with_origins(self, problems: typing.Iterable[Problem]) -> list[Problem]:
        """Problems that a later stage found, told where their values come from."""
        return [dataclasses.replace(p, origin=p.origin or _origin_of(p.where, self.layers)) for p in problems]


def load(path: Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """YAML file + dotlist → RunConfig. Raises SpecError with every problem found."""
    return load_traced(path, overrides).config


def load_traced(path: Path, overrides: list[str] | tuple[str, ...] = ()) -> Loaded:
    """Like load(), and the origins are kept."""
    if not OmegaConf.has_resolver("python_stdlib"):
        OmegaConf.register_resolver("python_stdlib", lambda: sysconfig.get_paths()["stdlib"])
    problems: list[Problem] = []
    base = read_yaml(path, problems)
    command_line = parse_overrides(overrides, problems)
    sections = choose_includes(base, command_line, problems)
    layers: list[Layer] = []
    for section, name in sections.items():
        layers += included_layer(path, section, name, problems)
    layers += [base, command_line]
    _raise_any(problems)

    config = _merge(layers, problems)
    _raise_any(problems)
    run_config = _instantiate(config, layers, problems)
    _raise_any(problems)
    loaded = Loaded(_absolute(typing.cast(RunConfig, run_config)), tuple(layers))
    _raise_any(loaded.with_origins(check(loaded.config)))
    return loaded


def _absolute(config: RunConfig) -> RunConfig:
    """Paths as they were meant where the command was typed: whoever reads the run later stands elsewhere."""
    data, training = config.data and absolute_data(config.data), absolute_training(config.training)
    workdir = config.workdir
    if workdir is not None or config.lays_itself_out or isinstance(config.model, OwnModel):
        workdir = _absolute_path(workdir or ".")
    return dataclasses.replace(config, root=_absolute_path(config.root), data=data, training=training,
                               workdir=workdir)


def _absolute_path(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _merge(layers: list[Layer], problems: list[Problem]) -> DictConfig:
    """Leaf by leaf, so that one wrong value does not hide the next."""
    config = OmegaConf.structured(RunConfig)
    _writable(config)
    # a section without a default is absent until something is said about it
    own = _is_own_model(layers)
    for section, cls in (("model", OwnModel if own else ModelSpec), ("model.moe", MoeSpec), ("model.mla", MlaSpec),
                         ("training", TrainingSpec), ("training.validation", ValidationSpec), ("data", DataSpec),
                         ("training.validation.data", DataSpec), ("cluster", ClusterSpec)):
        if any(key.startswith(f"{section}.") for layer in layers for key in layer.leaves):
            node = OmegaConf.structured(cls)
            _writable(node)
            OmegaConf.update(config, section, node, merge=False)
            _writable(OmegaConf.select(config, section))
    for layer in layers:
        for key, value in layer.leaves.items():
            problem = _unknown_key(key, own_model=own) or _set(config, key, value)
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


def _is_own_model(layers: typing.Sequence[Layer]) -> bool:
    """The model is of the user's own: an entry point has been said of it."""
    return any("model.entrypoint" in layer.leaves for layer in layers)


def _unknown_key(key: str, *, own_model: bool) -> Problem | None:
    cls: Any = RunConfig
    parts = key.split(".")
    for i, part in enumerate(parts):
        if not dataclasses.is_dataclass(cls):
            return None  # inside a free-form mapping
        fields = {f.name for f in dataclasses.fields(cls)}
        if part not in fields:
            where = ".".join(parts[: i + 1])
            message = f"unknown key; {_suggest_key(part, fields, '.'.join(parts[:i]))}"
            if cls is OwnModel and part in {field.name for field in dataclasses.fields(ModelSpec)}:
                message = "is of orc's own decoder, not of a model.entrypoint; set model=null, or leave one of them out"
            return Problem(where=where, value=None, message=message)
        cls = OwnModel if own_model and parts[:i + 1] == ["model"] else _dataclass_in(typing.get_type_hints(cls)[part])
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


def _instantiate(config: DictConfig, layers: list[Layer], problems: list[Problem]) -> RunConfig | None:
    try:
        missing = OmegaConf.missing_keys(config)
        for key in sorted(missing):
            problems.append(Problem(where=key, value=None, message="is missing; it has no default"))
        if missing:
            return None
        return typing.cast(RunConfig, OmegaConf.to_object(config))
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None) or "config"
        message = f"cannot be resolved: {first_line(error)}; a $ that is meant is written \\$"
        problems.append(Problem(where=key, value=None, message=message, origin=_origin_of(key, layers)))
        return None


def _origin_of(key: str, layers: typing.Sequence[Layer]) -> str:
    """Where `key` was written; of a list's item, where the list was; of a mapping, where its first key was."""
    key = key.partition("[")[0]
    return next((layer.origins[name] for layer in reversed(layers) for name in layer.origins
                 if name == key or name.startswith(f"{key}.")), "")


def _raise_any(problems: list[Problem]) -> None:
    if problems:
        raise SpecError(problems)
