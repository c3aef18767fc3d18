"""What a task of your own is made of: `from instar.own import …`. See docs/own-task.md."""

from pydantic import Field

from instar.config.samples import SamplesConfig
from instar.config.section import Section
from instar.data.columns import Ragged
from instar.models.shape import Shape, Table
from instar.tasks.own import OwnTask
from instar.tasks.task import Batch

__all__ = [
    "Batch",
    "Field",
    "OwnTask",
    "Ragged",
    "SamplesConfig",
    "Section",
    "Shape",
    "Table",
]
