"""The pictures of a report: drawn for any history, and legible."""
import itertools

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Annotation

from jobs.spec.events import AttemptStarted
from orchestrator.monitoring.goodput import goodput
from orchestrator.monitoring.plots import STYLE, goodput_figure, loss_figure, throughput_figure, write_plots
from orchestrator.monitoring.wording import duration
from tests.helpers.histories import step_report, two_attempts

EVENTS = two_attempts()
HISTORIES = {
    "two attempts": EVENTS,
    "one attempt": two_attempts(crash_step=None),
    "crash before the first checkpoint": two_attempts(crash_step=4),
    "losses that are not numbers": two_attempts(nan_steps=(5, 30)),
    "with validation": two_attempts(validating=8),
    "one step": [step_report(attempt=1, step=1, t=1.0)],
    "no loss is a number": [step_report(attempt=1, step=step, t=step, loss=float("nan")) for step in (1, 2)],
    "four hundred steps": two_attempts(steps=400, crash_step=333, interval=50),
    "restart near the end": two_attempts(steps=40, crash_step=39, interval=38),
    "forty attempts from three places": [
        event for n in range(1, 41)
        for event in (AttemptStarted(t=n, attempt=n, nodes=("a",), world_size=1, resume_step=n % 3 or None, layout=""),
                      step_report(attempt=n, step=n % 3 + 1, t=n))],
}
DURATIONS = [(0.0, "0.0 s"), (4.24, "4.2 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"), (187, "3 min 07 s"),
             (3600, "1 h 00 min"), (18720, "5 h 12 min"), (48 * 3600, "2 d 00 h"), (2 * 86400 + 3 * 3600, "2 d 03 h")]


@pytest.mark.parametrize("events", HISTORIES.values(), ids=HISTORIES)
def test_every_history_gives_three_pictures(events, tmp_path):
    written = write_plots(events, ledger=goodput(events), title="demo", folder=tmp_path / "report")
    assert [path.name for path in written] == ["loss.png", "throughput.png", "goodput.png"]
    for path in written:
        picture = imread(path)
        assert picture.shape[1] == 1350
        assert picture[..., :3].std() > 0.01  # something is drawn


def test_history_without_steps_gives_the_goodput_alone(tmp_path):
    written = write_plots(EVENTS[:4], ledger=goodput(EVENTS[:4]), title="demo", folder=tmp_path)
    assert [path.name for path in written] == ["goodput.png"]


@pytest.mark.parametrize("events", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("draw", [loss_figure, throughput_figure])
def test_labels_do_not_cover_each_other(draw, events):
    with matplotlib.rc_context(STYLE):
        figure = draw(events, title="a run with a rather long name")
        boxes = _boxes(figure)
    assert len(boxes) >= 3
    assert [(a, b) for (a, box), (b, other) in itertools.combinations(boxes.items(), 2) if box.overlaps(other)] == []


def test_goodput_names_every_part_that_is_not_zero():
    ledger = goodput(EVENTS)
    with matplotlib.rc_context(STYLE):
        figure = goodput_figure(ledger, title="demo")
        FigureCanvasAgg(figure).draw()
    names = [text.get_text().split("  ")[0] for text in figure.legends[0].get_texts()]
    assert names == ["productive", "lost work", "detection", "restart", "checkpoint stall", "start-up", "other"]
    bars = figure.axes[0].patches
    assert sum(bar.get_width() for bar in bars) == pytest.approx(ledger.wall_s)


def test_loss_curve_shows_lost_steps_restart_and_checkpoints():
    with matplotlib.rc_context(STYLE):
        axes = loss_figure(EVENTS, title="demo").axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["attempt 1: 6 steps lost"].get_xdata()) == list(range(20, 27))
    assert list(lines["attempt 2"].get_xdata()) == list(range(20, 41))
    assert list(lines["checkpoint"].get_xdata()) == [10, 20, 30, 40]
    assert [text.get_text() for text in axes.texts] == ["attempt 2 from step 20"]
    assert "validation" not in lines


def test_loss_curve_shows_each_validation_that_was_kept_once():
    with matplotlib.rc_context(STYLE):
        axes = loss_figure(two_attempts(validating=8), title="demo").axes[0]
    line = next(line for line in axes.lines if line.get_label() == "validation")
    assert list(line.get_xdata()) == [8, 16, 24, 32, 40]
    assert list(line.get_ydata()) == [2.0 + 3.4 / step for step in (8, 16, 24, 32, 40)]


@pytest.mark.parametrize("seconds, text", DURATIONS)
def test_duration(seconds, text):
    assert duration(seconds) == text


def _boxes(figure) -> dict:
    """Where the legend, the axes' ticks, the titles and the annotations came to lie, in pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = {}
    for number, axes in enumerate(figure.axes):
        texts = [axes._left_title, axes._right_title, *(t for t in axes.texts if isinstance(t, Annotation))]
        boxes |= {(number, text.get_text()): text.get_window_extent() for text in texts if text.get_text()}
        if (ticks := axes.xaxis.get_tightbbox()) is not None:  # None where a panel below carries them
            boxes[number, "axis"] = ticks
    return boxes | {"legend": legend.get_window_extent() for legend in figure.legends}
