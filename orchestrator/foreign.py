"""Another trainer's config as wishes for the planner: the degrees it fixes, in our words.

Called by `orc plan --from FILE`. Reads Accelerate's and Axolotl's YAML; which of the two is seen from its keys.
A field that would change the layout and is not understood is refused, not skipped.
"""
import dataclasses
from pathlib import Path
from typing import Any

import yaml

from jobs.spec.load import Problem, SpecError
from orchestrator.config import ParallelRequest

PREFIX = "parallelism_config_"
ACCELERATE_DEGREES = {"dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard", "tp_size": "tp",
                      "cp_size": "cp"}
AXOLOTL_DEGREES = {"dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard", "tensor_parallel_size": "tp",
                   "context_parallel_size": "cp", "micro_batch_size": "microbatch_size",
                   "gradient_accumulation_steps": "num_microbatches"}
# Both tools' ways of moving keys and values: the ring rotates them with all-to-all messages there.
CP_METHODS = {"allgather": "allgather", "alltoall": "ring"}


def read_request(path: Path, *, request: ParallelRequest) -> ParallelRequest:
    """`request` with what the file fixes. Raises SpecError: unreadable, of neither tool, or against the request."""
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError([Problem(where="--from", value=str(path), message=f"cannot be read: {error}")]) from error
    if not isinstance(data, dict):
        raise SpecError([Problem(where="--from", value=str(path), message="is not a mapping of keys to values")])
    problems: list[Problem] = []
    if any(key in data for key in ("distributed_type", "parallelism_config", "compute_environment")):
        wishes = _accelerate(data, problems)
    elif any(key in data for key in (*AXOLOTL_DEGREES, "base_model", "fsdp_config")):
        wishes = _axolotl(data, problems)
    else:
        problems.append(Problem(where="--from", value=str(path), message="is neither Accelerate's YAML "
                                                                         "(distributed_type, "
                                "parallelism_config) nor Axolotl's (base_model, dp_shard_size, …)"))
        wishes = {}
    for name, value in wishes.items():
        asked = request.options(name)
        if asked is not None and value not in asked:
            problems.append(Problem(where=f"parallel.{name}", value=getattr(request, name), message=f"contradicts "
                                                                                                    f"{name}="
                                    f"{value} of {path.name}; leave it auto, or change the file"))
    if problems:
        raise SpecError([dataclasses.replace(p, origin=p.origin or path.name) for p in problems])
    return dataclasses.replace(request, **wishes)


def _accelerate(data: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    section = data.get("parallelism_config") or {}
    sizes = {key.removeprefix(PREFIX): value for key, value in section.items()}
    wishes: dict[str, Any] = {"pp": 1, "ep": 1}
    if section:
        wishes |= {ours: 1 for ours in ACCELERATE_DEGREES.values()}
    else:  # plain FSDP shards over all processes, plain DDP over none
        wishes |= {"tp": 1, "cp": 1}
        sharded = data.get("distributed_type") == "FSDP"
        if isinstance(data.get("num_processes"), int):
            wishes |= {"dp_shard": data["num_processes"] if sharded else 1,
                       "dp_replicate": 1 if sharded else data["num_processes"]}
    _take(sizes, ACCELERATE_DEGREES, wishes, problems, prefix=f"parallelism_config.{PREFIX}")
    if sizes.get("sp_size") not in (None, 1):
        problems.append(Problem(where=f"parallelism_config.{PREFIX}sp_size", value=sizes["sp_size"], message="is "
                                "Ulysses sequence parallelism, which is neither planned nor trained here; try 1 and "
                                "cp_size"))
    if "cp_comm_strategy" in sizes and wishes.get("cp", 1) > 1:
        wishes["cp_method"] = _method(sizes["cp_comm_strategy"], f"parallelism_config.{PREFIX}cp_comm_strategy",
                                      problems)
    fsdp = {key.removeprefix("fsdp_"): value for key, value in (data.get("fsdp_config") or {}).items()}
    return wishes | _fsdp(fsdp, "fsdp_config.fsdp_", problems,
                          sharded=wishes.get("dp_shard", 1) * wishes.get("cp", 1) > 1)


def _axolotl(data: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    wishes: dict[str, Any] = {"pp": 1, "ep": 1, "tp": 1, "cp": 1}
    _take(data, AXOLOTL_DEGREES, wishes, problems, prefix="")
    if data.get("expert_parallel_size") not in (None, 1):
        wishes["ep"] = data["expert_parallel_size"]
    if data.get("gradient_checkpointing") is True:
        wishes["recompute"] = "full"
    return wishes | _fsdp(data.get("fsdp_config") or {}, "fsdp_config.", problems, sharded=wishes.get("dp_shard") != 1)


def _take(data: dict[str, Any], names: dict[str, str], wishes: dict[str, Any], problems: list[Problem], *,
          prefix: str) -> None:
    for theirs, ours in names.items():
        value = data.get(theirs)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(Problem(where=f"{prefix}{theirs}", value=value, message="is not a whole number of at least "
                                                                                    "1"))
        else:
            wishes[ours] = value


def _fsdp(fsdp: dict[str, Any], prefix: str, problems: list[Problem], *, sharded: bool) -> dict[str, Any]:
    wishes: dict[str, Any] = {}
    if isinstance(fsdp.get("reshard_after_forward"), bool) and sharded:
        wishes["zero_stage"] = 3 if fsdp["reshard_after_forward"] else 2
    if fsdp.get("activation_checkpointing") is True:
        wishes["recompute"] = "full"
    if fsdp.get("offload_params") is True:
        problems.append(Problem(where=f"{prefix}offload_params", value=True, message="moves parameters to the host, "
                                                                                     "which "
                                "is neither planned nor trained here; try false"))
    return wishes


def _method(value: Any, where: str, problems: list[Problem]) -> str:
    if value not in CP_METHODS:
        problems.append(Problem(where=where, value=value, message=f"is not one of {', '.join(CP_METHODS)}"))
    return CP_METHODS.get(value, "ring")
