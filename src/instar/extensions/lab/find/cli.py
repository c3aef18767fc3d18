"""`instar find` and `instar doctor`: settings of a config, and what a machine has; they leave no run behind."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import click

from instar.cli.options import CommandGroup, json_option, set_option, trust_option
from instar.cli.output import picture_kind, print_json, print_named, print_table, write_picture
from instar.config.errors import ConfigError
from instar.config.files import read_regular
from instar.config.writers.edit import check_replaceable, edited_config
from instar.logs.plot.picture import check_matplotlib, picture
from instar.record.atomic import replace_file
from instar.record.format import bytes_text, si

_LR = "instar find lr"


@click.group(cls=CommandGroup)
def find() -> None:
    """Find settings of a config by short trainings, which leave no run behind."""


@find.command()
@click.argument("cfg", required=False, type=click.Path())
@set_option
@click.option(
    "--steps",
    type=click.IntRange(min=8),
    help="Steps of the longest trainings; default: an eighth of the run, or 400 if that is more.",
)
@click.option(
    "--budget",
    type=click.IntRange(min=2),
    help="Maximum steps of all trainings together; default: 10 times --steps.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Plot the losses into FILE (.png, .svg or .pdf).",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The config with the rate, for `instar train`; default: CFG's name, ending in .lr.yaml, beside it.",
)
@trust_option
@json_option
def lr(
    cfg: str | None,
    overrides: tuple[str, ...],
    steps: int | None,
    budget: int | None,
    output: Path | None,
    write: Path | None,
    as_json: bool,
) -> None:
    """Find the learning rate with the lowest validation loss after a short training.

    Trains CFG's model on its data with rates around optimizer.lr, all from the same weights on the
    same samples: many for a quarter of the steps, the best for half, the best of these for all. Each
    training has the whole learning rate schedule in small. The config with the rate, and with what --set
    says, is written as a file.
    """
    kind = None if output is None else picture_kind(output, "-o")
    if output is not None:
        check_matplotlib()
        if not output.absolute().parent.is_dir():
            raise ConfigError.of(f"no such folder: {output.parent}", "-o")

    from instar.run.load_config import load_run_config

    loaded_config = load_run_config(cfg, overrides)
    path = write or Path(cfg or loaded_config.config.name).with_suffix(".lr.yaml")
    check_replaceable(path, _LR, "--write")
    text = "" if cfg is None else read_regular(cfg, follow=True).decode("utf-8-sig")

    from instar.extensions.lab.find.learning_rate import find_learning_rate, rates_chart

    result = find_learning_rate(
        loaded_config, steps, budget, say=_say, on_run=lambda run: _say(str(run))
    )
    settings = [*overrides, *(f"{key}={value:.4g}" for key, value in result.settings.items())]
    replace_file(path, edited_config(text, settings, _LR, result.notes()).encode())
    if output is not None and kind is not None:
        rounds = {
            f"{steps:,} steps": [(run.lr, run.loss) for run in runs]
            for steps, runs in result.rate.rounds().items()
        }
        write_picture(output, picture(rates_chart(rounds, result.rate.lr), kind), "-o")
        _say(f"wrote {output}")
    if as_json:
        print_json(result.to_dict() | {"config": str(path)})
        return
    headers, *rows = result.table()
    print_table(headers, rows, right=headers)
    for key, value in result.settings.items():
        click.echo(f"{key}: {value:g}")
    for note in result.notes():
        _say(note)
    click.echo(f"{path}\nnext: {shlex.join(['instar', 'train', str(path)])}")


@find.command()
@click.argument("cfg", required=False, type=click.Path())
@set_option
@click.option("--max", "max_batch", type=click.IntRange(min=1), help="Largest micro-batch to try.")
@trust_option
@json_option
def batch(
    cfg: str | None, overrides: tuple[str, ...], max_batch: int | None, as_json: bool
) -> None:
    """Find the largest micro-batch that fits in memory, and the fastest.

    Trains some steps of CFG's model with 1, 2, 4 … samples at once, on one device, and prints
    train.batch_size and train.gradient_accumulation_steps that keep the global batch.
    """
    from instar.run.load_config import load_run_config

    loaded_config = load_run_config(cfg, overrides)

    from instar.extensions.lab.find.batch_size import find_batch_size

    result = find_batch_size(
        loaded_config,
        max_batch,
        say=_say,
        on_try=lambda trial: _say(f"{trial.batch_size} samples …"),
    )
    if as_json:
        print_json(result.to_dict())
        return
    headers = ["batch_size", f"{result.unit}s/s", "memory"]
    rows = [
        [f"{trial.batch_size:,}", si(trial.per_s), bytes_text(trial.memory_bytes)]
        if trial.fits
        else [f"{trial.batch_size:,}", "", "does not fit"]
        for trial in result.tried
    ]
    print_table(headers, rows, right=headers)
    for key, value in result.settings.items():
        click.echo(f"{key}: {value}")
    how = "" if result.measured else ", extrapolated"
    _say(
        f"fastest: {result.fastest:,} samples; largest that fits in "
        f"{bytes_text(result.limit_bytes)}: {result.largest:,}{how}"
    )


@click.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default="runs",
    show_default=True,
    help="Folder of runs, whose disk is written to.",
)
@click.option("--quick", is_flag=True, help="Measure no speed, and compile nothing.")
@json_option
def doctor(folder: Path, quick: bool, as_json: bool) -> None:
    """Check what this machine has for training, and how fast it is.

    Prints devices, matrix products, NCCL, network, torch.compile, memory, disk and limits, what to
    change, and the settings with which Instar would train here. Takes up to a minute.
    """
    from instar.extensions.lab.find.machine import examine

    report = examine(folder, quick=quick, say=lambda text: _say(f"{text} …"))
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    print_table(["CHECK", "FOUND"], [[check.what, check.found] for check in report.checks])
    click.echo("\nInstar would train with")
    print_named(((f"  {key}", str(value)) for key, value in report.settings.items()), 22)
    advice_lines = [(f"  {check.what}", check.advice) for check in report.checks if check.advice]
    if advice_lines:
        click.echo("\nto change")
        print_named(advice_lines, 22)


def _say(text: str) -> None:
    click.echo(text, err=True)
