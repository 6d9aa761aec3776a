"""What a planner has to beat: a roofline of forty lines with four constants, fitted on the same rows.

Called by tests.benchmarks.accuracy. One matmul efficiency that saturates with the microbatch, rings on two links, and
the bubble's formula; no shapes, no overlap, no memory traffic.
"""
from dataclasses import dataclass, replace
from math import log

from jobs.spec.counts import attention_flops_per_token, expert_params, matmul_params, num_params
from orchestrator.validation.settle import Case

STEPS = (0.3, 0.1, 0.03)


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    efficiency: float = 0.6  # of the peak, of a large microbatch
    half_tokens: float = 500.0  # a microbatch at which half of it is reached
    fast_link: float = 0.7  # of the published rate
    slow_link: float = 0.7

    def step_s(self, case: Case) -> float:
        model, setup = case
        layout, dims, cluster, training = setup.layout, setup.layout.dims, setup.cluster, setup.training
        tokens = layout.microbatch_size * training.seq_len / dims.cp
        again = setup.recomputed_share if layout.recompute == "full" else 0.0
        attention = attention_flops_per_token(model, seq_len=training.seq_len, convention="causal")
        flops = (6 + 2 * again) * matmul_params(model) + (1 + again / 3) * attention
        peak = cluster.peak(setup.software.matmul_dtype or "bfloat16") * 1e12
        rate = peak * self.efficiency * tokens / (tokens + self.half_tokens)
        links = (cluster.link_gb_s * 1e9 * self.fast_link, cluster.inter_node_gb_s * 1e9 * self.slow_link)
        tp_s = self._ring_s(2 * tokens * model.dim, dims.tp, links[dims.tp > cluster.gpus_per_node])
        experts_s = 0.0
        if model.moe is not None and dims.ep > 1:
            experts_s = 8 * tokens / dims.tp * model.moe.top_k * model.dim / links[dims.ep > cluster.domain_gpus]
        layers = model.num_layers / dims.pp
        microbatch_s = tokens * flops / dims.tp / dims.pp / rate + layers * ((8 + 4 * again) * tp_s + experts_s)
        bubble = (dims.pp - 1) / layout.virtual_stages
        mixtures = sum(model.is_moe(layer) for layer in range(model.num_layers))
        idle = (model.moe.num_experts - model.moe.top_k) * expert_params(model) * mixtures if mixtures else 0
        shared = num_params(model) - idle + idle / dims.ep
        ranks = dims.dp_replicate * dims.fsdp
        link = links[ranks * dims.tp > cluster.gpus_per_node]
        gradients_s = 2 * self._ring_s(2 * shared / dims.tp / dims.pp, ranks, link)
        return (layout.num_microbatches + bubble) * microbatch_s + gradients_s

    @staticmethod
    def _ring_s(payload_bytes: float, ranks: int, bytes_s: float) -> float:
        return (ranks - 1) / ranks * payload_bytes / bytes_s


def fitted(known: list[tuple[str, Case, float]]) -> Roofline:
    """On (group, case, measured seconds), every group weighing the same, by coordinate descent. Nothing to fit on
    leaves it as it is."""
    if not known:
        return Roofline()

    def loss(one: Roofline) -> float:
        by_group: dict[str, list[float]] = {}
        for group, case, seconds in known:
            by_group.setdefault(group, []).append(abs(log(one.step_s(case) / seconds)))
        return sum(sum(errors) / len(errors) for errors in by_group.values()) / len(by_group)

    best = Roofline()
    for step in STEPS:
        improved = True
        while improved:
            before = loss(best)
            for name in Roofline.__slots__:
                for factor in (1 + step, 1 / (1 + step)):
                    best = min(best, replace(best, **{name: getattr(best, name) * factor}), key=loss)
            improved = loss(best) < before - 1e-4
    return best
