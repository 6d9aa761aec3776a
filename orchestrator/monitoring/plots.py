"""Pictures of a run: loss, rates and where the time went, as PNG files in the run's report folder.

Called by `orc report`. Draws from the history alone. Loads matplotlib, which takes a second: import it only
where pictures are wanted.
"""
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from jobs.spec.events import AttemptStarted, CheckpointCommitted, Event
from jobs.spec.reports import StepReport, ValidationReport
from orchestrator.monitoring.goodput import PARTS, Goodput, is_kept, kept_steps
from orchestrator.monitoring.wording import PART_STYLE, duration

# Attempts in turn; legible on white and to most colour-blind eyes.
COLORS = ("#2f6db3", "#d9822b", "#3a9a68", "#a45ab5", "#c2453d", "#5b6f82")
LEGEND_LIMIT = 16  # entries
GREY, INK = "#8a939c", "#2b3138"
STYLE = {"font.size": 10, "axes.edgecolor": GREY, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK,
         "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "grid.color": "#e6e9ec", "axes.axisbelow": True, "axes.titlelocation": "left", "axes.titleweight": "bold",
         "legend.frameon": False}


def write_plots(events: Sequence[Event], *, ledger: Goodput, title: str, folder: Path) -> list[Path]:
    """Write loss.png, throughput.png (both only if steps were reported) and goodput.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"goodput.png": lambda: goodput_figure(ledger, title=title)}
    if any(isinstance(event, StepReport) for event in events):
        figures = {"loss.png": lambda: loss_figure(events, title=title),
                   "throughput.png": lambda: throughput_figure(events, title=title)} | figures
    written = []
    with matplotlib.rc_context(STYLE):
        for name, draw in figures.items():
            figure = draw()
            figure.savefig(folder / name, dpi=150)
            written.append(folder / name)
    return written


def loss_figure(events: Sequence[Event], *, title: str) -> Figure:
    """Loss over steps: one colour per attempt, steps that were lost again as a broad pale band (their values
    equal those computed again, so a line would be covered), restarts marked, checkpoints along the foot."""
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    kept = kept_steps(list(events))
    before: list[StepReport] = []
    for n, steps in _by_attempt(events).items():
        color = COLORS[(n - 1) % len(COLORS)]
        good = [s for s in steps if is_kept(s.step, attempt=n, kept=kept)]
        lost = [s for s in steps if not is_kept(s.step, attempt=n, kept=kept)]
        if good:
            curve = before[-1:] + good  # joined to what it continues
            axes.plot([s.step for s in curve], [s.loss for s in curve], color=color, lw=1.8, label=f"attempt {n}",
                      marker="o" if len(curve) < 3 else None, ms=4)
            before = good
        if lost:
            joined = good[-1:] + lost
            axes.plot([s.step for s in joined], [s.loss for s in joined], color=color, lw=7, alpha=0.28, zorder=1.5,
                      solid_capstyle="butt", label=f"attempt {n}: {len(lost)} steps lost")
    validated = [e for e in events if isinstance(e, ValidationReport) and is_kept(e.step, attempt=e.attempt, kept=kept)]
    if validated:
        axes.plot([e.step for e in validated], [e.loss for e in validated], color=INK, lw=1.2, ls=(0, (4, 2)),
                  marker="o", ms=4, mfc="white", label="validation", zorder=4)
    _mark_not_finite(axes, events)
    _mark_restarts(axes, events, label=True)
    _mark_checkpoints(axes, events)
    axes.set(xlabel="step", ylabel="loss (mean over the batch's tokens)")
    axes.set_title(f"{title}: loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    _legend_below(figure, axes)
    return figure


def throughput_figure(events: Sequence[Event], *, title: str) -> Figure:
    """Tokens per second and MFU over steps, each with its median (of the steps that were kept)."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    kept = kept_steps(list(events))
    attempts = _by_attempt(events)
    good = [s for steps in attempts.values() for s in steps if is_kept(s.step, attempt=s.attempt, kept=kept)]
    convention = next((s.mfu_convention for steps in attempts.values() for s in steps if s.mfu_convention), "unknown")
    panels = ((upper, "tokens_per_s", "tokens/s", "{:,.0f} tokens/s"), (lower, "mfu", f"MFU ({convention})", "{:.1%}"))
    for axes, name, label, form in panels:
        for n, steps in attempts.items():
            axes.plot([s.step for s in steps], [getattr(s, name) for s in steps], color=COLORS[(n - 1) % len(COLORS)],
                      lw=1.3, marker="o" if len(steps) < 80 else None, ms=2.5, label=f"attempt {n}")
        values = [value for s in good if (value := getattr(s, name)) is not None and math.isfinite(value)]
        if values:
            middle = median(values)
            axes.axhline(middle, color=INK, lw=0.8, ls=(0, (4, 3)))
            axes.set_title("median " + form.format(middle), loc="right", fontsize=9.5, fontweight="normal")
            axes.set_ylim(0, 1.12 * max(values))
        _mark_restarts(axes, events, label=False)
        axes.set_ylabel(label)
    upper.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    lower.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1%}"))
    lower.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    lower.set_xlabel("step")
    upper.set_title(f"{title}: throughput")
    _legend_below(figure, lower)
    return figure


def goodput_figure(ledger: Goodput, *, title: str) -> Figure:
    """One bar: the wall time and its parts. Labels stand in the legend, so that small parts cannot collide."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for part in PARTS:
        seconds = getattr(ledger, part)
        if seconds > 0:
            name, color = PART_STYLE[part]
            share = seconds / ledger.wall_s
            axes.barh(0, seconds, left=left, color=color, height=0.5, edgecolor="white", lw=0.8,
                      label=f"{name}  {duration(seconds)} ({share:.1%})")
            left += seconds
    known = "unknown (no step yet)" if ledger.goodput is None else f"{ledger.goodput:.1%}"
    axes.set_title(f"{title}: goodput {known} of {duration(ledger.wall_s)}")
    axes.set(ylim=(-0.35, 0.35), xlim=(0, max(ledger.wall_s, 1e-9)), yticks=[])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    _legend_below(figure, axes)
    return figure


def _by_attempt(events: Sequence[Event]) -> dict[int, list[StepReport]]:
    attempts: dict[int, list[StepReport]] = {}
    for event in events:
        if isinstance(event, StepReport):
            attempts.setdefault(event.attempt, []).append(event)
    return attempts


def _legend_below(figure: Figure, axes: Axes) -> None:
    """Outside of the axes, so that it covers nothing. Of very many attempts only the first and last few are named."""
    handles, labels = axes.get_legend_handles_labels()
    entries = list(zip(handles, labels))
    if not entries:
        return
    if len(entries) > LEGEND_LIMIT:
        entries = entries[:LEGEND_LIMIT // 2] + entries[-LEGEND_LIMIT // 2:]
    figure.legend(*zip(*entries), loc="outside lower center", ncols=4, fontsize=9)


def _mark_restarts(axes: Axes, events: Sequence[Event], *, label: bool) -> None:
    """A dotted line where attempts resumed. Its label stands at the head; one too near to the last is left out."""
    starts: dict[int, list[str]] = {}
    for start in [event for event in events if isinstance(event, AttemptStarted)][1:]:
        starts.setdefault(start.resume_step or 0, []).append(str(start.attempt))
    left, right = axes.get_xlim()
    labelled = -math.inf
    for number, (step, attempts) in enumerate(sorted(starts.items())):
        axes.axvline(step, color=GREY, lw=1, ls=(0, (1, 2)), label=None if number else "restart")
        if not label or step - labelled < 0.03 * (right - left):
            continue
        labelled = step
        who = f"attempt {attempts[0]}" if len(attempts) == 1 else f"attempts {attempts[0]}–{attempts[-1]}"
        axes.annotate(f"{who} from step {step}", xy=(step, 1), xycoords=("data", "axes fraction"), xytext=(-4, -4),
                      textcoords="offset points", rotation=90, ha="right", va="top", fontsize=8.5, color=GREY,
                      bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.5})


def _mark_checkpoints(axes: Axes, events: Sequence[Event]) -> None:
    steps = sorted({event.step for event in events if isinstance(event, CheckpointCommitted)})
    if steps:
        axes.plot(steps, [0.0] * len(steps), transform=axes.get_xaxis_transform(), ls="none", marker="^", ms=6,
                  color=INK, clip_on=False, zorder=5, label="checkpoint")


def _mark_not_finite(axes: Axes, events: Sequence[Event]) -> None:
    steps = [event.step for event in events if isinstance(event, StepReport) and event.loss is not None
             and not math.isfinite(event.loss)]
    if steps:
        axes.plot(steps, [0.97] * len(steps), transform=axes.get_xaxis_transform(), ls="none", marker="x", ms=6,
                  color="#c2453d", label="loss is not a number")
