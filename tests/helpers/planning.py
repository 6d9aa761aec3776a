"""Models, clusters and layouts that the planner's tests share, and the recorded plans.

`python -m tests.helpers.planning` records the golden plans anew, after a change that is meant to alter them.
"""
import json
from pathlib import Path
from typing import Any

from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout, ParallelDims, split_layers
from jobs.spec.training import TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.request import ParallelRequest
from orchestrator.planner import Plan, plan, plan_json
from orchestrator.planner.question import Question
from orchestrator.planner.search import Search
from orchestrator.planner.timeline import pipeline_s

LLAMA = {"vocab_size": 128256, "num_kv_heads": 8}
LLAMA3_8B = ModelSpec(name="llama3-8b", dim=4096, num_layers=32, num_heads=32, ffn_dim=14336, **LLAMA)
LLAMA3_70B = ModelSpec(name="llama3-70b", dim=8192, num_layers=80, num_heads=64, ffn_dim=28672, **LLAMA)
LLAMA3_405B = ModelSpec(name="llama3-405b", dim=16384, num_layers=126, num_heads=128, ffn_dim=53248, **LLAMA)
SMALL = ModelSpec(name="small", vocab_size=256, dim=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=1024)


def h100(num_nodes: int, **changes) -> ClusterSpec:
    return ClusterSpec(name="h100", kind="slurm", num_nodes=num_nodes, gpus_per_node=8, gpu="h100",
                       **{"intra_node_latency_us": 3.5} | changes)


def cpu(num_nodes: int, gpus_per_node: int = 4, **changes) -> ClusterSpec:
    links = {"inter_node_gb_s": 1.0, "intra_node_latency_us": 1000.0, "inter_node_latency_us": 1000.0}
    return ClusterSpec(name="local", kind="local", num_nodes=num_nodes, gpus_per_node=gpus_per_node, gpu="cpu",
                       **links | changes)


def training(*, global_batch_size: int, seq_len: int = 128, param_dtype: str = "float32") -> TrainingSpec:
    return TrainingSpec(steps=10, seq_len=seq_len, global_batch_size=global_batch_size, param_dtype=param_dtype)


def layout_of(model: ModelSpec, *, microbatch_size: int = 1, num_microbatches: int = 1, dims: dict | None = None,
              **rest) -> Layout:
    dims = ParallelDims(**(dims or {}))
    return Layout(dims=dims, microbatch_size=microbatch_size, num_microbatches=num_microbatches,
                  layers_per_stage=split_layers(model.num_layers, dims.pp), **rest)


def plan_for(model: ModelSpec, cluster: ClusterSpec, spec: TrainingSpec, *, headroom: float = 0.1,
             allow_tp_across_nodes: bool = False, trainable: bool = False, clock=lambda: 0.0, **fixed) -> Plan:
    question = Question(model=model, training=spec, cluster=cluster, request=ParallelRequest(**fixed),
                        allow_tp_across_nodes=allow_tp_across_nodes, num_nodes=cluster.num_nodes, trainable=trainable)
    return plan(question, headroom=headroom, clock=clock)


def step_s(search: Search, layout: Layout) -> float:
    """As Search.price, the step time alone."""
    costs = search.costs(layout)
    return costs.tail_s + costs.update_s + pipeline_s(
        layout.schedule, stages=costs.times(), virtual_stages=layout.virtual_stages,
        num_microbatches=layout.num_microbatches)


GOLDEN = Path(__file__).parents[1] / "golden"
# name → model, nodes, global batch, fixed; bf16 on H100, sequences of 8192
GOLDEN_PLANS = {
    "llama3_8b": (LLAMA3_8B, 16, 512, {"recompute": "selective"}),
    "llama3_70b": (LLAMA3_70B, 32, 512, {"recompute": "full"}),
    "llama3_405b": (LLAMA3_405B, 2048, 2048, {"recompute": "full", "tp": 8, "pp": 16, "dp_shard": 16}),
}


def golden_plan(name: str) -> Plan:
    model, nodes, batch, fixed = GOLDEN_PLANS[name]
    spec = training(global_batch_size=batch, seq_len=8192, param_dtype="bfloat16")
    return plan_for(model, h100(nodes), spec, **fixed)


def flatten(data: Any, where: str = "") -> dict[str, Any]:
    """Nested JSON → {dotted path: leaf}, floats to nine digits: what may differ between machines is left out."""
    if isinstance(data, dict | list):
        items = data.items() if isinstance(data, dict) else enumerate(data)
        return {key: leaf for name, value in items for key, leaf in flatten(value, f"{where}.{name}").items()}
    return {where: float(f"{data:.9g}") if isinstance(data, float) else data}


if __name__ == "__main__":
    for golden in GOLDEN_PLANS:
        (GOLDEN / f"plan_{golden}.json").write_text(json.dumps(plan_json(golden_plan(golden)), indent=1) + "\n")
