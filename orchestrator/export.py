"""A plan in the terms of another trainer: Accelerate, Axolotl, torchtitan, Megatron-LM.

Called by `orc export`. Writes the tool's own field names and nothing that the plan does not say. What the tool does
otherwise (orchestrator.dialects) stands above it as comments, and goes to the terminal; what would make it another plan
is refused.
"""
import textwrap
from collections.abc import Callable
from typing import Any

import yaml

from jobs.spec.load import SpecError
from jobs.spec.parallel import Layout
from orchestrator.dialects import dialect, losses, nearest, refusals
from orchestrator.planner.plan import Plan, PlannedJob

# Our word → the tool's, for the values that are words.
TITAN_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B",
                   "interleaved_zero_bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV"}
MEGATRON_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
MEGATRON_CP = {"ring": "p2p", "allgather": "all_gather"}
ACCELERATE_CP = {"ring": "alltoall", "allgather": "allgather"}  # how keys and values rotate


def notes(plan: Plan, *, to: str) -> list[str]:
    """What the reader of the file must know: each detail that the tool does otherwise, and what it lacks."""
    return [*losses(plan.layout, to=to), f"{to} lacks: {dialect(to).lacks}"]


def export(plan: Plan, *, to: str) -> str:
    """The text of the tool's file (Accelerate, Axolotl: YAML; torchtitan, Megatron-LM: command-line arguments), under
    a comment with the plan and its notes. Raises SpecError naming everything without which it would be another plan."""
    problems = refusals(plan, to=to)
    if problems:
        raise SpecError(problems)
    writers: dict[str, Callable[[Layout, PlannedJob], str]] = {
        "accelerate": _accelerate, "axolotl": _axolotl, "torchtitan": _torchtitan, "megatron": _megatron}
    head = [f"{plan.job.model} on {plan.job.num_nodes} × {plan.job.gpus_per_node} {plan.job.gpu}: {plan.layout}",
            *notes(plan, to=to)]
    return _comment(*head) + writers[to](nearest(plan.layout, to=to), plan.job)


def _comment(*lines: str) -> str:
    """Names come from the user's files: a line break in one must not end the comment."""
    return "".join(f"# {part}\n" for line in lines for part in textwrap.wrap(" ".join(line.split()), 110))


# ------------------------------------------------------------------ Hugging Face
def _accelerate(layout: Layout, job: PlannedJob) -> str:
    """`accelerate launch --config_file`, which refuses keys that it does not know: what belongs into the script is a
    comment. The layers that FSDP wraps are those that the model itself names as not to be split. Plain replication is
    not FSDP there, and knows no parallelism_config."""
    dims = layout.dims
    sync = ", sync_each_batch=True" if layout.reduce_every_microbatch else ""
    script = _comment(f"in the script: {layout.microbatch_size} sequences of {job.seq_len} tokens per rank, Accelerator"
                      "(gradient_accumulation_plugin=GradientAccumulationPlugin("
                      f"num_steps={layout.num_microbatches}{sync}))")
    plain = dims.fsdp == dims.tp == 1
    data: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if not plain else "MULTI_GPU" if dims.world_size > 1 else "NO",
        "mixed_precision": "bf16" if job.param_dtype == "bfloat16" else "no",
        "num_machines": dims.world_size // job.gpus_per_node or 1,
        "num_processes": dims.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
    }
    if plain:
        return script + _yaml(data)
    parallelism: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": dims.dp_replicate, "parallelism_config_dp_shard_size": dims.dp_shard,
        "parallelism_config_tp_size": dims.tp, "parallelism_config_cp_size": dims.cp}
    if dims.cp > 1:
        parallelism["parallelism_config_cp_comm_strategy"] = ACCELERATE_CP[layout.cp_method]
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": layout.reshard_after_forward,
            "fsdp_activation_checkpointing": layout.recompute == "full", "fsdp_offload_params": False,
            "fsdp_cpu_ram_efficient_loading": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    return script + _yaml(data | {"fsdp_config": fsdp, "parallelism_config": parallelism})


def _axolotl(layout: Layout, job: PlannedJob) -> str:
    """Beside base_model, datasets and the optimizer. Its context parallelism is ring-flash-attn's."""
    dims = layout.dims
    data: dict[str, Any] = {
        "dp_replicate_size": dims.dp_replicate,
        "dp_shard_size": dims.dp_shard,
        "tensor_parallel_size": dims.tp,
        "context_parallel_size": dims.cp,
        "sequence_len": job.seq_len,
        "micro_batch_size": layout.microbatch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "bf16": job.param_dtype == "bfloat16",
        "gradient_checkpointing": layout.recompute == "full" and dims.fsdp == 1,
    }
    if dims.cp > 1:
        data |= {"attn_implementation": "flash_attention_2", "ring_attn_func": "batch_ring"}
    if layout.reduce_every_microbatch:
        data["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if dims.fsdp > 1:
        data |= {"fsdp_version": 2,
                 "fsdp_config": {"offload_params": False, "reshard_after_forward": layout.reshard_after_forward,
                                 "activation_checkpointing": layout.recompute == "full",
                                 "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT"}}
    return _yaml(data)


def _yaml(data: dict[str, Any]) -> str:
    return yaml.safe_dump(data, sort_keys=False)


# ------------------------------------------------------------------ torchtitan
def _torchtitan(layout: Layout, job: PlannedJob) -> str:
    """Arguments behind its --module and --config. Uneven stages are written out module by module; its CUDA graphs
    know neither pipelines nor experts' all-to-all."""
    dims = layout.dims
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": dims.dp_replicate, "data_parallel_shard_degree": dims.dp_shard,
        "fsdp_reshard_after_forward": "always" if layout.reshard_after_forward else "never",
        "tensor_parallel_degree": dims.tp, "context_parallel_degree": dims.cp,
        "pipeline_parallel_degree": dims.pp, "expert_parallel_degree": dims.ep}
    if dims.pp > 1:
        parallelism |= {"pipeline_parallel_schedule": TITAN_SCHEDULES[layout.schedule],
                        "pipeline_parallel_microbatch_size": layout.microbatch_size,
                        "module_fqns_per_model_part": " ".join(_modules(layout))}
    training = {"local_batch_size": layout.microbatch_size * (layout.num_microbatches if dims.pp > 1 else 1),
                "global_batch_size": job.global_batch_size, "seq_len": job.seq_len,
                "mixed_precision_param": job.param_dtype}
    flags = [f"--{section}.{name} {value}" for section, values in (("training", training), ("parallelism", parallelism))
             for name, value in values.items()]
    if dims.tp > 1 and not layout.sequence_parallel:
        flags.append("--parallelism.no-enable-sequence-parallel")
    if dims.pp > 1 or dims.ep > 1:
        flags.append("--training.disable-cuda-graphs")
    return _comment("torchtitan --module … --config … $(grep -v '^#' FILE)") + "\n".join(
        [*flags, f"activation-checkpoint:{layout.recompute}"]) + "\n"


def _modules(layout: Layout) -> list[str]:
    """Names of torchtitan's modules, one string per stage."""
    stages = [[f"layers.{i}" for i in layout.layers(stage)] for stage in range(layout.num_stages)]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return [",".join(stage) for stage in stages]


# ------------------------------------------------------------------ Megatron-LM
def _megatron(layout: Layout, job: PlannedJob) -> str:
    """Command-line arguments, one per line, beside those of the model. Stages are always written out: a count of
    layers alone has been misread for virtual and uneven stages."""
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
    sharded = dims.fsdp > 1 and layout.zero_stage > 1
    if dims.fsdp > 1:
        args += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
        if sharded:
            args += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {MEGATRON_SHARDING[layout.zero_stage]}",
                     "--ckpt-format fsdp_dtensor"]
        if dims.dp_replicate > 1:
            args.append(f"--num-distributed-optimizer-instances {dims.dp_replicate}")
    if layout.recompute == "full":
        args.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if job.param_dtype == "bfloat16":
        args.append("--bf16")
    connections = "unset" if sharded else "1" if max(dims.tp, dims.cp) > 1 else "as it is"
    return _comment(f"pretrain_gpt.py … $(grep -v '^#' FILE), with CUDA_DEVICE_MAX_CONNECTIONS {connections}") + \
        "\n".join(args) + "\n"


def stage_layout(layout: Layout) -> str:
    """Megatron-LM's string of stages: E the embedding, t a layer, L the loss, | a boundary."""
    stages = ["t" * count for count in layout.layers_per_stage]
    return "|".join(["E" + stages[0], *stages[1:]]) + "L" if len(stages) > 1 else f"E{stages[0]}L"
