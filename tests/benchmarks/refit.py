"""The fitted constants of the cost model, fitted again: on all fitted groups, or leaving one source after another out.

    python -m tests.benchmarks.refit TABLE.csv                    # what orchestrator/planner/constants.py states
    python -m tests.benchmarks.refit TABLE.csv --leave-one-out    # error on each source, of constants fitted without it

Least absolute errors of log(predicted/measured), every group weighing the same, on the slopes of the model at the
stated constants. Two minutes, and a quarter of an hour.
"""
import dataclasses
import sys
from collections import Counter, defaultdict
from math import exp, log
from pathlib import Path

import numpy as np

from jobs.spec.hardware import GPUS
from orchestrator.planner import compute, constants
from orchestrator.validation.predict import measured_s
from orchestrator.validation.settle import Case, settle, step_s
from orchestrator.validation.table import Row, read_table

# An entry of a dictionary is written NAME.key; portable_attention is that of Hopper, in jobs.spec.hardware.
PARAMETERS = ("SUSTAINED_MATMUL.bfloat16", "SUSTAINED_MATMUL.float8", "TILE_OVERHEAD_S", "KERNEL_RAMP_S",
              "FLASH_FORWARD", "UNFUSED_SCORE_BYTES", "MEMORY_EFFICIENCY", "BACKWARD_TRAFFIC",
              "EAGER_TRAFFIC", "PORTS_OF_2021", "portable_attention")
CEILINGS = {"SUSTAINED_MATMUL.bfloat16": 0.97, "SUSTAINED_MATMUL.float8": 0.97, "MEMORY_EFFICIENCY": 0.92,
            "portable_attention": 1.0}
ALIKE = {"SUSTAINED_MATMUL.bfloat16": "SUSTAINED_MATMUL.float16", "SUSTAINED_MATMUL.float8": "SUSTAINED_MATMUL.float4"}
FLOORS = {"MEMORY_EFFICIENCY": 0.80}
HOPPER = ("h100", "h100-96gb", "h200", "h800")
ROUNDS, STEP, TRUST, RIDGE = 5, 0.05, 0.25, 0.01
CACHES = (compute.matmul_s, compute.layer_times, compute.head_times, compute.embedding_times)

Measured = tuple[str, Case, float]  # group, what to price, seconds


def main(table: Path, *, leave_one_out: bool) -> None:
    rows = read_table(table, group_by="group")
    known = measured_cases(rows)
    fitted = [one for one in known if one[0] in constants.FITTED_GROUPS]
    if not fitted:
        raise SystemExit(f"{table}: no row of {', '.join(constants.FITTED_GROUPS)}; give the table of published runs")
    if not leave_one_out:
        print(f"before {loss(fitted):.4f}")
        values = fit(fitted)
        print(f"after  {loss(fitted):.4f}")
        for name, value in values.items():
            print(f"{name:28s} {value:.4g}")
        return
    stated = {name: value_of(name) for name in PARAMETERS}
    for group in constants.FITTED_GROUPS:
        kept, left = [one for one in fitted if one[0] != group], [one for one in fitted if one[0] == group]
        inside = mape(left)
        fit(kept)
        print(f"{group:28s} rows {len(left):3d}  MAPE fitted {inside:.1%}, left out {mape(left):.1%}", flush=True)
        for name, value in stated.items():
            set_value(name, value)


def measured_cases(rows: tuple[Row, ...]) -> list[Measured]:
    found = []
    for row, case in zip(rows, settle(rows)):
        seconds = None if isinstance(case, str) else measured_s(row, *case)
        if seconds is not None:
            found.append((row.group, case, seconds))
    return found


def fit(known: list[Measured]) -> dict[str, float]:
    """Leaves the constants at the values found, and returns them."""
    best = loss(known)
    for _ in range(ROUNDS):
        stated = {name: value_of(name) for name in PARAMETERS}
        before, wanted = best, _direction(known)
        for share in (1.0, 0.5, 0.25):  # the model is not linear: as far as it gets better
            _move(stated, share * wanted)
            best = loss(known)
            if best < before:
                break
        else:
            _move(stated, 0.0 * wanted)
            return stated
    return {name: value_of(name) for name in PARAMETERS}


def _direction(known: list[Measured]) -> np.ndarray:
    """Changes of the parameters' logarithms with which a linear model's mean absolute error is least: weighted least
    squares, reweighted until they are absolute errors; a little of each change is charged."""
    errors, sizes = _errors(known), Counter(group for group, _, _ in known)
    slopes = np.empty((len(known), len(PARAMETERS)))
    for column, name in enumerate(PARAMETERS):
        value = value_of(name)
        set_value(name, value * (1 + STEP))
        slopes[:, column] = (_errors(known) - errors) / np.log1p(STEP)
        set_value(name, value)
    weights = np.array([1 / sizes[group] / len(sizes) for group, _, _ in known])
    change = np.zeros(len(PARAMETERS))
    for _ in range(60):
        pull = weights / np.maximum(np.abs(errors + slopes @ change), 0.005)
        system = slopes.T @ (pull[:, None] * slopes) + RIDGE * np.eye(len(PARAMETERS))
        change = np.clip(np.linalg.solve(system, -slopes.T @ (pull * errors)), -TRUST, TRUST)
    return change


def _move(stated: dict[str, float], change: np.ndarray) -> None:
    for (name, value), by in zip(stated.items(), change):
        moved = value * float(np.exp(by))
        set_value(name, max(FLOORS.get(name, 0.0), min(moved, CEILINGS.get(name, float("inf")))))


def _errors(known: list[Measured]) -> np.ndarray:
    for cache in CACHES:
        cache.cache_clear()
    return np.array([log(step_s(*case) / seconds) for _, case, seconds in known])


def loss(known: list[Measured]) -> float:
    """Mean over groups of the mean |log(predicted/measured)|."""
    groups: dict[str, list[float]] = defaultdict(list)
    for (group, _, _), error in zip(known, _errors(known)):
        groups[group].append(abs(error))
    return sum(sum(errors) / len(errors) for errors in groups.values()) / len(groups)


def mape(known: list[Measured]) -> float:
    return sum(abs(exp(error) - 1) for error in _errors(known)) / len(known)


def value_of(name: str) -> float:
    if name == "portable_attention":
        return GPUS[HOPPER[0]].portable_attention
    head, _, key = name.partition(".")
    return getattr(constants, head)[key] if key else getattr(constants, head)


def set_value(name: str, value: float) -> None:
    if name == "portable_attention":
        for gpu in HOPPER:
            GPUS[gpu] = dataclasses.replace(GPUS[gpu], portable_attention=value)
        return
    head, _, key = name.partition(".")
    if key:
        getattr(constants, head)[key] = value
    else:
        setattr(constants, head, value)
    if name == "FLASH_FORWARD":
        constants.FLASH_BACKWARD = constants.FLASH_BACKWARD_RATE * value
    if name in ALIKE:
        set_value(ALIKE[name], value)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), leave_one_out="--leave-one-out" in sys.argv[2:])
