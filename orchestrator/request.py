"""ParallelRequest: what a user asks of the layout, each field fixed, a list, or left to the planner.

The `parallel` section of the run's YAML. Read by the planner and by whoever speaks another trainer's dialect.
"""
import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

from jobs.spec.load import Problem
from jobs.spec.parallel import MESH_ORDER, CpMethod, Recompute, Schedule, ZeroStage

# A value, a list of values to choose from, or "auto": every legal one. `check` reads what OmegaConf has no type for.
Choice = Any
COUNTS = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "microbatch_size", "num_microbatches", "virtual_stages",
          "layers_per_unit", "num_nodes")
CHOICES = {"schedule": get_args(Schedule), "recompute": get_args(Recompute), "zero_stage": get_args(ZeroStage),
           "cp_method": get_args(CpMethod), "sequence_parallel": (True, False),
           "reduce_every_microbatch": (True, False)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelRequest:
    """What the user fixes of the layout; `auto` is left to the planner."""

    dp_replicate: Choice = "auto"
    dp_shard: Choice = "auto"
    cp: Choice = "auto"
    tp: Choice = "auto"
    pp: Choice = "auto"
    ep: Choice = "auto"
    microbatch_size: Choice = "auto"
    num_microbatches: Choice = "auto"
    schedule: Choice = "auto"
    virtual_stages: Choice = "auto"
    recompute: Choice = "auto"
    sequence_parallel: Choice = "auto"
    zero_stage: Choice = "auto"
    layers_per_unit: Choice = "auto"
    reduce_every_microbatch: Choice = "auto"
    cp_method: Choice = "auto"
    num_nodes: Choice = "auto"  # that train; the others of the allocation wait
    layers_per_stage: Any = "auto"  # one split, a list with an entry per stage
    mesh_order: Any = "auto"  # one order, a list of the five mesh axes, outermost first
    uneven_batch: bool = True  # more slots than global_batch_size, the surplus weighing nothing, where that is faster

    def options(self, name: str) -> tuple[Any, ...] | None:
        """The values asked for; None: all that are legal."""
        value = getattr(self, name)
        if value == "auto":
            return None
        return tuple(value) if isinstance(value, list | tuple) else (value,)

    def fixed(self) -> dict[str, Any]:
        """Everything that is not left to the planner."""
        named = (f.name for f in dataclasses.fields(self) if f.name != "uneven_batch")
        return {name: value for name in named if (value := getattr(self, name)) != "auto"}


def request_value_problems(request: ParallelRequest) -> list[Problem]:
    """Values that no rule of a layout could read: of the wrong kind, or below 1."""
    found = []

    def refuse(name: str, value: Any, message: str) -> None:
        found.append(Problem(where=f"parallel.{name}", value=value, message=message))

    for name in COUNTS:
        for value in request.options(name) or ():
            if not isinstance(value, int) or isinstance(value, bool):
                refuse(name, value, "is not a whole number; give one, a list of them, or auto")
            elif value < 1:
                refuse(name, value, "must be at least 1")
    for name, known in CHOICES.items():
        for value in request.options(name) or ():
            if not any(value is one or (value == one and not isinstance(value, bool)) for one in known):
                refuse(name, value, f"is not one of {', '.join(map(str, known))}, a list of them, or auto")
    for name in (*COUNTS, *CHOICES):
        if request.options(name) == ():
            refuse(name, [], "leaves no choice; give a value, a list of values, or auto")
    split = request.layers_per_stage
    if split != "auto" and not (isinstance(split, list | tuple) and split
                                and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in split)):
        refuse("layers_per_stage", split, "is not a list of layers per stage, e.g. [7, 8, 8, 7], or auto")
    order = request.mesh_order
    if order != "auto" and (not isinstance(order, list | tuple) or sorted(map(str, order)) != sorted(MESH_ORDER)):
        refuse("mesh_order", order, f"does not name each of {', '.join(MESH_ORDER)} once, outermost first")
    if not isinstance(request.uneven_batch, bool):
        refuse("uneven_batch", request.uneven_batch, "is neither true nor false")
    return found
