"""A table of measured runs: one Row per line, blanks as None.

Read by orchestrator.validation. It knows the columns and their types, and what a measurement says; it does not know
what any of it means for a prediction.
"""
import csv
import math
from dataclasses import dataclass, fields
from pathlib import Path

from jobs.spec.counts import model_flops_per_token
from jobs.spec.load import Problem, SpecError
from jobs.spec.model import AttentionConvention, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run as published. Names as in the table's header."""

    id: str
    group: str
    model: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    seq_len: int | None = None
    params_b: float | None = None
    moe: str | None = None
    gpu: str | None = None
    peak: float | None = None
    mem_gb: float | None = None
    gpus_per_node: int | None = None
    n_gpus: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    zero_stage: int | None = None
    mbs: int | None = None
    gbs: int | None = None
    grad_accum: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    precision: str | None = None
    status: str | None = None
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu_pct: float | None = None
    hfu_pct: float | None = None
    memory_gb: float | None = None
    flop_kind: str | None = None
    convention: str | None = None

    @property
    def ran(self) -> bool:
        return self.status in (None, "ok")


NEEDED = ("id", "gpu", "n_gpus")


def read_table(path: Path, *, group_by: str) -> tuple[Row, ...]:
    """The rows of a CSV. Columns that are not known are left alone; a cell that is not a number is a problem."""
    if not path.is_file():
        raise SpecError([Problem(where="table", value=str(path),
                                 message=f"{'is no file' if path.exists() else 'does not exist'}; give a CSV of "
                                         "measured runs")])
    try:
        return _read(path, group_by=group_by)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError([Problem(where="table", value=str(path), message=f"cannot be read: {error}; give a CSV of "
                                                                         "measured runs")]) from error


def _read(path: Path, *, group_by: str) -> tuple[Row, ...]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        header = reader.fieldnames or []
        missing = [name for name in (*NEEDED, group_by) if name not in header]
        if missing:
            raise SpecError([Problem(where="table", value=", ".join(missing), origin=str(path),
                                     message=f"no such column; the header has {', '.join(header[:12])}…")])
        problems: list[Problem] = []
        rows = tuple(_row(cells, line, group_by, problems, origin=str(path)) for line, cells in enumerate(reader, 2))
    if problems:
        raise SpecError(problems)
    return rows


def _row(cells: dict[str, str], line: int, group_by: str, problems: list[Problem], *, origin: str) -> Row:
    values: dict[str, object] = {}
    for field in fields(Row):
        text = (cells.get(field.name) or "").strip()
        if not text or field.name == "group":
            continue
        kind = str(field.type)
        try:
            value = values[field.name] = text if "str" in kind else _finite(text) if "float" in kind else _whole(text)
            wrong = "" if isinstance(value, str) or value >= 0 else "is below 0"
        except ValueError:
            wrong = "is not a number"
        if wrong:
            problems.append(Problem(where=field.name, value=text, message=wrong, origin=f"{origin}:{line}"))
    values.setdefault("id", f"line {line}")
    return Row(group=(cells.get(group_by) or "").strip(), **values)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _whole(text: str) -> int:
    value = _finite(text)
    if value != int(value):
        raise ValueError(text)
    return int(value)


def convention_of(row: Row) -> AttentionConvention:
    """The attention that the row's FLOPs count. Unstated, it is PaLM's: full."""
    return "causal" if row.convention and "causal" in row.convention else "full"


def measured_step_s(row: Row, *, model: ModelSpec, seq_len: int, global_batch_size: int, world_size: int,
                    recomputed_per_token: float) -> float | None:
    """Seconds of a step that the row states, in whatever figure it states them: its time, tokens/s, TFLOP/s or
    utilisation. `recomputed_per_token` are the FLOPs that count where the row counts hardware FLOPs."""
    if not row.ran:
        return None
    tokens_per_gpu = global_batch_size * seq_len / world_size
    if row.step_time_s:
        return row.step_time_s
    if row.tokens_per_s_per_gpu:
        return tokens_per_gpu / row.tokens_per_s_per_gpu
    flops = model_flops_per_token(model, seq_len=seq_len, convention=convention_of(row))
    hardware = row.flop_kind is not None and row.flop_kind.startswith("hardware")
    if row.tflops_per_gpu:
        return tokens_per_gpu * (flops + (recomputed_per_token if hardware else 0.0)) / (row.tflops_per_gpu * 1e12)
    if row.mfu_pct and row.peak:
        return tokens_per_gpu * flops / (row.mfu_pct / 100 * row.peak * 1e12)
    if row.hfu_pct and row.peak:
        return tokens_per_gpu * (flops + recomputed_per_token) / (row.hfu_pct / 100 * row.peak * 1e12)
    return None
