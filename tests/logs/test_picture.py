"""Pictures by matplotlib: what is seen, and the same bytes every time."""

import io
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from drawn import falling, read_run, train
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.image import imread
from records import make_runs
from scenes import SCENES

from instar.config.errors import ConfigError
from instar.logs.plot.chart import short_names
from instar.logs.plot.compose import ChartRequest, compose
from instar.logs.plot.figure import draw
from instar.logs.plot.legend import RC
from instar.logs.plot.picture import picture
from instar.logs.read.record import RunRecord, read_record
from instar.record.events import OperationEvent, RunStarted
from instar.record.rundir import runs_in


@pytest.fixture
def record(tmp_path) -> RunRecord:
    return read_run(tmp_path / "demo-abcde", falling())


def draw_figure(records: list[RunRecord], **request) -> Figure:
    with rc_context(RC):
        figure = draw(compose(records, ChartRequest(**request)))
        figure.canvas.draw()
        return figure


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_a_figure_has_its_curves_its_names_and_its_marks(record):
    figure = draw_figure([record], lr=True)

    axes, rate_axes = figure.axes
    assert axes.get_title("left") == "demo-abcde"
    assert axes.get_ylabel() == "loss (nats per token)"
    assert axes.get_xlabel() == "step"
    assert rate_axes.get_ylabel() == "learning rate (10⁻⁶)"
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == [
        "training loss",
        "validation loss",
        "learning rate",
        "best, 2.1",
        "growth",
        "checkpoint",
    ]
    assert "widen_mlp 192→352" in texts(figure)
    assert any(set(line.get_xdata()) == {50} for line in axes.lines)


def test_panels_share_their_x_axis(record):
    figure = draw_figure([record], panels=(("loss",), ("lr",)), axis="tokens", log=True)

    upper, lower = figure.axes
    assert upper.get_xlim() == lower.get_xlim()
    assert (upper.get_xlabel(), lower.get_xlabel()) == ("", "tokens")
    labels = [t.get_text() for t in lower.get_xticklabels() if t.get_position()[0] >= 0]
    assert labels[:3] == ["0", "50k", "100k"]
    assert lower.get_yscale() == "log"


def test_labels_of_marks_lie_over_nothing(tmp_path):
    events = falling(400)
    names = ("change_batch_size", "widen_mlp", "insert_layers", "set_lr", "reset_lr_schedule")
    for number, name in enumerate(names):
        at = 100 + 12 * number
        events.append(OperationEvent(name=name, change=f"{at}→{2 * at}", step=at, tokens=at * 2048))
    figure = draw_figure([read_run(tmp_path / "busy", events)])

    boxes = [t.get_window_extent() for t in figure.axes[0].texts if t.get_text()]
    assert len(boxes) == len(names) + 1
    for number, box in enumerate(boxes):
        assert box.y0 >= figure.axes[0].bbox.y1
        assert box.x1 <= figure.bbox.x1
        for other in boxes[number + 1 :]:
            assert not box.shrunk(0.97, 0.9).overlaps(other.shrunk(0.97, 0.9))


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_same_chart_is_the_same_file(record, kind):
    chart = compose([record], ChartRequest(weight=0.5, lr=True))

    first = picture(chart, kind)

    assert first == picture(chart, kind)
    assert first.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind])
    assert len(first) < 200_000


def test_another_process_draws_the_same_svg(tmp_path):
    record = read_run(tmp_path / "demo-abcde", falling())
    code = (
        "import sys; from pathlib import Path; from instar.record.rundir import RunDir;"
        "from instar.logs.read.record import read_record; from instar.logs.plot.compose import *;"
        "from instar.logs.plot.picture import picture;"
        "chart = compose([read_record(RunDir(Path(sys.argv[1])))], ChartRequest());"
        "sys.stdout.buffer.write(picture(chart, 'svg'))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(record.run.path)], capture_output=True, check=True
    )

    assert process.stdout == picture(compose([record], ChartRequest()), "svg")


def test_a_png_is_not_empty_and_a_svg_is_xml(record):
    chart = compose([record], ChartRequest())

    pixels = imread(io.BytesIO(picture(chart, "png")))
    assert pixels.shape[1] == 1152
    assert 0.005 < (pixels[..., :3].min(axis=2) < 0.8).mean() < 0.2
    assert ET.fromstring(picture(chart, "svg")).tag.endswith("svg")


@pytest.mark.parametrize("axis", ["step", "samples", "tokens", "epoch", "flops", "wall_s", "time"])
@pytest.mark.parametrize("log_x", [False, True])
def test_every_axis_has_ticks_with_words(record, axis, log_x):
    figure = draw_figure([record], axis=axis, log_x=log_x, log=True)

    axes = figure.axes[0]
    low, high = axes.get_xlim()
    labels = [t.get_text() for t in axes.get_xticklabels() if low <= t.get_position()[0] <= high]
    assert len(labels) >= 2
    assert all(labels)


def test_names_that_look_like_formulas_or_another_script_are_only_names(tmp_path, recwarn):
    events = [*falling(), OperationEvent(name="$x_{", change="日本→$^", step=70)]
    record = read_run(tmp_path / "$\\frac{-名-abcde", events)

    assert picture(compose([record], ChartRequest()), "png")
    assert not recwarn.list


def test_what_was_superseded_is_faint(tmp_path):
    first = [train(step, 9 - step / 10) for step in range(1, 31)]
    resume = RunStarted(run_id="drawn", step=20, resumed_from="step-20")
    second = [(2, train(step, 8 - step / 10)) for step in range(21, 41)]
    figure = draw_figure([read_run(tmp_path / "run", [*first, (2, resume), *second])])

    faint = [line for line in figure.axes[0].lines if line.get_alpha() == 0.3]
    assert [line.get_xdata().tolist() for line in faint] == [list(range(20, 31))]
    assert "superseded" in [t.get_text() for t in figure.axes[0].get_legend().get_texts()]
    assert "resume" in texts(figure)


def test_the_legend_is_below_its_curves_with_short_names(tmp_path):
    SCENES["eight"](tmp_path)
    records = [read_record(run) for run in runs_in(tmp_path)][:6]
    figure = draw_figure(records, panels=(("loss", "val/loss"), ("grad_norm", "lr")), lr=True)

    for axes in (figure.axes[0], figure.axes[1]):
        box = axes.get_legend().get_window_extent()
        assert box.y1 <= axes.bbox.y0
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y0 >= 0
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert "lr2e-3-seed1" in labels
    assert {"growth", "settings change"} <= set(labels)
    shades = {text.get_color() for text in figure.axes[0].texts if "mlp" in text.get_text()}
    assert len(shades) == len(records)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["run-a", "run-b"], ["a", "b"]),
        # a number alone names nothing
        (["grid-seed-1", "grid-seed-2"], ["seed-1", "seed-2"]),
        (["runs/seeds 1", "runs/seeds 2 x"], ["seeds 1", "seeds 2 x"]),
        (["seed 1", "seed 2"], ["seed 1", "seed 2"]),
        (["lr1e-3-x", "lr1e-4-x"], ["lr1e-3-x", "lr1e-4-x"]),
        (["demo", "demo-2"], ["demo", "demo-2"]),
        (["alone-in-the-world"], ["alone-in-the-world"]),
        (["same", "same"], ["same", "same"]),
        ([], []),
        (["a" * 50 + "1", "b" * 50], ["a" * 19 + "…" + "a" * 19 + "1", "b" * 19 + "…" + "b" * 20]),
        ((["a" * 30 + "x" + "a" * 30, "a" * 30 + "y" + "a" * 30],) * 2),
    ],
)
def test_names_are_shortened_until_they_would_be_equal(names, short):
    assert short_names(names) == short


def test_a_single_point_is_seen(tmp_path):
    figure = draw_figure([read_run(tmp_path / "run", [train(1, 3.0)])])

    assert any(line.get_marker() == "o" for line in figure.axes[0].lines)


def test_a_hundred_runs_are_drawn_within_seconds(tmp_path):
    records = [read_record(run) for run in make_runs(tmp_path, 100, 300)]

    start = time.perf_counter()
    chart = compose(records, ChartRequest(weight=0.9))
    data = picture(chart, "png")

    assert time.perf_counter() - start < 8
    assert len(data) < 1_000_000
    spikes = [curve.raw.y.max() for curve in chart.panels[0].curves if curve.metric == "loss"]
    assert np.min(spikes) > 49


def test_without_matplotlib_the_extra_is_named(record, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(ConfigError, match=r"matplotlib.*pip install 'instar\[plot\]'"):
        picture(compose([record], ChartRequest()), "png")
