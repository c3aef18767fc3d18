"""What `instar train`, `resume` and `test` do: load, check, forecast or launch. Their options are in `train.py`, which a shell
loads to complete them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import click

from instar.cli.options import schedule_option
from instar.cli.output import print_json
from instar.config.errors import ConfigError
from instar.config.load import Loaded, from_launcher
from instar.distributed.failure import NOTHING_STARTED, stopped_before_start
from instar.distributed.launch import launch_ranks, print_stderr, torchrun_line
from instar.distributed.placement import DEVICES_VARIABLE, RankCount, placement, resolve_ranks
from instar.distributed.rank_log import running_rank
from instar.distributed.signals import StopSignal
from instar.extensions import forecast_notes, values_of_notes
from instar.record.atomic import abandon
from instar.record.format import bytes_text
from instar.record.rundir import find_run
from instar.record.start_folder import begun_in
from instar.record.system import host_bytes
from instar.run.init_weights import starting_weights
from instar.run.load_config import load_run_config
from instar.run.resume import Resume, automatic, named_checkpoint, with_restoring
from instar.run.start.launch import launch_options, preflight_launch, preflight_rest
from instar.run.start.preflight import foreseen_precision, preflight, suggestion
from instar.schedule.memory import in_force
from instar.schedule.render import render
from instar.tasks.task import SampleSetSpec


def train(**options: Any) -> int:
    """Do what `instar train`, `resume` or `test` is asked to; return the exit code."""
    return _train(_TrainOptions(**options))


@dataclass(frozen=True)
class _TrainOptions:
    """The options of `instar train`."""

    cfg: str | None
    nproc: int | None
    devices: list[int] | None
    overrides: tuple[str, ...]
    schedule: str | None
    until: tuple[str, ...]
    max_restarts: int
    resume: str | None
    start: str
    allow: tuple[str, ...]
    only_test: bool
    profile: int
    dry_run: bool
    as_json: bool
    on: str | None = None
    utilization: float | None = None

    def all_overrides(self) -> tuple[str, ...]:
        """Return the texts of `--set`, with the options that are short for one."""
        overrides = self.overrides
        if self.schedule is not None:
            overrides = (*overrides, schedule_option(self.schedule))
        if self.until:
            overrides = (*overrides, f"train.until={json.dumps(list(self.until))}")
        return overrides


def _train(options: _TrainOptions) -> int:
    if options.resume is not None and options.cfg is None:
        run, base, overrides = begun_in(
            find_run(options.resume), options.overrides, lambda text: click.echo(text, err=True)
        )
        options = replace(options, overrides=tuple(overrides))
        if not base.samefile("."):
            click.echo(f"in {base}, where the run was started", err=True)
            with chdir(base):
                return _train(replace(options, resume=str(run.path)))
    _check_forecast_options(options)
    loaded_config, resume, argv = _load(options)
    if options.on is not None:
        return _forecast_on_hardware(options, options.on, loaded_config, argv)
    place = placement(os.environ)
    count = resolve_ranks(loaded_config.config.parallel, place, options.nproc, options.devices)
    if options.dry_run:
        return _forecast(options, loaded_config, resume, argv, count.ranks)
    if place.is_set:
        if options.devices:
            os.environ[DEVICES_VARIABLE] = ",".join(map(str, options.devices))
        return _one_rank(loaded_config, resume, options)
    return _launch(options, loaded_config, resume, argv, count)


def _check_forecast_options(options: _TrainOptions) -> None:
    """Raise ConfigError if options of a forecast on other hardware contradict each other."""
    if options.on is None:
        if options.utilization is not None:
            hint = "e.g. --dry-run --on 8xH100 --utilization 0.5"
            raise ConfigError.of("is a share of the speed of --on", "--utilization", hint)
        return
    if not options.dry_run:
        hint = "add --dry-run; --nproc and --devices say where a run is started"
        raise ConfigError.of("forecasts a run, and starts none", "--on", hint)
    if options.resume is not None:
        hint = "leave --resume out: give the config, and --until"
        raise ConfigError.of("forecasts a new run, from its first step to its end", "--on", hint)
    if options.nproc is not None or options.devices is not None:
        raise ConfigError.of(
            "says how many ranks there are, as --nproc and --devices do", "--on", "leave them out"
        )


def _load(options: _TrainOptions) -> tuple[Loaded, Resume | None, list[str]]:
    """Return the config, the resume if there is one, and the words for each rank."""
    cfg, overrides = options.cfg, options.all_overrides()
    argv = [*([cfg] if cfg else []), *(word for text in overrides for word in ("--set", text))]
    resume = None
    if options.resume is not None:
        run, start = find_run(options.resume), options.start
        resume = Resume(
            run, start, options.allow, fresh=start == "latest", has_user_config=cfg is not None
        )
        named_checkpoint(resume)
        cfg = cfg or str(run.config)
        argv = [*argv, *resume.words(), *["--only-test"] * options.only_test]
    argv += ["--profile", f"{options.profile}it"] if options.profile else []
    try:
        loaded_config = from_launcher() or load_run_config(
            cfg, overrides, resuming=resume is not None
        )
    except ConfigError as error:
        if resume is None or resume.has_user_config:
            raise
        raise with_restoring(resume.run, error) from None
    return loaded_config, resume, argv


def _launch(
    options: _TrainOptions,
    loaded_config: Loaded,
    resume: Resume | None,
    argv: Sequence[str],
    count: RankCount,
) -> int:
    """Check everything before any rank starts; then run in this process, or launch ranks."""
    devices, max_restarts = options.devices, options.max_restarts
    try:
        preflight_launch(
            loaded_config, count.ranks, resume, lambda text: click.echo(text, err=True), devices
        )
        if count.ranks == 1 and devices is None and not max_restarts:
            return _one_rank(loaded_config, resume, options)
        port = loaded_config.config.parallel.master_port
        line = torchrun_line(argv, count.ranks, devices, max_restarts=max_restarts, port=port)
        click.echo(f"same as: {line}", err=True)
        return launch_ranks(launch_options(loaded_config, argv, count, resume, max_restarts))
    except KeyboardInterrupt:
        # a signal arrived before its handler was installed
        resumable = resume is not None or loaded_config.config.resume == "auto"
        raise stopped_before_start(resumable=resumable) from None


def _one_rank(loaded_config: Loaded, resume: Resume | None, options: _TrainOptions) -> int:
    def leave() -> None:
        abandon()
        if placement(os.environ).rank == 0:
            print_stderr(NOTHING_STARTED)

    # before importing torch
    with StopSignal(last=True, before_start=leave) as signal, running_rank() as rank:
        signal.resumable = resume is not None or loaded_config.config.resume == "auto"
        from instar.run.worker import run

        test, profiled = options.only_test, options.profile
        run(loaded_config, rank.log, signal, resume, only_test=test, profiled_steps=profiled)
    return rank.code


def _forecast(
    options: _TrainOptions,
    loaded_config: Loaded,
    resume: Resume | None,
    argv: Sequence[str],
    ranks: int,
) -> int:
    resume = resume or automatic(loaded_config.config)
    assume = partial(click.echo, err=True)
    if resume is None:
        preparation = preflight(loaded_config, ranks, assume=assume)
    else:
        loaded_config, preparation = preflight_rest(loaded_config, ranks, resume, assume)
    weights = starting_weights(loaded_config, preparation.spec) if resume is None else None
    line = torchrun_line(
        argv, ranks, options.devices, port=loaded_config.config.parallel.master_port
    )
    path = options.cfg or (str(resume.run.config) if resume else None)
    notes = forecast_notes(preparation.forecast, loaded_config, path)
    precision = foreseen_precision(preparation)
    if options.as_json:
        more: dict[str, Any] = {"from": str(weights.path)} if weights else {}
        more |= values_of_notes(notes)
        more["precision"] = precision
        print_json({**preparation.forecast.to_dict(), **more, "torchrun": line})
        return 0
    if weights:
        click.echo(f"weights   {weights.about}")
    click.echo(render(preparation.forecast, [note.text for note in notes]))
    click.echo(f"precision   {precision}")
    available = host_bytes() // ranks
    needed_bytes = preparation.forecast.peak_bytes(in_force(loaded_config.config, ranks))
    if needed_bytes > available:
        better = suggestion(loaded_config, preparation.forecast, available)
        where = "" if ranks == 1 else f" for each of {ranks} ranks"
        click.echo(
            f"does not fit in this machine's memory: a rank needs about {bytes_text(needed_bytes)}, and there are "
            f"{bytes_text(available)}{where}{f'; {better}' if better else ''}",
            err=True,
        )
    for warning in preparation.warnings if resume is None else ():  # it has said them
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"same as: {line}")
    if isinstance(preparation.spec, SampleSetSpec):
        click.echo("No micro-batch was tried; the run tries one before it creates anything.")
    click.echo("Nothing was started.")
    return 0


def _forecast_on_hardware(
    options: _TrainOptions, hardware: str, loaded_config: Loaded, argv: Sequence[str]
) -> int:
    """Print a forecast of a run on devices that are not here."""
    # devices that are not here are the business of this forecast alone
    from instar.run.start.other_hardware import forecast_on

    result = forecast_on(
        loaded_config, hardware, options.utilization, lambda text: click.echo(text, err=True)
    )
    forecast, spec = result.checked_run.forecast, result.checked_run.spec
    weights = starting_weights(loaded_config, spec)
    notes = forecast_notes(forecast, loaded_config, options.cfg)
    if options.as_json:
        more: dict[str, Any] = {"from": str(weights.path)} if weights else {}
        more |= values_of_notes(notes) | {"precision": result.precision, "remedy": result.remedy}
        print_json({**forecast.to_dict(), **more, "on": result.estimate.to_dict()})
        return 0
    if weights:
        click.echo(f"weights   {weights.about}")
    click.echo(render(forecast, [note.text for note in notes]))
    click.echo(f"precision   {result.precision}")
    click.echo(result.text())
    for warning in result.checked_run.warnings:
        click.echo(f"warning: {warning}", err=True)
    if result.hardware.hosts == 1:
        port = loaded_config.config.parallel.master_port
        click.echo(f"same as: {torchrun_line(argv, result.hardware.devices, None, port=port)}")
    click.echo("Nothing was started.")
    return 0
