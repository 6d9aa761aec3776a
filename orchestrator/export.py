"""A plan in the terms of another trainer: Accelerate, Axolotl, torchtitan, Megatron-LM.

Called by `orc export`. Writes the tool's own field names and nothing that the plan does not say. What a tool has no
field for is refused, never left out: a plan that loses its pipeline on the way is another plan.
"""
from collections.abc import Callable
from typing import Any, Literal, get_args

import yaml

from jobs.spec.load import Problem, SpecError, suggest
from jobs.spec.parallel import Layout
from orchestrator.planner.plan import Plan

Tool = Literal["accelerate", "axolotl", "torchtitan", "megatron"]

# Our word → the tool's, for the values that are words.
TITAN_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B",
                   "interleaved_zero_bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV"}
MEGATRON_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
ROTATIONS = {"ring": "alltoall", "allgather": "allgather"}  # of keys and values, Accelerate and torchtitan
MEGATRON_CP = {"ring": "p2p", "allgather": "all_gather"}
# What a tool can say, by field of the layout; a field that is not named takes any value.
LIMITS: dict[str, dict[str, tuple[Any, ...]]] = {
    "accelerate": {"pp": (1,), "ep": (1,), "zero_stage": (2, 3), "layers_per_unit": (1,), "recompute": ("none", "full"),
                   "reduce_every_microbatch": (False,)},
    "axolotl": {"pp": (1,), "ep": (1,), "zero_stage": (2, 3), "layers_per_unit": (1,), "recompute": ("none", "full"),
                "reduce_every_microbatch": (False,)},
    "torchtitan": {"zero_stage": (2, 3), "layers_per_unit": (1,), "reduce_every_microbatch": (False,)},
    "megatron": {"schedule": ("1f1b", "interleaved_1f1b"), "reduce_every_microbatch": (False,)},
}


def export(plan: Plan, *, to: str) -> str:
    """The text of the tool's file (Accelerate, Axolotl: YAML; torchtitan: TOML; Megatron-LM: command-line arguments).
    Raises SpecError naming everything that the tool cannot say."""
    if to not in get_args(Tool):
        raise SpecError([Problem(where="--to", value=to, message=f"is no tool; {suggest(to, get_args(Tool))}")])
    problems = _unsaid(plan, to)
    if problems:
        raise SpecError(problems)
    writers: dict[str, Callable[[Plan], str]] = {"accelerate": _accelerate, "axolotl": _axolotl,
                                                 "torchtitan": _torchtitan, "megatron": _megatron}
    return f"# {plan.job.model} on {plan.job.num_nodes} × {plan.job.gpus_per_node} {plan.job.gpu}: {plan.layout}\n" + \
        writers[to](plan)


def _unsaid(plan: Plan, to: str) -> list[Problem]:
    layout, job, found = plan.layout, plan.job, []
    for name, sayable in LIMITS[to].items():
        value = getattr(layout, name) if hasattr(layout, name) else getattr(layout.dims, name)
        if value in sayable or _idle(layout, name):
            continue
        found.append(Problem(where=f"layout.{name}", value=value, message=f"has no field in {to}; plan again with "
                             f"parallel.{name}={sayable[-1]}"))
    if layout.slots != job.global_batch_size:
        dp = layout.dims.dp
        found.append(Problem(where="layout.num_microbatches", value=layout.num_microbatches,
                             message=f"× microbatch_size "
                             f"× dp = {layout.slots} slots for global_batch_size={job.global_batch_size}, and {to} has "
                             f"no weightless ones; plan again with parallel.uneven_batch=false, or a global_batch_size "
                             f"that is a multiple of {layout.microbatch_size * dp}"))
    if to == "accelerate" and layout.dims.dp_replicate > 1 and layout.dims.tp > 1 and layout.dims.dp_shard == 1:
        found.append(Problem(where="layout.dp_shard", value=1, message="with dp_replicate and tp above 1 is refused by "
                             "accelerate; plan again with parallel.dp_replicate=1"))
    return found


def _idle(layout: Layout, name: str) -> bool:
    """Where the field makes no difference to this layout."""
    if name in ("zero_stage", "layers_per_unit"):
        return layout.dims.fsdp == 1
    return name == "schedule" and layout.dims.pp == 1


# ------------------------------------------------------------------ Hugging Face
def _accelerate(plan: Plan) -> str:
    """`accelerate launch --config_file`, as of 1.15, which refuses keys that it does not know: what belongs into the
    script is a comment. The layers that FSDP wraps are those that the model itself names as not to be split."""
    layout, job = plan.layout, plan.job
    dims = layout.dims
    parallelism: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": dims.dp_replicate, "parallelism_config_dp_shard_size": dims.dp_shard,
        "parallelism_config_tp_size": dims.tp, "parallelism_config_cp_size": dims.cp}
    if dims.cp > 1:
        parallelism["parallelism_config_cp_comm_strategy"] = ROTATIONS[layout.cp_method]
    batch = (f"# in the script: {layout.microbatch_size} sequences of {job.seq_len} tokens per rank, "
             f"Accelerator(gradient_accumulation_steps={layout.num_microbatches})\n")
    return batch + _yaml({
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": _mixed(job.param_dtype),
        "num_machines": dims.world_size // job.gpus_per_node or 1,
        "num_processes": dims.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                        "fsdp_reshard_after_forward": layout.reshard_after_forward,
                        "fsdp_activation_checkpointing": layout.recompute == "full", "fsdp_offload_params": False,
                        "fsdp_cpu_ram_efficient_loading": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
        "parallelism_config": parallelism,
    })


def _axolotl(plan: Plan) -> str:
    layout, job = plan.layout, plan.job
    dims = layout.dims
    return _yaml({
        "dp_replicate_size": dims.dp_replicate,
        "dp_shard_size": dims.dp_shard,
        "tensor_parallel_size": dims.tp,
        "context_parallel_size": dims.cp,
        "sequence_len": job.seq_len,
        "micro_batch_size": layout.microbatch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "bf16": job.param_dtype == "bfloat16",
        "gradient_checkpointing": False,
        "fsdp_version": 2,
        "fsdp_config": {"offload_params": False, "reshard_after_forward": layout.reshard_after_forward,
                        "activation_checkpointing": layout.recompute == "full",
                        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT"},
    })


def _mixed(param_dtype: str) -> str:
    return "bf16" if param_dtype == "bfloat16" else "no"


def _yaml(data: dict[str, Any]) -> str:
    return yaml.safe_dump(data, sort_keys=False)


# ------------------------------------------------------------------ torchtitan
def _torchtitan(plan: Plan) -> str:
    """A job TOML. Uneven stages are written out module by module."""
    layout, job = plan.layout, plan.job
    dims = layout.dims
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": dims.dp_replicate, "data_parallel_shard_degree": dims.dp_shard,
        "fsdp_reshard_after_forward": "always" if layout.reshard_after_forward else "never",
        "tensor_parallel_degree": dims.tp, "context_parallel_degree": dims.cp,
        "pipeline_parallel_degree": dims.pp, "expert_parallel_degree": dims.ep}
    if dims.cp > 1:
        parallelism["context_parallel_rotate_method"] = ROTATIONS[layout.cp_method]
    if dims.ep > 1:
        parallelism["expert_tensor_parallel_degree"] = 1
    if dims.pp > 1:
        parallelism |= {"pipeline_parallel_schedule": TITAN_SCHEDULES[layout.schedule],
                        "pipeline_parallel_microbatch_size": layout.microbatch_size,
                        "module_fqns_per_model_part": _modules(layout)}
    training = {"local_batch_size": layout.microbatch_size * (layout.num_microbatches if dims.pp > 1 else 1),
                "global_batch_size": job.global_batch_size, "seq_len": job.seq_len,
                "mixed_precision_param": job.param_dtype}
    return _toml({"training": training, "parallelism": parallelism,
                  "activation_checkpoint": {"mode": layout.recompute}})


def _modules(layout: Layout) -> list[list[str]]:
    """Names of torchtitan's modules per stage."""
    stages = [[f"layers.{i}" for i in layout.layers(stage)] for stage in range(layout.num_stages)]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def _toml(tables: dict[str, dict[str, Any]]) -> str:
    return "\n".join(f"[{name}]\n" + "".join(f"{key} = {_toml_value(value)}\n" for key, value in table.items())
                     for name, table in tables.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


# ------------------------------------------------------------------ Megatron-LM
def _megatron(plan: Plan) -> str:
    """Command-line arguments, one per line. Stages are always written out: a count of layers alone has been
    misread for virtual and uneven stages."""
    layout, job = plan.layout, plan.job
    dims = layout.dims
    args = [f"--tensor-model-parallel-size {dims.tp}", f"--pipeline-model-parallel-size {dims.pp}",
            f"--context-parallel-size {dims.cp}", f"--expert-model-parallel-size {dims.ep}",
            f"--micro-batch-size {layout.microbatch_size}", f"--global-batch-size {job.global_batch_size}",
            f"--seq-length {job.seq_len}"]
    if dims.ep > 1:
        args.append("--expert-tensor-parallel-size 1")
    if dims.pp > 1:
        args.append(f"--pipeline-model-parallel-layout {stage_layout(layout)}")
    if dims.cp > 1:
        args.append(f"--cp-comm-type {MEGATRON_CP[layout.cp_method]}")
    if dims.tp > 1 and layout.sequence_parallel:
        args.append("--sequence-parallel")
    if dims.fsdp > 1:
        args.append("--use-distributed-optimizer")
        if layout.zero_stage > 1:
            args += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {MEGATRON_SHARDING[layout.zero_stage]}"]
        if layout.layers_per_unit > 1:
            args.append(f"--suggested-communication-unit-size {layout.layers_per_unit}")
        if dims.dp_replicate > 1:
            args.append(f"--num-distributed-optimizer-instances {dims.dp_replicate}")
    if layout.recompute == "full":
        args.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif layout.recompute == "selective":
        args.append("--recompute-granularity selective")
    if job.param_dtype == "bfloat16":
        args.append("--bf16")
    return "\n".join(args) + "\n"


def stage_layout(layout: Layout) -> str:
    """Megatron-LM's string of stages: E the embedding, t a layer, L the loss, | a boundary."""
    stages = ["t" * count for count in layout.layers_per_stage]
    return "|".join(["E" + stages[0], *stages[1:]]) + "L" if len(stages) > 1 else f"E{stages[0]}L"
