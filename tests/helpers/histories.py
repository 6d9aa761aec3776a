"""Histories as a supervisor writes them, for tests of their readers.

The main one: two attempts on two nodes; rank 3 is killed in attempt 1, attempt 2 resumes from the newest
committed checkpoint and completes. Times are exact, so that a test can say how the wall time divides.
"""
import math
from dataclasses import dataclass, field
from pathlib import Path

from jobs.spec.events import (AgentJoined, AttemptEnded, AttemptStarted, CheckpointCommitted, Decision, Diagnosis,
                              Event, RunEnded, RunStarted)
from jobs.spec.reports import FaultInjected, NodeSample, RankExit, StepReport, ValidationReport
from jobs.spec.wire import encode

T0 = 1_750_000_000.0  # the first supervisor takes charge
NODES = ("node-0", "node-1")
LAYOUT = "dp_shard=2 tp=2 pp=2 mb=2×4"


@dataclass
class Scenario:
    """One run with one crash, in round figures of seconds."""

    steps: int = 40
    interval: int = 10  # steps between checkpoints
    validating: int | None = None  # steps between validations
    crash_step: int | None = 26  # last step completed in attempt 1; None: no crash
    step_s: float = 0.5
    save_s: float = 0.25
    validation_s: float = 0.4
    start_s: float = 3.0  # agents, fork servers, first step about to begin
    partial_s: float = 0.3  # into the step that the crash interrupts
    detect_s: float = 1.25
    decide_s: float = 0.05
    restart_s: float = 2.0  # from the decision to the next attempt's start
    load_s: float = 1.5
    shutdown_s: float = 0.75
    sample_s: float = 2.0
    gpus: int = 2
    wandb_id: str = "demo-3f9c2a1b"
    nan_steps: tuple[int, ...] = ()
    events: list[Event] = field(default_factory=list)
    t: float = T0
    sampled: float = T0


def two_attempts(**changes) -> list[Event]:
    """The whole history of a Scenario; keyword arguments replace its figures."""
    s = Scenario(**changes)
    s.events.append(RunStarted(t=s.t, run="demo", job_id="4711", term=1, host="node-0", wandb_id=s.wandb_id,
                               max_restarts=5))
    for node in NODES:
        s.events.append(AgentJoined(t=s.t + 0.5, node=node, host=f"{node}.cluster", pid=300, gpus=4))
    first, attempt = 1, 1
    if s.crash_step is not None:
        _train(s, attempt=1, first=1, last=s.crash_step, start_s=s.start_s)
        first, attempt = _crash(s) + 1, 2
    _train(s, attempt=attempt, first=first, last=s.steps, start_s=s.start_s if attempt == 1 else s.load_s)
    _finish(s, attempt=attempt, first=first)
    return s.events


def write(events: list[Event], path: Path, *, append: bool = False) -> None:
    with path.open("ab" if append else "wb") as file:
        file.writelines(encode(event) for event in events)


def step_report(*, attempt: int, step: int, t: float, step_time_s: float = 0.5, checkpoint_s: float = 0.0,
                loss: float | None = None) -> StepReport:
    """Loss falls from ln(256) as byte-level models' do, with a little deterministic ripple."""
    if loss is None:
        loss = 1.9 + 3.6 * math.exp(-step / 14) + 0.05 * math.sin(2.1 * step)
    tokens = 16 * 128
    rate = tokens / step_time_s
    return StepReport(attempt=attempt, rank=4, step=step, t=t, loss=loss, grad_norm=1.0 + 2.0 / step,
                      lr=3e-4 * min(1.0, step / 10), tokens=tokens, step_time_s=step_time_s, data_s=0.01 * step_time_s,
                      forward_backward_s=0.84 * step_time_s, optimizer_s=0.1 * step_time_s, checkpoint_s=checkpoint_s,
                      tokens_per_s=rate, tokens_per_s_per_gpu=rate / 8, tflops_per_gpu=0.005 / step_time_s,
                      mfu=0.21 * 0.5 / step_time_s, mfu_convention="causal", peak_memory_bytes=412 * 2**20)


def node_sample(node: str, *, t: float, gpus: int = 2) -> NodeSample:
    """gpus=0 is a CPU node; the last GPU of a node tells no temperature."""
    return NodeSample(node=node, t=t, cpu_percent=83.5, memory_used_bytes=11 * 2**30, memory_total_bytes=64 * 2**30,
                      network_sent_bytes=int(t - T0) * 10**6, network_received_bytes=int(t - T0) * 10**6,
                      gpu_utilization=tuple(97.0 - i for i in range(gpus)),
                      gpu_memory_used_bytes=tuple(50 * 2**30 for _ in range(gpus)),
                      gpu_temperature_c=tuple(None if i == gpus - 1 else 61.0 + i for i in range(gpus)))


def _train(s: Scenario, *, attempt: int, first: int, last: int, start_s: float) -> None:
    s.t += 0.5 * start_s
    s.events.append(AttemptStarted(t=s.t, attempt=attempt, nodes=NODES, world_size=8, layout=LAYOUT,
                                   resume_step=None if first == 1 else first - 1))
    s.t += 0.5 * start_s
    for step in range(first, last + 1):
        jitter = 1.0 + 0.06 * math.sin(1.7 * step) if step != first else 1.4  # the first step warms up
        s.t += s.step_s * jitter
        loss = math.nan if step in s.nan_steps else None
        s.events.append(step_report(attempt=attempt, step=step, t=s.t, step_time_s=s.step_s * jitter, loss=loss))
        if s.validating is not None and (step % s.validating == 0 or step == s.steps):
            s.t += s.validation_s
            s.events.append(ValidationReport(attempt=attempt, rank=4, step=step, t=s.t, loss=2.0 + 3.4 / step,
                                             tokens=4 * 16 * 128, validation_s=s.validation_s))
        if step % s.interval == 0 or step == s.steps:
            s.t += s.save_s
            s.events.append(CheckpointCommitted(t=s.t, attempt=attempt, step=step, data_cursor=step,
                                                size_bytes=48_500_000, save_s=s.save_s))
        if s.t - s.sampled >= s.sample_s:
            s.sampled = s.t
            s.events.extend(node_sample(node, t=s.t, gpus=s.gpus) for node in NODES)


def _crash(s: Scenario) -> int:
    """Ends attempt 1 and returns the step to resume from."""
    resume = (s.crash_step // s.interval) * s.interval
    s.events.append(FaultInjected(attempt=1, rank=3, step=s.crash_step, t=s.t, fault="sigkill"))
    s.t += s.partial_s
    s.events.append(RankExit(attempt=1, rank=3, local_rank=3, node="node-0", pid=1204, t=s.t, signal=9))
    s.t += s.detect_s
    s.events.append(Diagnosis(t=s.t, attempt=1, kind="crash", step=s.crash_step, rank=3, node="node-0",
                              summary="rank 3 on node-0 was killed by signal 9 (SIGKILL)",
                              suspects=("rank 3 on node-0",), fingerprint="signal:9",
                              evidence=("rank 3 exited with signal 9", "fault injected: sigkill")))
    s.t += s.decide_s
    s.events.append(Decision(t=s.t, attempt=1, act="restart", resume_step=resume or None, delay_s=1.0,
                             reason=f"restart 1 of 5 without progress; newest committed checkpoint is step {resume}"))
    for rank in (0, 1, 2, 4, 5, 6, 7):  # the survivors are killed: echoes, after the diagnosis
        s.events.append(RankExit(attempt=1, rank=rank, local_rank=rank % 4, node=NODES[rank // 4], pid=1201 + rank,
                                 t=s.t + 0.1, signal=15))
    s.events.append(AttemptEnded(t=s.t + 0.2, attempt=1, first_step=1, last_step=s.crash_step))
    s.t += s.restart_s
    return resume


def _finish(s: Scenario, *, attempt: int, first: int) -> None:
    for rank in range(8):
        s.events.append(RankExit(attempt=attempt, rank=rank, local_rank=rank % 4, node=NODES[rank // 4],
                                 pid=1301 + rank, t=s.t + 0.25, exit_code=0))
    s.t += s.shutdown_s
    s.events.append(Diagnosis(t=s.t, attempt=attempt, kind="completed", step=s.steps,
                              summary=f"all 8 ranks finished step {s.steps}"))
    s.events.append(Decision(t=s.t, attempt=attempt, act="finish", reason="the last step is done"))
    s.events.append(AttemptEnded(t=s.t, attempt=attempt, first_step=first, last_step=s.steps))
    s.events.append(RunEnded(t=s.t, state="completed", reason="all steps are done", final_step=s.steps))
