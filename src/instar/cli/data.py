"""`instar data`: text into token shards, and a look at them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from instar.cli.config import json_option, set_option

if TYPE_CHECKING:
    from instar.data.tokenizer import Tokenizer
    from instar.data.tokens import TokenDataset

DATA_KEYS = (
    "source",
    "val_source",
    "text_field",
    "tokenizer",
    "vocab_size",
    "max_bytes",
    "val_fraction",
    "test_fraction",
    "path",
)


@click.group()
def data() -> None:
    """Prepare and inspect training data."""


@data.command()
@click.argument("cfg", required=False)
@set_option
@click.option("--source", metavar="TEXT", help="stdlib, or a file, folder or glob.")
@click.option("--val-source", metavar="TEXT", help="Held out in place of a share of the source.")
@click.option("--text-field", metavar="NAME", help="Key or column of the text in rows.")
@click.option(
    "--tokenizer", metavar="KIND", help="byte, char, bpe, or the path of a tokenizer.json."
)
@click.option("--vocab-size", metavar="N", help="Vocabulary of a trained BPE tokenizer.")
@click.option("--max-bytes", metavar="N", help="Use only about so much of the source.")
@click.option("--val-fraction", metavar="SHARE", help="Share held out.")
@click.option("--test-fraction", metavar="SHARE", help="Share kept for a final test.")
@click.option("--path", metavar="FOLDER", help="Where the data set goes.")
@click.option("--seed", metavar="N", help="Decides which documents are held out.")
@json_option
def prepare(
    cfg: str | None,
    overrides: tuple[str, ...],
    seed: str | None,
    as_json: bool,
    **fields: str | None,
) -> None:
    """Make the data set that the file CFG, --set and the options below describe.

    Its folder is printed, or with --json what `inspect --json` says of it.
    """
    from instar.config.load import load

    given = {f"data.{key}": fields[key] for key in DATA_KEYS} | {"seed": seed}
    options = [
        f"{key}={json.dumps(value) if key in _TEXTS else value}"
        for key, value in given.items()
        if value is not None
    ]
    config = load(cfg, [*overrides, *options]).config

    from instar.data import prepare as preparing
    from instar.data.tokens import open_dataset

    folder = preparing.prepare(
        config.data, config.seed, say=lambda line: click.echo(line, err=True)
    )
    if as_json:
        _print_json(_summary(open_dataset(folder)))
    else:
        click.echo(str(folder))


_TEXTS = frozenset(
    {"data.source", "data.val_source", "data.text_field", "data.tokenizer", "data.path"}
)


@data.command()
@click.argument("path")
@click.option(
    "--sample",
    default=24,
    show_default=True,
    type=click.IntRange(min=0),
    help="Show so many of each split's first tokens, as text.",
)
@click.option("--verify", is_flag=True, help="Read every token and compare the fingerprints.")
@json_option
def inspect(path: str, sample: int, verify: bool, as_json: bool) -> None:
    """Say what the data set in the folder PATH holds, and check that it is whole."""
    from instar.cli.table import print_table
    from instar.data.tokenizer import load_tokenizer
    from instar.data.tokens import open_dataset, verify_tokens

    dataset = open_dataset(path)
    tokenizer = load_tokenizer(path, fingerprint=dataset.tokenizer_fingerprint)
    if verify:
        verify_tokens(dataset)
    beginnings = _beginnings(dataset, tokenizer, sample)
    if as_json:
        _print_json(_summary(dataset) | {"verified": verify} | {"sample": beginnings})
        return
    made_from = ", ".join(f"{key}={value}" for key, value in dataset.source.items())
    click.echo(f"tokenizer    {dataset.tokenizer}, vocabulary {dataset.vocab_size:,}")
    click.echo(f"fingerprint  {dataset.fingerprint}{'  verified' if verify else ''}")
    click.echo(f"made from    {made_from}")
    click.echo()
    rows = [
        [name, f"{len(split):,}", str(len(split.arrays))]
        + ([json.dumps(beginnings[name], ensure_ascii=False)] if sample else [])
        for name, split in dataset.splits.items()
    ]
    print_table(["split", "tokens", "shards", *(["begins"] if sample else [])], rows)


def _beginnings(dataset: TokenDataset, tokenizer: Tokenizer, count: int) -> dict[str, str]:
    return {
        name: tokenizer.decode(split.read(0, min(count, len(split))).tolist())
        for name, split in dataset.splits.items()
    }


def _summary(dataset: TokenDataset) -> dict[str, Any]:
    return {
        "path": str(dataset.path),
        "tokenizer": dataset.tokenizer,
        "vocab_size": dataset.vocab_size,
        "fingerprint": dataset.fingerprint,
        "source": dict(dataset.source),
        "splits": {
            name: {
                "tokens": len(split),
                "shards": len(split.arrays),
                "fingerprint": split.fingerprint,
            }
            for name, split in dataset.splits.items()
        },
    }


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
