"""A pilot: short runs from which the saving of a schedule of growth is predicted, and their file.

The file is JSON of `Pilot`. It is read as data from anywhere: every number is bounded, and nothing in
it names a path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from instar.config.errors import ConfigError
from instar.config.fields import is_launch_only, values
from instar.config.files import of_bounded_depth, read_regular
from instar.config.schema import RunConfig
from instar.record.atomic import replace_file

SUFFIX = ".pilot.json"
MAX_BYTES = 1 << 24
MOST = 4096
"""runs, and evaluations of a run"""

_DEPENDS_ON = (
    *("data.", "model.", "optimizer.", "learning_rate.", "precision", "train."),
    *("eval.context", "eval.eval_iters"),
)
_DEPENDS_NOT_ON = ("train.until",)

Amount = Annotated[float, msgspec.Meta(ge=0, le=1e40)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e40)]
Steps = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
Step = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Loss = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
T = TypeVar("T")


class Spent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run spends on a stage."""

    flops_per_token: Positive
    tokens: Amount


class PilotCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A short run: the final size from scratch, one that grows as the schedule says, or the size that
    the schedule begins with, which does neither grow nor decay."""

    arm: Literal["final", "grown", "small"]
    seed: Seed
    steps: Steps
    grown_at: Annotated[tuple[Step, ...], msgspec.Meta(max_length=MOST)] = ()
    """The step of each growth; empty: none."""

    @property
    def name(self) -> str:
        """The end of its folder's name."""
        growth_mark = f"-at-{self.grown_at[-1]}" if self.grown_at else ""
        return f"{self.arm}-{self.steps}{growth_mark}-s{self.seed}"


class PilotRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a case ended, with its rate decayed as the config's run ends."""

    case: PilotCase
    loss: Loss
    """Held-out loss of its last step, nats."""
    spent: Annotated[tuple[Spent, ...], msgspec.Meta(min_length=1, max_length=MOST)]
    """By stage."""
    evaluations: Annotated[
        tuple[tuple[Step, Amount, Loss], ...], msgspec.Meta(max_length=MOST)
    ] = ()
    """Steps, tokens and held-out loss, at any rate."""

    @property
    def tokens(self) -> float:
        """Tokens trained on."""
        return sum(stage.tokens for stage in self.spent)


class PilotModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A size of the model."""

    parameters: Steps
    flops_per_token: Positive
    seconds_per_step: Positive
    """Measured with the config's global batch."""


class Pilot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The short runs of a config, planned and done."""

    name: Text
    """The config's."""
    settings: dict[Text, Any]
    """The values of the config on which the result depends, by dotted key."""
    growth: Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=MOST)]
    """The operations that grow the model."""
    run_steps: Steps
    """Steps of the run whose saving is to be predicted."""
    stable_share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Share of a run's steps before its rate decays."""
    tokens_per_step: Positive
    evaluations: Steps
    """Of each run."""
    small: PilotModel
    final: PilotModel
    cases: Annotated[tuple[PilotCase, ...], msgspec.Meta(min_length=1, max_length=MOST)]
    """In the order in which they are run."""
    runs: Annotated[tuple[PilotRun, ...], msgspec.Meta(max_length=MOST)] = ()
    found: dict[str, Any] = {}
    """What the runs say, for readers of the file; predictions begin with the runs."""
    schedule: list[dict[Text, Any]] | None = None
    """The operations of the config's schedule; None: not known."""
    version: Literal[1] = 1

    def differing(self, config: RunConfig) -> list[str]:
        """Return the keys of the settings that are others in a config."""
        settings = settings_of(config)
        return sorted(
            key
            for key in {*settings, *self.settings}
            if settings.get(key) != self.settings.get(key)
        )

    @property
    def horizon(self) -> int:
        """Steps of the longest run of the final size."""
        return max((case.steps for case in self.cases if case.arm == "final"), default=1)

    @property
    def missing(self) -> tuple[PilotCase, ...]:
        """The cases that have not been run."""
        finished_cases = {run.case for run in self.runs}
        return tuple(case for case in self.cases if case not in finished_cases)


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the values of a config on which a pilot's result depends, by dotted key."""
    return {
        key: value
        for key, value in values(config).items()
        if key.startswith(_DEPENDS_ON) and key not in _DEPENDS_NOT_ON and not is_launch_only(key)
    }


def schedule_of(config: RunConfig) -> list[dict[str, Any]]:
    """Return the operations of a config's schedule as JSON values, without comments."""
    return [entry.model_dump(mode="json", exclude={"desc"}) for entry in config.schedule]


def read_pilot(path: Path) -> Pilot:
    """Read a pilot file.

    Raises:
        ConfigError: it is missing or no pilot file; says what is wrong in it.
    """
    return read_json_as(path, Pilot, "a pilot file", "instar schedule pilot CONFIG -o FILE")


def read_json_as(path: Path, kind: type[T], what: str, command: str) -> T:
    """Read JSON of a type from a file.

    Args:
        what: the file is.
        command: writes one.

    Raises:
        ConfigError: it is missing or no such file; says what is wrong in it.
    """
    try:
        return msgspec.json.decode(
            of_bounded_depth(read_regular(path, MAX_BYTES, follow=True)), type=kind
        )
    except OSError as error:
        raise ConfigError.of(f"cannot be read: {error.strerror or error}", str(path)) from None
    except (msgspec.MsgspecError, ValueError) as error:
        hint = f"write one with: {command}"
        raise ConfigError.of(f"is not {what}: {error}", str(path), hint) from None


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Replace a file by JSON of a value atomically."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def pilot_path(config: str | Path) -> Path:
    """Return the path of the pilot file of a config."""
    return Path(config).with_suffix(SUFFIX)
