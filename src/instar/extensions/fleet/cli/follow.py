"""`instar fleet status`, `logs`, `stop`, `down` and `reap`: what is done with a fleet that has started."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import click

from instar.cli import completion
from instar.cli.options import StrictCommand, json_option
from instar.cli.output import print_json, print_table
from instar.config.errors import ConfigError
from instar.extensions.fleet.cli import say_to_terminal
from instar.extensions.fleet.engines import slurm
from instar.extensions.fleet.folder import (
    check_own,
    describe_fleet,
    find_fleet,
    fleet_names,
    leftovers,
    reopen_fleet,
)
from instar.extensions.fleet.lock import launcher_pid, signal_launcher
from instar.extensions.fleet.plan import instances_of
from instar.extensions.fleet.state import CONTROL, FLEETS, STATE_FILE
from instar.extensions.fleet.view.live import (
    HEADERS,
    OPTIONAL,
    RIGHT,
    cell,
    fleet_table,
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
    for text in instances:
        index = text if text.isdecimal() else indices.get(text)
        if index is None:
            raise ConfigError.of(f"{name} has no instance '{text}'", where=str(folder))
        if arrays is None:
            path = folder / CONTROL / f"{int(index)}.stop"
            try:
                put_request(path)
            except OSError as error:
                text = f"cannot ask: {error.strerror}"
                raise ConfigError.of(text, where=str(path.parent)) from None
        else:
            arrays.stop([int(index)], kill=False)


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
