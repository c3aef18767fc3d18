"""`instar schedule`: what a schedule makes of a run, before there is one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from instar.cli.config import json_option, set_option

if TYPE_CHECKING:
    from instar.config.schema import RunConfig


@click.group()
def schedule() -> None:
    """Check schedules of operations."""


@schedule.command()
@click.argument("file")
@click.option("--config", "cfg", metavar="CFG", help="The run's config; default: the defaults.")
@click.option("--nproc", type=click.IntRange(min=1), default=1, help="Ranks of the run.")
@set_option
@json_option
def check(
    file: str, cfg: str | None, nproc: int, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Print what the run would be, stage by stage, under the schedule in FILE.

    Every mistake is listed with its line, exit code 2. No data are prepared for it: where they
    are not there yet, epochs are not known.
    """
    from instar.schedule.checks import load_checked
    from instar.schedule.forecast import checked_forecast
    from instar.schedule.render import render

    loaded = load_checked(cfg, (*overrides, schedule_option(file)))
    tokens, vocabulary = _data(loaded.config)
    told = checked_forecast(loaded, tokens, vocabulary, nproc)
    click.echo(json.dumps(told.to_dict(), indent=2) if as_json else render(told))


def schedule_option(file: str) -> str:
    """The schedule's file as a text for --set."""
    return f"schedule={json.dumps(file)}"


def _data(config: RunConfig) -> tuple[int | None, int]:
    """Training tokens, None where they are not prepared yet, and the vocabulary.

    Raises ConfigError for a data set that is damaged.
    """
    from instar.data.dataset import folders, open_data

    missing = [str(path) for path in folders(config.data, config.seed) if not path.exists()]
    if not missing:
        dataset = open_data(config.data, config.seed)
        return dataset.train_tokens(config.model.context), dataset.vocab_size
    from instar.data.tokenizer import named_tokenizer

    named = named_tokenizer(config.data.tokenizer)
    trained = config.data.vocab_size if config.data.tokenizer == "bpe" else _BYTES
    vocabulary = trained if named is None else named.vocab_size
    where = ", ".join(missing)
    click.echo(f"no data in {where} yet: a vocabulary of {vocabulary:,} is assumed", err=True)
    return None, vocabulary


_BYTES = 256
"""tokens of the byte tokenizer, and a guess for one of characters"""
