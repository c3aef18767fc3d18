"""`instar train --dry-run --on 8xH100`: what a run takes on devices that are not here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pretrained import write_place
from typed_places import Instar

TASK = """\
import numpy as np
from torch import nn
from instar.custom import CustomTask

class Lines(CustomTask):
    unit = "row"

    def samples(self):
        return {"x": np.zeros((100, 4), "f4")}

    def module(self, shape):
        return nn.Linear(4, 4)

    def loss(self, model, batch):
        return model(batch["x"]).square().mean(1)
"""
COUNTS = """
    def flops(self, shape):
        return 10**12
"""
BIG = ("model.n_layer=24", "model.n_embd=2048", "model.n_head=16", "model.context=2048")


def sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def forecast_text(instar: Instar, *arguments: str, on: str = "8xH100") -> str:
    """What is printed, its lines joined as they were before they were wrapped."""
    result = instar("train", "tiny.yaml", "--dry-run", "--on", on, *arguments)
    assert result.stdout.endswith("Nothing was started.\n")
    return " ".join(result.stdout.split())


def facts(instar: Instar, *arguments: str, on: str = "8xH100") -> dict[str, Any]:
    result = instar("train", "tiny.yaml", "--dry-run", "--json", "--on", on, *arguments)
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def test_it_says_whether_it_fits_how_long_it_takes_and_what_it_costs(
    instar: Instar, place: Path
) -> None:
    before = sorted(place.rglob("*"))
    text = forecast_text(instar, *sets("train.batch_size=8"))
    for part in (
        "on 8 × H100 (SXM): 80 GB and 989 TFLOP/s of dense bf16 each (NVIDIA H100",
        "verdict fits: ",
        "of 74.5 GiB on each device",
        "speed ",
        "time about ",
        "cost under 0.01 device hours",
        "checkpoint ",
        "assumed 25% of the peak (--utilization)",
        "they wait for the launch of theirs",
        "torchrun --nproc_per_node=8",
    ):
        assert part in text
    assert sorted(place.rglob("*")) == before
    assert "on 2 hosts × 8 × H200" in forecast_text(
        instar, *sets("train.batch_size=16"), on="2x8xH200"
    )


def test_no_torch_is_needed(place: Path) -> None:
    code = (
        "import sys; from instar.cli.main import main\n"
        "sys.argv = ['instar', 'train', 'tiny.yaml', '--dry-run', '--on', '4xL4']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=True
    )
    assert process.stdout.endswith("False\n")
    assert "verdict     fits" in process.stdout


def test_a_share_of_the_peak_can_be_given(instar: Instar) -> None:
    half, all_of_it = (
        facts(instar, "--utilization", share, on="H100")["on"] for share in ("0.5", "1")
    )
    assert half["late"]["training_s"] == pytest.approx(2 * all_of_it["late"]["training_s"])
    assert half["assumptions"]["utilization"] == 0.5
    assert facts(instar, on="H100")["on"]["assumptions"]["utilization"] == 0.25
    compiled = facts(instar, *sets("compile=true"), on="H100")["on"]
    assert compiled["assumptions"]["utilization"] == 0.4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--on", "8xH100"), "--on: forecasts a run, and starts none; add --dry-run"),
        (("--dry-run", "--utilization", "0.5"), "--utilization: is a share of the speed of --on"),
        (("--dry-run", "--on", "8xH100", "--nproc", "2"), "as --nproc and --devices do"),
        (("--dry-run", "--on", "8xH100", "--utilization", "0"), "0<x<=1"),
        (("--dry-run", "--on", "8xH10O"), "did you mean H100?"),
        (("--dry-run", "--on", "8xH100"), "a global batch of 4 samples leaves some of 8 ranks"),
        (("--dry-run", "--on", "T4", "--set", "precision=bf16"), "T4 has no units for it"),
    ],
)
def test_what_contradicts_it_is_refused(
    instar: Instar, arguments: tuple[str, ...], message: str
) -> None:
    assert message in instar("train", "tiny.yaml", *arguments, code=2).stderr


def test_a_resumed_run_is_refused(instar: Instar) -> None:
    instar("train", "tiny.yaml", "--until", "1it", "--set", "record.run_dir=run")
    result = instar("train", "--resume", "run", "--dry-run", "--on", "H100", code=2)
    assert "--on: forecasts a new run" in result.stderr


def test_keys_that_say_where_a_run_is_here_do_not_count_and_it_is_said(instar: Instar) -> None:
    keys = sets("parallel.world_size=2", "device=cpu")
    result = instar("train", "tiny.yaml", "--dry-run", "--on", "4xH100", *keys)
    assert "parallel.world_size 2 does not count: --on has 4 devices" in result.stderr
    assert "device cpu does not count" in result.stderr
    assert "on 4 ranks" in result.stdout


@pytest.mark.parametrize(
    ("on", "changes", "key"),
    [
        ("8xA100-40GB", ("train.batch_size=64",), "train.gradient_accumulation_steps"),
        (
            "RTX-4090",
            ("model.n_embd=1024", "model.context=32768", "train.batch_size=1"),
            "train.gradient_checkpointing",
        ),
        ("8xT4", ("train.batch_size=8", "precision=fp16"), "parallel.strategy"),
    ],
)
def test_a_run_that_does_not_fit_is_told_keys_with_which_it_does(
    instar: Instar, on: str, changes: tuple[str, ...], key: str
) -> None:
    run_settings = sets(*BIG, "data.tokenizer=byte", *changes, "data.path=none")
    values = facts(instar, *run_settings, on=on)
    assert values["on"]["fits"] is False
    keys = re.findall(r"[a-z_.]+=\w+", values["remedy"])
    assert any(text.startswith(key) for text in keys)
    after = facts(instar, *run_settings, *sets(*keys), on=on)
    assert after["on"]["fits"] is True
    stages = values["stages"][0]["settings"], after["stages"][0]["settings"]
    batches = [s["batch_size"] * s["grad_accum"] for s in stages]
    assert batches[0] == batches[1]
    text = forecast_text(instar, *run_settings, on=on)
    assert "does not fit: " in text
    assert values["remedy"] in text


def test_where_no_key_helps_it_says_what_is_left(instar: Instar) -> None:
    text = forecast_text(instar, *sets(*BIG, "model.n_embd=8192", "data.path=none"), on="2xL4")
    assert "does not fit" in text
    assert "use more devices, or a smaller model" in text


def test_strategy_auto_is_resolved_by_the_memory_of_the_devices(instar: Instar) -> None:
    run_settings = sets(*BIG, "train.batch_size=8", "parallel.strategy=auto", "data.path=none")
    small, large = (facts(instar, *run_settings, on=on)["on"] for on in ("8xL4", "8xH200"))
    ddp = facts(instar, *run_settings[:-4], "--set", "data.path=none", on="8xH200")["on"]
    assert large["fit"]["needed_bytes"] == ddp["fit"]["needed_bytes"]
    assert small["fit"]["needed_bytes"] < large["fit"]["needed_bytes"]


def test_a_device_without_bf16_computes_in_fp32(instar: Instar) -> None:
    values = facts(instar, on="2xV100-32GB")
    assert values["precision"] == "fp32"
    assert values["on"]["assumptions"]["arithmetic"] == "fp32"
    assert facts(instar, on="2xA100-40GB")["precision"] == "bf16"


def test_a_task_of_ones_own_has_a_time_where_it_tells_its_flops(
    instar: Instar, place: Path
) -> None:
    (place / "lines.py").write_text(TASK)
    (place / "lines.yaml").write_text("task: lines:Lines\ntrain: {until: 10it, batch_size: 16}\n")

    def of_task(on: str) -> str:
        result = instar("train", "lines.yaml", "--dry-run", "--on", on)
        return " ".join(result.stdout.split())

    text = of_task("2xH100")
    assert "verdict open: the activations of this task are not known" in text
    assert "time not known: lines:Lines has no flops(self, shape)" in text
    assert "device hours" not in text
    (place / "lines.py").write_text(TASK + COUNTS)
    text = of_task("2xH100")
    # 10 steps of 16 samples of a TFLOP; 494 TFLOP/s in TF32, and an evaluation of 10 samples
    seconds = 160e12 / (2 * 494e12 * 0.25)
    assert f"training {seconds:.2f}s, 1 evaluation 0.01s" in text
    assert "there are 80: 2 passes" in text


def test_a_model_of_transformers_is_estimated(instar: Instar, place: Path) -> None:
    write_place("llama", place)
    result = instar("train", "run.yaml", "--dry-run", "--on", "H100")
    text = " ".join(result.stdout.split())
    assert "verdict fits" in text
    assert "time about" in text
