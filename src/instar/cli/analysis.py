"""How an analysis of a model reads to a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from instar.cli.table import print_table

if TYPE_CHECKING:
    from instar.run.analyze import CheckpointAnalysis


def print_analysis(found: CheckpointAnalysis) -> None:
    """A table of matrices, one of heads, what changed beside them, and what it may mean."""
    analysis = found.analysis
    click.echo(f"checkpoint  {found.path}")
    click.echo(f"against     {found.against or 'nothing: it is the first'}")
    click.echo()
    since = {change.name: change for change in analysis.changes}
    per_step = any(change.relative_per_step for change in analysis.changes)
    rows = []
    for rank in analysis.ranks:
        change = None if rank.adapter else since.get(f"{rank.name}.weight")
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
    changed = ["change", *(["per step"] if per_step else [])]
    print_table(["matrix", "shape", *energies, "of", *changed], rows)
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
    for line in _beside(found):
        click.echo(line)


def _beside(found: CheckpointAnalysis) -> Iterator[str]:
    analysis = found.analysis
    if (drift := analysis.drift) is not None:
        yield (
            f"token table: {drift.rows:,} rows at a mean cosine of {drift.cosine:.4f} to what they "
            f"were; {drift.still:,} of them have not moved"
        )
    yield from (f"left out: {reason}" for reason in analysis.left_out)
    yield from (f"suggestion: {text}" for text in analysis.suggestions)


def _update(per_step: float | None) -> str:
    return "" if per_step is None else f"{per_step:.1e}"
