"""`instar checkpoint`: inspect, verify, compare, average, export and import checkpoints."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from instar.checkpoint.compare import (
    Verification,
    compare_facts,
    compare_tensors,
    verify_checkpoint,
)
from instar.checkpoint.layout import read_header
from instar.checkpoint.listing import (
    dangling_pointers,
    latest_intact,
    list_checkpoints,
    pointer_target,
    pointers,
    resolve_checkpoint,
)
from instar.checkpoint.manifest import (
    MANIFEST,
    SUFFIX,
    CheckpointError,
    Line,
    Manifest,
    UnreadableError,
    line_of,
    read_manifest,
    superseded_at,
)
from instar.checkpoint.store import load_checkpoint
from instar.cli import completion
from instar.cli.checkpoint_output import (
    parameter_count,
    pretrained_facts,
    print_analysis,
    print_check,
    print_facts,
    print_headers,
    print_manifest,
    print_rows,
    print_tensors,
)
from instar.cli.options import CommandGroup, NewFolder, byte_size, json_option
from instar.cli.output import print_json, print_named
from instar.config.errors import ConfigError
from instar.extensions import checkpoint_importer, how_to_install
from instar.models.hf import is_pretrained
from instar.record.progress import track_items
from instar.record.rundir import RunDir, find_run

EXIT_BROKEN = 3
EXPECTED = (
    "Give a checkpoint's folder, the one with manifest.json in it, or a run by its folder, id, "
    "name or `latest`"
)


@click.group(cls=CommandGroup)
def checkpoint() -> None:
    """Inspect, verify, compare, average, export and import checkpoints."""


@checkpoint.command("list")
@click.argument("run", shell_complete=completion.run_names)
@click.option(
    "--verify", is_flag=True, help="Read every byte and report which checkpoints are whole."
)
@json_option
def list_(run: str, verify: bool, as_json: bool) -> int:
    """List the checkpoints of RUN (its folder, id, name, or `latest`), oldest first.

    `left at step N`: the checkpoint is on a branch; the run was resumed from step N before it.
    """
    root = _root(run)
    line = line_of(root)
    rows = [_row(path, verify, line) for path in _with_progress(list_checkpoints(root))]
    if as_json:
        print_json(rows)
    elif rows:
        print_rows(rows)
    else:
        click.echo(f"{root} has no checkpoint yet", err=True)
    faults = [fault for row in rows for fault in row["broken"]]
    unreadable = [fault for row in rows for fault in row["unreadable"]]
    for fault in (*faults, *unreadable):
        click.echo(fault, err=True)
    if faults:
        return _print_newest_intact(root)
    return EXIT_BROKEN if unreadable else 0


@checkpoint.command("inspect")
@click.argument("where", metavar="CHECKPOINT|RUN|FOLDER", shell_complete=completion.checkpoints)
@click.option("--tensors", is_flag=True, help="Also list every tensor, its type and shape.")
@click.option(
    "--config", "config_only", is_flag=True, help="Print the config that the run began with."
)
@json_option
def inspect_checkpoint(where: str, tensors: bool, config_only: bool, as_json: bool) -> None:
    """Print the contents and origin of a checkpoint; of a RUN, the latest.

    Of a FOLDER that transformers saved: its family, axes and parameters, as `instar grow` knows them.
    """
    if is_pretrained(Path(where)) and not config_only:
        _inspect_pretrained(Path(where), tensors, as_json)
        return

    path = checkpoint_at(where)
    with _with_advice(path):
        manifest = read_manifest(path)
    if config_only:
        from instar.config.origins import yaml_of
        from instar.schedule.operations import config_of_branch, history_from_json

        if not manifest.config:
            raise CheckpointError(f"{path}: saved by an older Instar, without the run's config")
        try:
            of_branch = config_of_branch(history_from_json(manifest.history))
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: its history is invalid: {error}") from error
        click.echo(yaml_of(manifest.config | of_branch), nl=False)
        return
    faults, headers = [], {}
    for name in (name for name in manifest.files if name.endswith(SUFFIX)):
        try:
            headers[name] = read_header(path / name)
        except CheckpointError as error:
            faults.append(str(error))
    if as_json:
        as_json_data = {"path": str(path), "parameters": parameter_count(manifest, headers)}
        as_json_data |= msgspec.to_builtins(manifest)
        print_json(as_json_data | ({"tensors": msgspec.to_builtins(headers)} if tensors else {}))
    else:
        print_manifest(path, manifest, headers)
        if tensors:
            print_headers(headers)
    if faults:
        raise CheckpointError(
            "\n".join(
                [
                    *faults,
                    f"List all broken files: instar checkpoint verify {shlex.quote(str(path))}",
                ]
            )
        )


def _inspect_pretrained(path: Path, tensors: bool, as_json: bool) -> None:
    from instar.models.hf.pretrained_folder import open_folder

    folder = open_folder(path)
    facts = pretrained_facts(folder)
    headers = {path.name: folder.layout.entries}
    if as_json:
        print_json(facts | ({"tensors": msgspec.to_builtins(headers)} if tensors else {}))
        return
    axes = ", ".join(f"{axis} {size:,}" for axis, size in facts["axes"].items())
    texts = {**facts, "axes": axes, "parameters": f"{facts['parameters']:,}"}
    print_named([(name, str(value)) for name, value in texts.items()], 14)
    if tensors:
        print_headers(headers)


@checkpoint.command("verify")
@click.argument("where", metavar="CHECKPOINT|RUN", shell_complete=completion.checkpoints)
@click.option("--all", "every", is_flag=True, help="Every checkpoint of the run, not one.")
@json_option
def verify_checkpoints(where: str, every: bool, as_json: bool) -> int:
    """Verify every byte of a checkpoint against its manifest; of a RUN, the latest, and its pointers.

    Lists every broken and every unreadable file; the exit code is 3 if there is one.
    """
    paths = list_checkpoints(_root(where)) if every else [checkpoint_at(where)]
    if not paths:
        raise CheckpointError(f"{_root(where)} has no checkpoint yet")
    checks = []
    for path in _with_progress(paths):
        checks.append(verify_checkpoint(path))
        if not as_json:
            print_check(checks[-1])
    if as_json:
        print_json([_check_to_json(check) for check in checks])
    if any(check.broken for check in checks):
        return _print_newest_intact(_root(where))
    dangling = [] if (Path(where) / MANIFEST).is_file() else dangling_pointers(_root(where))
    for text in dangling:
        click.echo(text, err=True)
    return EXIT_BROKEN if dangling or any(check.unreadable for check in checks) else 0


@checkpoint.command("diff")
@click.argument("a", metavar="A", shell_complete=completion.checkpoints)
@click.argument("b", metavar="B", shell_complete=completion.checkpoints)
@click.option(
    "--tensors", is_flag=True, help="List the tensors of all files, not only the model's."
)
@json_option
def diff_checkpoints(a: str, b: str, tensors: bool, as_json: bool) -> None:
    """Compare the checkpoints A and B (each a folder, or a run: its latest)."""
    from instar.config.fields import differing_keys

    path_a, path_b = checkpoint_at(a), checkpoint_at(b)
    with _with_advice(path_a):
        manifest_a = read_manifest(path_a)
    with _with_advice(path_b):
        manifest_b = read_manifest(path_b)
    settings = differing_keys([_settings(path_a, manifest_a), _settings(path_b, manifest_b)])
    groups = {"settings": settings, **compare_facts(path_a, path_b)}
    differences_by_file = compare_tensors(path_a, path_b)
    if as_json:
        as_json_data: dict[str, Any] = {"a": str(path_a), "b": str(path_b)}
        for group, differences in groups.items():
            as_json_data[group] = {
                key: {"a": value_a, "b": value_b} for key, (value_a, value_b) in differences.items()
            }
        as_json_data["tensors"] = {
            file: [d.to_dict() for d in file_differences]
            for file, file_differences in differences_by_file.items()
        }
        print_json(as_json_data)
    else:
        print_facts(groups, str(path_a), str(path_b))
        print_tensors(differences_by_file, tensors)


@checkpoint.command("analyze")
@click.argument("where", metavar="CHECKPOINT|RUN", shell_complete=completion.checkpoints)
@click.option("--against", metavar="CHECKPOINT|RUN", help="Default: the one saved before it.")
@json_option
def analyze_weights(where: str, against: str | None, as_json: bool) -> None:
    """Analyze how a checkpoint's model uses its capacity, and where it may be too small.

    Reports effective ranks of matrices and adapters, attention entropy over held-out tokens if the
    data exist, and the change since an earlier checkpoint.
    """
    path = checkpoint_at(where)
    before = None if against is None else checkpoint_at(against)

    from instar.run.offline.analysis import analyze_checkpoint

    with _with_advice(path):
        analysis = analyze_checkpoint(path, before)
    if as_json:
        print_json(analysis.to_dict())
    else:
        print_analysis(analysis)


@checkpoint.command("export")
@click.argument("where", metavar="CHECKPOINT|RUN", shell_complete=completion.checkpoints)
@click.argument("folder", type=NewFolder())
@click.option(
    "--to",
    "form",
    type=click.Choice(["hf", "peft"]),
    required=True,
    help="hf: transformers; peft: the adapters alone.",
)
@click.option(
    "--with-base", is_flag=True, help="peft: write the model under the adapters into FOLDER/base."
)
@click.option("--ema", is_flag=True, help="Export the moving average of the weights.")
@click.option(
    "--max-shard-size",
    callback=byte_size,
    metavar="SIZE",
    default="50GB",
    show_default=True,
    help="Largest file of weights; a larger model is several files.",
)
@json_option
def export_checkpoint(
    where: str,
    folder: Path,
    form: str,
    with_base: bool,
    ema: bool,
    max_shard_size: int,
    as_json: bool,
) -> None:
    """Write the model into the new folder FOLDER, in the format of transformers, or its adapters in that of peft.

    With --to peft, the weights under the adapters must still be those of the folder that the run began from.

    A GPT-2 style model becomes a GPT2LMHeadModel, a Llama style one a LlamaForCausalLM (with windows of
    one size a MistralForCausalLM or MinistralForCausalLM), and a model of transformers what it was; the run's tokenizer is included. One tensor at a time is in memory.
    """
    path = checkpoint_at(where)

    from instar.models.architecture import Architecture
    from instar.models.hf.config import to_config
    from instar.models.hf.folder import export_adapter, export_folder
    from instar.models.hf.module import class_name

    if with_base and form != "peft":
        raise click.UsageError("--with-base is for --to peft")
    with _with_advice(path):
        checkpoint = load_checkpoint(path)
    if "ema" in checkpoint.components and not ema:
        click.echo(
            "without --ema: the weights themselves, not their moving average, which sample and test use",
            err=True,
        )
    if form == "peft":
        with _checkpoint_errors():
            base = export_adapter(
                checkpoint,
                folder,
                averaged=ema,
                with_base=with_base,
                max_shard_bytes=max_shard_size,
            )
        if as_json:
            print_json({"path": str(folder), "base": str(base)})
        else:
            click.echo(str(folder))
        click.echo(f"next: AutoPeftModelForCausalLM.from_pretrained({str(folder)!r})", err=True)
        return
    with _checkpoint_errors():
        arch = export_folder(checkpoint, folder, averaged=ema, max_shard_bytes=max_shard_size)
    if isinstance(arch, Architecture):
        name = to_config(arch)["architectures"][0]
    else:
        name = class_name(arch)
    if as_json:
        print_json({"path": str(folder), "class": name})
    else:
        click.echo(str(folder))
    click.echo(f"next: {name}.from_pretrained({str(folder)!r})", err=True)


def _steps(_context: click.Context, _option: click.Parameter, text: str | None) -> list[int] | None:
    """Return steps such as 100,200,300."""
    if text is None:
        return None
    steps = [part.strip() for part in text.split(",")]
    if not all(step.isascii() and step.isdigit() for step in steps) or len(steps) > len({*steps}):
        raise click.BadParameter(f"{text!r} is no list of different steps; write e.g. 100,200,300")
    return [int(step) for step in steps]


@checkpoint.command("average")
@click.argument("run", shell_complete=completion.run_names)
@click.option("--last", type=click.IntRange(1), metavar="N", help="The last N checkpoints (3).")
@click.option("--steps", callback=_steps, metavar="A,B,C", help="Those of these steps.")
@click.option("--out", type=NewFolder(), help="The new run's folder; default: RUN.average.")
@json_option
def average(
    run: str, last: int | None, steps: list[int] | None, out: Path | None, as_json: bool
) -> None:
    """Create a run whose one checkpoint has the mean of the weights of several checkpoints of RUN.

    All else is that of the last of them, but for the moving average of the weights, which it does not have. One
    tensor of each is in memory at a time.
    """
    if last is not None and steps is not None:
        raise click.UsageError("--last and --steps exclude each other")
    root = _root(run)

    from instar.run.offline.grow import average_checkpoints

    folder = out or (place := root.resolve()).with_name(f"{place.name}.average")
    with _checkpoint_errors():
        path = average_checkpoints(root, steps or last or 3, folder)
    manifest = read_manifest(path)
    if as_json:
        print_json(
            {"path": str(path), "averaged_steps": manifest.history[-1]["operation"]["value"]}
        )
    else:
        click.echo(str(path))
    click.echo(f"{manifest.reason}; next: instar sample {shlex.quote(str(folder))}", err=True)


@checkpoint.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--to", "run_dir", type=NewFolder(), required=True, help="The new run's folder.")
@click.option(
    "--tokenizer", metavar="FILE", help="Of a SOURCE without tokenizer.json; or byte, for bytes."
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Of a file: nanoGPT's folder of train.bin, with which the run goes on.",
)
def import_(source: Path, run_dir: Path, tokenizer: str | None, data: Path | None) -> None:
    """Create a run from SOURCE: a folder in which transformers saved a GPT-2 or a Llama, or nanoGPT's ckpt.pt.

    The run of a ckpt.pt goes on at its step, with the optimizer's state and the settings that the file has.
    """
    importer = checkpoint_importer(source.suffix) if source.is_file() else None
    if importer is None and source.is_file():
        remedy = how_to_install("checkpoints", source.suffix)
        known = "a folder that transformers saved, or nanoGPT's ckpt.pt, is imported"
        raise CheckpointError(f"{source}: not a checkpoint that is known here; {remedy or known}")
    if importer is None and data is not None:
        raise click.UsageError("--data is for a checkpoint of nanoGPT, a file")

    from instar.models.hf.folder import import_folder

    with _checkpoint_errors():
        if importer is None:
            path = import_folder(source, run_dir, tokenizer=tokenizer)
        else:
            say = partial(click.echo, err=True)
            path = importer(source, run_dir, tokenizer=tokenizer, data=data, say=say)
    click.echo(str(path))
    command = "sample" if data is None else "resume"
    click.echo(f"next: instar {command} {shlex.quote(str(run_dir))}", err=True)


@contextmanager
def _checkpoint_errors(*advice: str) -> Iterator[None]:
    """Convert ConfigErrors of a run, config or tokenizer to CheckpointErrors, exit code 3."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointError("\n".join([*map(str, error.problems), *advice])) from error


@contextmanager
def _with_advice(path: Path) -> Iterator[None]:
    """Add to a CheckpointError the command that lists the whole checkpoints of the run."""
    try:
        yield
    except CheckpointError as error:
        run = shlex.quote(str(path.absolute().parent.parent))
        advice = f"List the run's whole checkpoints: instar checkpoint list {run} --verify"
        raise CheckpointError(f"{error}\n{advice}") from error


def checkpoint_at(text: str) -> Path:
    """Return the checkpoint folder that `text` names; the error suggests what to give instead.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    with _checkpoint_errors(EXPECTED):
        return resolve_checkpoint(text)


def _with_progress(paths: list[Path]) -> Iterator[Path]:
    return track_items(paths, "reading checkpoints", "checkpoints", len(paths))


def _root(text: str) -> Path:
    """Return the folder of the run, or of the checkpoint's run, that `text` names."""
    path = Path(text).absolute()
    if path.is_dir() and path.parent.name == "checkpoints":
        return path.parent.parent
    if (path / "checkpoints").is_dir():
        return Path(text)
    with _checkpoint_errors(EXPECTED):
        return find_run(text).path


def _row(path: Path, verify: bool, line: Line | None) -> dict[str, Any]:
    root = path.parent.parent
    pointer_names = [pointer for pointer in pointers(root) if pointer_target(root, pointer) == path]
    row: dict[str, Any] = {"name": path.name, "path": str(path), "pointers": pointer_names}
    try:
        manifest = read_manifest(path)
    except UnreadableError as error:
        return row | {"verified": verify, "broken": [], "unreadable": [str(error)]}
    except CheckpointError as error:
        return row | {"verified": verify, "broken": [str(error)], "unreadable": []}
    outcome = verify_checkpoint(path) if verify else None
    return row | {
        "step": manifest.step,
        "tokens": manifest.progress.get("tokens"),
        "loss": manifest.loss,
        "size_bytes": sum(entry.size_bytes for entry in manifest.files.values()),
        "time": manifest.time,
        "reason": manifest.reason,
        "world_size": manifest.world_size,
        "left_at": superseded_at(manifest, line),
        "verified": verify,
        "broken": list(outcome.broken) if outcome else [],
        "unreadable": list(outcome.unreadable) if outcome else [],
    }


def _check_to_json(check: Verification) -> dict[str, Any]:
    return {
        "path": str(check.path),
        "whole": not check.broken and not check.unreadable,
        "broken": check.broken,
        "unreadable": check.unreadable,
        "unlisted": check.extra_files,
        "size_bytes": check.size_bytes,
        "seconds": check.seconds,
        "bytes_per_s": check.bytes_per_s,
    }


def _print_newest_intact(root: Path) -> int:
    """Print on stderr the newest whole checkpoint of a run with a damaged one; return exit code 3."""
    try:
        intact, _ = latest_intact(root)
        click.echo(f"The newest whole checkpoint of this run is {intact.path}", err=True)
    except CheckpointError:
        click.echo("No checkpoint of this run is whole", err=True)
    return EXIT_BROKEN


def _settings(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the config's keys and, as `in force: …`, the settings after the history; empty if the
    checkpoint is not in a run's folder."""
    from instar.config.fields import values
    from instar.run.resume import began_with
    from instar.schedule.operations import effective, history_from_json

    run = RunDir(path.absolute().parent.parent)
    if not (manifest.config or run.config.is_file()):
        return {}
    with _checkpoint_errors():
        began = began_with(run, manifest)
    try:
        config, settings = effective(began, history_from_json(manifest.history))
    except ValueError as error:
        raise CheckpointError(f"{path}: its history is invalid: {error}") from error
    force = dataclasses.asdict(settings)
    return values(config) | {f"in force: {name}": value for name, value in force.items()}
