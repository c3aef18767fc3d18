"""Which trackers a config asks for, and whether they can be had here. Imports none of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit

from instar.config.clash import Clash
from instar.config.record import AlertsConfig, RecordConfig, TrackersConfig
from instar.trackers.tracker import Tracker

PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
}
"""What each tracker needs to be importable, which is also the name of its extra."""


def configured(config: TrackersConfig) -> list[Tracker]:
    """The trackers that are asked for; what they need is imported when they start."""
    found: list[Tracker] = []
    if config.tensorboard is not None:
        from instar.trackers.tensorboard import TensorBoard

        found.append(TensorBoard(config.tensorboard))
    if config.wandb is not None:
        from instar.trackers.wandb import Wandb

        found.append(Wandb(config.wandb))
    if config.trackio is not None:
        from instar.trackers.trackio import Trackio

        found.append(Trackio(config.trackio))
    if config.mlflow is not None:
        from instar.trackers.mlflow import Mlflow

        found.append(Mlflow(config.mlflow))
    return found


def missing(config: RecordConfig) -> list[Clash]:
    """What `record.trackers` and `record.alerts` ask for and this machine does not have."""
    return [*_missing_trackers(config.trackers), *_missing_alerts(config.alerts)]


def _missing_trackers(config: TrackersConfig) -> Iterator[Clash]:
    for name, package in PACKAGES.items():
        if getattr(config, name) is not None and find_spec(package) is None:
            yield Clash(
                (f"record.trackers.{name}",),
                f"record.trackers.{name} needs the library `{package}`, which is not installed",
                f"install the extra: pip install 'instar[{name}]', or leave it out",
            )
    uri = config.mlflow.uri if config.mlflow else None
    if uri and _is_database(uri) and find_spec("sqlalchemy") is None:
        yield Clash(
            ("record.trackers.mlflow",),
            f"record.trackers.mlflow.uri: {uri.partition(':')[0]} needs the library `sqlalchemy`, "
            "which mlflow-skinny does not bring",
            "pip install sqlalchemy alembic, or give a folder or the address of a server",
        )


def _is_database(uri: str) -> bool:
    return uri.partition(":")[0].partition("+")[0] in ("sqlite", "postgresql", "mysql", "mssql")


def _missing_alerts(config: AlertsConfig) -> Iterator[Clash]:
    try:
        argv = config.argv
    except ValueError as error:
        yield Clash(
            ("record.alerts.command",),
            f"record.alerts.command cannot be taken apart into words: {str(error).lower()}",
            "give it as a list",
        )
    else:
        if argv and shutil.which(argv[0]) is None:
            yield Clash(
                ("record.alerts.command",),
                f"record.alerts.command: there is no program '{argv[0]}' here",
                "give its path; a shell's own words need: [sh, -c, …]",
            )
    if config.webhook is not None and not _is_web(config.webhook):
        yield Clash(
            ("record.alerts.webhook",),
            "record.alerts.webhook must be an address of http or https",
            "e.g. https://example.org/hooks/1",
        )


def _is_web(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False
