"""What contradicts itself in the config of a language run; needs no data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from instar.config.clash import Clash
from instar.config.language import DataConfig, ModelConfig

_FUNCTION = re.compile(r"[\w.]+:[\w.]+")


def shape_checks(model: ModelConfig) -> list[Clash]:
    """Sizes that do not divide each other."""
    found = []
    heads, width = model.n_head, model.n_embd
    if width % heads:
        near = max(heads, round(width / heads) * heads)
        found.append(
            Clash(
                ("model.n_embd", "model.n_head"),
                f"model.n_embd ({width}) must be divisible by model.n_head ({heads})",
                f"n_embd {near} would be",
            )
        )
    elif model.positions == "rope" and (width // heads) % 2:
        found.append(
            Clash(
                ("model.n_embd", "model.n_head", "model.positions"),
                f"rope turns pairs of channels: model.n_embd / model.n_head must be even, "
                f"got {width} / {heads} = {width // heads}",
            )
        )
    if model.n_kv_head is not None and heads % model.n_kv_head:
        found.append(
            Clash(
                ("model.n_kv_head", "model.n_head"),
                f"model.n_head ({heads}) must be divisible by model.n_kv_head ({model.n_kv_head})",
            )
        )
    return found


def data_checks(data: DataConfig) -> list[Clash]:
    """Everything in the section that contradicts itself."""
    rules: tuple[Callable[[DataConfig], Iterator[Clash]], ...] = (
        _shares,
        _source,
        _held_out,
        _order,
        _samples,
        _mixture,
        _workers,
    )
    return [clash for rule in rules for clash in rule(data)]


def data_rank_checks(data: DataConfig, world_size: int) -> list[Clash]:
    """Everything in the section that so many ranks contradict."""
    if data.strategy == "dispatched" or world_size == 1:
        return []
    if data.kind == "python":
        return [
            Clash(
                ("data.strategy", "data.kind"),
                f"a Python iterable can be read by rank 0 only, not by each of {world_size} ranks",
                "say data.strategy: dispatched",
            )
        ]
    if data.kind == "stream" and data.lanes < world_size:
        return [
            Clash(
                ("data.lanes", "data.strategy"),
                f"{world_size} ranks cannot share {data.lanes} lanes: each reads whole ones",
                f"say data.lanes: {world_size} or a multiple, or data.strategy: dispatched",
            )
        ]
    return []


def _shares(data: DataConfig) -> Iterator[Clash]:
    share = data.val_fraction + data.test_fraction
    if share >= 1:
        yield Clash(
            ("data.val_fraction", "data.test_fraction"),
            f"data.val_fraction + data.test_fraction must be less than 1, got {share:g}: "
            "nothing would be left to train on",
        )


def _source(data: DataConfig) -> Iterator[Clash]:
    if data.kind == "python" and not _FUNCTION.fullmatch(data.source):
        yield Clash(
            ("data.source", "data.kind"),
            f"data.source of kind python names a function, not {data.source!r}",
            "e.g. my_package.my_module:samples",
        )
    elif data.kind in ("rows", "stream") and data.source == "stdlib" and not data.mixture:
        yield Clash(
            ("data.source", "data.kind", "data.mixture"),
            f"data.source of kind {data.kind} must be given: files, a folder or a name on the hub",
        )
    if data.mixture and data.source != "stdlib":
        yield Clash(
            ("data.source", "data.mixture"),
            "data.source is not read where data.mixture says what is",
            "name it as a part of data.mixture, or leave one of them out",
        )
    if data.kind in ("tokens", "python") and (data.subset or data.source_split != "train"):
        key = "data.subset" if data.subset else "data.source_split"
        yield Clash(
            (key, "data.kind"),
            f"{key} is of a Hugging Face data set, and kind {data.kind} reads none",
            "use kind rows or stream, or leave it out",
        )
    if data.kind == "tokens" and data.tokens_field is not None:
        yield Clash(
            ("data.tokens_field", "data.kind"),
            "data.tokens_field names a column of rows, and kind tokens prepares text",
            "say data.kind: rows",
        )
    if data.kind != "tokens" and data.max_bytes is not None:
        yield Clash(
            ("data.max_bytes", "data.kind"),
            f"data.max_bytes limits what kind tokens prepares; kind {data.kind} reads its source "
            "as it is",
        )


def _held_out(data: DataConfig) -> Iterator[Clash]:
    if data.kind in ("stream", "python") and data.val_source is None:
        yield Clash(
            ("data.val_source", "data.kind"),
            f"kind {data.kind} cannot be split: data.val_source must say what is held out",
            "a file, folder or glob of text",
        )


def _order(data: DataConfig) -> Iterator[Clash]:
    if data.kind in ("stream", "python") and data.order in ("random", "blocks"):
        yield Clash(
            ("data.order", "data.kind"),
            f"data.order {data.order} reads at any place, and kind {data.kind} is read from its "
            "beginning",
            "use sequential, or shuffled (within data.shuffle_window)",
        )
    if data.order == "random" and not data.packing:
        yield Clash(
            ("data.order", "data.packing"),
            "data.order random draws windows of packed text, and data.packing is false",
        )


def _samples(data: DataConfig) -> Iterator[Clash]:
    if data.kind == "tokens" and not data.packing:
        yield Clash(
            ("data.packing", "data.kind"),
            "token shards hold text end to end: data.packing false needs rows",
            "say data.kind: rows",
        )
    if data.kind in ("stream", "python") and data.tokenizer in ("char", "bpe"):
        yield Clash(
            ("data.tokenizer", "data.kind"),
            f"a {data.tokenizer} tokenizer is trained before, and kind {data.kind} is not read "
            "before it trains",
            "use byte, or the path of a tokenizer.json",
        )


def _mixture(data: DataConfig) -> Iterator[Clash]:
    if not data.mixture:
        return
    if data.kind not in ("tokens", "rows"):
        yield Clash(
            ("data.mixture", "data.kind"),
            f"sources of kind {data.kind} cannot be mixed: they are read from their beginning",
            "use rows, or tokens",
        )
    without = [number for number, part in enumerate(data.mixture) if part.weight is None]
    if 0 < len(without) < len(data.mixture):
        key = f"data.mixture[{without[0]}]"
        yield Clash(
            (key, "data.mixture"),
            "either all parts of data.mixture have a weight, or none",
            f"{key} has none",
        )
    if data.tokenizer in ("char", "bpe"):
        yield Clash(
            ("data.tokenizer", "data.mixture"),
            f"a {data.tokenizer} tokenizer would be trained on each part of data.mixture anew",
            "train one with `instar data prepare`, and name its tokenizer.json; or use byte",
        )
    if data.order in ("random", "blocks"):
        yield Clash(
            ("data.order", "data.mixture"),
            f"data.order {data.order} is of one source; those of a mixture are shuffled or "
            "sequential",
        )


def _workers(data: DataConfig) -> Iterator[Clash]:
    if data.workers and data.kind == "python":
        yield Clash(
            ("data.workers", "data.kind"),
            "an iterable is read by one process: data.workers must be 0 with kind python",
        )
