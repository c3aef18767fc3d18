"""How much a chain's links change, where, and whether at the same places as the link before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from instar.checkpoint.delta.encoding import EncodingError, changed_places
from instar.checkpoint.delta.folder import Segment, links, segments
from instar.checkpoint.delta.link import LinkFile, read_link
from instar.checkpoint.delta.state import Outline, block_words, open_state, outline, word_count
from instar.checkpoint.inspect import TensorEntry
from instar.checkpoint.manifest import CheckpointError

Places = dict[tuple[str, int], npt.NDArray[np.int64]]
"""Indices of the changed elements in each block of each tensor."""

_LAYER = re.compile(r"(?:.*?\.)??\d+(?=\.)")


@dataclass(frozen=True)
class Share:
    """Changed elements of a link or a layer."""

    changed: int
    elements: int
    common: int | None
    """number of changed elements that the link before changed too; None: unknown"""
    changed_before: int
    """number of elements that the link before changed"""

    @property
    def density(self) -> float:
        return self.changed / self.elements if self.elements else 0.0

    @property
    def overlap(self) -> float | None:
        """Jaccard index of the changed elements and those of the link before, from 0 to 1; None
        after an anchor."""
        if self.common is None:
            return None
        either = self.changed + self.changed_before - self.common
        return self.common / either if either else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {"changed": self.changed, "density": self.density, "overlap": self.overlap}


@dataclass(frozen=True)
class LinkStatistics:
    """Statistics of one link."""

    number: int
    step: int
    size_bytes: int
    full_bytes: int
    whole: Share
    layers: dict[str, Share] = field(default_factory=dict)
    """by `layer_of` the names of tensors"""

    @property
    def ratio(self) -> float:
        """How many times smaller the link is than the tensors."""
        return self.full_bytes / self.size_bytes

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["whole"]
        layers = {name: share.to_dict() for name, share in self.layers.items()}
        return fields | {"ratio": self.ratio, **self.whole.to_dict(), "layers": layers}


def layer_of(name: str) -> str:
    """Returns the layer of a tensor: its name up to the first number, or without its last part."""
    if found := _LAYER.match(name):
        return found[0]
    return name.rpartition(".")[0] or name


def statistics(folder: Path) -> list[LinkStatistics]:
    """Returns the statistics of every link of a chain in order, without its anchors.

    Raises:
        CheckpointError: there is no chain, or a file is missing or damaged.
    """
    return [found for segment in segments(links(folder)) for found in _of_segment(segment)]


@dataclass(frozen=True)
class _Changed:
    """What a link changes, or nothing."""

    counts: Mapping[str, int] = field(default_factory=dict)
    places: Places | None = None
    """None: unknown"""


def _of_segment(segment: Segment) -> Iterator[LinkStatistics]:
    entries = outline(open_state(segment.anchor.file))
    before = _Changed()
    for link in segment.links:
        now = _changed(read_link(link.file), entries)
        layers: dict[str, list[Share]] = {}
        for name in entries:
            layers.setdefault(layer_of(name), []).append(_share(name, entries[name], now, before))
        shares = {layer: _sum(shares) for layer, shares in layers.items()}
        whole = _sum(list(shares.values()))
        yield LinkStatistics(
            link.number, link.step, link.size_bytes, link.full_bytes, whole, shares
        )
        before = now


def _changed(file: LinkFile, entries: Outline) -> _Changed:
    file.check_fits(entries)
    counts = {name: changes.changed for name, changes in file.footer.tensors.items()}
    places: Places = {}
    for name, changes in file.footer.tensors.items():
        step, words = block_words(entries[name]), word_count(entries[name])
        for span in changes.spans:
            if span.gaps is None and file.footer.values == "absolute":
                return _Changed(counts)
            difference = file.difference(name, span.block)
            assert difference is not None
            try:
                size = min(step, words - span.block * step)
                places[name, span.block] = changed_places(difference, size)
            except EncodingError as error:
                raise CheckpointError(f"{file.path}: invalid: {name}: {error}") from error
    return _Changed(counts, places)


def _share(name: str, entry: TensorEntry, now: _Changed, before: _Changed) -> Share:
    common: int | None = None
    if now.places is not None and before.places is not None:
        common = 0
        for block in range(-(-word_count(entry) // block_words(entry))):
            places, last = now.places.get((name, block)), before.places.get((name, block))
            if places is not None and last is not None:
                marked = np.zeros(max(places[-1], last[-1]) + 1, np.bool_)
                marked[last] = True
                common += int(np.count_nonzero(marked[places]))
    return Share(now.counts.get(name, 0), entry.elements, common, before.counts.get(name, 0))


def _sum(shares: Sequence[Share]) -> Share:
    common = [share.common for share in shares if share.common is not None]
    return Share(
        sum(share.changed for share in shares),
        sum(share.elements for share in shares),
        sum(common) if len(common) == len(shares) else None,
        sum(share.changed_before for share in shares),
    )
