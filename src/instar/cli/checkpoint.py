"""`instar checkpoint`: look into checkpoints, check and compare them, carry them over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from instar.cli.facts import print_json
from instar.cli.lazy import Group
from instar.cli.options import json_option

if TYPE_CHECKING:
    from instar.checkpoint.compare import Check
    from instar.checkpoint.manifest import Manifest
    from instar.models.shape import Growable

BROKEN = 3
WHAT_TO_GIVE = (
    "Give a checkpoint's folder, the one with manifest.json in it, or a run by its folder, id, "
    "name or `latest`"
)


@click.group(cls=Group)
def checkpoint() -> None:
    """Look into checkpoints, check and compare them, carry them over."""


@checkpoint.command("list")
@click.argument("run")
@click.option("--verify", is_flag=True, help="Read every byte and say which are whole.")
@json_option
def list_(run: str, verify: bool, as_json: bool) -> int:
    """List the checkpoints of RUN (its folder, id, name, or `latest`), the oldest first."""
    from instar.checkpoint.store import checkpoints
    from instar.cli.describe import print_rows

    root = _root(run)
    rows = [_row(path, verify) for path in checkpoints(root)]
    if as_json:
        print_json(rows)
    elif rows:
        print_rows(rows)
    else:
        click.echo(f"{root} has no checkpoint yet", err=True)
    faults = [fault for row in rows for fault in row["broken"]]
    for fault in faults:
        click.echo(fault, err=True)
    return _advise(root) if faults else 0


@checkpoint.command()
@click.argument("where", metavar="CHECKPOINT|RUN")
@click.option("--tensors", is_flag=True, help="Also list every tensor, its type and shape.")
@json_option
def inspect(where: str, tensors: bool, as_json: bool) -> None:
    """Say what a checkpoint holds and where it comes from; of a RUN, the latest."""
    import msgspec

    from instar.checkpoint.header import read_header
    from instar.checkpoint.manifest import CheckpointError, read_manifest
    from instar.checkpoint.patterns import SUFFIX
    from instar.cli.describe import parameter_count, print_headers, print_manifest

    path = checkpoint_at(where)
    with _advised(path):
        manifest = read_manifest(path)
    faults, headers = [], {}
    for name in (name for name in manifest.files if name.endswith(SUFFIX)):
        try:
            headers[name] = read_header(path / name)
        except CheckpointError as error:
            faults.append(str(error))
    if as_json:
        said = {"path": str(path), "parameters": parameter_count(headers)}
        said |= msgspec.to_builtins(manifest)
        print_json(said | ({"tensors": msgspec.to_builtins(headers)} if tensors else {}))
    else:
        print_manifest(path, manifest, headers)
        if tensors:
            print_headers(headers)
    if faults:
        raise CheckpointError(
            "\n".join([*faults, f"What else is broken: instar checkpoint verify {path}"])
        )


@checkpoint.command()
@click.argument("where", metavar="CHECKPOINT|RUN")
@click.option("--all", "every", is_flag=True, help="Every checkpoint of the run, not one.")
@json_option
def verify(where: str, every: bool, as_json: bool) -> int:
    """Read every byte of a checkpoint and compare it with the manifest; of a RUN, the latest.

    Every broken file is named; the exit code is 3 if there is one.
    """
    from instar.checkpoint.compare import check
    from instar.checkpoint.manifest import CheckpointError
    from instar.checkpoint.store import checkpoints
    from instar.cli.describe import print_check

    paths = checkpoints(_root(where)) if every else [checkpoint_at(where)]
    if not paths:
        raise CheckpointError(f"{_root(where)} has no checkpoint yet")
    checks = []
    for path in paths:
        checks.append(check(path))
        if not as_json:
            print_check(checks[-1])
    if as_json:
        print_json([_of_check(each) for each in checks])
    return _advise(_root(where)) if any(each.broken for each in checks) else 0


@checkpoint.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--tensors", is_flag=True, help="Name the tensors of all files, not the model's only."
)
@json_option
def diff(a: str, b: str, tensors: bool, as_json: bool) -> None:
    """Say in what the checkpoints A and B differ (each a folder, or a run: its latest)."""
    from instar.checkpoint.compare import compare_tensors
    from instar.checkpoint.manifest import read_manifest
    from instar.cli.describe import print_facts, print_tensors
    from instar.config.differing import differing

    path_a, path_b = checkpoint_at(a), checkpoint_at(b)
    with _advised(path_a):
        one = read_manifest(path_a)
    with _advised(path_b):
        other = read_manifest(path_b)
    groups = {
        "architecture": differing([one.architecture, other.architecture]),
        "settings": differing([_settings(path_a, one), _settings(path_b, other)]),
        "history": differing([_numbered(one.history), _numbered(other.history)]),
        "saved": differing([_outline(one), _outline(other)]),
    }
    compared = compare_tensors(path_a, path_b)
    if as_json:
        said: dict[str, Any] = {"a": str(path_a), "b": str(path_b)}
        for group, found in groups.items():
            said[group] = {key: {"a": left, "b": right} for key, (left, right) in found.items()}
        said["tensors"] = {file: [d.to_dict() for d in found] for file, found in compared.items()}
        print_json(said)
    else:
        print_facts(groups, str(path_a), str(path_b))
        print_tensors(compared, tensors)


@checkpoint.command()
@click.argument("where", metavar="CHECKPOINT|RUN")
@click.option("--against", metavar="CHECKPOINT|RUN", help="Default: the one saved before it.")
@json_option
def analyze(where: str, against: str | None, as_json: bool) -> None:
    """Say what a checkpoint's model makes of its room, and where it may be short of it.

    Effective ranks of matrices and adapters, entropy of attention over held-out tokens where the
    data are there, change since an earlier checkpoint.
    """
    from instar.cli.analysis import print_analysis

    path = checkpoint_at(where)
    before = None if against is None else checkpoint_at(against)

    from instar.run.analyze import analyze_checkpoint

    with _advised(path):
        found = analyze_checkpoint(path, before)
    if as_json:
        print_json(found.to_dict())
    else:
        print_analysis(found)


@checkpoint.command()
@click.argument("where", metavar="CHECKPOINT|RUN")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--to", "_to", type=click.Choice(["hf"]), required=True, help="hf: transformers.")
@click.option("--ema", is_flag=True, help="The moving average of the weights, not the weights.")
def export(where: str, folder: Path, _to: str, ema: bool) -> None:
    """Write the model into the new folder FOLDER, which transformers loads.

    A GPT-2 style model becomes a GPT2LMHeadModel, a Llama style one a LlamaForCausalLM; the run's
    tokenizer goes with it.
    """
    from instar.checkpoint.store import load

    path = checkpoint_at(where)

    from instar.models.hf import CLASSES, style_of
    from instar.models.hf_folder import export_folder

    with _advised(path):
        found = load(path)
    with _checkpoint_errors():
        arch = export_folder(found, folder, averaged=ema)
    click.echo(str(folder))
    click.echo(f"next: {CLASSES[style_of(arch)]}.from_pretrained({str(folder)!r})", err=True)


@checkpoint.command("import")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--to", "run_dir", type=click.Path(path_type=Path), required=True, help="The new run's folder."
)
def import_(folder: Path, run_dir: Path) -> None:
    """Make a run of the folder FOLDER, in which transformers saved a GPT-2 or a Llama."""
    from instar.models.hf_folder import import_folder

    with _checkpoint_errors():
        path = import_folder(folder, run_dir)
    click.echo(str(path))
    click.echo(f"next: instar sample {run_dir}", err=True)


@contextmanager
def _checkpoint_errors(*advice: str) -> Iterator[None]:
    """A run, a config or a tokenizer that cannot be used ends these commands with exit code 3."""
    from instar.checkpoint.manifest import CheckpointError
    from instar.config.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        raise CheckpointError("\n".join([*map(str, error.problems), *advice])) from error


@contextmanager
def _advised(path: Path) -> Iterator[None]:
    """What is wrong with a checkpoint, and how the run's whole ones are found."""
    from instar.checkpoint.manifest import CheckpointError

    try:
        yield
    except CheckpointError as error:
        run = path.absolute().parent.parent
        advice = f"Which of its run are whole: instar checkpoint list {run} --verify"
        raise CheckpointError(f"{error}\n{advice}") from error


def checkpoint_at(text: str) -> Path:
    """The checkpoint folder that `text` means; if there is none, what to give instead.

    Raises:
        CheckpointError: there is none.
    """
    from instar.checkpoint.store import resolve

    with _checkpoint_errors(WHAT_TO_GIVE):
        return resolve(text)


def _root(text: str) -> Path:
    """The folder of the run that `text` means, or that the checkpoint `text` belongs to."""
    from instar.record.rundir import find_run

    path = Path(text).absolute()
    if path.is_dir() and path.parent.name == "checkpoints":
        return path.parent.parent
    if (path / "checkpoints").is_dir():
        return Path(text)
    with _checkpoint_errors(WHAT_TO_GIVE):
        return find_run(text).path


def _row(path: Path, verify: bool) -> dict[str, Any]:
    from instar.checkpoint.compare import check
    from instar.checkpoint.manifest import CheckpointError, read_manifest
    from instar.checkpoint.store import pointed_at, pointers

    root = path.parent.parent
    named = [pointer for pointer in pointers(root) if pointed_at(root, pointer) == path]
    row: dict[str, Any] = {"name": path.name, "path": str(path), "pointers": named}
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return row | {"verified": verify, "broken": [str(error)]}
    return row | {
        "step": manifest.step,
        "tokens": manifest.progress.get("tokens"),
        "loss": manifest.loss,
        "size_bytes": sum(entry.size_bytes for entry in manifest.files.values()),
        "time": manifest.time,
        "reason": manifest.reason,
        "world_size": manifest.world_size,
        "verified": verify,
        "broken": list(check(path).broken) if verify else [],
    }


def _of_check(each: Check) -> dict[str, Any]:
    return {
        "path": str(each.path),
        "whole": not each.broken,
        "broken": each.broken,
        "unlisted": each.unlisted,
        "size_bytes": each.size_bytes,
        "seconds": each.seconds,
        "bytes_per_s": each.bytes_per_s,
    }


def _advise(root: Path) -> int:
    """Say on stderr what the run can go on from, where a checkpoint of it is broken."""
    from instar.checkpoint.manifest import CheckpointError
    from instar.checkpoint.store import newest_whole

    try:
        whole, _ = newest_whole(root)
        click.echo(f"The newest whole checkpoint of this run is {whole.path}", err=True)
    except CheckpointError:
        click.echo("No checkpoint of this run is whole", err=True)
    return BROKEN


def _settings(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The config's keys and, as `in force: …`, the settings after the history; nothing where the
    checkpoint lies outside a run."""
    import dataclasses

    from instar.config.fields import keys, value_of
    from instar.config.language import LanguageConfig
    from instar.config.load import load
    from instar.models.architecture import resolve
    from instar.record.rundir import RunDir
    from instar.run.state import history_from_json
    from instar.schedule.operations import fold
    from instar.tasks.blueprint import kind_of

    file = RunDir(path.absolute().parent.parent).config
    if not file.is_file():
        return {}
    with _checkpoint_errors():
        loaded = load(str(file))
    config = loaded.config
    if isinstance(config, LanguageConfig):
        vocabulary = config.model.vocab_size or manifest.architecture["vocab_size"]
        began: Growable = resolve(config.model, vocabulary)
    else:
        began = kind_of(config.task).assumed(loaded, lambda _: None).architecture
    force = dataclasses.asdict(fold(config, began, history_from_json(manifest.history)).settings)
    told = {key: value_of(config, key) for key in keys(type(config))}
    return told | {f"in force: {name}": value for name, value in force.items()}


def _numbered(history: list[Any]) -> dict[str, Any]:
    return {f"operation {number}": entry for number, entry in enumerate(history, 1)}


def _outline(manifest: Manifest) -> dict[str, Any]:
    """What a manifest says beside all that is compared on its own."""
    return {
        "step": manifest.step,
        "world_size": manifest.world_size,
        "loss": manifest.loss,
        "reason": manifest.reason,
        "data": manifest.data,
        "tokenizer": manifest.tokenizer,
        **{f"progress.{unit}": value for unit, value in manifest.progress.items()},
        **{f"version of {name}": version for name, version in manifest.versions.items()},
    }
