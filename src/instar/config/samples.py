"""What a config says of samples that come one by one: graphs, rows of a table, images."""

from __future__ import annotations

from pydantic import Field

from instar.config.schema import FeedConfig

Size = int | float | str
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
