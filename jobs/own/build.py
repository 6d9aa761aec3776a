"""Calling the user's code: entry point → module and plan table, with everything that can be wrong told as value, origin
and remedy.

Called by jobs.own.chain, in every rank and where the model is measured. Knows no mesh. What the user's code raises is
raised on as the cause: its traceback belongs in the log.
"""
import contextlib
import importlib
import os
import random
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from jobs.own.recipe import Recipe
from jobs.spec.own_model import OwnModel


_NOT_THEIRS = (f"{os.sep}torch{os.sep}", f"{os.sep}jobs{os.sep}own{os.sep}")  # in the path of a frame


class OwnModelError(ValueError):
    """The user's model cannot be used; the message says what to change."""


def load_entrypoint(entrypoint: str, *, where: str = "model.entrypoint") -> Callable[..., Any]:
    """package.module:function → the function. Raises OwnModelError."""
    module, colon, name = entrypoint.partition(":")
    if not (module and colon and name):
        raise OwnModelError(f"{where}: {entrypoint!r} is not package.module:function")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise OwnModelError(f"{where}: {entrypoint!r}: no module {error.name!r}; it is looked for in `workdir`, in "
                            "PYTHONPATH and among what is installed") from error
    except (Exception, SystemExit) as error:
        raise OwnModelError(f"{where}: {entrypoint!r} cannot be imported: {told(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            known = sorted(key for key, value in vars(found).items() if callable(value) and not key.startswith("_"))
            raise OwnModelError(f"{where}: {entrypoint!r}: {module} has no {part!r}; it has {', '.join(known)}")
        found = getattr(found, part)
    if not callable(found):
        raise OwnModelError(f"{where}: {entrypoint!r} is a {type(found).__name__}, not a function")
    return found


def build(spec: OwnModel, *, seq_len: int, seed: int | None = None) -> tuple[nn.Module, dict[str, Any], Recipe]:
    """Call the user's function: its module, on meta; its table; and the weights that it would have, of this seed (None:
    they are not needed). Raises OwnModelError."""
    with _seeded(seed or 0):  # a module may draw as it is imported
        function = load_entrypoint(spec.entrypoint)
    recipe = Recipe(seed=seed)
    with _seeded(seed or 0), recipe:
        try:
            made = function(vocab_size=spec.vocab_size, seq_len=seq_len, **spec.arguments)
        except (Exception, SystemExit) as error:
            raise OwnModelError(f"model.entrypoint: {spec.entrypoint!r} raised {told(error)}") from error
    pair = isinstance(made, tuple) and len(made) == 2
    if not (pair and isinstance(made[0], nn.Module) and isinstance(made[1], dict)):
        what = [type(one).__name__ for one in made] if isinstance(made, tuple) else type(made).__name__
        raise OwnModelError(f"model.entrypoint: {spec.entrypoint!r} returned {what}; it must return (nn.Module, plan "
                            "table), the table a dict")
    _refuse(made[0])
    recipe.name(made[0])
    return *made, recipe


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Every rank calls the user's code, so all must draw the same: from numpy, from `random`, and from torch for
    tensors that are given as numbers."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def told(error: BaseException) -> str:
    """Type, message, and the last line of the user's code that was running; as one line."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [one for one in frames if not any(part in one.filename for part in _NOT_THEIRS)]
    frame = (theirs or frames or [None])[-1]
    at = f" ({frame.filename}:{frame.lineno} in {frame.name})" if frame is not None else ""
    return f"{type(error).__name__}: {' '.join(str(error).splitlines())}{at}"


def _refuse(model: nn.Module) -> None:
    """What cannot be taken to other devices and layouts."""
    problems = []
    held: dict[tuple[int, int], tuple[str, nn.Parameter]] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                problems.append(f"{path or type(model).__name__}.{name} is a tensor but neither parameter nor buffer; "
                                "use register_buffer")
        for name, parameter in module.named_parameters(recurse=False):
            if nn.parameter.is_lazy(parameter):
                problems.append(f"{path}.{name} has no shape yet; use a module that is not lazy")
                continue
            if not parameter.requires_grad or not parameter.is_floating_point():
                problems.append(f"{path}.{name} is not trained (requires_grad is false); make it a buffer")
            if parameter.ndim == 0:
                problems.append(f"{path}.{name} is a scalar, which cannot be cut over ranks; give it one dimension, as "
                                "nn.Parameter(torch.ones(1)) has")
            elif parameter.numel() == 0:
                problems.append(f"{path}.{name} has no elements, {list(parameter.shape)}; leave it out")
            place = parameter.untyped_storage()._cdata, parameter.storage_offset()
            first, other = held.setdefault(place, (f"{path}.{name}", parameter))
            if other is not parameter:
                problems.append(f"{path}.{name} and {first} are two parameters of one memory, which each rank would "
                                "train apart; make them one (`a.weight = b.weight`), or .clone()")
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and type(module) is not nn.Dropout:
            problems.append(f"{path} is a {type(module).__name__}, whose numbers would depend on the layout; use "
                            "nn.Dropout, or set p=0")
        elif type(module) is nn.Dropout and module.p == 1:
            problems.append(f"{path} drops everything; set p below 1")
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            problems.append(f"{path} is a batch norm, which mixes sequences of other ranks; use a norm of each token")
    if problems:
        raise OwnModelError("model.entrypoint: " + "; ".join(once_per_kind(problems)))


def once_per_kind(problems: list[str]) -> list[str]:
    """What is wrong in the same way in several blocks is told of the first, with the number of the others."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=[.' ])", "*", problem), []).append(problem)
    return [found[0] + (f" (and {len(found) - 1} more like it)" if len(found) > 1 else "") for found in alike.values()]
