"""`instar data`: prepare the data of a run in advance, and inspect prepared data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from instar.cli.options import MOST_RANKS, CommandGroup, json_option, set_option, trust_option
from instar.cli.output import print_json, print_named, print_table
from instar.config.errors import ConfigError
from instar.config.files import read_regular
from instar.config.language import TextConfig
from instar.run.load_config import load_run_config
from instar.run.start.preflight import prepare_run_data

if TYPE_CHECKING:
    from instar.data.text.shards import TokenDataset
    from instar.data.text.tokenizer import Tokenizer

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
_TEXTS = frozenset(
    {"data.source", "data.val_source", "data.text_field", "data.tokenizer", "data.path"}
)


@click.group(cls=CommandGroup)
def data() -> None:
    """Prepare and inspect training data."""


@data.command("prepare")
@click.argument("cfg", required=False)
@set_option
@click.option("--source", metavar="TEXT", help="stdlib, or a file, folder or glob.")
@click.option("--val-source", metavar="TEXT", help="Held out in place of a share of the source.")
@click.option("--text-field", metavar="NAME", help="Key or column of the text in rows.")
@click.option(
    "--tokenizer", metavar="KIND", help="byte, char, bpe, or the path of a tokenizer.json."
)
@click.option("--vocab-size", metavar="N", help="Vocabulary of a trained BPE tokenizer.")
@click.option("--max-bytes", metavar="N", help="Use about this many bytes of the source.")
@click.option("--val-fraction", metavar="SHARE", help="Share held out.")
@click.option("--test-fraction", metavar="SHARE", help="Share kept for a final test.")
@click.option("--path", metavar="FOLDER", help="Where the data set goes.")
@click.option("--seed", metavar="N", help="Decides which documents are held out.")
@click.option(
    "--nproc",
    type=click.IntRange(1, MOST_RANKS),
    default=1,
    show_default=True,
    help="Ranks of the run to come: several that share a stream need it counted.",
)
@trust_option
@json_option
def prepare_data(
    cfg: str | None,
    overrides: tuple[str, ...],
    seed: str | None,
    nproc: int,
    as_json: bool,
    **fields: str | None,
) -> None:
    """Prepare the data set that the file CFG, --set and the options below describe.

    Prints its folder, one line per part of a mixture. With --json, prints what `inspect --json`
    prints of the data set, as a list if it is a mixture.
    """
    settings = {f"data.{key}": fields[key] for key in DATA_KEYS} | {"data.seed": seed}
    options = [
        f"{key}={json.dumps(value) if key in _TEXTS else value}"
        for key, value in settings.items()
        if value is not None
    ]
    loaded_config = load_run_config(cfg, [*overrides, *options])
    config = loaded_config.config
    prepare_run_data(loaded_config, nproc, lambda line: click.echo(line, err=True))
    if not isinstance(config, TextConfig):
        click.echo(config.data.path or "in memory")
        return
    from instar.data.text.dataset import folders

    paths = folders(config.data, config.data_seed)
    if not as_json:
        click.echo("\n".join(map(str, paths)))
        return
    summaries = [_summary(_open(str(folder))[0]) for folder in paths]
    print_json(summaries if config.data.mixture else summaries[0])


@data.command()
@click.argument("path")
@click.option(
    "--sample",
    default=24,
    show_default=True,
    type=click.IntRange(min=0),
    help="Number of first tokens of each split to show, as text.",
)
@click.option("--verify", is_flag=True, help="Read every token and compare the fingerprints.")
@json_option
def inspect(path: str, sample: int, verify: bool, as_json: bool) -> None:
    """Print the contents of the data set in the folder PATH, and check that it is whole."""
    from instar.data.text.verify import verify_tokens

    dataset, tokenizer = _open(path)
    if verify:
        verify_tokens(dataset)
    beginnings = _beginnings(dataset, tokenizer, sample)
    if as_json:
        summary = _summary(dataset)
        print_json(summary | {"verified": verify} | {"sample": beginnings})
        return
    origin = _source_options(dataset.source)
    facts = [
        ("kind", _kind(dataset)),
        ("tokenizer", f"{dataset.tokenizer}, vocabulary {dataset.vocab_size:,}"),
        ("fingerprint", f"{dataset.fingerprint}{'  verified' if verify else ''}"),
        ("made from", ", ".join(f"{key}={value}" for key, value in origin.items())),
    ]
    print_named(facts, 13)
    click.echo()
    rows = [
        [name, f"{len(split):,}", str(len(split.shards))]
        + ([json.dumps(beginnings[name], ensure_ascii=False)] if sample else [])
        for name, split in dataset.splits.items()
    ]
    print_table(["split", "tokens", "shards", *(["begins"] if sample else [])], rows)


def _open(path: str) -> tuple[TokenDataset, Tokenizer]:
    """Open a folder. Raises ConfigError unless it holds a complete data set."""
    from instar.data.text.shards import DATASET_FILE, open_dataset
    from instar.data.text.tokenizer import load_saved_tokenizer

    parts = sorted(str(file.parent) for file in Path(path).glob(f"*/{DATASET_FILE}"))
    if parts and not Path(path, DATASET_FILE).exists():
        raise ConfigError.of(
            "a folder of several data sets", where=path, hint=f"name one: {', '.join(parts)}"
        )
    dataset = open_dataset(path)
    return dataset, load_saved_tokenizer(path, fingerprint=dataset.tokenizer_fingerprint)


def _kind(dataset: TokenDataset) -> str:
    """Return the kind of the data as text."""
    kind, source = _kind_of(dataset), dataset.source.get("source")
    counts_by_unit = _lane_counts(dataset)
    if kind == "tokens":
        return "tokens: all of it as token shards"
    if kind == "rows":
        documents = dataset.source.get("documents", 0)
        return f"rows: {documents:,} documents of {source} as token shards"
    if not counts_by_unit:
        return f"{kind}: {source}, not read to its end yet"
    ((what, counts),) = counts_by_unit.items()
    lanes = f"{len(counts)} lane{'' if len(counts) == 1 else 's'}"
    return f"{kind}: {source}, counted: {sum(counts):,} {what} in {lanes}"


def _kind_of(dataset: TokenDataset) -> str:
    return str(dataset.source.get("kind", "tokens"))


def _lane_counts(dataset: TokenDataset) -> dict[str, Any]:
    """Return the counts of a stream: tokens or documents per lane."""
    from instar.data.text.streams.index import LANES_FILE, LanesRecord

    lanes = dataset.path / LANES_FILE
    if not lanes.exists():
        return {}

    record = msgspec.json.decode(read_regular(lanes, follow=True), type=LanesRecord)
    return {"tokens" if record.packing else "documents": list(record.counts)}


def _source_options(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters to print: those that are set."""
    unread = {"resolved"}
    if source.get("kind") in ("stream", "python"):
        unread |= {"documents", "bytes"}
    return {key: value for key, value in source.items() if value is not None and key not in unread}


def _beginnings(dataset: TokenDataset, tokenizer: Tokenizer, count: int) -> dict[str, str]:
    return {
        name: tokenizer.decode(split.read(0, min(count, len(split))).tolist())
        for name, split in dataset.splits.items()
    }


def _summary(dataset: TokenDataset) -> dict[str, Any]:
    return {
        "path": str(dataset.path),
        "kind": _kind_of(dataset),
        "tokenizer": dataset.tokenizer,
        "vocab_size": dataset.vocab_size,
        "fingerprint": dataset.fingerprint,
        "source": dict(dataset.source),
        "splits": {
            name: {
                "tokens": len(split),
                "shards": len(split.shards),
                "fingerprint": split.fingerprint,
            }
            for name, split in dataset.splits.items()
        },
        "elsewhere": _lane_counts(dataset),
    }
