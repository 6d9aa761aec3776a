"""Run inside another trainer's own environment: reads the file that `orc export` wrote with the tool's own parser and
validation, and prints what the tool then has. Called by tests/system/test_export_real.py as a script:
`python tool_readers.py TOOL FILE WORLD_SIZE [the tool's own arguments]`. Must not know orc.
"""
import json
import os
import sys
from pathlib import Path


def arguments(file: str) -> list[str]:
    """What the shell makes of `$(grep -v '^#' FILE)`."""
    return [word for line in Path(file).read_text().splitlines() if not line.startswith("#") for word in line.split()]


def accelerate(file: str, world: int, _own: list[str]) -> dict:
    """As `accelerate launch --config_file` and then the script's Accelerator read it."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", file, "script.py"]))
    os.environ.update({key: str(value) for key, value in prepare_multi_gpu_env(args).items()})
    from accelerate import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin
    found = {"processes": args.num_processes, "machines": args.num_machines, "mixed_precision": args.mixed_precision,
             "fsdp": bool(args.use_fsdp), "multi_gpu": bool(args.multi_gpu)}
    script = " ".join(line.removeprefix("#") for line in Path(file).read_text().splitlines() if line.startswith("#"))
    plugin_text = script.partition("gradient_accumulation_plugin=")[2].rpartition(")")[0]
    accumulation = eval(plugin_text, {"GradientAccumulationPlugin": GradientAccumulationPlugin})  # noqa: S307
    found |= {"num_microbatches": accumulation.num_steps, "reduce_every": accumulation.sync_each_batch}
    if not args.use_fsdp:
        return found
    config, plugin = ParallelismConfig(), FullyShardedDataParallelPlugin()

    class Launched:  # what the Accelerator of `world` such processes answers, without starting them
        multi_device, num_processes, is_fsdp2, is_main_process = True, world, plugin.fsdp_version == 2, True
        distributed_type = "FSDP"
    config._validate_accelerator(Launched())
    return found | {
        "dp_replicate": config.dp_replicate_size, "dp_shard": config.dp_shard_size, "tp": config.tp_size,
        "cp": config.cp_size, "cp_method": config.cp_handler.cp_comm_strategy if config.cp_size > 1 else None,
        "reshard": plugin.reshard_after_forward, "recompute": plugin.activation_checkpointing,
        "wraps": plugin.auto_wrap_policy.__name__,
        "offload": bool(plugin.cpu_offload and type(plugin.cpu_offload).__name__ != "OffloadPolicy"),
        "total": config.total_size}


def axolotl(file: str, world: int, _own: list[str]) -> dict:
    """As `axolotl train` reads it, beside a user's own part. Its context parallelism imports ring_flash_attn, which is
    of CUDA alone."""
    import types

    import yaml
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.distributed import _get_parallel_config_kwargs
    try:
        import ring_flash_attn  # noqa: F401
    except ImportError:
        sys.modules["ring_flash_attn"] = types.ModuleType("ring_flash_attn")
    data = yaml.safe_load(Path(file).read_text())
    own = {"base_model": "nobody/model", "datasets": [{"path": "nobody/data", "type": "alpaca"}],
           "learning_rate": 1e-4, "optimizer": "adamw_torch", "num_epochs": 1, "output_dir": "out",
           "sample_packing": False}
    capabilities = {"bf16": True, "fp8": False, "tf32": True, "n_gpu": world, "n_node": 1,
                    "compute_capability": "sm_90"}
    cfg = validate_config(DictDefault(own | data), capabilities=capabilities,
                          env_capabilities={"torch_version": "2.13.0"})
    sizes = _get_parallel_config_kwargs(world, cfg.tensor_parallel_size, cfg.context_parallel_size, cfg.dp_shard_size,
                                        cfg.dp_replicate_size, bool(cfg.fsdp_config))
    unread = [key for key in data if key not in cfg and data[key] is not None]
    fsdp = cfg.fsdp_config or {}
    kwargs = (cfg.accelerator_config or {}).get("gradient_accumulation_kwargs") or {}
    return {axis: sizes.get(f"{axis}_size", 1) for axis in ("dp_replicate", "dp_shard", "cp", "tp")} | {
        "unread": unread, "microbatch_size": cfg.micro_batch_size, "num_microbatches": cfg.gradient_accumulation_steps,
        "seq_len": cfg.sequence_len, "reshard": fsdp.get("reshard_after_forward"), "fsdp_version": cfg.fsdp_version,
        "recompute": bool(fsdp.get("activation_checkpointing") or cfg.gradient_checkpointing),
        "reduce_every": kwargs.get("sync_each_batch", False), "ring": str(cfg.ring_attn_func or ""),
        "wraps": fsdp.get("auto_wrap_policy")}


def torchtitan(file: str, world: int, own: list[str]) -> dict:
    """As torchtitan.train reads it; the stages are looked up in the real model, on the meta device."""
    import torch
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import ParallelDims
    config = ConfigManager().parse_args([*own, *arguments(file)])
    dims = ParallelDims.from_config(config.parallelism, world)
    parallelism, training = config.parallelism, config.training
    batch = training.local_batch_size * dims.dp_replicate * dims.dp_shard
    assert training.global_batch_size % batch == 0
    with torch.device("meta"):
        model = config.model_spec.model.build()
    names = [f"layers.{i}" for i, _ in enumerate(model.layers)]
    names += [name for name, _ in model.named_children() if name != "layers"]
    parts = parallelism.module_fqns_per_model_part
    return {axis: getattr(dims, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")} | {
        "accumulation": training.global_batch_size // batch, "local": training.local_batch_size,
        "microbatch_size": parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size,
        "seq_len": training.seq_len, "reshard": parallelism.fsdp_reshard_after_forward,
        "recompute": type(config.activation_checkpoint).__qualname__, "dtype": training.mixed_precision_param,
        "schedule": get_schedule_class(parallelism.pipeline_parallel_schedule).__name__ if dims.pp > 1 else None,
        "stages": [sum(name.startswith("layers.") for name in part) for part in parts] if parts else None,
        "missing": sorted(set(names) ^ {name for part in parts for name in part}) if parts else [],
        "sequence_parallel": parallelism.enable_sequence_parallel}


def megatron(file: str, world: int, own: list[str]) -> dict:
    """As pretrain_gpt.py reads it, up to the model's config. The parser asks the GPU for its generation: Hopper."""
    import typing

    import torch
    import typing_extensions
    typing.override = typing_extensions.override  # Python 3.12's name, on 3.11
    torch.cuda.get_device_properties = lambda *_: type("Hopper", (), {"major": 9, "minor": 0})
    sys.path.insert(0, os.environ["ORC_MEGATRON_LM"])
    os.environ |= {"WORLD_SIZE": str(world), "RANK": "0", "NO_VCS_VERSION": "1"}
    if "DEVICE_MAX_CONNECTIONS 1" in Path(file).read_text():
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
    sys.argv = ["pretrain_gpt.py", *own, *arguments(file)]
    args = validate_args(parse_args())
    config = core_transformer_config_from_args(args)
    layout = config.pipeline_model_parallel_layout
    return _megatron_facts(config, layout) | {
        "dp": args.data_parallel_size, "microbatch_size": args.micro_batch_size, "batch": args.global_batch_size,
        "seq_len": args.seq_length, "sharding": args.use_megatron_fsdp and args.data_parallel_sharding_strategy,
        "distributed_optimizer": args.use_distributed_optimizer,
        "dp_replicate": args.num_distributed_optimizer_instances,
        "overlap": args.overlap_grad_reduce and args.overlap_param_gather}


def megatron_core(file: str, world: int, own: list[str]) -> dict:
    """The config dataclasses of the megatron-core package alone: every argument is a field of one of them, or of the
    training loop that the package has not."""
    import dataclasses

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig
    loop = {"micro_batch_size", "global_batch_size", "seq_length", "ckpt_format"}
    given: dict = {}
    for word in own + arguments(file):
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            given[name] = True
        else:
            given[name] = int(word) if word.isdigit() else word
    classes = (TransformerConfig, DistributedDataParallelConfig)
    fields = {cls: {f.name for f in dataclasses.fields(cls)} for cls in classes}
    unknown = set(given) - loop - set.union(*fields.values())
    if "pipeline_model_parallel_layout" in given:
        stages = given["pipeline_model_parallel_layout"].count("|") + 1
        given["virtual_pipeline_model_parallel_size"] = stages // given["pipeline_model_parallel_size"]
    import torch
    config = TransformerConfig(pipeline_dtype=torch.bfloat16, **{k: v for k, v in given.items() if k in fields[
        TransformerConfig]})
    ddp = DistributedDataParallelConfig(**{k: v for k, v in given.items()
                                           if k in fields[DistributedDataParallelConfig]})
    return _megatron_facts(config, config.pipeline_model_parallel_layout) | {
        "unknown": sorted(unknown), "sharding": given.get("use_megatron_fsdp", False) and
        ddp.data_parallel_sharding_strategy, "dp_replicate": ddp.num_distributed_optimizer_instances,
        "distributed_optimizer": ddp.use_distributed_optimizer}


def _megatron_facts(config, layout) -> dict:
    """Stages in the order of the model: virtual stage by virtual stage over the pipeline's ranks."""
    stages = None
    if layout is not None:
        stages = [sum("decoder" in str(kind) for kind in layout.layout[rank][chunk])
                  for chunk in range(layout.virtual_pipeline_model_parallel_size)
                  for rank in range(layout.pipeline_model_parallel_size)]
    cp_method = config.cp_comm_type
    return {"tp": config.tensor_model_parallel_size, "pp": config.pipeline_model_parallel_size,
            "cp": config.context_parallel_size, "ep": config.expert_model_parallel_size,
            "etp": config.expert_tensor_parallel_size, "sequence_parallel": config.sequence_parallel,
            "recompute": config.recompute_granularity, "stages": stages,
            "cp_method": cp_method[0] if isinstance(cp_method, list) else cp_method,
            "virtual": config.virtual_pipeline_model_parallel_size or 1}


if __name__ == "__main__":
    tool, path, ranks, *rest = sys.argv[1:]
    print(json.dumps(globals()[tool](path, int(ranks), rest)))
