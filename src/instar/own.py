"""The former name of `instar.custom`, for scripts that import `OwnTask` from here."""

from instar.custom import Batch, Field, Ragged, SamplesConfig, Section, Shape, Table
from instar.custom import CustomTask as OwnTask

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
