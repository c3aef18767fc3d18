"""An estimate as text: verdict, speed, time, cost, data, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from instar.config.budget import parse_budget
from instar.record.format import bytes_text, duration, percent, si
from instar.schedule.forecast import Forecast
from instar.schedule.hardware.estimate import Estimate, StageTime
from instar.schedule.memory import FORECAST_SHARE
from instar.schedule.render import wrapped_row

_GIGA = 10**9
_SHORT_S = 0.01
"""A step below this probably waits for the launch of its kernels, which take some microseconds each."""


def render_estimate(result: Estimate, forecast: Forecast, remedy: str, flops_remark: str) -> str:
    """Render what a run takes on other hardware, in lines of at most 80 columns.

    Args:
        remedy: what makes it fit, where it does not.
        flops_remark: why there is no time, where there is none.
    """
    device, assumptions = result.assumptions.hardware.device, result.assumptions
    peak = device.peak_flops[assumptions.arithmetic] / 1e12
    about = (
        f"{assumptions.hardware}: {device.memory_bytes // _GIGA} GB and {peak:,.4g} TFLOP/s of dense "
        f"{assumptions.arithmetic} each ({device.source})"
    )
    unit = forecast.unit
    rows: list[tuple[str, Sequence[str]]] = [
        ("on", [about]),
        ("verdict", list(_verdict(result, forecast, remedy))),
        ("speed", list(_speeds(result, forecast))),
        ("time", list(_time(result, unit, flops_remark))),
        ("cost", list(_cost(result))),
        ("data", list(lines_on_data(forecast, result.units_within_limit))),
        (
            "checkpoint",
            [f"{bytes_text(result.checkpoint_bytes)} each; writing them is not counted"],
        ),
        ("assumed", list(_assumptions(result, forecast)) if result.paces else []),
    ]
    return "\n".join(line for label, texts in rows if texts for line in wrapped_row(label, texts))


def _verdict(result: Estimate, forecast: Forecast, remedy: str) -> Iterator[str]:
    fit = result.fit
    stage = f" in stage {fit.stage + 1}" if len(forecast.stages) > 1 else ""
    sizes = (
        f"{bytes_text(fit.needed_bytes)} of {bytes_text(fit.device_bytes)} on each device{stage}"
    )
    if fit.fits is None:
        yield f"open: the activations of this task are not known; without them {sizes}"
    elif fit.fits:
        yield f"fits: {sizes}"
    else:
        yield f"does not fit: {sizes}, of which {percent(FORECAST_SHARE)} can be used"
        yield remedy
    if fit.offloaded_bytes:
        yield f"besides {bytes_text(fit.offloaded_bytes)} of host memory for each device"


def _speeds(result: Estimate, forecast: Forecast) -> Iterator[str]:
    unit, several = forecast.unit, len(forecast.stages) > 1
    for number, (stage, pace) in enumerate(zip(forecast.stages, result.paces, strict=False), 1):
        if stage.first_step is not None:
            head = f"stage {number}: " if several else ""
            yield f"{head}{si(pace.units_per_s)} {unit}s/s, {_step_text(pace.step_s)} per step"


def _step_text(seconds: float) -> str:
    return duration(seconds) if seconds >= _SHORT_S else f"{1000 * seconds:.2g} ms"


def _time(result: Estimate, unit: str, flops_remark: str) -> Iterator[str]:
    if not result.paces:
        yield f"not known: {flops_remark or 'the FLOPs of this task are not known'}"
        return
    late, early, limit_s = result.late, result.early, result.limit_s
    if late is None or early is None:
        if limit_s is None:
            step_s = result.paces[0].step_s
            yield f"open, as the end of the run; 1,000 steps take {duration(1000 * step_s)}"
    else:
        longer, shorter = sorted((early, late), key=lambda d: d.total_s, reverse=True)
        yield f"about {duration(longer.total_s)}: training {duration(longer.training_s)}, {_evaluations(result)}"
        if shorter != longer:
            when = "earliest" if shorter is early else "latest"
            yield f"{duration(shorter.total_s)} if every operation fires at its {when} step"
    if limit_s is not None and result.units_within_limit is not None:
        yield f"ends by the clock after {duration(limit_s)}, with {si(result.units_within_limit)} {unit}s"


def _evaluations(result: Estimate) -> str:
    longer = max((d for d in (result.early, result.late) if d is not None), key=lambda d: d.total_s)
    number = f"{longer.evaluations:,} evaluation{'' if longer.evaluations == 1 else 's'}"
    if any(pace.evaluation_s is None for pace in result.paces):
        return f"{number} not counted: how much is held out is not known yet"
    return f"{number} {duration(longer.evaluations_s)}"


def _cost(result: Estimate) -> Iterator[str]:
    if (hours := result.device_hours) is not None and result.paces:
        amount = (
            f"{hours:,.0f}" if hours >= 99.5 else f"{hours:.2g}" if hours >= 0.01 else "under 0.01"
        )
        yield f"{amount} device hours"


def lines_on_data(forecast: Forecast, units_within_limit: float | None = None) -> Iterator[str]:
    """Yield how much data a run needs, and how much there is."""
    unit, size, totals = forecast.unit, forecast.dataset_tokens, forecast.late
    amount = units_within_limit or (None if totals is None else totals.tokens)
    if amount is None:
        return
    if size is None:
        yield f"needs {si(amount)} {unit}s; how many there are is not known yet"
        return
    passes = amount / size if totals is None or totals.epochs is None else totals.epochs
    yield f"needs {si(amount)} {unit}s, and there are {si(size)}: {_passes(passes)}"
    if all(parse_budget(text).kind == "epochs" for text in forecast.until):
        yield (
            f"the budget counts passes of the {si(size)} {unit}s that are here: of other data, time and cost differ; "
            f"give a budget of another kind, e.g. --until {'10Btok' if unit == 'token' else '10000it'}"
        )


def _passes(number: float) -> str:
    if number <= 1:
        return f"{percent(number)} of them"
    return f"{number:,.0f} passes" if number >= 9.95 else f"{number:.2g} passes"


def _assumptions(result: Estimate, forecast: Forecast) -> Iterator[str]:
    assumptions = result.assumptions
    yield (
        f"{percent(assumptions.utilization)} of the peak (--utilization), reading of data and communication included"
    )
    if assumptions.recomputes:
        yield "a third more FLOPs for gradient checkpointing"
    paces = [
        pace
        for stage, pace in zip(forecast.stages, result.paces, strict=True)
        if stage.first_step is not None
    ]
    if min(pace.step_s for pace in paces) < _SHORT_S:
        yield "kernels that keep a device busy: such short steps take longer, for they wait for the launch of theirs"
    busiest = max(paces, key=lambda pace: pace.hiding_bytes)
    yield from _communication(busiest, result)
    uneven = min(pace.balance for pace in paces)
    if uneven < 1:
        yield (
            f"{percent(uneven)} of the devices' time is used: the samples of a step are not a multiple of "
            f"{assumptions.hardware.devices}"
        )


def _communication(pace: StageTime, result: Estimate) -> Iterator[str]:
    hardware = result.assumptions.hardware
    if hardware.devices == 1 or not pace.hiding_bytes:
        return
    link = f"{hardware.device.link}, {hardware.device.link_bytes / _GIGA:,.3g} GB/s"
    if pace.link_s > pace.compute_s:
        yield (
            f"sending, which takes longest: {_step_text(pace.link_s)} per step over {link}, computing "
            f"{_step_text(pace.compute_s)}; a larger global batch sends less often"
        )
    else:
        needs = f"{pace.hiding_bytes / _GIGA:,.3g} GB/s"
        yield f"communication beside computation, for which each device must send {needs} ({link})"
    if hardware.hosts > 1:
        yield "a network between hosts that keeps up with this"
