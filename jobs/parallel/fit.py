"""Whether a model and its training fit a layout: what must divide what.

Called by jobs.parallel on every rank, before anything is built; the planner's rules say the same of layouts that it
looks at. Knows sizes, no tensor.
"""
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout, ParallelDims
from jobs.spec.support import layout_problems, model_problems
from jobs.spec.training import TrainingSpec


def refuse_misfits(spec: ModelSpec, *, layout: Layout, training: TrainingSpec) -> None:
    """Raises ValueError with every reason, one a line."""
    dims = layout.dims
    problems = [str(problem) for problem in (*layout_problems(layout), *model_problems(spec))]
    if spec.positions == "learned" and training.seq_len > spec.max_positions:
        problems.append(f"training.seq_len: {training.seq_len} is above model.max_positions={spec.max_positions}, the "
                        "rows of its learned positions")
    if dims.cp > 1 and training.seq_len % (2 * dims.cp):
        problems.append(f"training.seq_len: {training.seq_len} is not divisible by 2·cp={2 * dims.cp}, the equal "
                        "chunks of a sequence")
    if len(layout.layers_per_stage) != layout.num_stages or sum(layout.layers_per_stage) != spec.num_layers:
        problems.append(f"layers_per_stage: {layout.layers_per_stage} does not split {spec.num_layers} layers over "
                        f"pp={dims.pp} stages" + f" × {layout.virtual_stages}" * (layout.virtual_stages > 1))
    if layout.sequence_parallel and training.seq_len % (dims.cp * dims.tp):
        problems.append(f"training.seq_len: {training.seq_len} is not divisible by "
                        f"{f'cp·tp={dims.cp * dims.tp}' if dims.cp > 1 else f'tp={dims.tp}'}, as sequence_parallel "
                        "needs")
    problems += tensor_parallel_problems(spec, tp=dims.tp, sequence_parallel=layout.sequence_parallel)
    problems += expert_problems(spec, dims=dims)
    if layout.slots < training.global_batch_size:
        problems.append(f"layout: {layout.slots} slots cannot hold global_batch_size={training.global_batch_size}")
    if problems:
        raise ValueError("\n".join(problems))


def tensor_parallel_problems(spec: ModelSpec, *, tp: int, sequence_parallel: bool) -> list[str]:
    """Why the model cannot be split over tp ranks; empty if it can."""
    sizes = {"num_heads": spec.num_heads, "vocab_size": spec.vocab_size}
    if spec.mla is None:
        sizes["num_kv_heads"] = spec.num_kv_heads
    if not all(spec.is_moe(layer) for layer in range(spec.num_layers)):
        sizes["ffn_dim"] = spec.ffn_dim
    if spec.moe is not None and spec.moe.num_shared_experts:
        sizes["moe.num_shared_experts·ffn_dim"] = spec.moe.num_shared_experts * spec.moe.ffn_dim
    problems = [f"parallel.tp: {tp} does not divide model.{name}={size}" for name, size in sizes.items() if size % tp]
    if spec.moe is not None and tp > 1 and not sequence_parallel:
        problems.append(f"parallel.sequence_parallel: false with tp={tp}, but a mixture of experts needs each tp rank "
                        "to have tokens of its own; set it to true")
    return problems


def expert_problems(spec: ModelSpec, *, dims: ParallelDims) -> list[str]:
    """Why the experts cannot be spread over ep ranks; empty if they can."""
    if spec.moe is None:
        return [] if dims.ep == 1 else [f"parallel.ep: {dims.ep}, but model.moe is none: there are no experts; set 1"]
    problems, ranks = [], dims.dp_shard * dims.cp * dims.tp
    if ranks % dims.ep:
        problems.append(f"parallel.ep: {dims.ep} does not divide dp_shard·cp·tp={ranks}, which it is carved out of")
    if spec.moe.num_experts % dims.ep:
        problems.append(f"parallel.ep: {dims.ep} does not divide model.moe.num_experts={spec.moe.num_experts}")
    return problems
