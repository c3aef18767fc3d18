"""What is known of a task before torch is there: its shape, its samples, what a step will cost."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from instar.config.load import Loaded
from instar.config.roots import ROOTS
from instar.config.schema import RunConfig
from instar.models.memory import ALL_TRAIN, Still
from instar.models.shape import Growable

if TYPE_CHECKING:
    from instar.tasks.task import Task

Say = Callable[[str], None]


class Blueprint(Protocol):
    """A task of one config, whose data are there or guessed at."""

    @property
    def architecture(self) -> Growable:
        """The shape that the run begins with."""
        ...

    @property
    def unit(self) -> str:
        """What a sample's loss weight counts: token, graph, node, sample."""
        ...

    @property
    def derived(self) -> Mapping[str, object]:
        """What the config leaves open, by dotted key."""
        ...

    @property
    def kept(self) -> Mapping[str, Path]:
        """Files that a run keeps a copy of, by name: what a checkpoint cannot speak without."""
        ...

    def check_test(self) -> None:
        """Raises ConfigError where there is nothing to test on."""
        ...

    def samples(self, context: int) -> int | None:
        """Training samples of an epoch; None where nobody has counted them."""
        ...

    def units(self, context: int) -> int | None:
        """Weight of all the training samples; of a text its tokens, also those that are no target."""
        ...

    def weight(self, context: int) -> int:
        """Loss weight of a sample, the mean where samples differ."""
        ...

    def flops(self, architecture: Any, context: int) -> int:
        """Forward and backward FLOPs of one unit of weight."""
        ...

    def memory(
        self,
        architecture: Any,
        context: int,
        batch_size: int,
        device: str,
        still: Still = ALL_TRAIN,
    ) -> dict[str, int]:
        """Bytes by part at the top of a step, on one rank; empty where nobody knows.

        Args:
            still: what does not train.
        """
        ...

    def style(self, architecture: Any) -> Sequence[tuple[str, Sequence[str]]]:
        """The shape in words: labels and lines."""
        ...

    def task(self, config: RunConfig) -> Task:
        """What the trainer trains under the config with nothing left to derive. Imports torch."""
        ...


class Kind(Protocol):
    """How the blueprints of one kind of task are made: a module of `instar.tasks`, or a user's class."""

    def prepare(self, loaded: Loaded, world_size: int, say: Say) -> None:
        """Make the data if they are not there; one process does this for all.

        Raises ConfigError where they cannot be made, or were made otherwise than the config says.
        """
        ...

    def blueprint(self, loaded: Loaded, world_size: int) -> Blueprint:
        """Open what `prepare` has made.

        Raises ConfigError with all that the data and the config do not agree upon.
        """
        ...

    def assumed(self, loaded: Loaded, say: Say) -> Blueprint:
        """The same where nothing may be made: what is not there is guessed at, and told.

        Raises ConfigError for data that are damaged.
        """
        ...


def kind_of(task: str) -> Kind:
    """The kind of a task that the config names.

    Raises ConfigError where there is none of that name.
    """
    if task in ROOTS:
        found: Any = importlib.import_module(f"instar.tasks.{task}_blueprint")
    else:
        found = importlib.import_module("instar.tasks.own").OwnKind(task)
    kind: Kind = found
    return kind
