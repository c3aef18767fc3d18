"""`instar train`: one run, on one process or many."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from instar.cli.options import allow_option, rank_options, set_option

if TYPE_CHECKING:
    from instar.config.load import Loaded
    from instar.distributed.ranklog import RankLog
    from instar.run.resume import Resume


@click.command(
    epilog="CFG may be left out: the run is then the default config under --set. "
    "Start with: instar init gpt"
)
@click.argument("cfg", required=False, type=click.Path())
@rank_options
@set_option
@click.option(
    "--schedule", metavar="FILE", help="Operations that change the run while it runs; YAML or JSON."
)
@click.option(
    "--until",
    multiple=True,
    metavar="BUDGET",
    help="When to stop, instead of train.until: 2000it, 50Mtok, 3ep, 10min, loss<3.0.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Start all ranks again, from the last checkpoint, so often when one fails.",
)
@click.option("--resume", metavar="RUN", help="Go on with this run; CFG is its run.yaml.")
@click.option("--from", "start", default="latest", help="With --resume: latest, best, or a step.")
@allow_option("With --resume: go on although this is another than it was.")
@click.option("--only-test", is_flag=True, hidden=True)
@click.option("--dry-run", is_flag=True, help="Say what the run would be, and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: as JSON.")
def train(
    cfg: str | None,
    nproc: int | None,
    devices: str | None,
    overrides: tuple[str, ...],
    schedule: str | None,
    until: tuple[str, ...],
    max_restarts: int,
    resume: str | None,
    start: str,
    allow: tuple[str, ...],
    only_test: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Train the model that CFG describes."""
    from instar.cli.schedule import schedule_option
    from instar.distributed.placement import DEVICES_VARIABLE, placement, share_cores
    from instar.distributed.start import start_of
    from instar.schedule.checks import load_checked

    share_cores(os.environ)
    if schedule is not None:
        overrides = (*overrides, schedule_option(schedule))
    if until:
        overrides = (*overrides, f"train.until={json.dumps(list(until))}")
    argv = [*([cfg] if cfg else []), *(word for text in overrides for word in ("--set", text))]
    indices = _indices(devices)
    going_on = None
    if resume is not None:
        from instar.record.rundir import find_run
        from instar.run.resume import Resume, named_checkpoint

        run = find_run(resume)
        going_on = Resume(run, start, allow)
        named_checkpoint(going_on)
        cfg = cfg or str(run.config)
        argv = [*argv, "--resume", str(run.path), "--from", start]
        argv += [word for one in allow for word in ("--allow", one)]
        argv += ["--only-test"] * only_test
    loaded = load_checked(cfg, overrides)
    place = placement(os.environ)
    begin = start_of(loaded.config.parallel, place, nproc, indices)
    if dry_run:
        return _forecast(loaded, argv, begin.ranks, indices, as_json)
    if place.told:
        if indices:
            os.environ[DEVICES_VARIABLE] = ",".join(map(str, indices))
        return _one_rank(loaded, going_on, only_test)
    return _from_the_shell(loaded, going_on, argv, begin.ranks, indices, max_restarts, only_test)


def _from_the_shell(
    loaded: Loaded,
    resume: Resume | None,
    argv: Sequence[str],
    ranks: int,
    devices: Sequence[int] | None,
    max_restarts: int,
    only_test: bool,
) -> int:
    """Find all mistakes before any rank is started; then run here, or launch ranks."""
    from instar.api import make_ready
    from instar.distributed.failure import NOTHING_STARTED, Interrupted

    try:
        make_ready(loaded, ranks, resume, lambda text: click.echo(text, err=True))
        if ranks == 1 and devices is None and not max_restarts:
            return _one_rank(loaded, resume, only_test)
        from instar.distributed.launch import launch, torchrun_line

        parallel = loaded.config.parallel
        line = torchrun_line(
            argv, ranks, devices, max_restarts=max_restarts, port=parallel.master_port
        )
        click.echo(f"same as: {line}", err=True)
        return launch(
            argv,
            ranks,
            devices if devices is not None else parallel.devices or None,
            device=loaded.config.device,
            host=parallel.master_address,
            port=parallel.master_port,
            max_restarts=max_restarts,
        )
    except KeyboardInterrupt:
        # a signal that came before anybody was there to hear it
        raise Interrupted(NOTHING_STARTED) from None


def _one_rank(loaded: Loaded, resume: Resume | None, only_test: bool = False) -> int:
    from instar.distributed.ranklog import run_rank
    from instar.distributed.signals import StopSignal

    # before torch is imported: a stop asked for meanwhile is heard at the first safe point
    with StopSignal() as signal:

        def work(log: RankLog) -> None:
            from instar.run.rank import run

            run(loaded, log, signal, resume, only_test=only_test)

        return run_rank(work)


def _forecast(
    loaded: Loaded,
    argv: Sequence[str],
    ranks: int,
    devices: Sequence[int] | None,
    as_json: bool,
) -> int:
    from instar.distributed.launch import torchrun_line
    from instar.run.preflight import preflight, prepare_data
    from instar.run.resume import automatic
    from instar.schedule.render import render

    prepare_data(loaded, ranks, lambda text: click.echo(text, err=True))
    prepared = preflight(loaded, ranks, new=automatic(loaded.config) is None)
    line = torchrun_line(argv, ranks, devices, port=loaded.config.parallel.master_port)
    if as_json:
        click.echo(json.dumps({**prepared.forecast.to_dict(), "torchrun": line}, indent=2))
        return 0
    click.echo(render(prepared.forecast))
    click.echo(f"same as: {line}")
    click.echo("Nothing was started.")
    return 0


def _indices(devices: str | None) -> list[int] | None:
    if devices is None:
        return None
    parts = [part.strip() for part in devices.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) != len(parts):
        raise click.BadParameter(
            f"{devices!r}; write each GPU's index once, e.g. 0,1", param_hint="--devices"
        )
    return [int(part) for part in parts]
