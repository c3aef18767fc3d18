"""What a run comes to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from drawn import eval_event, read_run
from hypothesis import given, settings
from hypothesis import strategies as st
from written_runs import BEGAN, place, write_run, writing

from instar.logs.query.summary import MetricValue, Summary, summarize, summary_to_json
from instar.logs.read.reader_cache import cached_summary
from instar.logs.read.record import direction, read_record
from instar.logs.text.summary import one_lines, page, summary_markdown
from instar.logs.text.values import metric_value_text
from instar.record.events import (
    Alert,
    BeginsAnew,
    Eval,
    Event,
    OperationEvent,
    RunStarted,
    Saved,
    Skip,
    Stop,
    Train,
    Warn,
    encode_event,
)
from instar.record.rundir import RunDir


def summary_of(folder: Path) -> Summary:
    return summarize(read_record(RunDir(folder)), now=BEGAN + 1e6)


@pytest.fixture
def growth_summary(tmp_path: Path) -> Summary:
    """A run that grew, was warned, skipped a step, and ended."""
    with writing(tmp_path / "grow-abcde") as writer:
        writer.start()
        writer.train(1, 4.0, tokens_per_s=100.0, memory_bytes=3000)
        writer.val(2, 3.0, standard_error=0.5, extra={"accuracy": 0.25})
        writer.write(
            OperationEvent(
                name="widen_mlp",
                verb="GROW",
                change="64→128",
                reason="val 3.00 < 3.50",
                preserves="exact",
                proof={"parameters_after": 2000, "max_logit_diff": 0.0},
                architecture={"n_layer": 2, "n_embd": 64},
                **place(2),
            )
        )
        writer.write(Skip(**place(3)))
        writer.recorder.write(Warn(message="a warning"))
        writer.write(Alert(name="stall", message="no progress", **place(3)))
        writer.train(4, 2.0, memory_bytes=2000)
        writer.val(4, 3.5, standard_error=0.4, extra={"accuracy": 0.5})
        writer.save(4)
        writer.stop(4, "reached 4it")
    return summary_of(tmp_path / "grow-abcde")


def test_amounts_are_those_of_the_furthest_step(growth_summary: Summary) -> None:
    assert (growth_summary.step, growth_summary.samples, growth_summary.tokens) == (4, 16, 256)
    assert (
        growth_summary.epoch,
        growth_summary.flops,
        growth_summary.wall_s,
        growth_summary.active_s,
    ) == (0.04, 4e6, 4.0, 2.0)
    assert growth_summary.tokens_per_s == 128.0
    assert (growth_summary.started, growth_summary.seen) == (BEGAN, BEGAN + 4)
    assert (
        growth_summary.name,
        growth_summary.id,
        growth_summary.state,
        growth_summary.reason,
    ) == (
        "grow",
        "abcde",
        "finished",
        "reached 4it",
    )


def test_every_value_has_its_own_step(growth_summary: Summary) -> None:
    assert growth_summary.last["loss"] == MetricValue(2.0, 4)
    assert growth_summary.last["val/loss"] == MetricValue(3.5, 4, error=0.4)
    assert growth_summary.best["val/loss"] == MetricValue(3.0, 2, error=0.5)
    assert growth_summary.best["val/accuracy"] == MetricValue(0.5, 4)
    assert set(growth_summary.best) == {"loss", "val/loss", "val/accuracy"}
    assert not any(":" in name for name in growth_summary.last)


def test_what_happened_beside_the_curves(growth_summary: Summary) -> None:
    assert [(o.step, o.name) for o in growth_summary.operations] == [(2, "widen_mlp")]
    assert (growth_summary.model, growth_summary.parameters) == ("2L/64d", 2000)
    assert (growth_summary.warnings, growth_summary.skipped_steps) == (("a warning",), 1)
    assert growth_summary.alerts == ("step 3: stall: no progress",)
    assert [
        (checkpoint.name, checkpoint.pointers) for checkpoint in growth_summary.checkpoints
    ] == [("step-4", ("latest",))]
    assert growth_summary.memory_peak_bytes == 3000


def test_what_a_resume_superseded_counts_in_nothing_but_the_memory(tmp_path: Path) -> None:
    with writing(tmp_path / "run") as writer:
        writer.start()
        writer.train(1, 4.0, memory_bytes=10)
        writer.save(1)
        writer.train(2, 0.5, memory_bytes=99)
        writer.val(2, 0.5)
        writer.start(step=1, resumed_from="step-1")
        writer.train(2, 3.0, memory_bytes=20)
        writer.val(2, 3.5)
    summary = summary_of(tmp_path / "run")
    assert (summary.segments, summary.step) == (2, 2)
    assert summary.best["val/loss"] == MetricValue(3.5, 2)
    assert summary.last["loss"] == summary.best["loss"] == MetricValue(3.0, 2)
    assert summary.memory_peak_bytes == 99


def test_values_that_are_no_numbers_are_last_but_never_best(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {1: 4.0, 2: math.nan}, {1: 3.0, 2: -math.inf})
    summary = summary_of(run.path)
    assert summary.best["val/loss"] == MetricValue(3.0, 1, error=0.01)
    assert math.isnan(summary.last["loss"].value)
    document = json.loads(json.dumps(summary_to_json(summary), allow_nan=False))
    assert document["last"]["loss"] == {"value": "NaN", "step": 2, "error": None}
    assert document["last"]["val/loss"]["value"] == "-Infinity"


odd = st.sampled_from([0.0, -1.0, 2.5, 1e300, -1e308, math.nan, math.inf, -math.inf])
steps = st.sampled_from([0, 1, 2, -1, 2**31, 2**62])


@st.composite
def odd_events(draw: st.DrawFn) -> Event:
    at: dict[str, Any] = {
        "step": draw(steps),
        "samples": draw(steps),
        "tokens": draw(steps),
        **{axis: draw(odd) for axis in ("epoch", "flops", "wall_s", "active_s")},
    }
    return draw(
        st.sampled_from(
            [
                RunStarted(run_id="x", step=at["step"], parameters=at["samples"]),
                Train(loss=draw(odd), lr=draw(odd), tokens_per_s=draw(odd), **at),
                Eval(split="val", loss=draw(odd), standard_error=draw(odd), **at),
                OperationEvent(
                    name="grow",
                    value=draw(odd),
                    proof={"parameters_after": draw(odd), "max_logit_diff": draw(odd)},
                    architecture={"n_layer": draw(odd)},
                    **at,
                ),
                Saved(path="step-1", size_bytes=at["tokens"], **at),
                Skip(**at),
                Stop(reason="", **at),
            ]
        )
    )


@given(st.lists(odd_events(), max_size=12))
@settings(max_examples=150, deadline=None)
def test_whatever_was_measured_it_is_summarized(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event]
) -> None:
    run = RunDir(tmp_path_factory.getbasetemp() / "odd")
    run.path.mkdir(exist_ok=True)
    lines = [encode_event(event, BEGAN, 1) for event in (RunStarted(run_id="x"), *events)]
    run.events.write_bytes(b"".join(lines))
    summary = summarize(read_record(run), now=BEGAN)
    json.dumps(summary_to_json(summary), allow_nan=False)
    assert page(summary, 80)
    assert one_lines([summary])
    assert summary_markdown([summary])


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    with writing(tmp_path / "run") as writer:
        writer.start()
    summary = summary_of(tmp_path / "run")
    assert (summary.step, summary.last, summary.best, summary.tokens_per_s) == (0, {}, {}, None)
    assert "best val - at -" in one_lines([summary])[0]
    assert page(summary, 80)[0] == "run"


def test_a_record_with_nothing_in_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {1: 1.0})
    run.events.write_bytes(b"")
    assert (summary_of(run.path).started, summary_of(run.path).state) == (0.0, "crashed")
    assert page(summary_of(run.path), 80)


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("loss", "min"),
        ("val/loss", "min"),
        ("val/ordering_fraction/mae", "min"),
        ("test/kind/accuracy", "max"),
        ("val/top5_accuracy", "max"),
        ("val/recall@10", "max"),
        ("val/r2", "max"),
        ("val/loss:error", None),
        ("tokens_per_s", None),
        ("grad_norm/blocks.0", None),
        ("lr", None),
        ("val/temperature", None),
    ],
)
def test_what_is_better_is_told_by_the_name(metric: str, better: str | None) -> None:
    assert direction(metric) == better


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("val/loss", 3.14159, "3.1416"),
        ("val/mse", 1.234e-5, "1.23e-5"),
        ("lr", 3e-4, "3.0e-4"),
        ("lr", 0.0, "0"),
        ("tokens_per_s", 1_020_000, "1.02M"),
        ("memory_bytes", 1 << 20, "1.00 MiB"),
        ("mfu", 0.41, "41%"),
        ("loss", math.nan, "nan"),
        ("loss", None, "-"),
    ],
)
def test_values_are_told_in_their_own_manner(name: str, value: float | None, text: str) -> None:
    assert metric_value_text(name, value) == text


def test_lines_of_several_runs_have_the_same_fields(
    tmp_path: Path, growth_summary: Summary
) -> None:
    other = summary_of(write_run(tmp_path / "b", {1000: 12345.6}).path)
    with writing(tmp_path / "c") as writer:
        writer.start()
    lines = one_lines([growth_summary, other, summary_of(tmp_path / "c")])
    assert " ".join(lines[0].split()) == (
        "finished grow-abcde step 4 256 tok loss 2.000 best val 3.0000 at 2 128 tok/s "
        "2.0s active 1 operation"
    )
    assert [line.index("step") for line in lines] == [lines[0].index("step")] * 3
    assert lines[2].startswith("crashed ")
    assert lines[2].endswith("ended without a message: killed, or the machine went down")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_page_keeps_to_its_width(growth_summary: Summary, width: int) -> None:
    too_long = [line for line in page(growth_summary, width) if len(line) > width]
    assert [line for line in too_long if growth_summary.path not in line] == []


def test_markdown_has_sections_for_one_run_and_a_table_for_several(growth_summary: Summary) -> None:
    lines = summary_markdown([growth_summary])
    assert lines[0] == "# grow-abcde"
    assert [line for line in lines if line.startswith("##")] == [
        "## Metrics",
        "## Operations",
        "## Alerts",
        "## Warnings",
    ]
    assert "| val/loss | 3.5000 ±0.4000 | 4 | 3.0000 | 2 |" in lines
    table = summary_markdown([growth_summary, growth_summary])
    assert {line.count("|") for line in table} == {11}
    assert len(table) == 4


def test_the_direction_that_a_run_has_said_counts_before_the_metric_s_name(tmp_path: Path) -> None:
    """The name doubt says nothing, and this score is better when it is low."""
    start = RunStarted(run_id="r", better={"loss": "min", "kind/doubt": "max", "score": "min"})
    values = [{"kind/doubt": 0.25, "score": 3.0}, {"kind/doubt": 0.5, "score": 4.0}]
    values.append({"kind/doubt": 0.125, "score": 5.0})
    events = [eval_event(10 * n, 1.0, extra=extra) for n, extra in enumerate(values, 1)]
    summary = summarize(read_run(tmp_path / "said", [start, *events]))
    assert (summary.best["val/kind/doubt"].value, summary.best["val/kind/doubt"].step) == (0.5, 20)
    assert (summary.best["val/score"].value, summary.best["val/score"].step) == (3.0, 10)
    by_name = summarize(read_run(tmp_path / "guessed", events))
    assert "val/kind/doubt" not in by_name.best
    assert by_name.best["val/score"].step == 30


def test_what_is_recorded_under_another_name_of_a_metric_is_that(tmp_path: Path) -> None:
    """`memory` is short for memory_bytes, and here a number of the task's own; training hides no evaluation."""
    with writing(tmp_path / "own-abcde") as writer:
        writer.start()
        writer.train(1, 4.0, memory_bytes=3000, extra={"memory": 0.25, "val/loss": 99.0})
        writer.val(1, 3.0)
    summary = summary_of(tmp_path / "own-abcde")
    assert (summary.last["memory"].value, summary.last["memory_bytes"].value) == (0.25, 3000)
    assert summary.best["val/loss"].value == 3.0
    record = read_record(RunDir(tmp_path / "own-abcde"))
    assert record.series("memory").value.tolist() == [0.25]
    with writing(tmp_path / "plain-abcde") as writer:
        writer.start()
        writer.train(1, 4.0, memory_bytes=3000)
    plain = read_record(RunDir(tmp_path / "plain-abcde"))
    assert plain.series("memory").value.tolist() == [3000]


def test_the_best_of_a_held_out_set_is_shown_where_it_decides(tmp_path: Path) -> None:
    """In a list and in a summary, comparable values only."""
    folder = tmp_path / "sets-abcde"
    with writing(folder) as writer:
        writer.start(best_metric="german/loss")
        for step, german in ((10, 4.0), (20, 3.0), (30, 3.5), (40, 3.75)):
            if step == 30:
                writer.write(BeginsAnew(reasons=("tokens per sample 64 → 128",), **place(29)))
            writer.train(step, 4.0)
            writer.val(step, 2.5)
            writer.write(Eval(split="german", loss=german, **place(step)))
    summary = summary_of(folder)
    assert summary.best_metric == "german/loss"
    assert (summary.best["german/loss"].value, summary.best["german/loss"].step) == (3.5, 30)
    assert "best german/loss 3.5" in "\n".join(one_lines([summary]))
    listing = cached_summary(RunDir(folder))
    assert (listing.best_metric, listing.best, listing.best_step) == ("german/loss", 3.5, 30)


def test_values_of_a_machine_whose_clock_is_behind_are_comparable(tmp_path: Path) -> None:
    """Resumed there after what is evaluated has changed."""
    with writing(tmp_path / "clock-abcde") as writer:
        writer.start()
        writer.val(10, 3.0)
        writer.write(BeginsAnew(reasons=("tokens per sample 64 → 128",), **place(15)))
        writer.val(20, 3.5)
    path = RunDir(tmp_path / "clock-abcde").events
    late = [RunStarted(step=20, run_id="clock"), Eval(split="val", loss=2.9, **place(30))]
    with path.open("ab") as file:
        file.writelines(encode_event(event, BEGAN - 600, 2) for event in late)
    best = summary_of(tmp_path / "clock-abcde").best["val/loss"]
    assert (best.value, best.step) == (2.9, 30)
