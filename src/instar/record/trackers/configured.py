"""The trackers of a config, and checks whether what they and alerts need is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from instar.config.errors import ConfigProblem
from instar.config.sections import AlertsConfig, RecordConfig, TrackersConfig
from instar.extensions import load_target
from instar.record.trackers import TRACKERS
from instar.record.trackers.tracker import Tracker


def configured_trackers(config: TrackersConfig) -> list[Tracker]:
    """Return the configured trackers; their packages are imported when they start."""
    sections = {name: getattr(config, name) for name in TRACKERS}
    return [
        load_target(TRACKERS[name].target)(section)
        for name, section in sections.items()
        if section is not None
    ]


def missing_libraries(config: RecordConfig) -> list[ConfigProblem]:
    """Return problems of `record.trackers` and `record.alerts`: missing packages and programs."""
    return [*_missing_trackers(config.trackers), *_missing_alerts(config.alerts)]


def _missing_trackers(config: TrackersConfig) -> Iterator[ConfigProblem]:
    for name, (_, package) in TRACKERS.items():
        if package and getattr(config, name) is not None and find_spec(package) is None:
            yield ConfigProblem(
                (f"record.trackers.{name}",),
                f"record.trackers.{name} needs the library `{package}`, which is not installed",
                f"install the extra: pip install 'instar[{package}]', or leave it out",
            )
    uri = config.mlflow.uri if config.mlflow else None
    if uri and _is_database(uri) and find_spec("sqlalchemy") is None:
        yield ConfigProblem(
            ("record.trackers.mlflow",),
            f"record.trackers.mlflow.uri: {uri.partition(':')[0]} needs the library `sqlalchemy`, "
            "which mlflow-skinny does not bring",
            "pip install sqlalchemy alembic, or give a folder or the address of a server",
        )


def _is_database(uri: str) -> bool:
    return uri.partition(":")[0].partition("+")[0] in ("sqlite", "postgresql", "mysql", "mssql")


def _missing_alerts(config: AlertsConfig) -> Iterator[ConfigProblem]:
    try:
        argv = config.argv
    except ValueError as error:
        yield ConfigProblem(
            ("record.alerts.command",),
            f"record.alerts.command cannot be taken apart into words: {str(error).lower()}",
            "give it as a list",
        )
    else:
        if argv and shutil.which(argv[0]) is None:
            yield ConfigProblem(
                ("record.alerts.command",),
                f"record.alerts.command: there is no program '{argv[0]}' here",
                "give its path; a shell's own words need: [sh, -c, …]",
            )
