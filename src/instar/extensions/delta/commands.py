"""The commands of `instar delta`: differences of weights, and chains of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from instar.checkpoint.listing import pointer_target
from instar.checkpoint.manifest import CheckpointError, read_manifest
from instar.checkpoint.store import LATEST, load_checkpoint
from instar.cli import completion
from instar.cli.checkpoint import checkpoint_at
from instar.cli.options import NewFolder, StrictCommand, json_option
from instar.cli.output import picture_kind, print_json, print_named, print_table, write_picture
from instar.config.errors import ConfigError
from instar.extensions.delta.config import delta_config
from instar.extensions.delta.events import gap_text
from instar.extensions.delta.export import export_state as export_like
from instar.extensions.delta.format.folder import (
    Link,
    deltas_of,
    files,
    find_link,
    links,
    missing_steps,
    read_any,
)
from instar.extensions.delta.format.link import read_link
from instar.extensions.delta.format.statistics import LinkStatistics, statistics
from instar.extensions.delta.replay import (
    apply_file,
    check_out_state,
    create_file,
    rebuild_index,
    remove_states,
    squash_links,
    verify_chain,
)
from instar.logs.plot.picture import check_matplotlib
from instar.record.atomic import WriteError
from instar.record.format import bytes_text
from instar.record.rundir import RunDir, check_folders, find_run
from instar.run.resume import began_with
from instar.schedule.operations import effective, history_from_json

path_type = click.Path(path_type=Path)
chain_argument = click.argument("where", metavar="CHAIN|RUN", shell_complete=completion.run_names)
link_option = click.option(
    "--link", "number", type=click.IntRange(0), help="Its number; default: the last."
)
step_option = click.option("--step", type=click.IntRange(0), help="Its training step instead.")


@click.command("create", cls=StrictCommand)
@click.argument("base", type=path_type)
@click.argument("new", type=path_type)
@click.argument("target", type=path_type, metavar="LINK")
@click.option(
    "--values",
    type=click.Choice(["steps", "absolute"]),
    default="steps",
    show_default=True,
    help="absolute: new values, which may be applied twice; larger.",
)
def create_link(base: Path, new: Path, target: Path, values: Any) -> None:
    """Write what changed from BASE to NEW into the new file LINK.

    BASE and NEW are safetensors files, or folders that transformers saved.
    """
    _check_new(target)
    footer = create_file(base, new, target, values)
    size = target.stat().st_size
    click.echo(
        f"{target}: {bytes_text(size)}, {footer.full_bytes / size:,.1f}x smaller; "
        f"{_share(footer.n_changed / max(1, footer.elements))} of {footer.elements:,} elements changed"
    )


@click.command("apply", cls=StrictCommand)
@click.argument("base", type=path_type)
@click.argument("link", type=path_type)
@click.argument("target", type=path_type, metavar="NEW")
def apply_link(base: Path, link: Path, target: Path) -> None:
    """Write the state that LINK makes of BASE into the new safetensors file NEW."""
    _check_new(target)
    apply_file(base, link, target)
    click.echo(str(target))


@click.command("verify", cls=StrictCommand)
@click.argument("where", metavar="CHAIN|RUN|LINK", shell_complete=completion.run_names)
@json_option
def verify_chains(where: str, as_json: bool) -> None:
    """Read every byte of a chain, rebuild every state and compare its hash; of a LINK, its checksum.

    The exit code is 3 if a file is missing, damaged or from elsewhere.
    """
    if Path(where).is_file():
        read_link(Path(where))
        _say(as_json, {"path": where, "whole": True}, f"{where}: whole")
        return

    folder = chain_at(where)
    chain = verify_chain(folder)
    gaps = _gaps(folder, chain)
    facts = {
        "path": str(folder),
        "whole": not gaps,
        "first": chain[0].number,
        "last": chain[-1].number,
        "gaps": [missing for missing, _ in gaps],
    }
    states = f"{folder}: {len(chain):,} states, {chain[0].number} to {chain[-1].number}, are "
    _say(as_json, facts, states + ("intact, but not all are there" if gaps else "whole"))
    _say_gaps(gaps)


@click.command(cls=StrictCommand)
@click.argument("path", metavar="LINK", type=path_type)
@click.option("--tensors", is_flag=True, help="List the changed tensors.")
@json_option
def info(path: Path, tensors: bool, as_json: bool) -> None:
    """Print what a link, or an anchor of a chain, holds."""
    link = read_any(path)
    file = read_link(path, check=False) if link.kind == "delta" else None
    changes = file.footer.tensors if file else {}
    facts = _facts(link) | ({"values": file.footer.values} if file else {})
    if as_json:
        rows = {
            name: {"dtype": c.dtype, "shape": c.shape, "changed": c.n_changed}
            for name, c in changes.items()
        }
        print_json(facts | ({"tensors": rows} if tensors else {}))
        return
    print_named(((name.replace("_", " "), _text(value)) for name, value in facts.items()), 14)
    if tensors:
        click.echo()
        cells = [
            [name, c.dtype, " × ".join(map(str, c.shape)), f"{c.n_changed:,}"]
            for name, c in changes.items()
        ]
        print_table(["tensor", "type", "shape", "changed"], cells, right=["changed"])


@click.command("log", cls=StrictCommand)
@chain_argument
@click.option(
    "--stats", is_flag=True, help="Read all links: density and overlap, also of each layer."
)
@click.option(
    "--plot", "picture", metavar="FILE", type=path_type, help="Draw --stats: .png, .svg or .pdf."
)
@json_option
def list_states(where: str, stats: bool, picture: Path | None, as_json: bool) -> None:
    """List the states of a chain: step, size, and how many elements changed.

    Density is the share of changed elements; overlap is the Jaccard index of the elements that
    changed and those that changed in the step before.
    """
    folder = chain_at(where)
    chain = links(folder)
    by_number: dict[int, LinkStatistics] = {}
    if stats or picture is not None:
        by_number = {entry.number: entry for entry in statistics(folder)}
    if picture is not None:
        _draw(list(by_number.values()), str(folder), picture)
    if as_json:
        print_json(
            [
                _facts(link)
                | (by_number[link.number].to_dict() if link.number in by_number else {})
                for link in chain
            ]
        )
        return
    headers = ["link", "step", "kind", "size", "smaller", "density"]
    rows = [_row(link) for link in chain]
    if by_number:
        headers.append("overlap")
        rows = [
            [
                *row,
                _share(by_number[link.number].whole.overlap if link.number in by_number else None),
            ]
            for row, link in zip(rows, chain, strict=True)
        ]
    print_table(headers, rows, right=[name for name in headers if name != "kind"])
    _say_gaps(_gaps(folder, chain))
    if by_number:
        _print_layers(list(by_number.values()))


@click.command(cls=StrictCommand)
@chain_argument
@click.argument("target", type=path_type, metavar="NEW")
@link_option
@step_option
def checkout(where: str, target: Path, number: int | None, step: int | None) -> None:
    """Write a state of a chain into the new safetensors file NEW; by default the last."""
    _check_new(target)
    folder = chain_at(where)
    check_out_state(folder, _number(folder, number, step), target)
    click.echo(str(target))


@click.command(cls=StrictCommand)
@chain_argument
@click.argument("first", type=click.IntRange(0))
@click.argument("last", type=click.IntRange(0))
def squash(where: str, first: int, last: int) -> None:
    """Replace the links FIRST to LAST by one; the states between them are given up."""
    link = squash_links(chain_at(where), first, last)
    click.echo(f"{link.file}: {bytes_text(link.size_bytes)}, from {link.first} to {link.number}")


@click.command(cls=StrictCommand)
@chain_argument
@click.option(
    "--keep-from",
    "number",
    type=click.IntRange(0),
    help="Remove the states before the last anchor at or before this number.",
)
@click.option(
    "--rebuild-index",
    "rebuild",
    is_flag=True,
    help="First write a damaged or missing index.json anew.",
)
def gc(where: str, number: int | None, rebuild: bool) -> None:
    """Remove old states of a chain, and what crashes left behind."""
    folder = chain_at(where)
    if rebuild:
        rebuild_index(folder)
    removed_files = remove_states(folder, number)
    click.echo(
        f"{folder}: removed {len(removed_files):,} file{'' if len(removed_files) == 1 else 's'}"
    )


@click.command("export", cls=StrictCommand)
@chain_argument
@click.argument("folder", type=NewFolder())
@click.option(
    "--like",
    required=True,
    metavar="MODEL|CHECKPOINT|RUN",
    help="Whose config and tokenizer: a folder of transformers, or a run.",
)
@link_option
@step_option
def export_chain(where: str, folder: Path, like: str, number: int | None, step: int | None) -> None:
    """Write a state of a chain as the new folder FOLDER, which transformers loads."""
    chain = chain_at(where)
    number = _number(chain, number, step)
    if (Path(like) / "config.json").is_file():
        for note in export_like(chain, number, Path(like), folder):
            click.echo(f"note: {note}", err=True)
    else:
        from instar.extensions.delta.chain import load_state
        from instar.models.hf.folder import export_folder

        export_folder(
            load_checkpoint(checkpoint_at(like)), folder, weights=load_state(chain, number)
        )
    click.echo(str(folder))


def chain_at(text: str) -> Path:
    """Return the folder of the chain that `text` names: itself, or that of a run.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(text)
    if files(path):
        return path
    try:
        run = RunDir(path) if deltas_of(path).is_dir() else find_run(text)
    except ConfigError as error:
        raise CheckpointError(f"{text}: neither a chain of delta checkpoints nor a run") from error
    if not deltas_of(run.path).is_dir():
        raise CheckpointError(
            f"{run.path}: this run has no deltas; set checkpoint.delta.every to save some"
        )
    check_folders(run)
    return deltas_of(run.path)


def _gaps(folder: Path, chain: Sequence[Link]) -> list[tuple[tuple[int, int], str]]:
    """Return the first and the last step of each gap of a chain, and what follows it."""
    gaps = [(link.missing, link.file.name) for link in chain if link.missing is not None]
    at_end = _unsaved_deltas(folder) if chain else None
    return gaps if at_end is None else [*gaps, at_end]


def _unsaved_deltas(folder: Path) -> tuple[tuple[int, int], str] | None:
    """Return the steps up to a run's latest checkpoint whose deltas were due and are not in its chain,
    and the checkpoint's name; None: there are none, or the folder is no run's.
    """
    root = folder.parent
    path = pointer_target(root, LATEST)
    if path is None:
        return None
    with suppress(CheckpointError, ConfigError, LookupError, TypeError, ValueError):
        manifest = read_manifest(path)
        config, _ = effective(
            began_with(RunDir(root), manifest), history_from_json(manifest.history)
        )
        every = delta_config(config).every
        # read after the pointer, as a run that goes on writes deltas before the checkpoint
        last = links(folder)[-1].step
        missing = None if every is None else missing_steps(last, manifest.step + 1, every)
        return None if missing is None else (missing, path.name)
    return None


def _say_gaps(gaps: Sequence[tuple[tuple[int, int], str]]) -> None:
    for missing, before in gaps:
        click.echo(gap_text(missing, before), err=True)


def _draw(statistics: Sequence[LinkStatistics], title: str, path: Path) -> None:
    """Write a plot of the statistics."""
    kind = picture_kind(path, "--plot")
    check_matplotlib()
    from instar.extensions.delta.picture import deltas_picture

    write_picture(path, deltas_picture(statistics, title, kind), "--plot")


def _number(folder: Path, number: int | None, step: int | None) -> int:
    if number is not None and step is not None:
        raise click.UsageError("Give --link or --step, not both.")
    return find_link(links(folder), number, step).number


def _check_new(target: Path) -> None:
    if target.exists():
        raise WriteError(f"{target} exists; choose a new file")


def _facts(link: Link) -> dict[str, Any]:
    return {
        "file": str(link.file),
        "kind": link.kind,
        "number": link.number,
        "first": link.first,
        "step": link.step,
        "size_bytes": link.size_bytes,
        "full_bytes": link.full_bytes,
        "elements": link.elements,
        "changed": link.n_changed,
        "base": link.base_hash,
        "result": link.result_hash,
        "aliases": dict(link.aliases),
        "missing": link.missing,
    }


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{alias} = {name}" for alias, name in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value) or "none"


def _row(link: Link) -> list[str]:
    span = f"{link.number:,}" if link.first == link.number else f"{link.first:,}-{link.number:,}"
    cells = [span, f"{link.step:,}", link.kind, bytes_text(link.size_bytes)]
    if link.kind == "anchor":
        return [*cells, "", ""]
    density = link.n_changed / link.elements if link.elements else 0.0
    return [*cells, f"{link.full_bytes / link.size_bytes:,.1f}x", _share(density)]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _print_layers(statistics: Sequence[LinkStatistics]) -> None:
    """Print the mean density and overlap of each layer."""
    layers: dict[str, list[Any]] = {}
    for entry in statistics:
        for name, share in entry.layers.items():
            layers.setdefault(name, []).append(share)
    if layers:
        click.echo()
    rows = []
    for name, shares in layers.items():
        overlaps = [share.overlap for share in shares if share.overlap is not None]
        density = sum(share.density for share in shares) / len(shares)
        overlap = sum(overlaps) / len(overlaps) if overlaps else None
        rows.append([name, f"{shares[0].elements:,}", _share(density), _share(overlap)])
    if rows:
        headers = ["layer", "elements", "density", "overlap"]
        print_table(headers, rows, right=headers[1:])


def _say(as_json: bool, facts: dict[str, Any], text: str) -> None:
    if as_json:
        print_json(facts)
    else:
        click.echo(text)
