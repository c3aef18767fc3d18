"""How much a chain's links change, where, and whether at the same places as the link before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from instar.checkpoint.layout import TensorEntry
from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta.format.encoding import EncodingError, changed_mask
from instar.extensions.delta.format.folder import Segment, links, segments
from instar.extensions.delta.format.link import LinkFile, read_link
from instar.extensions.delta.format.state import (
    Outline,
    block_words,
    open_state,
    outline,
    word_count,
)
from instar.record.progress import track_items

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


def layer_name(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number, or without its last part."""
    if match := _LAYER.match(name):
        return match[0]
    return name.rpartition(".")[0] or name


def statistics(folder: Path) -> list[LinkStatistics]:
    """Return the statistics of every link of a chain in order, without its anchors.

    Raises:
        CheckpointError: there is no chain, or a file is missing or damaged.
    """
    chain = links(folder)
    statistics_of_links = (entry for segment in segments(chain) for entry in _of_segment(segment))
    return list(track_items(statistics_of_links, f"reading {folder}", "links", len(chain)))


def _of_segment(segment: Segment) -> Iterator[LinkStatistics]:
    entries = outline(open_state(segment.anchor.file))
    before: LinkFile | None = None
    for link in segment.links:
        now = read_link(link.file)
        yield link_statistics(now, entries, before)
        before = now


def link_statistics(link: LinkFile, entries: Outline, before: LinkFile | None) -> LinkStatistics:
    """Return the statistics of a link.

    Args:
        entries: all tensors.
        before: the link before it; None: that is an anchor.

    Raises:
        CheckpointError: a link is damaged.
    """
    link.check_fits(entries)
    layers: dict[str, list[Share]] = {}
    for name, entry in entries.items():
        layers.setdefault(layer_name(name), []).append(_share(name, entry, link, before))
    shares = {layer: _sum(layer_shares) for layer, layer_shares in layers.items()}
    head = link.footer
    total = _sum(list(shares.values()))
    return LinkStatistics(head.number, head.step, link.size_bytes, head.full_bytes, total, shares)


def _share(name: str, entry: TensorEntry, now: LinkFile, before: LinkFile | None) -> Share:
    if before is None:
        return Share(_n_changed(now, name), entry.elements, None, 0)
    common: int | None = 0
    # one block of each at a time: the masks of a whole tensor may take as much memory as itself
    for block in range(-(-word_count(entry) // block_words(entry))):
        mask, last = (_mask(link, name, entry, block) for link in (now, before))
        if common is None or mask is None or last is None:
            common = None
        else:
            common += int(np.count_nonzero(mask & last))
    return Share(_n_changed(now, name), entry.elements, common, _n_changed(before, name))


def _n_changed(link: LinkFile, name: str) -> int:
    changes = link.footer.tensors.get(name)
    return 0 if changes is None else changes.n_changed


def _mask(
    link: LinkFile, name: str, entry: TensorEntry, block: int
) -> npt.NDArray[np.bool_] | None:
    """Return whether each element of a block is changed; None: unknown."""
    step = block_words(entry)
    size = min(step, word_count(entry) - block * step)
    difference = link.difference(name, block)
    if difference is None:
        return np.zeros(size, np.bool_)
    if difference.gaps is None and link.footer.values == "absolute":
        return None
    try:
        return changed_mask(difference, size)
    except EncodingError as error:
        raise CheckpointError(f"{link.path}: invalid: {name}: {error}") from error


def _sum(shares: Sequence[Share]) -> Share:
    common = [share.common for share in shares if share.common is not None]
    return Share(
        sum(share.changed for share in shares),
        sum(share.elements for share in shares),
        sum(common) if len(common) == len(shares) else None,
        sum(share.changed_before for share in shares),
    )
