"""The commands of `instar fleet`: what starts a fleet, or would, and what is done with one that has started."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections.abc import Collection
from contextlib import chdir, suppress
from pathlib import Path

import click

from instar.cli import completion
from instar.cli.options import StrictCommand, json_option, set_option, trust_option
from instar.cli.output import print_json, print_table
from instar.config.errors import ConfigError
from instar.extensions.fleet.checks import missing_commands
from instar.extensions.fleet.cli import (
    detach_option,
    engine_option,
    gpus_option,
    matrix_option,
    only_option,
    say_to_terminal,
)
from instar.extensions.fleet.doctor import diagnose_fleet
from instar.extensions.fleet.engines import slurm
from instar.extensions.fleet.engines.start import check_engine, run_fleet, scheduler_request
from instar.extensions.fleet.engines.work import name_gpus, plan_and_gpus, run_on_host
from instar.extensions.fleet.folder import (
    FleetFolder,
    as_test,
    check_own,
    check_own_file,
    create_fleet_folder,
    describe_fleet,
    find_fleet,
    fleet_names,
    launcher_pid,
    leftovers,
    reopen_fleet,
    signal_launcher,
)
from instar.extensions.fleet.matrix import load_fleet_or_run
from instar.extensions.fleet.placement import numbers_in
from instar.extensions.fleet.plan import instances_of, load_fleet
from instar.extensions.fleet.state import CONTROL, FLEETS, STATE_FILE
from instar.extensions.fleet.view.best_config import write_best_configs
from instar.extensions.fleet.view.live import (
    HEADERS,
    OPTIONAL,
    RIGHT,
    cell,
    fleet_table,
    plan_row,
    shown_below,
    title,
    watch_fleet,
)
from instar.extensions.fleet.view.reader import FleetReader, ProcessLog, process_logs, tail_logs
from instar.extensions.fleet.view.rows import FleetView, fleet_json, fleet_overview
from instar.record.console import LiveScreen, open_screen
from instar.record.control import put_request

_DOWN_S = 600.0
_AGAIN_S = 0.2
"""between the two requests of --kill"""


def complete_fleets(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> completion.Items:
    """Complete the name of a fleet."""
    return completion.matching_items(fleet_names(), incomplete)


@click.command("plan", cls=StrictCommand)
@click.argument("file")
@matrix_option
@set_option
@gpus_option
@engine_option
@json_option
def plan_fleet(
    file: str,
    dimensions: tuple[str, ...],
    overrides: tuple[str, ...],
    gpus: str | None,
    engine: str | None,
    as_json: bool,
) -> None:
    """Check FILE and print which instance would get which GPUs and ports."""
    loaded_config = load_fleet_or_run(file, dimensions, _with_engine(overrides, engine))
    loaded_config = name_gpus(loaded_config, gpus, None if as_json else say_to_terminal)
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
@matrix_option
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
    dimensions: tuple[str, ...],
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
    loaded_config = load_fleet_or_run(file, dimensions, _with_engine(overrides, engine))
    if max_steps is not None:
        loaded_config = as_test(loaded_config, max_steps)
    loaded_config = name_gpus(loaded_config, gpus, say_to_terminal)
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
    loaded_config = name_gpus(loaded_config, gpus, None if as_json else say_to_terminal)
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


@click.command("status", cls=StrictCommand)
@click.argument("name", required=False, shell_complete=complete_fleets)
@click.option("--watch", is_flag=True, help="Keep it up to date until the fleet has ended.")
@json_option
def status(name: str | None, watch: bool, as_json: bool) -> int:
    """Print the state of fleet NAME, or list all fleets; also after its launcher has died."""
    if name is None:
        folders = sorted(path.parent for path in FLEETS.glob(f"*/{STATE_FILE}"))
        rows = [fleet_overview(FleetReader(folder).read(runs=False)) for folder in folders]
        if as_json:
            print_json(rows)
        else:
            cells = [[cell(value) for value in row.values()] for row in rows]
            print_table(["FLEET", "STATE", "INSTANCES", "SUCCEEDED", "FAILED", "LAUNCHER"], cells)
        return 0
    reader = FleetReader(find_fleet(name))
    if watch and not as_json:
        return _watch(reader)
    view = reader.read()
    if as_json:
        print_json(fleet_json(view, reader.status, time.time()))
    else:
        _print_view(view)
    return 0


@click.command("logs", cls=StrictCommand)
@click.argument("name", shell_complete=complete_fleets)
@click.argument("instance", required=False)
@click.argument("process", required=False)
@click.option(
    "-f", "--follow", is_flag=True, help="Print new lines until the fleet has ended, or Ctrl-C."
)
@click.option("-n", "--lines", default=20, show_default=True, help="Last lines of each log.")
@json_option
def logs(
    name: str, instance: str | None, process: str | None, follow: bool, lines: int, as_json: bool
) -> None:
    """Print the logs of fleet NAME: of all instances, or of INSTANCE (index or name) and PROCESS."""
    if as_json and follow:
        raise ConfigError.of("--json cannot be combined with -f", hint="leave one of them out")
    folder = find_fleet(name)
    indices = _indices(folder)

    def is_wanted(log: ProcessLog) -> bool:
        of_instance = instance in (None, log.instance, indices.get(log.instance))
        return of_instance and process in (None, log.process)

    matching = [*filter(is_wanted, process_logs(folder))]
    if not matching:
        root = folder / "logs"
        raise ConfigError.of(
            "no log matches", where=str(root), hint=f"{name} has {_folder_names(root)}"
        )
    if as_json:
        rows = tail_logs(folder, is_wanted, lines, follow=False)
        names = ("instance", "process", "line")
        print_json(
            [dict(zip(names, (log.instance, log.process, line), strict=True)) for log, line in rows]
        )
        return
    is_only = len(matching) == 1 and not (follow and process is None)
    for log, line in tail_logs(folder, is_wanted, lines, follow=follow):
        mark = "" if is_only else f"{log.instance}/{log.process} | "
        click.echo(f"{mark}{line}")


@click.command("stop", cls=StrictCommand)
@click.argument("name", shell_complete=complete_fleets)
@click.argument("instances", nargs=-1, required=True)
def stop(name: str, instances: tuple[str, ...]) -> None:
    """Stop INSTANCES (indices or names) of a running fleet; the others go on."""
    folder = find_fleet(name)
    arrays = slurm.find_job_arrays(folder)
    if arrays is None:
        _running_launcher(folder)
    else:
        check_own(folder)
    indices = _indices(folder)
    chosen = [int(text if text.isdecimal() else indices.get(text, -1)) for text in instances]
    for text, index in zip(instances, chosen, strict=True):
        if index < 0 or (indices and index >= len(indices)):
            raise ConfigError.of(f"{name} has no instance '{text}'", where=str(folder))
    for index in chosen:
        if arrays is None:
            path = folder / CONTROL / f"{index}.stop"
            try:
                put_request(path)
            except OSError as error:
                message = f"cannot ask: {error.strerror}"
                raise ConfigError.of(message, where=str(path.parent)) from None
        else:
            arrays.stop([index], kill=False)


@click.command("down", cls=StrictCommand)
@click.argument("name", shell_complete=complete_fleets)
@click.option("--kill", is_flag=True, help="Kill at once instead of asking.")
def down(name: str, kill: bool) -> int:
    """Stop a running fleet: jobs, then services; return when everything has ended."""
    folder = find_fleet(name)
    if slurm.find_job_arrays(folder) is not None:
        slurm.cancel(reopen_fleet(folder), say_to_terminal, kill=kill)
        return 0
    pid = _running_launcher(folder)
    signal_launcher(folder, signal.SIGINT)
    if kill:
        time.sleep(_AGAIN_S)
        try:
            signal_launcher(folder, signal.SIGINT)
        except ConfigError:
            if launcher_pid(folder) == pid:
                raise
    deadline = time.monotonic() + _DOWN_S
    while launcher_pid(folder) == pid and time.monotonic() < deadline:
        time.sleep(0.05)
    return 0 if launcher_pid(folder) != pid else 4


@click.command("reap", cls=StrictCommand)
@click.option("--dry-run", is_flag=True, help="Only list them.")
def reap(dry_run: bool) -> int:
    """Kill processes of fleets whose launcher is gone (yours; see --dry-run)."""
    orphans = leftovers()
    for process in orphans:
        click.echo(f"{process.pid}  {process.fleet}  {process.instance}  {process.command}")
        if not dry_run:
            process.kill()
    if not orphans:
        click.echo("nothing is left behind", err=True)
    return 0


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
    for path in write_best_configs(fleet_folder, view.best):
        say_to_terminal(f"{path}\nnext: {shlex.join(['instar', 'train', str(path)])}")
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


def _running_launcher(folder: Path) -> int:
    pid = launcher_pid(folder)
    if pid is None:
        raise ConfigError.of(f"fleet {folder.name} is not running", where=str(folder))
    return pid


def _indices(folder: Path) -> dict[str, str]:
    """Return the index of each instance by its name."""
    with suppress(ConfigError, ValueError):
        return {
            instance.run_name: str(instance.index)
            for instance in instances_of(describe_fleet(folder)[0])
        }
    return {}


def _folder_names(root: Path) -> str:
    return ", ".join(sorted({path.name for path in root.glob("*")})) or "no logs yet"


def _print_view(view: FleetView) -> None:
    click.echo(title(view))
    rows = list(fleet_table(view, time.time()))
    print_table(HEADERS, rows, right=RIGHT, optional=OPTIONAL)
    for mean in view.means:
        click.echo(mean.text)
    for text in view.best_lines:
        click.echo(text)


def _watch(reader: FleetReader) -> int:
    screen = open_screen(sys.stdout)
    try:
        last = watch_fleet(reader, screen)
    finally:
        screen.close()
    if isinstance(screen, LiveScreen):
        _print_view(last)
    return 0
