"""What no number in a config may be, found by walking any dataclass. Called by orchestrator.config.check.

It knows the names of fields, not where they stand: a name means the same thing everywhere.
"""
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jobs.spec.load import Problem

POSITIVE = frozenset({
    # counts
    "num_nodes", "gpus_per_node", "threads_per_rank", "time_min", "interval_steps", "keep", "vocab_size", "dim",
    "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "head_dim", "num_experts", "top_k", "max_positions",
    "sliding_window", "global_every", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "steps", "seq_len", "global_batch_size", "user_error_repeats", "attempt", "step",
    "batches",
    # rates and sizes that something is divided by
    "inter_node_gb_s", "intra_node_gb_s", "peak_tflops", "memory_gib", "rope_theta", "norm_eps", "eps", "signal_lead_s",
    "attention_softcap", "output_softcap", "memory_bandwidth_gb_s", "matmul_efficiency", "nodes", "oversubscription",
    "nvlink_domain",
    # waits of nothing would end everything at once
    "heartbeat_s", "heartbeat_timeout_s", "agent_start_s", "attempt_start_s", "sample_s", "hang_s", "silence_s",
    "weight", "max_epochs"})
BELOW_ONE = frozenset({"beta1", "beta2", "dropout", "attention_dropout", "headroom"})
AT_MOST_ONE = frozenset({"matmul_efficiency"})
# Figures of hardware: beyond these a unit is wrong, and products of them are no numbers any more.
HARDWARE = frozenset({"inter_node_gb_s", "intra_node_gb_s", "peak_tflops", "memory_gib", "memory_bandwidth_gb_s",
                      "inter_node_latency_us", "intra_node_latency_us", "oversubscription"})
SLOWEST, FASTEST = 1e-6, 1e9
LARGEST = 2**63 - 1  # what torch, numpy and JSON readers take for an integer


def number_problems(value: Any, where: str = "") -> list[Problem]:
    """Every number below `value` that is negative, zero where it cannot be, not finite, or absurdly large."""
    return [Problem(where=path, value=number, message=message) for path, name, number in _numbers(value, where)
            if (message := _wrong(name, number)) is not None]


def _wrong(name: str, number: int | float) -> str | None:
    if not math.isfinite(number) if isinstance(number, float) else number > LARGEST:
        return "is not a finite number" if isinstance(number, float) else "is too large for any machine integer"
    if number < 0:
        return "must not be negative" if name not in POSITIVE else "must be at least 1" if isinstance(number, int) \
            else "must be more than 0"
    if number == 0 and name in POSITIVE:
        return "must be at least 1" if isinstance(number, int) else "must be more than 0"
    if number >= 1 and name in BELOW_ONE:
        return "must be below 1"
    if number > 1 and name in AT_MOST_ONE:
        return "must be at most 1"
    if name in HARDWARE and number and not SLOWEST <= number <= FASTEST:
        return f"is absurd; try {SLOWEST:g} to {FASTEST:g}"
    return None


def _numbers(value: Any, where: str, name: str = "") -> Iterator[tuple[str, str, int | float]]:
    """(dotted path, field name, number)"""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            path = f"{where}.{field.name}" if where else field.name
            yield from _numbers(getattr(value, field.name), path, field.name)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{where}[{index}]", name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield where, name, value
