"""`precision: auto` is resolved before a run; a run's speed is told as a share of what is possible."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import science
import tiny_run
import torch
from forks import children_as_ranks, forks

from instar.config.load import Loaded, load_config
from instar.distributed.failure import RunFailed
from instar.distributed.world import World
from instar.models.cost import bf16_pays
from instar.record import device, system
from instar.record.device import PeakFlops
from instar.record.events import Alert, Skip, Train, Warn, read_events
from instar.record.rundir import RunDir
from instar.run.resume import Resume, continuation
from instar.run.start import rank_consistency
from instar.run.start.preflight import Prepared
from instar.run.start.rank_consistency import resolve_precision
from instar.run.trainer import Trainer
from instar.tasks.task import TaskSpec

HERE = World(0, 0, 1, torch.device("cpu"), "none")
CPU = torch.device("cpu")


@pytest.fixture
def cfg(config: Callable[..., Loaded], tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(config("train.until=[2it]").to_yaml(origin=False), encoding="utf-8")
    return path


@pytest.fixture
def cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Makes the kernel list other features of the processor."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")

    def write(text: str) -> None:
        file = tmp_path / "cpuinfo"
        file.write_text(f"processor\t: 0\n{text}\n")
        monkeypatch.setattr(system, "CPUINFO", file)

    return write


@pytest.mark.parametrize(
    ("line", "units"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni", True),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
        ("model name\t: bf16", False),
    ],
)
def test_bf16_units_are_those_that_the_kernel_lists(
    cpuinfo: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, line: str, units: bool
) -> None:
    cpuinfo(line)
    assert system.has_bf16_units() == units
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    assert system.has_bf16_units() == units
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")
    assert not system.has_bf16_units()


LARGE = ("model.n_embd=256", "train.batch_size=16", "model.context=64")


def test_auto_takes_bf16_where_it_is_faster(
    cpuinfo: Callable[[str], None],
    prepare_run: Callable[..., Prepared],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(*overrides: str) -> tuple[str, str]:
        loaded_config, reason = resolve_precision(prepare_run(*overrides), HERE)
        return loaded_config.config.precision, reason

    monkeypatch.setattr(rank_consistency, "measure_bf16_gain", lambda: 4.0)
    cpuinfo("flags\t: avx512_bf16")
    for preset in ("fast", "plain"):
        assert prepare_run(f"preset={preset}", *LARGE).config.precision == "auto"
        precision, reason = resolve(f"preset={preset}", *LARGE)
        assert precision == "bf16"
        assert "4.0 times" in reason
    precision, reason = resolve("preset=fast", *LARGE, "model.n_embd=32")
    assert precision == "fp32"
    assert "32 × 32" in reason
    assert resolve("precision=fp32", *LARGE) == ("fp32", "")
    # units that are slower than those for float32
    monkeypatch.setattr(rank_consistency, "measure_bf16_gain", lambda: 0.6)
    precision, reason = resolve("preset=fast", *LARGE)
    assert precision == "fp32"
    assert "0.6 times" in reason
    cpuinfo("flags\t: avx512_vnni")
    precision, reason = resolve("preset=fast", *LARGE)
    assert precision == "fp32"
    assert "no bf16 units" in reason
    assert resolve("precision=bf16", *LARGE) == ("bf16", "")


@pytest.mark.parametrize(
    ("width", "tokens", "pays"),
    [(32, 4096, False), (64, 1024, False), (64, 2048, True), (128, 256, False), (128, 768, True)],
)
def test_small_products_do_not_pay(width: int, tokens: int, pays: bool) -> None:
    assert bf16_pays(width, tokens) == pays


def test_the_gain_is_measured_with_one_thread_and_leaves_them_as_they_were() -> None:
    torch.set_num_threads(2)
    try:
        assert 0 < device.measure_bf16_gain() < 100
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_other_tasks_keep_fp32_unless_told(prepare_run: Callable[..., Prepared]) -> None:
    assert load_config(None, ["task=causal_lm"], checks=()).config.precision == "auto"
    spec = prepare_run().spec
    assert "task language" in TaskSpec.fp32_reason(spec, "cuda")
    assert not spec.fp32_reason("cuda")


def test_a_run_that_goes_on_keeps_what_it_began_with(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("precision: bf16\n")
    going_on = Resume(RunDir(tmp_path), has_user_config=True)
    continued_run = continuation(going_on, load_config(None, ["precision=auto"]), None)
    assert continued_run.loaded_config.config.precision == "bf16"
    assert not continued_run.changes


@pytest.mark.torture
@pytest.mark.parametrize(("older", "expected"), [(1, "fp32"), (2, "bf16")])
def test_all_ranks_must_have_units(tmp_path: Path, older: int, expected: str) -> None:
    """Two real ranks, of which the one numbered `older`, if any, is an older processor."""
    place = tiny_run.Place(tmp_path, science.forks())
    (tmp_path / "squares.txt").write_text(tiny_run.TEXT, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(tiny_run.CONFIG, encoding="utf-8")
    body = "failures:bf16_units_except_on_rank"
    sets = ("record.run_dir=run", "train.until=[2it]", "model.n_embd=256")
    words = ["train", "run.yaml", *(word for text in sets for word in ("--set", text))]
    ranks = children_as_ranks(place.forks, 2, body, words, older, place=place.path)
    assert tiny_run.codes(ranks) == [0, 0], tiny_run.output_of(ranks)
    text = (place.path / "run" / "run.yaml").read_text(encoding="utf-8")
    reason = (
        "bf16 matrix products are 4.0 times"
        if expected == "bf16"
        else ".* no bf16 units.* .rank 1.$"
    )
    assert re.search(rf"^precision: {expected} +# auto: {reason}", text, re.MULTILINE)
    assert load_config(str(place.path / "run" / "run.yaml")).config.precision == expected
    # resumed by one rank without units, it keeps its precision, and warns where that is slow
    assert tiny_run.codes(place.resume(Path("run"), "--until", "4it")) == [0]
    assert load_config(str(place.path / "run" / "run.yaml")).config.precision == expected
    messages = warnings(place.path / "run" / "events.jsonl")
    assert any("bf16 on a processor without" in text for text in messages) == (expected == "bf16")


def warnings(path: Path) -> list[str]:
    return [event.message for event in read_events(path) if isinstance(event, Warn)]


def test_bf16_without_units_is_warned_of_with_the_figure(cfg: Path, tmp_path: Path) -> None:
    peak = PeakFlops(CPU, "bf16", 1)
    peak.measured_flops = {"fp32": 2.6e11, "bf16": 1e11}
    assert "2.6 times as long as in fp32" in peak.warning
    peak.measured_flops = {"fp32": 1e11, "bf16": 2.6e11}
    assert not peak.warning
    assert not PeakFlops(CPU, "fp32", 1).warning
    run_dir = tmp_path / "run"
    slow = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [forks().command, "train", str(cfg)]
    words = ["--set", "precision=bf16", "--set", f"record.run_dir={run_dir}"]
    subprocess.run([*command, *words], env=slow, check=True, capture_output=True)
    (message,) = warnings(run_dir / "events.jsonl")
    assert re.search(r"bf16 on a processor without bf16 units: .* [\d.]+ times as long", message)


def test_the_peak_of_a_slow_type_is_that_of_fp32() -> None:
    peak = PeakFlops(CPU, "bf16", 2)
    assert peak.measured_flops.keys() == {"fp32", "bf16"}
    fastest = max(peak.measured_flops.values())
    assert peak.share(fastest) == pytest.approx(0.5)


def test_no_run_uses_more_than_all_that_was_seen_to_be_possible() -> None:
    peak = PeakFlops(CPU, "fp32", 1)
    possible = peak.measured_flops["fp32"]
    assert peak.share(possible / 2) == pytest.approx(0.5)
    assert peak.share(20 * possible) == 1.0
    assert peak.share(possible) == pytest.approx(0.05)


def test_a_peak_taken_on_a_busy_machine_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter((1e9, 8e9, 2e9, 4e9))
    monkeypatch.setattr(device, "measure_peak_flops", lambda *_: next(peaks))
    peak = PeakFlops(CPU, "fp32", 2)
    assert peak.share(1e9) == pytest.approx(0.5)
    for _ in range(10):  # only the first three measure
        peak.measure_again()
    assert peak.share(1e9) == pytest.approx(1 / 16)


def test_a_recorded_share_is_at_most_1(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    run = trainer()
    assert run.parts.logger.peak is not None
    run.parts.logger.peak._best = 1.0  # as if measured on the busiest of machines
    run.parts.logger.peak._remaining_measurements = 0
    run.train()
    shares = [
        event.mfu for event in read_events(tmp_path / "events.jsonl") if isinstance(event, Train)
    ]
    assert shares
    assert all(share is not None and 0 < share <= 1 for share in shares)


HOT = (
    "precision=fp16",
    "train.max_skipped_steps=3",
    "early_stopping.rules=[]",
    "train.until=[24it]",
)


def scale_losses(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """The losses of the task are as large as squared prices."""
    loss = science.Halves.loss

    def larger(self: science.Halves, *arguments: Any) -> torch.Tensor:
        return factor * loss(self, *arguments)

    monkeypatch.setattr(science.Halves, "loss", larger)


def test_fp16s_search_for_its_loss_scale_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    science.place(tmp_path)
    scale_losses(monkeypatch, 3e4)
    with science.trainer(tmp_path / "run", *HOT, "record.alerts.nan_skips=2") as run:
        run.train()
        assert run.parts.stepper.scaler.get_scale() > 1
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    skips = [event for event in events if isinstance(event, Skip)]
    assert len(skips) > 8
    assert {(event.reason, event.consecutive) for event in skips} == {("loss scale lowered", 0)}
    assert not any(isinstance(event, Alert) for event in events)


def test_a_gradient_that_no_loss_scale_helps_ends_the_run_with_the_right_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    science.place(tmp_path)
    scale_losses(monkeypatch, 1e12)
    with (
        science.trainer(tmp_path / "run", *HOT) as run,
        pytest.raises(RunFailed, match="precision fp16 has no smaller loss scale than 1 to try"),
    ):
        run.train()
    assert run.state.step == 16 + 3, "65536 is halved 16 times"
