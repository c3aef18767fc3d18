"""What the evaluations of runs were made on, as their checkpoints say: which of their values can be compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from instar.checkpoint.manifest import STATE
from instar.config.files import of_bounded_depth, read_regular
from instar.logs.query.groups import RunGroup
from instar.record.rundir import RunDir
from instar.tasks.basis import Basis, incomparable, without_seed

_CHECKPOINT = re.compile(r"step-[0-9.]+")
_MOST_BYTES = 1 << 24
_NAMED = 3
"""runs of one basis that a note names"""


class _State(msgspec.Struct):
    basis: dict[str, str] = {}


def recorded_basis(run: RunDir) -> Basis:
    """Return what the last evaluation before a run's latest checkpoint was made on; empty if there is none."""
    try:
        name = read_regular(run.checkpoints / "latest").decode().strip()
        if not _CHECKPOINT.fullmatch(name):
            return {}
        text = read_regular(run.checkpoints / name / STATE, _MOST_BYTES)
        return msgspec.json.decode(of_bounded_depth(text), type=_State).basis
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True)
class Comparability:
    """Whether losses on held-out data can be compared between the runs of groups."""

    differing: tuple[str, ...]
    """one line for each way in which evaluations differ from those of the first group"""
    is_known: bool
    """whether what is recorded decides it, for all runs"""


def comparability(groups: Sequence[RunGroup]) -> Comparability:
    """Compare what the runs of groups were evaluated on with the run of the first group that has the same seed,
    else with its first run. That runs of several seeds hold out other samples is left to the notes on groups."""
    bases = {run: recorded_basis(run) for group in groups for run in group.runs}
    first = groups[0]
    partners = dict(zip(first.keys, first.runs, strict=True))
    has_several_runs = any(len(group.runs) > 1 for group in groups)
    is_known = all(bases.values())
    lines: dict[tuple[str, ...], tuple[str, list[str]]] = {}
    for group in groups:
        for run, key in zip(group.runs, group.keys, strict=True):
            partner = first.runs[0] if group is first else partners.get(key, first.runs[0])
            before, after = bases[partner], bases[run]
            if has_several_runs and (group is first or key not in partners) and run != partner:
                before, after = without_seed(before), without_seed(after)
                is_known = is_known and group is first
            if before and after and (reasons := incomparable(before, after)):
                lines.setdefault(reasons, (partner.path.name, []))[1].append(run.path.name)
    return Comparability(
        tuple(
            _line("losses", names, partner, reasons) for reasons, (partner, names) in lines.items()
        ),
        is_known,
    )


def notes_on_bases(bases: Mapping[str, Basis]) -> list[str]:
    """Return one line for each basis in a list of runs but the first; runs without one are left out.

    Args:
        bases: by the name of the run.
    """
    known_bases = {name: basis for name, basis in bases.items() if basis}
    if not known_bases:
        return []
    first = next(iter(known_bases))
    lines: dict[tuple[str, ...], list[str]] = {}
    for name, basis in known_bases.items():
        if reasons := incomparable(known_bases[first], basis):
            lines.setdefault(reasons, []).append(name)
    notes = [_line("values", names, first, reasons) for reasons, names in lines.items()]
    more = len(notes) - _NAMED
    return [
        *notes[:_NAMED],
        *([f"nor are those of runs on {more} other bases"] if more > 0 else []),
    ]


def _line(what: str, names: Sequence[str], first: str, reasons: Sequence[str]) -> str:
    return f"held-out {what} of {_names(names)} are not comparable with those of {first}: {', '.join(reasons)}"


def _names(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join([*names[:_NAMED], *([f"{more} more"] if more > 0 else [])])
