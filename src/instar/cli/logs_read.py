"""The runs that a command line means, read: one that cannot be read does not hide the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from instar.logs.reading.record import RunRecord
    from instar.record.rundir import RunDir

OUT_DIR = Path("runs")


@dataclass(frozen=True)
class Read:
    """Records, and of the runs that have none that can be read what is wrong."""

    records: tuple[RunRecord, ...]
    faults: tuple[str, ...]

    def tell(self) -> int:
        """Say on stderr what is wrong; the command's exit code."""
        for fault in self.faults:
            click.echo(fault, err=True)
        return 4 if self.faults else 0


def chosen(runs: Sequence[str], *, every: bool = False) -> list[RunDir]:
    """The runs that are meant; all of the folder `runs` with `every` and no other word.

    Raises:
        ConfigError: a text means none.
    """
    from instar.logs.find import find_runs

    return find_runs(runs or ([str(OUT_DIR)] if every else []), OUT_DIR)


def read_all(runs: Sequence[RunDir]) -> Read:
    """Read them, in their order.

    Raises:
        RecordError: none of them can be read.
    """
    from instar.logs.reading.many import read_many
    from instar.logs.reading.record import read
    from instar.record.events import RecordError

    with suppress(RecordError):
        return Read(tuple(read_many(runs)), ())
    records, faults = [], []
    for run in runs:
        try:
            records.append(read(run))
        except RecordError as error:
            faults.append(str(error))
    if not records:
        raise RecordError("\n".join(faults))
    return Read(tuple(records), tuple(faults))
