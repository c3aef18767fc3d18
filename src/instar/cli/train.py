"""The commands `instar train`, `resume`, `test`, `sample` and `control`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from instar.api.training import launch_options, preflight_launch
from instar.checkpoint.manifest import CheckpointError, read_manifest
from instar.cli import completion
from instar.cli.options import (
    allow_option,
    from_option,
    json_option,
    profile_option,
    rank_options,
    schedule_option,
    set_option,
    trust_option,
)
from instar.cli.output import print_json
from instar.config.errors import ConfigError, InstarError
from instar.config.files import read_regular
from instar.config.load import Loaded, from_launcher
from instar.distributed.failure import NOTHING_STARTED, stopped_before_start
from instar.distributed.launch import launch_ranks, print_stderr, torchrun_line
from instar.distributed.placement import DEVICES_VARIABLE, RankCount, placement, resolve_ranks
from instar.distributed.rank_log import running_rank
from instar.distributed.signals import StopSignal
from instar.extensions import forecast_notes, values_of_notes
from instar.logs.query.state import run_status
from instar.record.atomic import abandon
from instar.record.control import REQUESTED, send_request
from instar.record.events import Saved
from instar.record.format import bytes_text
from instar.record.lock import lock_owner
from instar.record.rundir import RunDir, find_run
from instar.record.start_folder import begun_in
from instar.record.system import host_bytes
from instar.run.load_config import load_run_config
from instar.run.resume import Resume, automatic, named_checkpoint, with_restoring
from instar.run.start.preflight import foreseen_precision, preflight, suggestion
from instar.schedule.memory import in_force
from instar.schedule.render import render
from instar.tasks.task import SampleSetSpec


@click.command(
    epilog="Without CFG, the run uses the default config and --set. Start with: instar init gpt"
)
@click.argument("cfg", required=False, type=click.Path())
@rank_options
@set_option
@click.option("--schedule", metavar="FILE", help="Schedule of operations; a YAML or JSON file.")
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
    help="Maximum number of restarts of all ranks from the last checkpoint after a failure.",
)
@click.option(
    "--resume",
    metavar="RUN",
    shell_complete=completion.run_names,
    help="Resume this run; CFG is its run.yaml.",
)
@click.option("--from", "start", default="latest", help="With --resume: latest, best, or a step.")
@trust_option
@allow_option("With --resume: resume although this has changed.")
@click.option("--only-test", is_flag=True, hidden=True)
@profile_option
@click.option("--dry-run", is_flag=True, help="Print a forecast of the run without starting it.")
@click.option(
    "--json", "as_json", is_flag=True, help="One line of JSON; with --dry-run, the forecast."
)
def train(**options: Any) -> int:
    """Train the model that CFG describes."""
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
    loaded_config, resume, argv = _load(options)
    place = placement(os.environ)
    count = resolve_ranks(loaded_config.config.parallel, place, options.nproc, options.devices)
    if options.dry_run:
        return _forecast(options, loaded_config, resume, argv, count.ranks)
    if place.is_set:
        if options.devices:
            os.environ[DEVICES_VARIABLE] = ",".join(map(str, options.devices))
        return _one_rank(loaded_config, resume, options)
    return _launch(options, loaded_config, resume, argv, count)


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
    from instar.run.init_weights import starting_weights

    new = automatic(loaded_config.config) is None
    preparation = preflight(
        loaded_config, ranks, new=new, assume=lambda text: click.echo(text, err=True)
    )
    weights = starting_weights(loaded_config, preparation.spec) if new else None
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
    for warning in preparation.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"same as: {line}")
    if isinstance(preparation.spec, SampleSetSpec):
        click.echo("No micro-batch was tried; the run tries one before it creates anything.")
    click.echo("Nothing was started.")
    return 0


@click.command()
@click.argument("run", shell_complete=completion.run_names)
@rank_options
@from_option("latest", "latest, best, best-<metric>, or a step.")
@set_option
@click.option("--until", multiple=True, metavar="BUDGET", help="A new end, e.g. 4000it.")
@profile_option
@trust_option
@allow_option("Resume although this has changed.")
@click.pass_context
def resume(context: click.Context, /, run: str, **options: Any) -> int:
    """Resume RUN (its folder, id, name, or `latest`) from its latest whole checkpoint.

    The number of ranks may differ: the remaining samples are the same. Changed settings are
    recorded and stay in force from then on.
    """
    code: int = context.invoke(train, resume=run, **options)
    return code


@click.command()
@click.argument("run", shell_complete=completion.run_names)
@rank_options
@from_option("best", "best, best-<metric>, latest, or a step.")
@set_option
@trust_option
@json_option
@click.pass_context
def test(context: click.Context, /, run: str, as_json: bool, **options: Any) -> int:
    """Test a checkpoint of RUN (its folder, id, name, or `latest`) on the whole test split.

    Writes `test/result.json` in the run's folder, and `test/predictions.parquet` if the task
    makes predictions, without training. The result does not depend on the number of ranks.
    """
    code: int = context.invoke(train, resume=run, only_test=True, **options)
    if as_json and code == 0:
        print_json(json.loads(read_regular(find_run(run).path / "test" / "result.json")))
    return code


class NotRunning(InstarError):  # noqa: N818
    """No running process can handle the request."""

    exit_code = 3


@click.command()
@click.argument("run", shell_complete=completion.run_names)
@click.argument("command", type=click.Choice(["save", "stop", "status"]))
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Maximum wait for the request to be carried out.",
)
@click.option("--json", "as_json", is_flag=True, help="With status: as JSON.")
def control(run: str, command: str, timeout: float, as_json: bool) -> int:
    """Make RUN (its folder, id, name, or `latest`) save or stop, or print its status.

    `stop` saves and ends the run as Ctrl-C does; `instar resume` continues it. Requests are files
    in the run's folder, so everyone with write access there can make them.
    """
    run_dir = find_run(run)
    if command == "status":
        _print_status(_status(run_dir), as_json)
        return 0
    if lock_owner(run_dir.lock) is None:
        raise NotRunning(
            f"{run_dir.path} is not running; resume it with: instar resume {run_dir.shell_word}"
        )
    latest = run_dir.checkpoints / "latest"
    before = _identity(latest)
    request = send_request(run_dir.control, "save" if command == "save" else "stop")
    deadline = time.monotonic() + timeout
    while not request.is_answered():
        # a run that cannot delete another user's request still handles it
        if command == "save" and _identity(latest) != before and _saved_on_request(run_dir):
            request.withdraw()
            break
        if lock_owner(run_dir.lock) is None:
            request.withdraw()
            if command == "stop" and _identity(latest) != before:
                break
            raise NotRunning(
                f"{run_dir.path} ended before it handled the request; see {run_dir.logs}"
            )
        if time.monotonic() > deadline:
            request.withdraw()
            raise NotRunning(
                f"{run_dir.path} did not handle the request within {timeout:g} s; the request is "
                "withdrawn; set a longer --timeout"
            )
        time.sleep(0.05)
    if _identity(latest) == before:
        raise NotRunning(f"{run_dir.path} could not save; see {run_dir.log(0)}")
    click.echo(
        f"{'saved' if command == 'save' else 'stopped'}: {read_regular(latest).decode().strip()}"
    )
    return 0


def _identity(path: Path) -> tuple[int, int]:
    """Return a value that changes whenever the file is replaced."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def _saved_on_request(run: RunDir) -> bool:
    """Return whether the latest checkpoint was saved on request."""
    path = run.latest_checkpoint()
    try:
        return path is not None and REQUESTED in read_manifest(path).reason
    except (OSError, ValueError, CheckpointError):
        return False


def _status(run: RunDir) -> dict[str, Any]:
    """Return the status of a run, from its record, its lock and its logs."""
    from instar.logs.query.summary import summarize
    from instar.logs.read.record import read_record

    if not run.events.exists():  # it is preparing its data, or stopped before training
        state = run_status(run, (), 0.0)
        states = {"state": state.state, "reason": state.reason}
        return states | {"process": state.process, "run": str(run.path)}
    record = read_record(run)
    summary = summarize(record)
    status: dict[str, Any] = {
        key: getattr(summary, key) for key in ("state", "reason", "process", "step", "tokens")
    }
    status |= {"run": summary.path, "seen": summary.seen, "go_on": summary.go_on}
    for key, metric in (
        ("loss", "loss"),
        ("tokens_per_s", "tokens_per_s"),
        ("val_loss", "val/loss"),
    ):
        if metric in summary.last:
            status[key] = summary.last[metric].value
    if save_event := record.of(Saved):
        status["saved"] = save_event[-1].event.path
    return status


def _print_status(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    reason = f" ({status['reason']})" if status["reason"] else ""
    parts = [f"{status['run']}: {status['state']}{reason}"]
    if status["process"]:
        parts.append(f"process {status['process']}")
    if "step" in status:
        parts.append(f"step {status['step']:,}")
    if status.get("seen"):
        parts.append(f"{max(0.0, time.time() - status['seen']):.0f} s ago")
    for key, name in (("loss", "loss"), ("val_loss", "val")):
        if key in status:
            parts.append(f"{name} {status[key]:.4f}")
    if "saved" in status:
        parts.append(f"saved {status['saved']}")
    click.echo("  ".join(parts))
    if status.get("go_on"):
        click.echo(f"resume with: {status['go_on']}")
