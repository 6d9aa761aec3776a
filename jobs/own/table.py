"""The plan table of an own model: module paths → what tensor parallelism does to them, and which modules are blocks.

Called by jobs.own.chain and jobs.own. A path is as named_modules() gives it; `*` stands for one part of it. Knows
modules and sizes, no mesh.
"""
import difflib
import re
from dataclasses import dataclass
from typing import Any, get_args, Literal

import torch.nn as nn

from jobs.own.build import OwnModelError, once_per_kind

# column   rows of the weight are split: the input enters (is whole on every rank), the output is the rank's own part
# row      columns of the weight are split: the input is the rank's own part, the output leaves (is summed)
# split    a module that works on the rank's own part: its input enters once for all that is in it; parameters of its
#          own are split along dimension 0
# channels a module inside a split whose parameters belong to channels: split along dimension 0
# shared   a module inside a split with the same parameters for every part, such as a norm of each head
# vocab    an embedding, split by rows; its output leaves
# head     the projection to logits, split by rows; the loss is computed on the parts
# sequence a module outside of any split that treats every token alike: under sequence parallelism it gets a share of
#          the tokens
Style = Literal["column", "row", "split", "channels", "shared", "vocab", "head", "sequence"]
STYLES = get_args(Style)
KEYS = ("blocks", "styles")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The plan table, resolved against one model."""

    blocks: tuple[str, ...]  # paths, in the order of the model
    styles: dict[str, Style]  # path → style
    ties: dict[str, str]  # of parameters that modules share, every further name → the first

    @property
    def head(self) -> str | None:
        return next((path for path, style in self.styles.items() if style == "head"), None)


def resolve(raw: dict[str, Any], model: nn.Module) -> Table:
    """The user's table for this model. Raises OwnModelError with every problem."""
    modules = dict(model.named_modules())
    problems = [f"plan table: unknown key {key!r}; it has {' and '.join(KEYS)}" for key in raw if key not in KEYS]
    patterns, wanted = raw.get("blocks", ()), raw.get("styles", {})
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    if not (isinstance(patterns, list | tuple) and all(isinstance(one, str) for one in patterns)):
        raise OwnModelError(f"plan table: blocks is {patterns!r}; give a pattern such as 'blocks.*', or a list of them")
    if not (isinstance(wanted, dict) and all(isinstance(one, str) for pair in wanted.items() for one in pair)):
        raise OwnModelError(f"plan table: styles is {wanted!r}; give a dict of pattern → style")
    found = {path for pattern in patterns for path in _matching(pattern, "blocks", modules, problems)}
    blocks = tuple(path for path in modules if path in found)
    if not patterns:
        problems.append("plan table: blocks is missing; name the modules that follow one another, e.g. 'blocks.*'")
    problems += [f"plan table: block {inner!r} lies in block {outer!r}; blocks follow one another" for outer in blocks
                 for inner in blocks if inner.startswith(f"{outer}.")]
    ties = _ties(model)
    problems += [f"plan table: {name} and {first} are one parameter, but not of one block; a block's weights are its "
                 "own, give each its own" for name, first in ties.items() if len({next(
                     (block for block in blocks if one.startswith(f"{block}.")), None) for one in (name, first)}) > 1]
    styles = _styles(wanted, modules, problems)
    problems += [problem for path, style in styles.items() for problem in _style_problems(path, style, modules[path])]
    problems += _split_problems(model, styles)
    if sum(style == "head" for style in styles.values()) > 1:
        problems.append("plan table: head is the style of more than one module; there is one projection to logits")
    if problems:
        raise OwnModelError("\n".join(once_per_kind(problems)))
    return Table(blocks=blocks, styles=styles, ties=ties)


def _ties(model: nn.Module) -> dict[str, str]:
    found, first = {}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(parameter, name)) != name:
            found[name] = known
    return found


def _styles(raw: dict[str, Any], modules: dict[str, nn.Module], problems: list[str]) -> dict[str, Style]:
    chosen: dict[str, tuple[str, Style]] = {}  # path → (pattern, style)
    for pattern, style in raw.items():
        if style not in STYLES:
            problems.append(f"plan table: {pattern!r}: {style!r} is no style; valid: {', '.join(STYLES)}")
            continue
        for path in _matching(pattern, style, modules, problems):
            if path in chosen:
                problems.append(f"plan table: {path!r} is matched by {chosen[path][0]!r} ({chosen[path][1]}) and by "
                                f"{pattern!r} ({style}); leave one")
            chosen[path] = pattern, style
    return {path: style for path, (_, style) in chosen.items()}


def _matching(pattern: str, what: str, modules: dict[str, nn.Module], problems: list[str]) -> list[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    found = [path for path in modules if path and expression.fullmatch(path)]
    if not found:
        plain = re.sub(r"\*", "0", pattern)
        close = difflib.get_close_matches(plain, list(modules), n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(list(modules)[1:9])}, …"
        problems.append(f"plan table: {pattern!r} ({what}) matches no module of the model; {hint}")
    return found


def _style_problems(path: str, style: Style, module: nn.Module) -> list[str]:
    """A style that this kind of module cannot have."""
    weight = getattr(module, "weight", None)
    if style in ("column", "row", "head") and (weight is None or weight.ndim != 2 or not isinstance(module, nn.Linear)):
        return [f"plan table: {path!r} is a {type(module).__name__}; {style} is for linear layers"]
    if style == "vocab" and not isinstance(module, nn.Embedding):
        return [f"plan table: {path!r} is a {type(module).__name__}; vocab is for embeddings"]
    if style == "vocab" and (module.padding_idx is not None or module.max_norm is not None):
        return [f"plan table: {path!r} has padding_idx or max_norm, which split rows do not keep; leave them out"]
    return []


def _split_problems(model: nn.Module, styles: dict[str, Style]) -> list[str]:
    """Parameters inside a split of which nobody has said what they are."""
    splits = [path for path, style in styles.items() if style == "split"]
    return [f"plan table: {path!r} lies in the split {split!r} and has no style; say column, row, channels or shared"
            for path, module in model.named_modules() for split in splits
            if path.startswith(f"{split}.") and path not in styles and list(module.parameters(recurse=False))]


def sequence_parallel_problem(model: nn.Module, table: Table) -> str | None:
    """Why the tokens cannot be shared out over tp between the splits; None if they can."""
    for path, module in model.named_modules():
        if list(module.parameters(recurse=False)) and path not in table.styles:
            return f"{path or 'the model itself'} has parameters and no style; it would get a share of the tokens"
    return None if "head" in table.styles.values() else "no module has the style head"


def tp_problem(model: nn.Module, table: Table, *, tp: int) -> str | None:
    """Why the model cannot be split over tp ranks; None if it can."""
    if tp == 1:
        return None
    if not table.styles:
        return "the plan table has no styles"
    modules = dict(model.named_modules())
    for path, style in table.styles.items():
        for name, dim in split_dimensions(modules[path], style).items():
            size = getattr(modules[path], name).shape[dim]
            if size % tp:
                return f"does not divide dimension {dim} of {path}.{name}, {size} ({style})"
        groups = getattr(modules[path], "groups", 1)
        if style in ("channels", "split") and groups > 1 and groups % tp:
            return f"does not divide the {groups} groups of {path} ({style})"
    for names in table.ties.items():
        styles = [table.styles.get(name.rpartition(".")[0]) for name in names]
        cuts = {_cut(modules, name, style) for name, style in zip(names, styles)}
        if len(cuts) > 1 or (cuts == {None} and len(set(styles)) > 1):
            return f"cuts {names[0]} and {names[1]}, one parameter, in two ways ({styles[0]} and {styles[1]})"
    return None


def _cut(modules: dict[str, nn.Module], name: str, style: Style | None) -> int | None:
    path, _, own = name.rpartition(".")
    return None if style is None else split_dimensions(modules[path], style).get(own)


def split_dimensions(module: nn.Module, style: Style) -> dict[str, int]:
    """Name of each of the module's own parameters that the style splits → along which dimension."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if style in ("column", "head", "channels", "split"):
        return dict.fromkeys(names, 0)
    return {"row": {"weight": 1}, "vocab": {"weight": 0}}.get(style, {})
