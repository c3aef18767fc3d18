"""Printed descriptions of checkpoints: manifest, tensors, differences and analysis."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from instar.checkpoint.compare import Difference, Verification
from instar.checkpoint.layout import TensorEntry, files_of
from instar.checkpoint.manifest import Manifest
from instar.cli.output import print_named, print_table
from instar.models.hf.pretrained import LoraShape
from instar.models.shape import ArchitectureError, count_parameters, windows_text
from instar.record.format import bytes_text, duration, loss, si

if TYPE_CHECKING:
    from instar.models.hf.pretrained_folder import PretrainedFolder
    from instar.run.offline.analysis import CheckpointAnalysis


Headers = Mapping[str, Mapping[str, "TensorEntry"]]
Pairs = Mapping[str, tuple[Any, Any]]

_SHAPE = ("n_layer", "n_embd", "n_head", "n_kv_head", "head_dim", "n_mlp", "context", "vocab_size")
_SWITCHES = ("norm", "activation", "positions", "bias", "tied")


def print_manifest(path: Path, manifest: Manifest, headers: Headers) -> None:
    """Print the contents of a checkpoint; `headers` are those of its readable tensor files."""
    print_named(_facts(path, manifest, headers), 14)
    click.echo()
    rows = [
        [
            name,
            entry.pattern,
            f"{len(headers[name]):,}" if name in headers else "",
            bytes_text(entry.size_bytes),
            entry.xxh3_128,
        ]
        for name, entry in manifest.files.items()
    ]
    print_table(["file", "held", "tensors", "size", "xxh3-128"], rows)


def pretrained_facts(folder: PretrainedFolder) -> dict[str, Any]:
    """Return what is known of a model of transformers on disk, as JSON values."""
    entries = [folder.layout.entries[name] for name in folder.stored.values()]
    return {
        "folder": str(folder.path),
        "family": folder.shape.family.name,
        "axes": folder.shape.sizes(),
        "parameters": count_parameters(folder.shape).total,
        "head": "tied" if folder.shape.tied else "untied",
        "dtype": ", ".join(sorted({entry.dtype for entry in entries})),
        "size": bytes_text(sum(entry.size_bytes for entry in entries)),
        "files": len({pieces[0].file for pieces in folder.layout.pieces.values()}),
        "refused": ", ".join(folder.shape.refusals()) or "no operation",
    }


def print_headers(headers: Headers) -> None:
    for file, entries in headers.items():
        click.echo()
        rows = [[name, e.dtype, _times(e.shape)] for name, e in entries.items()]
        print_table([file, "type", "shape"], rows)


def parameter_count(manifest: Manifest, headers: Headers) -> int | None:
    """Return the number of elements of the model's parameters; None if a file is unreadable."""
    files = files_of(manifest, "model")
    if not files or not files.keys() <= headers.keys():
        return None
    return sum(
        entry.elements
        for file in files
        for name, entry in headers[file].items()
        if name not in manifest.buffers
    )


def _facts(path: Path, manifest: Manifest, headers: Headers) -> Iterator[tuple[str, str]]:
    save_date = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(manifest.time))
    ranks = f"{manifest.world_size} rank{'' if manifest.world_size == 1 else 's'}"
    progress = {unit: value for unit, value in manifest.progress.items() if unit != "step"}
    parameters = parameter_count(manifest, headers)
    yield "checkpoint", str(path)
    yield "step", f"{manifest.step:,}"
    yield "saved", f"{save_date}, {duration(time.time() - manifest.time)} ago, by {ranks}"
    yield "reason", manifest.reason or "unknown"
    if progress:
        yield "progress", ", ".join(_amount(unit, value) for unit, value in progress.items())
    if manifest.loss is not None:
        yield "loss", f"{loss(manifest.loss, 4)}, validation"
    yield from zip(("architecture", ""), _architecture(manifest.architecture), strict=False)
    yield "parameters", "?" if parameters is None else f"{parameters:,}"
    if manifest.buffers:
        yield "buffers", f"{len(manifest.buffers):,}"
    yield "data", manifest.data or "none"
    yield "tokenizer", manifest.tokenizer or "none"
    history = [_operation(entry) for entry in manifest.history] or ["no operations"]
    yield from zip(("history", *[""] * (len(history) - 1)), history, strict=True)
    if manifest.left_out:
        yield "left out", ", ".join(manifest.left_out)
    yield "versions", ", ".join(f"{name} {value}" for name, value in manifest.versions.items())
    yield "format", str(manifest.format)


def _amount(unit: str, value: float) -> str:
    if unit.endswith("_s"):
        return f"{duration(value)} {unit.removesuffix('_s')}"
    return f"{si(value)} {'FLOPs' if unit == 'flops' else unit}"


def _architecture(fields: Mapping[str, Any]) -> list[str]:
    """Describe a GPT in two lines; list the fields of any other architecture."""
    if "model_type" in fields and (lines := _describe_pretrained(fields)):
        return lines
    has_counts = all(type(fields.get(name)) is int for name in _SHAPE)
    if not (has_counts and all(name in fields for name in (*_SWITCHES, "rope_base"))):
        return [", ".join(f"{name} {_cell(value)}" for name, value in fields.items()) or "none"]
    a = fields
    m = a.get("mask")
    heads = f"{a['n_head']} heads of {a['head_dim']}"
    if a["n_kv_head"] != a["n_head"]:
        heads = f"{a['n_head']} heads ({a['n_kv_head']} for keys and values) of {a['head_dim']}"
    switches = [
        a["norm"],
        a["activation"],
        f"rope (base {a['rope_base']:g})" if a["positions"] == "rope" else "learned positions",
        "biases" if a["bias"] else "no biases",
        "tied head" if a["tied"] else "untied head",
        *(["queries and keys normalised"] if a.get("qk_norm") else []),
        *(
            [f"embeddings times {a['embedding_multiplier']}"]
            if a.get("embedding_multiplier", 1) != 1
            else []
        ),
        *([f"a convolution over {a['conv_size']} tokens"] if a.get("conv_size") else []),
        *([f"windows of {windows_text(a['windows'])}"] if a.get("windows") else []),
        *([f"dropout {a['dropout']:g}"] if a.get("dropout") else []),
        *(
            [f"{a['num_experts']} experts, {a.get('num_experts_per_tok')} per token"]
            if a.get("num_experts")
            else []
        ),
        *(
            f"adapters of rank {adapter['rank']} on {adapter['target']}"
            for adapter in a.get("lora", ())
        ),
        *([f"new {m['axis']} entering until step {m['begin'] + m['steps']:,}"] if m else []),
    ]
    return [
        f"{a['n_layer']} layers, {a['n_embd']} wide, {heads}, MLP {a['n_mlp']}, "
        f"context {a['context']}, vocabulary {a['vocab_size']:,}",
        ", ".join(switches),
    ]


def _describe_pretrained(fields: Mapping[str, Any]) -> list[str]:
    """Describe a model of transformers; empty if it is not known."""
    try:
        shape = LoraShape.from_dict(fields)
    except ArchitectureError:
        return []
    axes = ", ".join(f"{axis} {size:,}" for axis, size in shape.sizes().items())
    adapters = [f"adapters of rank {adapter.rank} on {adapter.target}" for adapter in shape.lora]
    head = "tied head" if shape.tied else "untied head"
    return [f"{shape.family.name}: {axes}", ", ".join([head, *adapters])]


def _operation(entry: Any) -> str:
    match entry:
        case {"operation": {"name": "override", "value": dict(given)}, "step": int(step)}:
            settings = ", ".join(f"{key} {_cell(value)}" for key, value in given.items())
            return f"step {step:,}: set at resume: {settings}"
        case {"operation": {"name": str(name), **values}, "step": int(step)}:
            texts = [_cell(value) for value in values.values() if value not in (None, {})]
            return " ".join([f"step {step:,}:", name, *texts])
    return _cell(entry)


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the checkpoints of a run, given as in `instar checkpoint list --json`."""
    now = time.time()
    texts = []
    for row in rows:
        cells = ["?"] * 6
        if "step" in row:
            cells = [
                f"{row['step']:,}",
                "" if row["tokens"] is None else si(row["tokens"]),
                "" if row["loss"] is None else loss(row["loss"], 4),
                bytes_text(row["size_bytes"]),
                duration(now - row["time"]),
                row["reason"],
            ]
        state = ["BROKEN"] if row["broken"] else ["whole"] if row["verified"] else []
        superseded_at = row.get("left_at")
        branch = [] if superseded_at is None else [f"left at step {superseded_at:,}"]
        texts.append([row["name"], *cells, " ".join([*row["pointers"], *branch, *state])])
    print_table(["checkpoint", "step", "tokens", "loss", "size", "age", "reason", ""], texts)


def print_check(check: Verification) -> None:
    """Print whether a checkpoint is whole, and the duration of the check."""
    rate = f"{bytes_text(check.size_bytes)} in {check.seconds:.2f} s, {check.bytes_per_s / 1e9:.1f} GB/s"
    verdict = "BROKEN" if check.broken else "UNREADABLE" if check.unreadable else "whole"
    click.echo(f"{check.path}: {verdict}, {rate}")
    for fault in (*check.broken, *check.unreadable):
        click.echo(f"  {fault}")
    for name in check.extra_files:
        click.echo(f"  {name}: not part of the checkpoint; nobody reads it")


def print_facts(groups: Mapping[str, Pairs], a: str, b: str) -> None:
    """Print the differing metadata of two checkpoints by group."""
    for group, pairs in groups.items():
        if pairs:
            print_table([group, a, b], [[key, *map(_cell, pair)] for key, pair in pairs.items()])
        else:
            click.echo(f"{group}: same")
        click.echo()


def print_tensors(differences_by_file: Mapping[str, Sequence[Difference]], in_full: bool) -> None:
    """Print the number of differing tensors per file, and those of the model; `in_full`: of all."""
    verdicts = ("same", "changed", "only_a", "only_b")
    counts = [
        [
            file,
            *(
                str(sum(difference.verdict == verdict for difference in differences))
                for verdict in verdicts
            ),
        ]
        for file, differences in differences_by_file.items()
    ]
    print_table(["tensors", "same", "changed", "only in A", "only in B"], counts)
    for file, file_differences in differences_by_file.items():
        unlike = [difference for difference in file_differences if difference.verdict != "same"]
        if unlike and (in_full or file == "model.safetensors"):
            click.echo()
            rows = [[difference.name, *_difference_cells(difference)] for difference in unlike]
            print_table([file, "", "max |b - a|", "‖b - a‖ / ‖a‖"], rows)


def _difference_cells(difference: Difference) -> list[str]:
    if difference.max_abs is not None and difference.relative_l2 is not None:
        return ["changed", f"{difference.max_abs:.3g}", f"{difference.relative_l2:.3g}"]
    if difference.a and difference.b:
        return [
            f"another shape: {_times(difference.a.shape)} → {_times(difference.b.shape)}",
            "",
            "",
        ]
    return ["only in A" if difference.a else "only in B", "", ""]


def _times(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def print_analysis(report: CheckpointAnalysis) -> None:
    """Print tables of matrices and of heads, other changes, and possible conclusions."""
    analysis = report.analysis
    click.echo(f"checkpoint  {report.path}")
    click.echo(f"against     {report.against or 'nothing: it is the first'}")
    click.echo()
    since = {change.name: change for change in analysis.changes}
    per_step = any(change.relative_per_step for change in analysis.changes)
    rows = []
    for rank in analysis.ranks:
        change = None if rank.adapter else since.get(f"{rank.name}.weight", since.get(rank.name))
        rows.append(
            [
                rank.name + (" (adapter)" if rank.adapter else ""),
                "×".join(map(str, rank.shape)),
                *(f"{effective:,}" for effective in rank.effective),
                f"{rank.full:,}",
                "" if change is None else f"{change.relative:.3g}",
                *([_update(change.relative_per_step) if change else ""] if per_step else []),
            ]
        )
    energies = [f"rank at {energy:.0%}" for energy in analysis.energies]
    columns = ["change", *(["per step"] if per_step else [])]
    print_table(["matrix", "shape", *energies, "of", *columns], rows)
    if analysis.heads:
        click.echo()
        layers: dict[int, list[str]] = {}
        for head in analysis.heads:
            layers.setdefault(head.layer, []).append(f"{head.share:4.0%}")
        print_table(
            ["attention", "entropy of each head, of the most that is possible"],
            [[f"layer {layer}", "  ".join(shares)] for layer, shares in layers.items()],
        )
    click.echo()
    for line in _notes(report):
        click.echo(line)


def _notes(report: CheckpointAnalysis) -> Iterator[str]:
    analysis = report.analysis
    if (drift := analysis.drift) is not None:
        yield (
            f"token table: {drift.rows:,} rows at a mean cosine of {drift.cosine:.4f} to what they "
            f"were; {drift.still:,} of them have not moved"
        )
    yield from (f"left out: {reason}" for reason in analysis.left_out)
    yield from (f"suggestion: {text}" for text in analysis.suggestions)


def _update(per_step: float | None) -> str:
    return "" if per_step is None else f"{per_step:.1e}"
