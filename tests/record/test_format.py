import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.record.events import Eval, OperationEvent, RunFinished, RunStarted, Saved, Train
from instar.record.format import (
    confusion_lines,
    duration,
    encodable_as,
    eval_line,
    finished_line,
    header_line,
    loss,
    operation_lines,
    percent,
    saved_line,
    scientific,
    si,
    sizes_text,
    train_line,
    unit_text,
)

TRAIN = Train(
    step=1000, tokens=524_000_000, loss=3.9121, lr=3e-4, grad_norm=0.81, tokens_per_s=1.02e6, mfu=0.41
)  # fmt: skip
WHERE = Path("runs/grow-r7f3a")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (7, "7"), (0.125, "0.12"), (12.5, "12"), (812.3, "812"), (999, "999"),
        (99.4, "99"), (99.7, "100"),
        (999.7, "1.00k"), (1000, "1.00k"), (9_994, "9.99k"), (9_996, "10.0k"), (99_960, "100k"),
        (999_499, "999k"), (999_500, "1.00M"), (1_020_000, "1.02M"), (124_000_000, "124M"),
        (1_558_000_000, "1.56B"), (3e12, "3.00T"), (12_345e12, "12345T"), (-5_000, "-5.00k"),
        (math.inf, "inf"), (math.nan, "nan"),
    ],
)  # fmt: skip
def test_si(number: float, text: str) -> None:
    assert si(number) == text


@given(st.floats(min_value=1, max_value=9.9e14))
def test_si_is_short_and_within_half_a_percent(number: float) -> None:
    text = si(number)
    scale = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert len(text) <= 5
    if number >= 100:
        assert float(text.rstrip("kMBT")) * scale == pytest.approx(number, rel=5.1e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00s"), (0.42, "0.42s"), (0.999, "1.0s"), (8.14, "8.1s"), (9.97, "10s"), (42, "42s"),
        (59.6, "1m00"), (303, "5m03"), (3599.7, "1h00"), (4920, "1h22"), (86_399, "1d00h"),
        (86_400 * 3 + 3600 * 4, "3d04h"), (-1, "?"), (math.inf, "?"), (math.nan, "?"),
    ],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.9121, "3.912"),
        (0.00004, "4.00e-05"),
        (0.0, "0.000"),
        (123456.0, "1.23e+05"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_loss(value: float, text: str) -> None:
    assert loss(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(3e-4, "3.0e-4"), (0.02, "2.0e-2"), (0, "0.0e0"), (math.nan, "nan"), (math.inf, "inf")],
)
def test_small(value: float, text: str) -> None:
    assert scientific(value) == text


@pytest.mark.parametrize(("share", "text"), [(0.414, "41%"), (1.5, "150%"), (math.nan, "nan")])
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_header() -> None:
    event = RunStarted(
        run_id="r7f3a", model="12L/768d", parameters=124_000_000, devices="4×H200 DDP"
    )
    assert header_line(event, WHERE) == "run r7f3a  12L/768d 124M  4×H200 DDP  → runs/grow-r7f3a"


def test_header_of_a_run_that_goes_on() -> None:
    assert sizes_text({"train": 1800, "val": 60}) == "train 1,800, val 60 samples"
    assert sizes_text({"train": None, "val": 60}) == "train of unknown length, val 60 samples"
    assert header_line(RunStarted(run_id="r7f3a", step=1200), WHERE) == (
        "run r7f3a  from step 1,200  → runs/grow-r7f3a"
    )


def test_train_line() -> None:
    assert train_line(TRAIN, eta_s=4920) == (
        "  1,000   524M tok  loss 3.912  lr 3.0e-4  gn 0.81  1.02M tok/s  mfu 41%  eta 1h22"
    )


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (200, "  1,000   524M tok  loss 3.912  lr 3.0e-4  gn 0.81  1.02M tok/s  mfu 41%  eta 1h22"),
        (80, "  1,000   524M tok  loss 3.912  lr 3.0e-4  gn 0.81  1.02M tok/s  eta 1h22"),
        (40, "  1,000  loss 3.912  eta 1h22"),
        (5, "  1,000  loss 3.912"),
    ],
)
def test_a_narrow_terminal_leaves_out_the_least_important(width: int, text: str) -> None:
    assert train_line(TRAIN, eta_s=4920, width=width) == text


def test_a_train_line_of_which_only_the_loss_is_known() -> None:
    assert train_line(Train(step=3, loss=math.nan)) == "      3  loss nan"


def test_evaluation() -> None:
    event = Eval(
        step=1000, tokens=524_000_000, split="val", loss=3.41023, standard_error=0.0031, best=True,
        seconds=4.2,
    )  # fmt: skip
    assert eval_line(event) == "  1,000   524M tok  val 3.4102  ±0.0031  best  4.2s"
    assert eval_line(event, width=24) == "  1,000  val 3.4102"


def test_growth_says_what_why_and_what_it_did() -> None:
    event = OperationEvent(
        step=2000, verb="GROW", name="widen_mlp", change="2048→3072", reason="val 3.41 < 3.50",
        notes=("124M→203M", "optimizer mapped"), preserves="exact",
        proof={"val_before": 3.4102, "val_after": 3.4102, "max_logit_diff": 2e-6},
    )  # fmt: skip
    assert operation_lines(event) == [
        "  2,000 GROW widen_mlp 2048→3072 (val 3.41 < 3.50)  124M→203M  optimizer mapped",
        "         val 3.4102 → 3.4102  max|Δlogit| 2.0e-6  exact ✓",
    ]


def test_an_operation_without_proof_is_one_line() -> None:
    event = OperationEvent(step=50, name="change_lr", change="1.0e-3→3.0e-4")
    assert operation_lines(event) == ["     50 SET change_lr 1.0e-3→3.0e-4"]


def test_a_save() -> None:
    event = Saved(step=2000, path="checkpoints/step-2000", size_bytes=498_000_000, seconds=0.61)
    assert saved_line(event) == "  2,000  saved checkpoints/step-2000  498MB  0.61s"


def test_the_end() -> None:
    event = RunFinished(
        step=2000, tokens=1_536_000, loss=1.5123, best_loss=1.4711, best_step=1750, active_s=2472,
        tokens_per_s=621.4,
    )  # fmt: skip
    assert finished_line(event, WHERE, stop_reason="") == (
        "done  2,000 steps  1.54M tok  loss 1.512  best val 1.4711 at 1,750  41m12 active"
        "  621 tok/s  → runs/grow-r7f3a"
    )


def test_an_early_end_says_why() -> None:
    line = finished_line(RunFinished(step=1200), WHERE, stop_reason="SIGINT")
    assert line == "stopped: SIGINT  1,200 steps  → runs/grow-r7f3a"


def test_what_a_stream_cannot_say_is_spelt() -> None:
    text = "4×H200  val 3.41 → 3.40  max|Δlogit| ±1  ✓ Größe"
    assert encodable_as(text, "utf-8") == text
    assert encodable_as(text, "ascii") == (
        "4xH200  val 3.41 -> 3.40  max|dlogit| +-1  ok Gr\\u00f6\\u00dfe"
    )
    assert encodable_as("→", None) == "->"
    assert encodable_as("→", "no-such-encoding") == "->"


def test_confusions_are_a_table() -> None:
    assert confusion_lines("kind", [[1196, 4], [0, 200]]) == [
        "kind: true ↓ predicted →      0      1",
        "                       0  1,196      4",
        "                       1      0    200",
    ]


def test_other_metrics_stand_behind_the_loss_without_its_parts() -> None:
    event = Eval(
        step=10,
        split="val",
        loss=0.5,
        standard_error=0.01,
        extra={"kind/loss": 0.25, "kind/accuracy": 0.9623, "size/mae": 1.5},
        errors={"kind/accuracy": 0.0021},
        best=True,
    )
    line = eval_line(event)
    assert "val 0.5000  ±0.0100  kind/accuracy 0.9623 ±0.0021  size/mae 1.5  best" in line
    assert "kind/loss" not in line


@pytest.mark.parametrize(
    ("best", "best_of", "mark"),
    [
        (True, (), "best"),
        (True, ("loss",), "best"),
        (False, ("loss",), "best loss"),
        (True, ("accuracy",), "best accuracy"),
        (True, ("accuracy", "loss"), "best accuracy, loss"),
        (False, (), ""),
    ],
)
def test_only_the_loss_that_the_pointer_best_follows_is_marked_without_a_name(
    best: bool, best_of: tuple[str, ...], mark: str
) -> None:
    line = eval_line(Eval(step=10, split="val", loss=0.5, best=best, best_of=best_of))
    assert line.partition("0.5000")[2].strip() == mark


def test_what_is_no_text_is_counted_in_its_own_unit() -> None:
    assert unit_text("token") == "tok"
    event = Train(step=1, tokens=3200, loss=1.0, tokens_per_s=120.0)
    assert "3.20k graphs" in train_line(event, unit=unit_text("graph"))
    assert "120 graphs/s" in train_line(event, unit=unit_text("graph"))
