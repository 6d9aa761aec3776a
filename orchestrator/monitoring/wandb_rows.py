"""What W&B is told about each event: one flat row of numbers. Pure, and knows nothing of the SDK.

Called by the W&B reader. A row never carries W&B's own step: after a restart steps are computed again, and
W&B would drop every row whose step lies below one it has seen. The axes are metrics instead (see AXES).
"""
from collections.abc import Iterable
from typing import Any

from jobs.spec.events import AttemptStarted, CheckpointCommitted, Event
from jobs.spec.reports import NodeSample, StepReport, ValidationReport
from orchestrator.monitoring.summary import RunSummary

# metric → its x axis
AXES = {
    "train/*": "train/step",
    "by_tokens/*": "tokens",
    "val/*": "val/step",
    "checkpoint/*": "checkpoint/step",
    "node/*": "elapsed_s",
    "attempt": "elapsed_s",
}
ATTEMPT_COLUMNS = ["n", "start", "end", "diagnosis", "suspects", "decision", "first_step", "last_step"]
GIB = 2**30


class Rows:
    """Turns events into rows; remembers only what the next row needs."""

    def __init__(self) -> None:
        self.start_t: float | None = None
        self.attempt = 0
        self.tokens = {0: 0}  # after each step, counted along the attempts that were kept

    def row(self, event: Event) -> dict[str, Any]:
        """The row of one event; {} for an event that W&B is not told as numbers."""
        if self.start_t is None:
            self.start_t = event.t
        if isinstance(event, AttemptStarted):
            self.attempt = event.attempt
        values = {name: value for name, value in self._values(event).items() if value is not None}
        return values | {"attempt": self.attempt, "elapsed_s": event.t - self.start_t} if values else {}

    def _values(self, event: Event) -> dict[str, Any]:
        match event:
            case StepReport():
                return self._step(event)
            case ValidationReport():
                return {f"val/{name}": getattr(event, name) for name in ("step", "loss", "tokens", "validation_s")}
            case NodeSample():
                return _node(event)
            case CheckpointCommitted():
                return {"checkpoint/step": event.step, "checkpoint/save_s": event.save_s,
                        "checkpoint/size_gib": event.size_bytes / GIB}
            case AttemptStarted():
                return {"restarts": event.attempt - 1, "world_size": event.world_size}
        return {}

    def _step(self, event: StepReport) -> dict[str, Any]:
        # Where a step's predecessor is unknown (a trainer that reports only some steps), count from the last.
        before = self.tokens.get(event.step - 1, self.tokens[max(self.tokens)])
        self.tokens[event.step] = before + (event.tokens or 0)
        same = ("step", "loss", "grad_norm", "lr", "step_time_s", "data_s", "forward_backward_s", "optimizer_s",
                "checkpoint_s", "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
        values = {f"train/{name}": getattr(event, name) for name in same}
        if event.peak_memory_bytes is not None:
            values["train/peak_memory_gib"] = event.peak_memory_bytes / GIB
        if event.tokens is not None:
            values |= {"tokens": self.tokens[event.step], "by_tokens/loss": event.loss}
        return values


def attempts_table(summary: RunSummary) -> list[list[Any]]:
    """Rows for ATTEMPT_COLUMNS."""
    return [[", ".join(a.suspects) if column == "suspects" else getattr(a, column) for column in ATTEMPT_COLUMNS]
            for a in summary.attempts]


def _node(event: NodeSample) -> dict[str, Any]:
    prefix = f"node/{event.node}"
    values: dict[str, Any] = {
        f"{prefix}/cpu_percent": event.cpu_percent,
        f"{prefix}/memory_used_gib": event.memory_used_bytes / GIB,
        f"{prefix}/network_sent_gib": event.network_sent_bytes / GIB,
        f"{prefix}/network_received_gib": event.network_received_bytes / GIB,
    }
    gpu_memory = [None if used is None else used / GIB for used in event.gpu_memory_used_bytes]
    for name, samples in (("utilization_percent", event.gpu_utilization), ("memory_used_gib", gpu_memory),
                          ("temperature_c", event.gpu_temperature_c)):
        values |= {f"{prefix}/gpu{gpu}/{name}": value for gpu, value in _known(samples)}
    return values


def _known(samples: Iterable[float | None]) -> Iterable[tuple[int, float]]:
    return ((gpu, value) for gpu, value in enumerate(samples) if value is not None)
