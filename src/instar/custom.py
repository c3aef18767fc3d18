"""The public names for custom tasks: `from instar.custom import …`. See docs/custom-task.md."""

from pydantic import Field

from instar.config.schema import SamplesConfig
from instar.config.sections import Section
from instar.data.columns import Ragged
from instar.models.table import Shape, Table
from instar.tasks.custom import CustomTask
from instar.tasks.logged import log, log_image, log_table
from instar.tasks.task import Batch

__all__ = [
    "Batch",
    "CustomTask",
    "Field",
    "Ragged",
    "SamplesConfig",
    "Section",
    "Shape",
    "Table",
    "log",
    "log_image",
    "log_table",
]
