"""Plots in characters: as wide as the terminal, and in what it can show."""

import sys

import pytest
from drawn import falling, read_run, train

from instar.config.errors import ConfigError
from instar.logs.plot.compose import ChartRequest, compose
from instar.logs.plot.terminal import TerminalSize, terminal
from instar.logs.read.record import RunRecord

BRAILLE = {chr(code) for code in range(0x2801, 0x2900)}


@pytest.fixture
def record(tmp_path) -> RunRecord:
    return read_run(tmp_path / "demo-abcde", falling())


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("metrics", [(("loss", "val/loss"),), (("loss",), ("tokens_per_s",))])
def test_no_line_is_wider_than_the_terminal(tmp_path, width, ascii_only, metrics):
    events = [train(n, 5 - n / 50, tokens_per_s=2e4 + n) for n in range(1, 100)]
    runs = [
        read_run(tmp_path / f"a-rather-long-name-{c * 5}", [*events, *falling()]) for c in "abc"
    ]

    for records in (runs[:1], runs):
        text = terminal(
            compose(records, ChartRequest(panels=metrics, axis="flops", lr=False)),
            TerminalSize(width, 24, ascii=ascii_only),
        )
        assert max(map(len, text.splitlines())) <= width
        assert text.isascii() or not ascii_only


def test_a_curve_is_braille_dots_from_the_upper_left_to_the_lower_right(record):
    lines = terminal(
        compose([record], ChartRequest(panels=(("loss",),))), TerminalSize(80, 24)
    ).splitlines()

    rows = [row for row, line in enumerate(lines) if set(line) & BRAILLE]
    columns = [min(i for i, c in enumerate(lines[row]) if c in BRAILLE) for row in rows]
    assert len(rows) > 10
    assert columns == sorted(columns)
    assert columns[0] < 8
    assert columns[-1] > 65


def test_evaluations_are_signs_and_operations_are_told_below(record):
    lines = terminal(compose([record], ChartRequest()), TerminalSize(80, 24)).splitlines()

    assert lines[0] == "demo-abcde"
    assert lines[1] == "loss (nats per token)"
    assert lines[2].split() == ["⠤", "training", "loss", "×", "validation", "loss"]
    assert sum(line.count("×") for line in lines[3:]) >= 8
    assert lines[-1] == "50 │ widen_mlp 192→352"


def test_colours_only_where_they_are_wanted(record):
    chart = compose([record], ChartRequest())

    assert "\033[" in terminal(chart, TerminalSize(80, 24, colour=True))
    assert "\033" not in terminal(chart, TerminalSize(80, 24))


def test_a_coloured_plot_has_no_background(record):
    text = terminal(compose([record], ChartRequest()), TerminalSize(80, 24, colour=True))

    assert "\033[48" not in text


def test_ascii_says_the_same_in_fewer_signs(record):
    text = terminal(compose([record], ChartRequest()), TerminalSize(60, 24, ascii=True))

    assert text.isascii()
    assert "widen_mlp 192->352" in text
    assert sum(line.count(".") for line in text.splitlines()) > 30


def test_the_learning_rate_is_a_panel_below(record):
    text = terminal(compose([record], ChartRequest(lr=True)), TerminalSize(80, 40))

    assert text.index("loss (nats per token)") < text.index("learning rate")
    assert "·10⁻⁶┤" in text


@pytest.mark.parametrize("axis", ["step", "tokens", "epoch", "flops", "active_s", "time"])
@pytest.mark.parametrize("log", [False, True])
def test_every_axis_can_be_drawn(record, axis, log):
    text = terminal(
        compose([record], ChartRequest(axis=axis, log=log, log_x=log)), TerminalSize(80, 24)
    )

    assert set(text) & BRAILLE


def test_a_gap_is_left_open(tmp_path):
    losses = [3.0] * 30 + [float("nan")] * 40 + [3.0] * 30
    record = read_run(tmp_path / "run", [train(n + 1, x) for n, x in enumerate(losses)])

    text = terminal(compose([record], ChartRequest(panels=(("loss",),))), TerminalSize(80, 24))

    (row,) = [line for line in text.splitlines() if set(line) & BRAILLE]
    first, last = (row.index(c) for c in (row.strip(" │")[0], row[-1]))
    middle = row[first + 26 : first + 46]
    assert first < last
    assert not set(middle) & BRAILLE


def test_without_plotext_the_extra_is_named(record, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotext", None)

    with pytest.raises(ConfigError, match=r"plotext.*pip install 'instar\[plot\]'"):
        terminal(compose([record], ChartRequest()), TerminalSize())
