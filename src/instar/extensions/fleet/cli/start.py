"""`instar fleet plan`, `up`, `resume` and `doctor`: what starts a fleet, or would."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection
from contextlib import chdir
from pathlib import Path

import click

from instar.cli.options import StrictCommand, json_option, set_option, trust_option
from instar.cli.output import print_json, print_table
from instar.config.errors import ConfigError
from instar.extensions.fleet.checks import missing_commands
from instar.extensions.fleet.cli import (
    detach_option,
    engine_option,
    gpus_option,
    only_option,
    say_to_terminal,
)
from instar.extensions.fleet.cli.follow import complete_fleets
from instar.extensions.fleet.doctor import diagnose_fleet
from instar.extensions.fleet.engines.start import check_engine, run_fleet, scheduler_request
from instar.extensions.fleet.engines.work import plan_and_gpus
from instar.extensions.fleet.folder import (
    FleetFolder,
    as_test,
    check_own_file,
    create_fleet_folder,
    find_fleet,
    reopen_fleet,
)
from instar.extensions.fleet.load import load_fleet
from instar.extensions.fleet.placement import numbers_in
from instar.extensions.fleet.view.live import cell, plan_row, shown_below, title
from instar.extensions.fleet.view.reader import FleetReader


@click.command("plan", cls=StrictCommand)
@click.argument("file")
@set_option
@gpus_option
@engine_option
@json_option
def plan_fleet(
    file: str, overrides: tuple[str, ...], gpus: str | None, engine: str | None, as_json: bool
) -> None:
    """Check FILE and print which instance would get which GPUs and ports."""
    loaded_config = load_fleet(file, _with_engine(overrides, engine))
    fleet_plan, _ = plan_and_gpus(loaded_config, gpus, on_this_machine=False)
    for problem in missing_commands(loaded_config):
        click.echo(f"{problem.where}: {problem.message}; `up` needs it: {problem.hint}", err=True)
    rows = [plan_row(fleet_plan, instance) for instance in fleet_plan.instances]
    requests = scheduler_request(fleet_plan, gpus)
    if as_json:
        print_json({"parallel": fleet_plan.parallel, **requests, "instances": rows})
        return
    headers = list(rows[0])
    cells = [[cell(row[header]) for header in headers] for row in rows]
    right = [header for header in headers if header not in ("run_name", "output_dir")]
    print_table([header.upper() for header in headers], cells, right=[h.upper() for h in right])
    for name, request in requests.items():
        click.echo(f"{name}: {request if isinstance(request, str) else json.dumps(request)}")
    if fleet_plan.spec.search is not None:
        click.echo(str(fleet_plan.spec.search), err=True)
    waiting = len(fleet_plan.instances) - fleet_plan.parallel
    where = "" if fleet_plan.spec.engine == "local" else f" by {fleet_plan.spec.engine}"
    click.echo(
        f"{len(fleet_plan.instances)} instances, {fleet_plan.parallel} at a time{where}"
        + (f"; {waiting} wait for a free place" if waiting > 0 else ""),
        err=True,
    )


@click.command("up", cls=StrictCommand)
@click.argument("file")
@set_option
@gpus_option
@engine_option
@only_option
@click.option(
    "--max-steps",
    type=click.IntRange(min=1),
    help="Quick test: runs end after so many steps; commands read ${max_steps}. Names and folders "
    "are those of a test.",
)
@click.option("--wait", is_flag=True, help="Wait for GPUs that other fleets hold.")
@detach_option
@trust_option
def up(
    file: str,
    overrides: tuple[str, ...],
    gpus: str | None,
    engine: str | None,
    only: str | None,
    max_steps: int | None,
    wait: bool,
    detach: bool,
) -> int:
    """Start FILE's instances and supervise them until all have ended.

    Exit code 0 if every instance succeeded or was pruned, 4 if one failed, 75 if stopped: `instar
    fleet resume` then runs what is left. Ctrl-C stops jobs, then services; a second one kills them.
    """
    check_own_file(Path(file))
    loaded_config = load_fleet(file, _with_engine(overrides, engine))
    if max_steps is not None:
        loaded_config = as_test(loaded_config, max_steps)
    fleet_plan, _ = plan_and_gpus(loaded_config, gpus)
    indices = _instances_in(only, len(fleet_plan.instances))
    _check_detach(fleet_plan.spec.engine, detach)
    check_engine(fleet_plan.spec, gpus, say_to_terminal)
    return _run(create_fleet_folder(loaded_config, gpus), indices, wait, detach)


@click.command("resume", cls=StrictCommand)
@click.argument("name", shell_complete=complete_fleets)
@only_option
@click.option("--wait", is_flag=True, help="Wait for GPUs that other fleets hold.")
@detach_option
@trust_option
def resume_fleet(name: str, only: str | None, wait: bool, detach: bool) -> int:
    """Run the instances of fleet NAME that have not succeeded; finished jobs are not run again.

    Pruned trials of a search are run if --only names them, and not pruned again.
    """
    fleet_folder = reopen_fleet(find_fleet(name))
    with chdir(fleet_folder.cwd):
        fleet_plan, _ = plan_and_gpus(fleet_folder.loaded_config, fleet_folder.gpus)
        _check_detach(fleet_plan.spec.engine, detach)
        return _run(fleet_folder, _instances_in(only, len(fleet_plan.instances)), wait, detach)


@click.command("host", cls=StrictCommand, hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("index", type=int)
@trust_option
def host(folder: Path, index: int) -> int:
    """Run instance INDEX of the fleet in FOLDER on this host, for the engine that placed it here."""
    from instar.extensions.fleet.engines import slurm
    from instar.extensions.fleet.engines.work import run_on_host

    code, stopped_by = run_on_host(folder, index, say_to_terminal)
    slurm.requeue(stopped_by, say_to_terminal)
    return code


@click.command("doctor", cls=StrictCommand)
@click.argument("file")
@set_option
@gpus_option
@json_option
def check_host(file: str, overrides: tuple[str, ...], gpus: str | None, as_json: bool) -> int:
    """Check what a long run of FILE needs: GPUs, disk, ports, keys of trackers, limits."""
    loaded_config = load_fleet(file, overrides)
    fleet_plan, found_gpus = plan_and_gpus(loaded_config, gpus, on_this_machine=False)
    findings = diagnose_fleet(fleet_plan, found_gpus, [*missing_commands(loaded_config)])
    if as_json:
        print_json([vars(finding) for finding in findings])
    else:
        rows = [
            ["ok" if finding.ok else "problem", finding.what, finding.text] for finding in findings
        ]
        print_table(["", "CHECK", "RESULT"], rows)
    return 0 if all(finding.ok for finding in findings) else 4


def _with_engine(overrides: tuple[str, ...], engine: str | None) -> tuple[str, ...]:
    return overrides if engine is None else (*overrides, f"engine={engine}")


def _check_detach(engine: str, detach: bool) -> None:
    if detach and engine != "slurm":
        hint = "its instances end with this process; nohup or tmux keep it"
        raise ConfigError.of(f"the engine {engine} cannot go on alone", "--detach", hint)


def _run(fleet_folder: FleetFolder, only: Collection[int], wait: bool, detach: bool) -> int:
    with shown_below(fleet_folder.path, sys.stderr) as say:
        code = run_fleet(fleet_folder, only, say, wait=wait, detach=detach)
    _summarize(fleet_folder, code)
    return code


def _summarize(fleet_folder: FleetFolder, code: int) -> None:
    view = FleetReader(fleet_folder.path).read(runs=False)
    say_to_terminal(title(view))
    for text in view.best_lines:
        say_to_terminal(text)
    if code:
        name = fleet_folder.path if fleet_folder.path.is_absolute() else fleet_folder.path.name
        say_to_terminal(f"next: instar fleet resume {shlex.quote(str(name))}")


def _instances_in(only: str | None, count: int) -> tuple[int, ...]:
    if only is None:
        return ()

    numbers = numbers_in(only if "," in only or "-" in only else f"{only}-{only}", "--only")
    if outside := [number for number in numbers if number >= count]:
        raise ConfigError.of(f"there is no instance {outside[0]}", "--only", f"0 to {count - 1}")
    return tuple(numbers)
