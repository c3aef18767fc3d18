"""`instar grow`: a larger model out of a checkpoint, on the disk."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from instar.cli.facts import print_json
from instar.cli.options import json_option

if TYPE_CHECKING:
    from instar.config.operation import Operation
    from instar.run.grow import Grown

_OPTION = re.compile(r"\s+(?=[a-z_]+=)")


@click.command(
    epilog="Operations and their options: docs/growth.md, e.g. --op widen_mlp=1024 "
    "--op 'insert_layers=2 where=even' --op 'set_lora_rank={target: attn, rank: 8}'"
)
@click.argument("where", metavar="CHECKPOINT|RUN")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--op",
    "texts",
    multiple=True,
    required=True,
    metavar="'NAME=VALUE [OPTION=VALUE …]'",
    help="What is done; may be given several times, and is done in this order.",
)
@click.option("--check", is_flag=True, help="Compare logits, and write nothing if a label fails.")
@json_option
def grow(where: str, out: Path, texts: tuple[str, ...], check: bool, as_json: bool) -> None:
    """Make the run OUT of a checkpoint (of a RUN, the latest), grown.

    Its one checkpoint has the weights, the optimizer's state and the history that the same operations
    would have given the run under way: `instar resume OUT` goes on from there. Of the model, memory
    holds one tensor at a time (with --check, both models).
    """
    operations = [operation_of(text) for text in texts]

    from instar.cli.checkpoint import checkpoint_at

    path = checkpoint_at(where)

    from instar.checkpoint.store import load
    from instar.run.grow import grow as grow_checkpoint

    made = grow_checkpoint(load(path), out, operations, check=check)
    if as_json:
        print_json(made.to_dict())
        return
    _tell(made)
    click.echo(str(out))
    click.echo(f"next: instar resume {out}", err=True)


def operation_of(text: str) -> Operation:
    """`insert_layers=2 where=even` as an operation; values are YAML.

    Raises:
        ConfigError: not of this form, or there is no such operation.
    """
    from instar.config.document import parse
    from instar.config.errors import ConfigError
    from instar.config.operation import Operation
    from instar.schedule.operations import check

    place = f"--op {text}"
    values: dict[str, Any] = {}
    for part in _OPTION.split(text.strip()):
        name, equals, given = part.partition("=")
        value, mistakes = parse(given, place, numbered=False)
        if mistakes:
            raise ConfigError(*(mistake.problem() for mistake in mistakes))
        if not re.fullmatch("[a-z_]+", name) or (values and not equals) or name in values:
            raise ConfigError.one(
                f"{part!r} is not name=value", place, "write e.g. 'insert_layers=2 where=even'"
            )
        values[name] = None if value is None else value.plain()
    (name, value), *options = values.items()
    operation = Operation(name, value, dict(options))
    try:
        check(operation)
    except ValueError as error:
        raise ConfigError.one(str(error), place) from None
    return operation


def _tell(made: Grown) -> None:
    """One line for each operation, on stderr: what it did, and how large the model is now."""
    from instar.record.amounts import count_text

    before = made.parameters_before
    for stage in made.stages:
        value = "" if stage.operation.value is None else f" {json.dumps(stage.operation.value)}"
        size = f"{count_text(before)} → {count_text(stage.parameters)}" if stage.label else ""
        words = [f"{stage.operation.name}{value}", size, stage.label or "", *stage.notes]
        click.echo("  ".join(filter(None, words)), err=True)
        before = stage.parameters
    if made.proof is not None:
        moved = f"max |Δlogit| {made.proof.max_logit_diff:.2g}, Δloss {made.proof.delta_loss:+.2g}"
        click.echo(f"checked on random tokens: {moved}: {made.proof.label}", err=True)
    click.echo(f"{made.path}, in {made.seconds:.1f} s", err=True)
