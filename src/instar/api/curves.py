"""Curves of runs in a notebook: as the value of a cell, and below a cell while a run trains."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast, get_args

from instar.config.errors import ConfigError
from instar.logs.plot.chart import Chart
from instar.logs.plot.compose import LOSS_CURVES, ChartRequest, compose
from instar.logs.plot.picture import check_matplotlib, picture
from instar.logs.query.summary import summarize
from instar.logs.read.record import RunRecord, read_record
from instar.record.events import RecordError
from instar.record.rundir import RunDir

Curves = bool | Sequence[str] | None
"""metrics that are drawn while a run trains; True: its losses; None: its losses, in a notebook; False: none"""
REDRAW_S = 1.0
"""shortest time between two drawings, in seconds"""
SHARE = 0.05
"""of the time that drawing may take"""
Format = Literal["png", "svg", "pdf"]


@dataclass(frozen=True)
class Plot:
    """Curves of runs; a notebook shows it as a picture."""

    chart: Chart

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        content = picture(self.chart, "png")
        pixels = int.from_bytes(content[16:20])  # of its width: it is shown at half its resolution
        return content, {"width": pixels // 2}

    def __repr__(self) -> str:
        return f"Plot({self.chart.title!r})"

    def figure(self) -> Any:
        """Return it as a `matplotlib.figure.Figure`, which can be changed.

        Raises:
            ConfigError: matplotlib is not installed; names the extra.
        """
        check_matplotlib()
        from instar.logs.plot.figure import draw_styled

        return draw_styled(self.chart)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it to a file, in the format that its name ends with: .png, .svg or .pdf.

        Raises:
            ConfigError: it is another, or matplotlib is not installed.
            OSError: the file cannot be written.
        """
        file = Path(path)
        kind = file.suffix.removeprefix(".")
        if kind not in get_args(Format):
            raise ConfigError.of(f"{file} ends with none of .png, .svg and .pdf", where="Plot.save")
        file.write_bytes(picture(self.chart, cast(Format, kind)))
        return file


def plot_records(
    records: Sequence[RunRecord],
    metrics: Sequence[str],
    *,
    axis: str = "step",
    smooth: float = 0.0,
    log: bool = False,
) -> Plot:
    """Return curves of runs; see `Run.plot`."""
    panels = tuple((name,) for name in dict.fromkeys(metrics)) or LOSS_CURVES
    return Plot(compose(records, ChartRequest(panels, axis, smooth, log)))


class LiveCurves:
    """The curves of a run below a cell, drawn again while it trains. It is a hook of `train`."""

    def __init__(self, metrics: Sequence[str] = ()) -> None:
        """`metrics`: names of what is drawn; none: the losses."""
        self._metrics = metrics
        self._display: Any = None
        self._next_s = 0.0
        self._has_failed = False

    def on_step_end(self, run: Any) -> None:
        """Draw the curves again if it is time; see `instar.run.step.hooks`."""
        if run.rank == 0:
            self.update(run.folder)

    def update(self, folder: Path, *, finished: bool = False) -> None:
        """Draw the curves of a run again if it is time, or it has finished. Training never fails with it."""
        if self._has_failed or not (finished or time.monotonic() >= self._next_s):
            return
        begin = time.monotonic()
        try:
            self._show(plot_records([read_record(RunDir(folder))], self._metrics))
        except (ConfigError, RecordError) as error:
            if finished:  # before, what is asked for may not have been measured yet
                print(f"no curves: {error}", file=sys.stderr)
        except Exception as error:
            self._has_failed = True
            print(f"no curves: {type(error).__name__}: {error}", file=sys.stderr)
        end = time.monotonic()
        self._next_s = end + max(REDRAW_S, (end - begin) / SHARE)

    def _show(self, plot: Plot) -> None:
        if self._display is None:
            # installed where there is a notebook
            display = import_module("IPython.display").display
            self._display = display(plot, display_id=True)
        else:
            self._display.update(plot)


def live_curves(curves: Curves) -> LiveCurves | None:
    """Return what draws a run's curves while it trains; None: nothing does.

    Raises:
        ConfigError: they are asked for where there is no notebook, or without matplotlib.
    """
    if curves is False or (curves is None and not in_notebook()):
        return None
    if isinstance(curves, str):
        raise ConfigError.of("curves must be a list of metrics", "instar", f'write ["{curves}"]')
    if not in_notebook():
        raise ConfigError.of(
            "curves are drawn in notebooks, and this is none",
            where="instar",
            hint="leave curves out; `instar logs plot` draws them in a terminal or into a file",
        )
    try:
        check_matplotlib()
    except ConfigError as error:
        if curves is not None:
            raise
        print(error, file=sys.stderr)
        return None
    return LiveCurves(curves if isinstance(curves, Sequence) else ())


def draw_end(drawing: LiveCurves | None, log: Path | None) -> None:
    """Draw the curves of a run that has ended, which has this log, if it began.

    Args:
        drawing: what has drawn them; None: nothing.
    """
    if drawing is not None and log is not None:
        drawing.update(log.parents[1], finished=True)


def watch_run(run: RunDir, metrics: Sequence[str]) -> None:
    """Draw the curves of a run below a cell until it ends; an interrupt ends the drawing alone."""
    drawing = live_curves(metrics or True)
    assert drawing is not None
    try:
        while summarize(read_record(run)).state == "running":
            drawing.update(run.path)
            time.sleep(REDRAW_S)
    except KeyboardInterrupt:
        pass
    drawing.update(run.path, finished=True)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")
