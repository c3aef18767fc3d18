"""Time and memory of a run on devices that are not here, against arithmetic by hand and published runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from sized import spec_for_tokens

from instar.config.errors import ConfigError
from instar.config.language import LanguageConfig
from instar.schedule.forecast import forecast
from instar.schedule.hardware.devices import ACCELERATORS, parse_hardware
from instar.schedule.hardware.estimate import Assumptions, Estimate, arithmetic_of, estimate
from instar.schedule.hardware.estimate_text import render_estimate
from instar.schedule.memory import FORECAST_SHARE
from instar.tasks.language import LanguageSpec

GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "context": 1024, "tied": True}
LLAMA_7B = {
    "n_layer": 32,
    "n_head": 32,
    "n_embd": 4096,
    "n_mlp": 11008,
    "context": 4096,
    "tied": False,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "positions": "rope",
}
MATRICES = 12 * 12 * 768**2 + 50304 * 768
TOKEN_FLOPS = 6 * MATRICES + 12 * 12 * 1024 * 768


def estimated(
    hardware: str,
    utilization: float = 0.4,
    *,
    vocab_size: int = 50304,
    tokens: int | None = None,
    spec_class: type[LanguageSpec] = LanguageSpec,
    **settings: object,
) -> Estimate:
    config = LanguageConfig.model_validate({"device": "cuda", "precision": "bf16", **settings})
    devices = parse_hardware(hardware)
    plain = spec_for_tokens(config, tokens, vocab_size)
    spec = spec_class(config, plain.architecture, plain.tokens)
    told = forecast(config, spec, devices.devices)
    kind = arithmetic_of(config, config.precision, devices)
    recomputes = config.train.gradient_checkpointing
    return estimate(told, config, spec, Assumptions(devices, utilization, kind, recomputes))


@pytest.mark.parametrize(
    ("text", "hosts", "per_host", "name"),
    [
        ("H100", 1, 1, "H100"),
        ("8xH100", 1, 8, "H100"),
        ("8 × h100 sxm", 1, 8, "H100"),
        ("2x8xH100", 2, 8, "H100"),
        ("4X4*a100_80gb", 4, 4, "A100-80GB"),
        ("8x4090", 1, 8, "RTX-4090"),
        ("rtx 3090", 1, 1, "RTX-3090"),
        ("16xmi300x", 1, 16, "MI300X"),
        # as torch names them
        ("NVIDIA H100 80GB HBM3", 1, 1, "H100"),
        ("NVIDIA H100 PCIe", 1, 1, "H100-PCIe"),
        ("8xNVIDIA A100-SXM4-40GB", 1, 8, "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", 1, 1, "A100-40GB-PCIe"),
        ("Tesla V100-SXM2-16GB", 1, 1, "V100-16GB"),
        ("NVIDIA GeForce RTX 5090", 1, 1, "RTX-5090"),
    ],
)
def test_hardware_is_hosts_times_devices(text: str, hosts: int, per_host: int, name: str) -> None:
    hardware = parse_hardware(text)
    assert (hardware.hosts, hardware.devices_per_host) == (hosts, per_host)
    assert hardware.device is ACCELERATORS[name]
    assert hardware.devices == hosts * per_host


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xH10O", "did you mean H100?"),
        ("H300", "did you mean H"),
        ("A100", "A100 may be A100-80GB or A100-40GB"),
        ("V100", "V100-32GB or V100-16GB"),
        ("mi300", "did you mean MI300X?"),
        ("TPUv4", "there are B200"),
        ("0xH100", "1 to 65,536 devices"),
        ("300x300xH100", "1 to 65,536 devices"),
        ("8x", "no data of a device"),
        ("", "names no devices"),
        ("-8xH100", "no data of a device"),
    ],
)
def test_what_is_no_hardware_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hardware(text)
    assert message.lower() in str(caught.value).lower()


@pytest.mark.parametrize(
    ("name", "memory_gb", "peak"),
    [
        # GB, dense TFLOP/s of bf16 (T4, V100: fp16); the data sheets of H100, H200, L4 and L40S give twice as much, with sparsity
        ("B200", 180, 4500 / 2),
        ("H200", 141, 1979 / 2),
        ("H100", 80, 1979 / 2),
        ("H100-PCIe", 80, 1513 / 2),
        ("H100-NVL", 94, 1671 / 2),
        ("A100-40GB", 40, 312),
        ("A100-80GB", 80, 312),
        ("L40S", 48, 733 / 2),
        ("L4", 24, 242 / 2),
        ("T4", 16, 65),
        ("V100-32GB", 32, 125),
        ("MI300X", 192, 1307),
        ("RTX-3090", 24, 71),
        ("RTX-4090", 24, 330.3 / 2),
        ("RTX-5090", 32, 419 / 2),
    ],
)
def test_the_table_is_that_of_the_data_sheets(name: str, memory_gb: int, peak: float) -> None:
    device = ACCELERATORS[name]
    assert device.memory_bytes == memory_gb * 10**9
    speeds = device.peak_flops
    assert speeds.get("bf16", speeds["fp16"]) == pytest.approx(peak * 1e12, rel=0.015)
    assert speeds["fp32"] <= speeds.get("tf32", speeds["fp32"]) <= speeds["fp16"]


def test_the_time_is_flops_over_a_share_of_the_peak() -> None:
    train = {"until": ("300Btok",), "batch_size": 96, "gradient_accumulation_steps": 5}
    result = estimated("8xA100-40GB", 0.3, model=GPT2, train=train)
    assert result.late is not None
    steps = math.ceil(300e9 / (480 * 1024))
    by_hand = steps * 480 * 1024 * TOKEN_FLOPS / (8 * 312e12 * 0.3)
    assert result.late.training_s == pytest.approx(by_hand, rel=1e-9)
    # nanoGPT trains this model on these tokens and devices in about 4 days
    assert by_hand / 86400 == pytest.approx(4, rel=0.05)
    assert result.paces[0].units_per_s == pytest.approx(8 * 312e12 * 0.3 / TOKEN_FLOPS)
    assert result.device_hours == pytest.approx(8 * result.late.total_s / 3600)


@pytest.mark.parametrize(
    ("model", "vocab_size", "budget", "hardware", "share", "device_hours"),
    [
        (GPT2, 50304, "300Btok", "8xA100-40GB", 0.30, 8 * 96),
        (GPT2, 50304, "10Btok", "8xA100-80GB", 0.635, 8 * 1.5),
        (LLAMA_7B, 32000, "2Ttok", "8xA100-80GB", 0.445, 184_320),
        (GPT2, 50304, "456000tok", "H200", 0.394, 1 / 3600),
    ],
)
def test_published_runs_reached_the_shares_that_the_docs_give(
    model: dict[str, object],
    vocab_size: int,
    budget: str,
    hardware: str,
    share: float,
    device_hours: float,
) -> None:
    train = {"until": (budget,), "batch_size": 64}
    result = estimated(hardware, share, vocab_size=vocab_size, model=model, train=train)
    assert result.late is not None
    hours = result.late.training_s * result.assumptions.hardware.devices / 3600
    assert hours == pytest.approx(device_hours, rel=0.02)
    page = (Path(__file__).parents[2] / "docs/scaling.md").read_text("utf-8")
    assert f"| {share:.0%} |" in page


def test_the_slowest_device_decides() -> None:
    even, uneven = (
        estimated("8xH100", model=GPT2, train={"batch_size": size}).paces[0] for size in (16, 12)
    )
    assert (even.balance, uneven.balance) == (1, 12 / 16)
    assert uneven.step_s == even.step_s


def test_gradient_checkpointing_repeats_the_forward_pass() -> None:
    plain, again = (
        estimated("H100", model=GPT2, train={"gradient_checkpointing": value}).paces[0]
        for value in (False, True)
    )
    assert again.step_s == pytest.approx(plain.step_s * 4 / 3)


def test_evaluations_are_forward_passes() -> None:
    result = estimated(
        "2xH100",
        model=GPT2,
        train={"until": ("1050it",), "batch_size": 8},
        eval={"eval_interval": 100, "eval_iters": 5, "at_start": True},
    )
    assert result.late is not None
    # at steps 0, 100 … 1,000, and at the end
    assert result.late.evaluations == 12
    seconds = 5 * 8 * 1024 * TOKEN_FLOPS / 3 / (2 * 989e12 * 0.4)
    assert result.late.evaluations_s == pytest.approx(12 * seconds)


def test_evaluations_of_data_of_unknown_size_are_not_counted_and_it_is_said() -> None:
    settings = {"model": GPT2, "train": {"until": ("500it",)}}
    result = estimated("H100", **settings)
    assert result.paces[0].evaluation_s is None
    assert result.late is not None
    assert result.late.evaluations_s == 0
    assert "2 evaluations not counted" in rendered("H100", **settings)


def test_sending_may_take_longest() -> None:
    train = {"batch_size": 2, "until": ("10it",)}
    fast, slow = (
        estimated(hardware, model=GPT2, train=train).paces[0]
        for hardware in ("2xA100-80GB", "2xA10")
    )
    parameters = MATRICES + 1024 * 768 + 12 * (13 * 768) + 2 * 768
    sent = 4 * parameters  # 2 · (2 - 1) / 2 of float32 gradients
    assert slow.link_s == pytest.approx(sent / 32e9, rel=2e-4)
    assert fast.link_s == pytest.approx(sent / 300e9, rel=2e-4)
    assert fast.step_s == fast.compute_s > fast.link_s
    assert slow.hiding_bytes == pytest.approx(sent / slow.compute_s, rel=2e-4)
    starved = estimated("2xL40S", model=GPT2, train=train)
    assert starved.paces[0].step_s == starved.paces[0].link_s > starved.paces[0].compute_s
    assert "which takes longest" in rendered("2xL40S", model=GPT2, train=train)
    assert estimated("A10", model=GPT2, train=train).paces[0].link_s == 0


def test_growth_is_estimated_stage_by_stage() -> None:
    small = GPT2 | {"n_layer": 4}
    schedule = [
        {"name": "insert_layers", "value": 4, "trigger_loss": 3.0, "max_wait_iters": 600},
        {"name": "insert_layers", "value": 4, "when": {"at_step": 800}},
    ]
    settings = {
        "model": small,
        "schedule": schedule,
        "train": {"until": ("1000it",), "batch_size": 16},
        "eval": {"eval_interval": 100, "eval_iters": 1},
    }
    result = estimated("4xH100", **settings)
    speed = 4 * 989e12 * 0.4
    flops = [
        6 * (layers * 12 * 768**2 + 50304 * 768) + 12 * layers * 1024 * 768 for layers in (4, 8, 12)
    ]
    late = [600, 200, 200]
    by_hand = sum(n * 16 * 1024 * f / speed for n, f in zip(late, flops, strict=True))
    assert result.early is not None
    assert result.late is not None
    assert result.late.training_s == pytest.approx(by_hand)
    assert result.late.evaluations == result.early.evaluations == 11
    # at its earliest, the first operation fires at step 0
    early = [0, 800, 200]
    by_hand = sum(n * 16 * 1024 * f / speed for n, f in zip(early, flops, strict=True))
    assert result.early.training_s == pytest.approx(by_hand)
    assert result.longest_s == result.early.total_s
    text = rendered("4xH100", **settings)
    assert "stage 3: " in text
    assert "if every operation fires at its latest step" in text


def test_a_budget_of_time_ends_it() -> None:
    train = {"until": ("600s", "loss<3"), "batch_size": 64}
    result = estimated("H100", model=GPT2, train=train)
    assert (result.early, result.late, result.longest_s) == (None, None, 600)
    assert result.units_within_limit == pytest.approx(600 * 989e12 * 0.4 / TOKEN_FLOPS)
    text = rendered("H100", model=GPT2, train=train)
    assert "ends by the clock after 10m00, with 278M tokens" in text
    both = estimated("H100", model=GPT2, train={**train, "until": ("5min", "10Mtok")})
    assert both.late is not None
    assert both.longest_s == both.late.total_s < 300
    assert both.units_within_limit is None


def test_without_an_end_the_time_of_a_thousand_steps_is_said() -> None:
    text = rendered("H100", model=GPT2, train={"until": ("loss<3",), "batch_size": 64})
    assert "open" in text
    assert "1,000 steps take 2m22" in text
    assert "device hours" not in text


class OneInFour(LanguageSpec):
    """Text of which a quarter are targets, as answers in chats are."""

    def weight(self, context: int) -> float:
        return context / 4


def test_tokens_that_are_no_targets_take_time_too() -> None:
    settings = {"model": GPT2, "train": {"until": ("100it",), "batch_size": 8}}
    plain, chats = (
        estimated("H100", spec_class=kind, **settings) for kind in (LanguageSpec, OneInFour)
    )
    assert chats.paces[0].step_s == plain.paces[0].step_s
    assert chats.paces[0].units_per_s == pytest.approx(plain.paces[0].units_per_s / 4)
    assert chats.late is not None
    assert plain.late is not None
    assert chats.late.training_s == pytest.approx(plain.late.training_s)


def test_it_fits_where_the_forecast_leaves_room_for_the_allocator() -> None:
    result = estimated("A100-40GB", model=GPT2, train={"batch_size": 16})
    needed = result.fit.needed_bytes
    assert result.fit.fits
    at = replace(result.fit, device_bytes=math.ceil(needed / FORECAST_SHARE))
    assert at.fits
    assert replace(at, device_bytes=at.device_bytes - 10).fits is False
    assert replace(at, is_complete=False).fits is None


def test_precisions_have_their_own_peaks() -> None:
    config = LanguageConfig()
    strict = LanguageConfig(tf32=False)
    h100, t4 = parse_hardware("H100"), parse_hardware("T4")
    assert arithmetic_of(config, "fp32", h100) == "tf32"
    assert arithmetic_of(strict, "fp32", h100) == "fp32"
    assert arithmetic_of(LanguageConfig(reproducible="elastic"), "fp32", h100) == "fp32"
    assert arithmetic_of(config, "fp32", t4) == "fp32"
    assert arithmetic_of(config, "fp16", t4) == "fp16"
    with pytest.raises(ValueError, match="T4 has no units for bf16"):
        arithmetic_of(config, "bf16", t4)


def test_the_data_that_a_budget_needs_are_compared_with_those_that_are_there() -> None:
    many = rendered("H100", tokens=83_600, model=GPT2, train={"until": ("300Btok",)})
    assert "needs 300B tokens, and there are 83.6k: 3,5" in many
    assert "the budget counts passes" not in many
    epochs = rendered("H100", tokens=83_600, model=GPT2, train={"until": ("3ep",)})
    assert ": 3 passes" in epochs
    assert "the budget counts passes of the 83.6k tokens that are here" in epochs
    part = rendered("H100", tokens=10**9, model=GPT2, train={"until": ("250Mtok",)})
    assert "25% of them" in part
    unknown = rendered("H100", model=GPT2, train={"until": ("250Mtok",)})
    assert "needs 250M tokens; how many there are is not known yet" in unknown


def rendered(hardware: str, **settings: object) -> str:
    """The text, its lines joined as they were before they were wrapped."""
    tokens = settings.pop("tokens", None)
    assert tokens is None or isinstance(tokens, int)
    config = LanguageConfig.model_validate({"device": "cuda", "precision": "bf16", **settings})
    told = forecast(
        config, spec_for_tokens(config, tokens, 50304), parse_hardware(hardware).devices
    )
    text = render_estimate(estimated(hardware, tokens=tokens, **settings), told, "", "")
    assert all(len(line) <= 80 for line in text.splitlines())
    return " ".join(text.split())
