"""What a row trained: its sizes → ModelSpec.

A table gives sizes and leaves options out, so they follow from rules on the sizes alone: a feed-forward of four
times the width is GELU's, unless the table's other models are gated; tied or not, what meets the printed count of
parameters. Experts are not in a table: a mixture is looked up under its name among the presets.
"""
import functools
import itertools
from pathlib import Path

import yaml

from jobs.spec.counts import num_params
from jobs.spec.load import SpecError, from_dict
from jobs.spec.model import ModelSpec
from orchestrator.planner.refusals import MOST_LAYERS
from orchestrator.validation.table import Row

PRESETS = Path(__file__).parents[2] / "configs" / "models"
GPT2_VOCABULARY = 51200  # padded to a multiple of 128·8: what a table of GPTs that states none trains
# Tokens of a sequence in a public model's main pre-training stage: what a row of it that states none trains.
# Llama 3: arXiv:2407.21783, section 3.4.1.
PRETRAINED_AT = {"llama3": 8192}
SIZES = ("layers", "hidden", "heads", "ffn")


class NotPriced(Exception):
    """A row that cannot be predicted, and why."""


def model_of(row: Row, *, gated_table: bool) -> ModelSpec:
    """Raises NotPriced."""
    preset = preset_of(row.model or "")
    if row.moe == "True" or (preset is not None and preset.moe is not None):
        if preset is None or preset.moe is None:
            raise NotPriced(f"expert sizes of {row.model} are neither in the table nor among the presets")
        return preset
    missing = [name for name in SIZES if not getattr(row, name)]
    if missing:
        raise NotPriced(f"sizes not stated: {', '.join(missing)}")
    if row.layers > MOST_LAYERS:
        raise NotPriced(f"layers={row.layers} are more than {MOST_LAYERS}")
    if row.hidden % row.heads:
        raise NotPriced(f"heads={row.heads} do not divide hidden={row.hidden}")
    gelu = row.ffn == 4 * row.hidden and not gated_table
    found = [_spec(row, gelu=gelu, tied=tied) for tied in (False, True)]
    if row.params_b is None:
        return found[1 if gelu else 0]
    return min(found, key=lambda spec: abs(num_params(spec) / 1e9 - row.params_b))


def _spec(row: Row, *, gelu: bool, tied: bool) -> ModelSpec:
    options = {"ffn": "gelu", "norm": "layernorm", "bias": True, "positions": "learned",
               "max_positions": row.seq_len} if gelu else {}
    return ModelSpec(name=row.model or row.id, vocab_size=row.vocab or GPT2_VOCABULARY, dim=row.hidden,
                     num_layers=row.layers, num_heads=row.heads, num_kv_heads=row.kv_heads or row.heads,
                     ffn_dim=row.ffn, tie_embeddings=tied, **options)


def gated_tables(rows: tuple[Row, ...]) -> frozenset[str]:
    """Groups one of whose models has a feed-forward that no GELU model has: their models are of one family."""
    return frozenset(group for group, members in itertools.groupby(sorted(rows, key=lambda r: r.group),
                                                                   key=lambda r: r.group)
                     if any(r.ffn is not None and r.hidden is not None and r.ffn != 4 * r.hidden for r in members))


def usual_seq_len(name: str | None) -> int | None:
    """None: not a model of which it is known."""
    plain = _plain(name or "")
    return next((length for family, length in PRETRAINED_AT.items() if plain.startswith(family)), None)


def preset_of(name: str) -> ModelSpec | None:
    return _presets().get(_plain(name))


@functools.cache
def _presets() -> dict[str, ModelSpec]:
    found = {}
    for path in sorted(PRESETS.glob("*.yaml")):
        try:
            spec = from_dict(ModelSpec, yaml.safe_load(path.read_text()), origin=str(path))
        except (SpecError, yaml.YAMLError):
            continue  # a preset being written: the rows that need it are refused
        found[_plain(spec.name)] = spec
    return found


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum() or c == ".")
