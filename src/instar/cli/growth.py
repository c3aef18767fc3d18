"""`instar grow`: grow a checkpoint or a folder of transformers offline; `instar schedule`: growth in a run. Imports
little: a shell that completes a checkpoint loads this."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from instar.checkpoint.store import load_checkpoint
from instar.cli import completion
from instar.cli.checkpoint import checkpoint_at
from instar.cli.options import (
    MOST_RANKS,
    CommandGroup,
    NewFolder,
    byte_size,
    json_option,
    refuse_deleted,
    schedule_option,
    set_option,
    trust_option,
)
from instar.cli.output import print_json
from instar.extensions import forecast_notes, values_of_notes
from instar.models.hf import is_pretrained
from instar.record.system import keep_freed_memory

Command = Callable[..., Any]


@click.command(
    epilog="Operations and their options: docs/growth.md, e.g. --op widen_mlp=1024 "
    "--op 'insert_layers=2 where=even' --op 'set_lora_rank={target: attn, rank: 8}'"
)
@click.argument("where", metavar="CHECKPOINT|RUN|FOLDER", shell_complete=completion.checkpoints)
@click.argument("out", type=NewFolder())
@click.option(
    "--op",
    "texts",
    multiple=True,
    required=True,
    metavar="'NAME=VALUE [OPTION=VALUE …]'",
    help="Operation; may be given several times, carried out in this order.",
)
@click.option(
    "--check/--no-proof",
    default=None,
    help="Compare outputs, and write nothing if a label fails. Default: for small models of transformers.",
)
@click.option(
    "--max-shard-size",
    callback=byte_size,
    metavar="SIZE",
    default="5GB",
    show_default=True,
    help="Largest file of weights of a FOLDER.",
)
@trust_option
@json_option
def grow(
    where: str,
    out: Path,
    texts: tuple[str, ...],
    check: bool | None,
    max_shard_size: int,
    as_json: bool,
) -> None:
    """Create the run OUT by growing a checkpoint (of a RUN, the latest), or the folder OUT by growing FOLDER.

    The run's one checkpoint has the same weights, optimizer state and history as if the operations had been
    carried out during training: `instar resume OUT` continues from there. FOLDER is one that transformers'
    save_pretrained wrote, and OUT another. Memory holds one tensor of the model at a time (with --check, both
    models).
    """
    from instar.schedule.typed import typed_operation  # brings the schema

    operations = [typed_operation(text) for text in texts]

    keep_freed_memory(all_of_it=True)
    if is_pretrained(Path(where)):
        from instar.growth.folders import grow_folder
        from instar.models.hf.pretrained_folder import open_folder

        result = grow_folder(
            open_folder(Path(where)), out, operations, check=check, max_shard_bytes=max_shard_size
        )
        advice = f"AutoModelForCausalLM.from_pretrained({str(out)!r})"
    else:
        path = checkpoint_at(where)

        from instar.run.offline.grow import grow_checkpoint

        result = grow_checkpoint(load_checkpoint(path), out, operations, check=bool(check))
        advice = f"instar resume {shlex.quote(str(out))}"
    if as_json:
        print_json(result.to_dict())
        return
    for line in result.lines():
        click.echo(line, err=True)
    click.echo(str(out))
    click.echo(f"next: {advice}", err=True)


@click.group(cls=CommandGroup)
def schedule() -> None:
    """Check schedules of operations, predict what growth saves, and search for a schedule that does."""


@schedule.command()
@click.argument("file")
@click.option("--config", "cfg", metavar="CFG", help="The run's config; default: the defaults.")
@click.option("--nproc", type=click.IntRange(1, MOST_RANKS), default=1, help="Ranks of the run.")
@click.option(
    "--pilot",
    "pilot_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Predict the saving from this pilot; default: CFG's, if there is one.",
)
@set_option
@trust_option
@json_option
def check(
    file: str,
    cfg: str | None,
    nproc: int,
    pilot_file: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print a forecast of the run, stage by stage, with the schedule in FILE.

    Every mistake is listed with its line, exit code 2. No data are prepared: until they are,
    epochs are unknown.
    """
    from instar.run.load_config import load_run_config
    from instar.schedule.checks import remarks
    from instar.schedule.forecast import checked_forecast
    from instar.schedule.render import render
    from instar.tasks.task import spec_class

    if pilot_file is not None:
        refuse_deleted("schedule pilot")
    loaded_config = load_run_config(cfg, (*overrides, schedule_option(file)))
    spec = spec_class(loaded_config.config.task).assume(
        loaded_config, lambda text: click.echo(text, err=True)
    )
    forecast = checked_forecast(loaded_config, spec, nproc)
    notes = forecast_notes(forecast, loaded_config, cfg, {"pilot": pilot_file})
    for text in (*loaded_config.notes, *remarks(loaded_config.config)):
        click.echo(f"warning: {text}", err=True)
    if as_json:
        print_json({**forecast.to_dict(), **values_of_notes(notes)})
        return
    click.echo(render(forecast, [note.text for note in notes]))
