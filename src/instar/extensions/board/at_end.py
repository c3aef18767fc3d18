"""The report of a run that has ended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from instar.record.rundir import RunDir

if TYPE_CHECKING:
    from instar.config.schema import RunConfig

logger = logging.getLogger("instar.report")


def write_report_of_run(run_dir: RunDir, config: RunConfig) -> None:
    """Write the run's HTML report, unless its config says not to; a failure is only a warning."""
    if not config.record.report:
        return
    try:
        from instar.extensions.board.report import write_report

        write_report(run_dir)
    except Exception as error:
        logger.warning("no report: %s: %s", type(error).__name__, error)
