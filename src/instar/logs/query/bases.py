"""What the evaluations of runs were made on, as their checkpoints say, and which of their values cannot be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from instar.checkpoint.manifest import STATE
from instar.config.files import of_bounded_depth, read_regular
from instar.record.rundir import RunDir
from instar.tasks.basis import Basis, incomparable

_MOST_BYTES = 1 << 24
_NAMED = 3
"""runs of one basis that a note names"""


class _State(msgspec.Struct):
    basis: dict[str, str] = {}


def recorded_basis(run: RunDir) -> Basis:
    """Return what the last evaluation before a run's latest checkpoint was made on; empty if there is none."""
    if (path := run.latest_checkpoint()) is None:
        return {}
    try:
        text = read_regular(path / STATE, _MOST_BYTES)
        return msgspec.json.decode(of_bounded_depth(text), type=_State).basis
    except (OSError, ValueError):
        return {}


def notes_on_bases(bases: Mapping[str, Basis]) -> list[str]:
    """Return one line for each basis in a list of runs but the first; runs without one are left out.

    Args:
        bases: by the name of the run.
    """
    known_bases = {name: basis for name, basis in bases.items() if basis}
    if not known_bases:
        return []
    first = next(iter(known_bases))
    groups: list[list[str]] = []
    for name, basis in known_bases.items():
        if incomparable(known_bases[first], basis):
            # runs that differ from the first alike need not be comparable with each other
            alike = (g for g in groups if not incomparable(known_bases[g[0]], basis))
            group = next(alike, None)
            if group is None:
                groups.append([name])
            else:
                group.append(name)
    notes = [
        note_on_basis(
            "values", names, first, incomparable(known_bases[first], known_bases[names[0]])
        )
        for names in groups
    ]
    more = len(notes) - _NAMED
    return [
        *notes[:_NAMED],
        *([f"nor are those of runs on {more} other bases"] if more > 0 else []),
    ]


def note_on_basis(what: str, names: Sequence[str], first: str, reasons: Sequence[str]) -> str:
    """Return the line that says why held-out values or losses of runs are not comparable with those of the first."""
    return f"held-out {what} of {_names(names)} are not comparable with those of {first}: {', '.join(reasons)}"


def _names(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join([*names[:_NAMED], *([f"{more} more"] if more > 0 else [])])
