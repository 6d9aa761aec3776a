"""Another trainer's config as wishes for the planner: the degrees it fixes, in our words.

Called by `orc plan --from FILE`. Reads Accelerate's and Axolotl's YAML; which of the two is seen from its keys.
A field that would change the layout and is not understood is refused, not skipped.
"""
import dataclasses
import math
from pathlib import Path
from typing import Any

from jobs.spec.load import Problem, SpecError, suggest
from orchestrator.request import ParallelRequest
from orchestrator.layers import parse_yaml

PREFIX = "parallelism_config_"
ACCELERATE_DEGREES = {"dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard", "tp_size": "tp",
                      "cp_size": "cp"}
ACCELERATE_OTHERS = ("cp_backend", "cp_comm_strategy", "sp_size", "sp_backend", "sp_seq_length",
                     "sp_seq_length_is_variable", "sp_attn_implementation")
AXOLOTL_DEGREES = {"dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard", "tensor_parallel_size": "tp",
                   "context_parallel_size": "cp", "sequence_parallel_degree": "cp",  # its name before
                   "micro_batch_size": "microbatch_size", "gradient_accumulation_steps": "num_microbatches"}
AXOLOTL_OTHERS = ("expert_parallel_size", "expert_parallel_backend", "expert_parallel_num_nvl_bytes",
                  "expert_parallel_num_rdma_bytes", "expert_parallel_token_capacity",
                  "expert_parallel_fallback_on_unsupported")
# Both tools' ways of moving keys and values: the ring rotates them with all-to-all messages in the first.
CP_METHODS = {"allgather": "allgather", "alltoall": "ring"}
RING_FUNCTIONS = {"batch_ring": "ring", "varlen_llama3": "allgather"}
SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "true": 3, "false": 2, "1": 3, "2": 2}  # FSDP1 has names and numbers


def read_request(path: Path, *, request: ParallelRequest) -> ParallelRequest:
    """`request` with what the file fixes. Raises SpecError: unreadable, of neither tool, contradicting itself or the
    request."""
    try:
        _, data = parse_yaml(path)
    except ValueError as error:
        raise SpecError([Problem(where="--from", value=str(path), message=f"cannot be read: {error}; give an "
                                 "Accelerate or Axolotl YAML")]) from error
    problems: list[Problem] = []
    if any(key in data for key in ("distributed_type", "parallelism_config", "compute_environment")):
        wishes = _accelerate(data, problems)
    elif any(key in data for key in (*AXOLOTL_DEGREES, "base_model", "fsdp_config")):
        wishes = _axolotl(data, problems)
    else:
        problems.append(Problem(where="--from", value=str(path), message="is neither Accelerate's YAML "
                                "(distributed_type, parallelism_config) nor Axolotl's (base_model, dp_shard_size, …)"))
        wishes = {}
    for name, value in wishes.items():
        asked = request.options(name)
        if asked is not None and value not in asked:
            problems.append(Problem(where=f"parallel.{name}", value=getattr(request, name), message="contradicts "
                                    f"{name}={value} of {path.name}; leave it auto, or change the file"))
    if problems:
        raise SpecError([dataclasses.replace(p, origin=p.origin or path.name) for p in problems])
    return dataclasses.replace(request, **wishes)


def _accelerate(data: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    kind = data.get("distributed_type", "FSDP")
    if kind not in ("FSDP", "MULTI_GPU", "MULTI_CPU", "NO"):
        problems.append(Problem(where="distributed_type", value=kind, message="has a layout of its own, which is not "
                                "read; try FSDP, MULTI_GPU or NO"))
        return {}
    wishes: dict[str, Any] = {"pp": 1, "ep": 1, "tp": 1, "cp": 1}
    processes: dict[str, Any] = {}
    _take(data, {"num_processes": "world"}, processes, problems, prefix="")
    section = _mapping(data, "parallelism_config", problems)
    sizes = {str(key).removeprefix(PREFIX): value for key, value in section.items()}
    known = (*ACCELERATE_DEGREES, *ACCELERATE_OTHERS)
    for key in sizes:
        if key not in known:
            problems.append(Problem(where=f"parallelism_config.{PREFIX}{key}", value=None, message=f"unknown key; "
                                    f"{suggest(key, known)}"))
    if section:
        wishes |= {ours: 1 for ours in ACCELERATE_DEGREES.values()}
    elif processes:  # plain FSDP shards over all processes, plain DDP over none
        wishes |= {"dp_shard": processes["world"] if kind == "FSDP" else 1,
                   "dp_replicate": 1 if kind == "FSDP" else processes["world"]}
    _take(sizes, ACCELERATE_DEGREES, wishes, problems, prefix=f"parallelism_config.{PREFIX}")
    if sizes.get("sp_size") not in (None, 1):
        problems.append(Problem(where=f"parallelism_config.{PREFIX}sp_size", value=sizes["sp_size"], message="is "
                                "Ulysses sequence parallelism, which is neither planned nor trained here; try 1 and "
                                "cp_size"))
    if "cp_comm_strategy" in sizes and wishes["cp"] > 1:
        _word(sizes["cp_comm_strategy"], CP_METHODS, "cp_method", f"parallelism_config.{PREFIX}cp_comm_strategy",
              wishes, problems)
    ranks = math.prod(wishes.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "cp", "tp"))
    if section and processes and ranks != processes["world"]:
        problems.append(Problem(where="num_processes", value=processes["world"], message="contradicts the "
                                f"{ranks} ranks of parallelism_config; make them equal"))
    fsdp = {str(key).removeprefix("fsdp_"): value for key, value in _mapping(data, "fsdp_config", problems).items()}
    return wishes | _fsdp(fsdp, "fsdp_config.fsdp_", problems,
                          sharded=wishes.get("dp_shard", 1) * wishes["cp"] > 1)


def _axolotl(data: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    wishes: dict[str, Any] = {"pp": 1, "ep": 1, "tp": 1, "cp": 1}
    known = (*AXOLOTL_DEGREES, *AXOLOTL_OTHERS)
    for key in map(str, data):
        if (key.startswith("dp_") or "_parallel_" in key) and key not in known:
            problems.append(Problem(where=key, value=None, message=f"unknown key; {suggest(key, known)}"))
    _take(data, AXOLOTL_DEGREES, wishes, problems, prefix="")
    if data.get("expert_parallel_size") not in (None, 1):
        problems.append(Problem(where="expert_parallel_size", value=data["expert_parallel_size"], message="is an axis "
                                "beside the others in axolotl, and folded over dp_shard·cp·tp here; leave it out, and "
                                "fix parallel.ep"))
    for key, remedy in {"deepspeed": "fsdp_config", "fsdp": "fsdp_version: 2 and fsdp_config"}.items():
        if data.get(key):
            problems.append(Problem(where=key, value=data[key], message=f"is not read; give {remedy} instead"))
    if data.get("ring_attn_func") is not None and wishes["cp"] > 1:
        _word(data["ring_attn_func"], RING_FUNCTIONS, "cp_method", "ring_attn_func", wishes, problems)
    accelerator = _mapping(data, "accelerator_config", problems)
    if _mapping(accelerator, "gradient_accumulation_kwargs", problems).get("sync_each_batch") is True:
        wishes["reduce_every_microbatch"] = True
    if data.get("gradient_checkpointing"):
        wishes["recompute"] = "full"
    return wishes | _fsdp(_mapping(data, "fsdp_config", problems), "fsdp_config.", problems,
                          sharded=wishes.get("dp_shard") != 1 or wishes["cp"] > 1)


def _mapping(data: dict[str, Any], key: str, problems: list[Problem]) -> dict[str, Any]:
    value = data.get(key)
    if value is not None and not isinstance(value, dict):
        problems.append(Problem(where=key, value=value, message="is not a mapping of keys to values"))
    return value if isinstance(value, dict) else {}


def _take(data: dict[str, Any], names: dict[str, str], wishes: dict[str, Any], problems: list[Problem], *,
          prefix: str) -> None:
    for theirs, ours in names.items():
        value = data.get(theirs)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(Problem(where=f"{prefix}{theirs}", value=value,
                                    message="is not a whole number of at least 1"))
        else:
            wishes[ours] = value


def _fsdp(fsdp: dict[str, Any], prefix: str, problems: list[Problem], *, sharded: bool) -> dict[str, Any]:
    wishes: dict[str, Any] = {}
    name = "reshard_after_forward" if fsdp.get("reshard_after_forward") is not None else "sharding_strategy"
    if fsdp.get(name) is not None and sharded:
        value = fsdp[name]
        known = SHARDING | {key.lower(): stage for key, stage in SHARDING.items()}
        _word(str(value).lower() if isinstance(value, bool) else str(value), known, "zero_stage", f"{prefix}{name}",
              wishes, problems)
    if fsdp.get("activation_checkpointing") in (True, "true"):
        wishes["recompute"] = "full"
    if fsdp.get("offload_params") in (True, "true"):
        problems.append(Problem(where=f"{prefix}offload_params", value=True, message="moves parameters to the host, "
                                "which is neither planned nor trained here; try false"))
    return wishes


def _word(value: Any, known: dict[str, Any], ours: str, where: str, wishes: dict[str, Any],
          problems: list[Problem]) -> None:
    """The tool's word for a choice, in ours."""
    if isinstance(value, str) and value in known:
        wishes[ours] = known[value]
    else:
        problems.append(Problem(where=where, value=value, message=f"is not read; try one of {', '.join(known)}"))
