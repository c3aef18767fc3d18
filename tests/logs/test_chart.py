"""From runs to charts: which curves, which part of them, and what is marked."""

import math
from itertools import pairwise

import numpy as np
import pytest
from drawn import eval_event, falling, place, read_run, train, write_run
from hypothesis import given
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.logs.plot.chart import decades, round_places, tick_texts
from instar.logs.plot.compose import ChartRequest, compose
from instar.logs.plot.transforms import band, smooth
from instar.logs.query.alignment import axis_named, place_on
from instar.logs.query.groups import group_indices, run_labels
from instar.logs.read.record import AXES
from instar.record.events import Alert, Failed, RunStarted


def test_a_run_is_drawn_with_its_losses_its_best_and_its_operation(tmp_path):
    chart = compose([read_run(tmp_path / "demo-abcde", falling())], ChartRequest())

    (panel,) = chart.panels
    assert panel.metrics == ("loss", "val/loss")
    assert panel.label == "loss (nats per token)"
    loss, held_out = panel.curves
    assert loss.line.x.tolist() == list(range(1, 101))
    assert held_out.best == (100.0, pytest.approx(2.1))
    assert [(mark.kind, mark.x, mark.text) for mark in chart.marks] == [
        ("operation", 50, "widen_mlp 192→352"),
        ("checkpoint", 50, "checkpoint at step 50"),
    ]
    assert chart.title == "demo-abcde"
    assert chart.subtitle == "2L/128d, 803k parameters"


def test_what_a_resume_superseded_hangs_on_the_last_point_that_counts(tmp_path):
    first = [train(step, 9 - step / 10) for step in range(1, 31)]
    resume = RunStarted(run_id="drawn", step=20, resumed_from="step-20")
    second = [(2, train(step, 8 - step / 10)) for step in range(21, 41)]
    record = read_run(tmp_path / "run", [*first, (2, resume), *second])

    chart = compose([record], ChartRequest(panels=(("loss",),)))

    (curve,) = chart.panels[0].curves
    assert (np.diff(curve.line.x) > 0).all()
    (old_line,) = curve.old_lines
    assert old_line.x.tolist() == list(range(20, 31))
    assert [(mark.kind, mark.x) for mark in chart.marks] == [("resume", 20)]


def test_a_pause_between_segments_is_a_gap_on_a_clock_alone(tmp_path):
    resume = RunStarted(run_id="drawn", step=20, resumed_from="step-20")
    first = [train(step, 3.0) for step in range(1, 21)]
    second = [(2, train(step, 3.0, wall_s=900.0 + step)) for step in range(21, 31)]
    record = read_run(tmp_path / "run", [*first, (2, resume), *second])

    gaps = {
        axis: np.isnan(
            compose([record], ChartRequest((("loss",),), axis)).panels[0].curves[0].line.y
        ).sum()
        for axis in ("step", "tokens", "active_s", "wall_s", "time")
    }

    assert gaps == {"step": 0, "tokens": 0, "active_s": 0, "wall_s": 1, "time": 1}


def test_smoothing_leaves_the_raw_curve_behind_it_and_what_was_held_out_alone(tmp_path):
    record = read_run(tmp_path / "run", falling())

    loss, held_out = compose([record], ChartRequest(weight=0.9)).panels[0].curves

    values = record.series("loss").value
    np.testing.assert_allclose(loss.line.y, smooth(values, 0.9))
    assert loss.raw is not None
    np.testing.assert_array_equal(loss.raw.y, values)
    assert held_out.raw is None


def test_a_spike_survives_in_a_long_run(tmp_path):
    losses = np.full(20_000, 3.0)
    losses[12_345] = 77.0
    record = read_run(tmp_path / "run", [train(n + 1, loss) for n, loss in enumerate(losses)])

    for log_x in (False, True):
        chart = compose([record], ChartRequest(panels=(("loss",),), points=500, log_x=log_x))
        line = chart.panels[0].curves[0].line
        assert len(line) <= (500 if not log_x else 2500)
        assert (line.x[line.y.argmax()], line.y.max()) == (12_346, 77.0)


def test_clipping_says_how_much_is_out_of_sight(tmp_path):
    losses = [3 + math.sin(step) / 10 for step in range(200)]
    losses[50], losses[60], losses[70] = 90.0, 80.0, 0.01
    record = read_run(tmp_path / "run", [train(n + 1, loss) for n, loss in enumerate(losses)])

    (panel,) = compose([record], ChartRequest(panels=(("loss",),), clip=98)).panels

    assert panel.limits is not None
    assert 2 < panel.limits[0] < 2.95
    assert 3.05 < panel.limits[1] < 4
    assert panel.notes == ("2 points above", "1 point below")


def test_what_cannot_be_drawn_is_a_gap_and_is_counted(tmp_path):
    values = [3.0, 2.9, math.nan, math.inf, 2.8]
    record = read_run(tmp_path / "run", [train(n + 1, loss) for n, loss in enumerate(values)])

    (panel,) = compose([record], ChartRequest(panels=(("loss",),))).panels

    assert np.isnan(panel.curves[0].line.y).tolist() == [False, False, True, True, False]
    assert panel.notes == ("2 points cannot be drawn",)
    curve = compose([record], ChartRequest()).to_dict()["panels"][0]["curves"][0]
    assert curve["value"] == [3.0, 2.9, "NaN", "NaN", 2.8]


def test_from_and_to_cut_on_the_axis_that_is_drawn(tmp_path):
    record = read_run(tmp_path / "run", falling())

    chart = compose([record], ChartRequest(axis="tokens", start=2048 * 10, end=2048 * 30))

    line = chart.panels[0].curves[0].line
    assert (line.x.min(), line.x.max()) == (20480, 61440)
    assert chart.limits == (20480, 61440)
    assert chart.marks == ()


def test_alerts_and_failures_are_marked_and_what_is_no_news_is_not(tmp_path):
    alert = Alert(name="stall", message="nothing since 20 steps", **place(30))
    failure = Failed(message="out of memory", rank=1, step=100)
    record = read_run(tmp_path / "run", [*falling(), alert, failure])

    kinds = [mark.kind for mark in compose([record], ChartRequest()).marks]

    assert kinds == ["alert", "operation", "checkpoint", "failed"]
    assert compose([record], ChartRequest(marks=False)).marks == ()


CONFIG = "name: demo\nseed: {seed}  # --set\nmodel:\n  n_mlp: {n_mlp}  # x.yaml:1:1\ndata:\n  path: data/{seed}  # derived\nrecord:\n  out_dir: {seed}  # --set\n"


def test_runs_are_called_by_what_tells_them_apart(tmp_path):
    def run(name, **config):
        return write_run(tmp_path / name, [], CONFIG.format(**config) if config else "")

    first, second = run("demo-aaaaa", seed=1, n_mlp=64), run("demo-bbbbb", seed=2, n_mlp=64)
    other, bare = run("other-ccccc", seed=1, n_mlp=64), run("demo-ddddd")
    wide = run("demo-eeeee", seed=1, n_mlp=96)

    assert run_labels([first]) == ["demo"]
    assert run_labels([first, other]) == ["demo", "other"]
    assert run_labels([first, second]) == ["demo seed=1", "demo seed=2"]
    assert run_labels([first, wide]) == ["demo n_mlp=64", "demo n_mlp=96"]
    assert run_labels([first, second, bare])[2] == "demo seed=none n_mlp=none"
    assert group_indices([first, second, wide], "seed") == {
        "demo n_mlp=64": [0, 1],
        "demo n_mlp=96": [2],
    }
    derived_run = write_run(
        tmp_path / "demo-fffff", [], "name: demo\nmodel:\n  n_mlp: 64  # derived\n"
    )
    set_run = write_run(tmp_path / "demo-ggggg", [], "name: demo\nmodel:\n  n_mlp: 96  # --set\n")
    assert group_indices([derived_run, set_run], "seed") == {
        "demo n_mlp=64": [0],
        "demo n_mlp=96": [1],
    }
    assert group_indices([first, second, other], "name") == {"demo": [0, 1], "other": [2]}


def test_a_mean_over_less_than_all_runs_says_so(tmp_path):
    records = [
        read_run(
            tmp_path / f"demo-{letter * 5}",
            [train(1, 4.0), *([eval_event(2, loss)] if loss else [])],
            CONFIG.format(seed=seed, n_mlp=64),
        )
        for seed, (letter, loss) in enumerate((("a", 3.0), ("b", 4.0), ("c", None)))
    ]
    chart = compose(records, ChartRequest(panels=(("val/loss",),), by="seed"))
    assert chart.panels[0].curves[0].line.y.tolist() == [3.5]
    assert "val/loss: 2 of 3 runs have values" in chart.panels[0].notes


def test_seeds_become_a_mean_with_a_band_over_what_all_have(tmp_path):
    records = [
        read_run(
            tmp_path / f"demo-{letter * 5}",
            [train(step, base + step) for step in range(1, last)],
            CONFIG.format(seed=base, n_mlp=64),
        )
        for letter, base, last in (("a", 1, 30), ("b", 3, 40))
    ]

    chart = compose(records, ChartRequest(panels=(("loss",),), by="seed"))

    assert chart.runs == ("demo (2 runs)",)
    (curve,) = chart.panels[0].curves
    assert curve.line.x.tolist() == list(range(1, 30))
    np.testing.assert_allclose(curve.line.y, 2 + curve.line.x)
    assert curve.band is not None
    np.testing.assert_allclose(curve.band[1] - curve.band[0], 2 * np.sqrt(2))


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 50), st.floats(-10, 10)), min_size=1, max_size=9),
        min_size=1,
        max_size=4,
    )
)
def test_a_band_lies_between_its_curves(curves):
    columns = [
        (np.unique([x for x, _ in curve]).astype(float), np.array([y for _, y in curve]))
        for curve in curves
    ]
    columns = [(x, y[: len(x)]) for x, y in columns]

    envelope = band(columns)

    low, high = max(x[0] for x, _ in columns), min(x[-1] for x, _ in columns)
    assert (envelope is None) == (low > high)
    if envelope is not None:
        assert (envelope.x[0], envelope.x[-1]) == (low, high)
        assert (np.diff(envelope.x) > 0).all()
        heights = np.stack([np.interp(envelope.x, x, y) for x, y in columns])
        assert (envelope.mean <= heights.max(axis=0) + 1e-9).all()
        assert (envelope.mean >= heights.min(axis=0) - 1e-9).all()


@pytest.mark.parametrize(
    ("chart_request", "message"),
    [
        (ChartRequest(panels=(("lss",),)), "no metric 'lss' in .*; did you mean 'loss'?"),
        (ChartRequest(panels=(("lss",), ("grad",))), "2 errors"),
        (
            ChartRequest(axis="epoch"),
            "has no values on the axis epoch; it has step, samples, tokens",
        ),
        (ChartRequest(panels=(("mfu",),)), "none of the 3 values of mfu .* is finite"),
        (ChartRequest(panels=(("below",),), log=True), "no value of below .* is above 0"),
        (ChartRequest(start=500.0), "no point between --from and --to"),
    ],
)
def test_what_cannot_be_drawn_says_why(tmp_path, chart_request, message):
    record = read_run(
        tmp_path / "run",
        [train(n, 3.0, epoch=0.0, mfu=math.nan, extra={"below": -1.0}) for n in (1, 2, 3)],
    )

    with pytest.raises(ConfigError, match=message.replace("?", "[?]")):
        compose([record], chart_request)


def test_a_run_without_a_metric_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no metric has been recorded yet"):
        compose([read_run(tmp_path / "run", [])], ChartRequest())


def test_of_several_runs_one_may_lack_a_metric(tmp_path):
    plain = read_run(tmp_path / "a-aaaaa", [train(1, 3.0), train(2, 2.0)])
    with_val = read_run(
        tmp_path / "b-bbbbb", [train(1, 3.0), eval_event(1, 3.0), eval_event(2, 2.0)]
    )

    (panel,) = compose([plain, with_val], ChartRequest(panels=(("val/loss",),))).panels

    assert [curve.run for curve in panel.curves] == [1]


@pytest.mark.parametrize(
    ("axis", "text", "value"),
    [
        ("step", "2000", 2000),
        ("tokens", "20M", 20e6),
        ("flops", "1.5e18", 1.5e18),
        ("wall_s", "10min", 600),
        ("active_s", "90", 90),
        ("wall_s", "1.5h", 5400),
        ("time", "1795300000", 1795300000),
        ("time", "2026-11-21T12:00+00:00", 1795262400),
    ],
)
def test_places_are_written_as_people_write_them(axis, text, value):
    assert place_on(axis, text, "--from") == value


@pytest.mark.parametrize(
    ("axis", "text"), [("step", "10min"), ("wall_s", "20M"), ("time", "noon"), ("step", "")]
)
def test_places_that_are_none_are_refused_with_the_forms(axis, text):
    with pytest.raises(ConfigError, match=r"--from: .* is not a place on the axis .*write it like"):
        place_on(axis, text, "--from")


def test_axes_have_friendly_names_and_near_ones_are_suggested():
    assert [axis_named(name, AXES) for name in ("wall", "active", "steps", "tokens", "time")] == [
        "wall_s",
        "active_s",
        "step",
        "tokens",
        "time",
    ]
    with pytest.raises(ConfigError, match="unknown axis 'tokenz'; did you mean 'tokens'"):
        axis_named("tokenz", AXES)


@given(
    st.floats(-1e15, 1e15),
    st.floats(1e-9, 1e15),
    st.integers(2, 12),
    st.sampled_from([1, 60, 3600]),
)
def test_round_places_are_few_ascending_and_inside(low, width, count, base):
    high = low + width
    places = round_places(low, high, count, base)

    assert len(places) <= count
    assert all(low - width * 1e-6 <= place <= high + width * 1e-6 for place in places)
    assert all(a < b for a, b in pairwise(places))


@given(st.floats(1e-12, 1e12), st.floats(1.01, 1e12), st.integers(2, 9))
def test_decades_lie_within_and_are_not_too_many(low, ratio, count):
    places = decades(low, low * ratio, count)

    assert len(places) <= count
    assert all(low * (1 - 1e-6) <= place <= low * ratio * (1 + 1e-6) for place in places)


@pytest.mark.parametrize(
    ("axis", "places", "texts"),
    [
        ("tokens", [0, 20e6, 40e6], ["0", "20M", "40M"]),
        ("step", [0, 500, 1000], ["0", "500", "1000"]),
        ("wall_s", [0, 600, 1200], ["0", "10 min", "20 min"]),
        ("active_s", [0, 20], ["0", "20 s"]),
        ("memory_bytes", [0, 2**30, 2**31], ["0", "1 GiB", "2 GiB"]),
        ("memory_bytes", [0, 500], ["0", "500 B"]),
        ("flops", [0, 5e11, 1e12], ["0", "0.5", "1"]),
        ("lr", [0.0005, 0.001], ["0.5", "1"]),
        ("", [0.001, 0.01], ["0.001", "0.01"]),
    ],
)
def test_numbers_along_an_axis_have_one_unit(axis, places, texts):
    assert tick_texts(axis, places) == texts
