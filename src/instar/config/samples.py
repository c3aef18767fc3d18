"""What a config says of samples that come one by one: graphs, rows of a table, images."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from instar.config.numerals import meant_number
from instar.config.schema import FeedConfig


def _no_number(size: int | float | str) -> int | float | str:
    """Refuses text that is a number to whoever wrote it, and would be a file's name."""
    if isinstance(size, str) and (number := meant_number(size, "")) is not None:
        raise ValueError(f"would be the name of a file, write {number}")
    return size


Size = Annotated[int | float | str, AfterValidator(_no_number)]
"""Of a split: a count of samples, a share below 1, or a file with their numbers."""


class SamplesConfig(FeedConfig):
    """Where the samples are, how they are split, and how they reach the ranks."""

    val: Size = Field(
        0.1,
        description="validation split: a share below 1, a count, or a text file of sample numbers",
    )
    test: Size = Field(0.1, description="test split, as val")
    stratify: str | None = Field(
        None, description="column of classes, of which every split gets the same shares"
    )
