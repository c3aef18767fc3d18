"""Base class of all config sections, number types with bounds, and the sections `schedule`, and `record`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    create_model,
    model_serializer,
)

Texts = Annotated[tuple[str, ...], Strict(False)]
LARGEST = 10**12
"""Bound of all numbers: larger ones are typing errors and lose floating-point precision."""
MOST_LAYERS = 10_000
MOST_HEADS = 2**16
MOST_WIDTH = 2**20
MOST_MLP = 2**22
MOST_CONTEXT = 2**24
MOST_VOCABULARY = 2**24
MOST_EXPERTS = 2**12
MOST_CONV = 64
MOST_PROCESSES = 1024

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST)]
Score = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Layers = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
LayersOrNone = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
Heads = Annotated[int, Field(gt=0, le=MOST_HEADS)]
Width = Annotated[int, Field(gt=0, le=MOST_WIDTH)]
MLPWidth = Annotated[int, Field(gt=0, le=MOST_MLP)]
Context = Annotated[int, Field(gt=0, le=MOST_CONTEXT)]
Experts = Annotated[int, Field(gt=0, le=MOST_EXPERTS)]
ConvSize = Annotated[int, Field(ge=2, le=MOST_CONV)]
Vocabulary = Annotated[int, Field(gt=0, le=MOST_VOCABULARY)]
Batch = Annotated[int, Field(gt=0, le=2**20)]
Ranks = Annotated[int, Field(gt=0, le=2**16)]
Rate = Annotated[float, Field(gt=0, le=1e6)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=1e8)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


def check_address(address: str) -> str:
    """Return a web address; the message of an error holds no part of it.

    Raises:
        ValueError: it is malformed.
    """
    if not re.fullmatch(r"[!-~]+", address):
        raise ValueError(
            "an address without spaces, control characters and letters beyond ASCII (percent-encoded: %20)"
        )
    try:
        parts = urlsplit(address)
        is_complete = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # its text holds a part of the address
        is_complete = False
    if not is_complete:
        raise ValueError("an address of http or https, e.g. https://example.org/hooks/1")
    return address


def check_store(uri: str) -> str:
    """Check the address of a store that is a web address; return any other as it is."""
    return check_address(uri) if uri.lower().startswith(("http:", "https:")) else uri


class Section(BaseModel):
    # the text of a pydantic error shows what was given otherwise, also a secret
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


FROM = "from"
M = TypeVar("M", bound=BaseModel)
S = TypeVar("S", bound=Section)


def with_fields(section: type[M], fields: Mapping[str, Any]) -> type[M]:
    """Return a section of the same name with more fields, or others."""
    section_class: type[M] = create_model(
        section.__name__,
        __base__=section,
        __doc__=section.__doc__,
        __module__=section.__module__,
        **dict(fields),
    )
    return section_class


def with_from(section: type[S]) -> type[S]:
    """Return a `model` section that also has the key `from`, which is no name in Python."""
    about = Field(
        None,
        description="weights to start from: a run's (of its best checkpoint, else of its latest), a "
        "checkpoint's folder, or a Hugging Face folder (for task language with a GPT-2 or Llama); the "
        "shape and the tokenizer come with them; default: random",
    )
    return with_fields(section, {FROM: (str | None, about)})


if TYPE_CHECKING:

    class ModelSection(Section):
        """A `model` section with the key `from`."""
else:
    ModelSection = with_from(Section)


def subsection(section: type[BaseModel], description: str | None) -> Any:
    """Return the field of a section within another: it may be left out, and has its defaults then."""
    return Field(default_factory=section, description=description)


class PlainSection(Section):
    """A section whose class is not imported: whatever keys it has, their values as plain data."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class Operation:
    """An operation with its value and options, all JSON values.

    Equal operations have equal effects on the same object: what only decides *when* one is carried
    out is not part of it.
    """

    name: str
    value: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Sparse(Section):
    """A section that is written with the keys it was given, and no others."""

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: value for k, value in serialize(self).items() if k in self.model_fields_set}


class PlateauTrigger(Sparse):
    """A validation loss that has stopped falling."""

    window: Annotated[int, Field(ge=2, le=10**6)] = Field(
        description="number of evaluations to which a line is fitted, all since the last operation"
    )
    slope: NonNegativeFloat = Field(
        description="largest decrease that counts as a plateau, nats per 1,000 steps"
    )
    patience: PositiveInt = Field(1, description="evaluations in a row for which this must hold")


class CurveSection(Sparse):
    """A loss by compute: floor + (flops / FLOPs trained) ** exponent."""

    floor: Score = Field(description="loss that it approaches, nats")
    flops: Annotated[float, Field(gt=0, le=1e40)] = Field(
        description="FLOPs after which it is 1 nat above the floor"
    )
    exponent: Annotated[float, Field(gt=0, le=10)] = Field(description="how fast it falls")


class SlopeTrigger(Sparse):
    """A validation loss that falls less per FLOP than another model's."""

    window: Annotated[int, Field(ge=2, le=10**6)] = Field(
        description="number of evaluations to which a line is fitted, all since the last operation"
    )
    slope: Annotated[float, Field(ge=0, le=1e40)] | None = Field(
        None, description="largest decrease with which it fires, nats per 1e15 FLOPs"
    )
    curve: CurveSection | None = Field(
        None, description="in place of slope: the other model's loss by compute, of a pilot"
    )
    patience: PositiveInt = Field(1, description="evaluations in a row for which this must hold")


class NoiseTrigger(Sparse):
    """A batch that is small for the measured noise of its gradient."""

    above: PositiveFloat = Field(description="multiple of the global batch")


class When(Sparse):
    """A trigger; all given keys must hold."""

    loss_below: Score | None = Field(None, description="the validation loss is less than this")
    waited: PositiveInt | None = Field(None, description="number of steps since the last operation")
    at_step: NonNegativeInt | None = Field(None, description="step of the run")
    at_tokens: PositiveInt | str | None = Field(
        None, description="tokens trained on: a number, or text such as 50Mtok"
    )
    at_fraction: Fraction | None = Field(None, description="used share of the run's budget")
    plateau: PlateauTrigger | None = Field(
        None, description="the validation loss has stopped falling"
    )
    slope_below: SlopeTrigger | None = Field(
        None, description="the validation loss falls less per FLOP than another model's"
    )
    noise_scale: NoiseTrigger | None = Field(
        None, description="the gradient noise scale is greater than a multiple of the global batch"
    )
    any: Annotated[tuple[When, ...], Strict(False)] | None = Field(
        None, description="one of these triggers fires"
    )
    all: Annotated[tuple[When, ...], Strict(False)] | None = Field(
        None, description="all of these triggers fire"
    )


class ScheduledOperation(Sparse):
    """One operation of a schedule. Keys that are not described here are the operation's options."""

    # options depend on the operation and are checked with it
    model_config = ConfigDict(extra="allow")

    name: str = Field(description="name of the operation")
    value: Any = Field(None, description="a factor, a number, a list …, depending on the operation")
    trigger_loss: Score | None = Field(
        None, description="fires when the validation loss is less than this …"
    )
    max_wait_iters: NonNegativeInt | None = Field(
        None,
        description="… or when this many steps have passed since the last operation; 0: at once",
    )
    when: When | None = Field(None, description="a trigger, instead of these two")
    desc: str | None = Field(None, description="a comment without effect")
    min_steps: PositiveInt | None = Field(
        None, description="fires only when this many steps have passed since the last operation"
    )
    max_params: PositiveInt | None = Field(
        None, description="fails if the model would have more parameters than this"
    )
    repeat: Annotated[int, Field(gt=0, le=100)] = Field(
        1, description="carry it out this many times, each when the trigger fires again"
    )
    reevaluate: bool = Field(False, description="evaluate at once afterwards")
    on_failure: Literal["stop", "skip"] = Field(
        "stop", description="stop the run, or continue without this operation"
    )
    allow_inexact: bool = Field(
        False, description="continue if an exact operation is measured to change the function"
    )


class TensorBoardConfig(Section):
    """TensorBoard's event files."""

    dir: str | None = Field(
        None,
        description="folder in which the run has a folder of its name; default: tensorboard in the "
        "run's own folder",
    )


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = Field("instar", description="project that the run belongs to")
    mode: Literal["offline", "online"] = Field(
        "offline", description="offline: written to disk, for `wandb sync` to send later"
    )
    entity: str | None = Field(None, description="user or team; default: your own")
    group: str | None = Field(None, description="group of runs that it belongs to")
    tags: Texts = Field((), description="labels of the run")
    dir: str | None = Field(
        None, description="folder that `wandb` writes into; default: the run's own folder"
    )
    system_stats: bool = Field(False, description="let `wandb` watch the machine as well")


class TrackioConfig(Section):
    """trackio, on this machine."""

    project: str = Field("instar", description="project that the run belongs to")
    dir: str | None = Field(
        None,
        description="folder of its databases; default: TRACKIO_DIR, or where trackio itself looks",
    )


class MlflowConfig(Section):
    """MLflow."""

    uri: Annotated[str, AfterValidator(check_store)] | None = Field(
        None,
        description="tracking store: sqlite:///…, http://…, or a folder, which MLflow itself opens only with "
        "MLFLOW_ALLOW_FILE_STORE=true; default: MLFLOW_TRACKING_URI, or the folder mlruns beside the run's",
    )
    experiment: str = Field("instar", description="experiment that the run belongs to")


class TrackersConfig(Section):
    """Other tools that the record is copied into while it is written; {} chooses their defaults."""

    tensorboard: TensorBoardConfig | None = Field(None, description="TensorBoard's event files")
    wandb: WandbConfig | None = Field(None, description="Weights & Biases, offline by default")
    trackio: TrackioConfig | None = Field(None, description="trackio, on this machine")
    mlflow: MlflowConfig | None = Field(None, description="MLflow")


class AlertsConfig(Section):
    """When to alert, and whom besides the display and the record."""

    divergence: PositiveFloat | None = Field(
        0.2,
        description="alert when the smoothed training loss has risen by this share of its total "
        "decrease; null: never",
    )
    stall: Share | None = Field(
        0.3,
        description="alert when training runs at less than this share of its usual speed; null: never",
    )
    nan_skips: PositiveInt | None = Field(
        3,
        description="alert when this many steps in a row were skipped for non-finite gradients; null: never",
    )
    command: Texts | str = Field(
        (),
        description="program to run for each alert, with its arguments, without a shell; it has "
        "the alert as JSON on stdin and in INSTAR_ALERT",
    )
    webhook: Annotated[str, AfterValidator(check_address)] | None = Field(
        None,
        description="address (http or https) that each alert is sent to as JSON, by POST; "
        "`user:password@` in it is sent as Basic authentication",
    )

    @property
    def argv(self) -> tuple[str, ...]:
        """`command` as a list of words.

        Raises:
            ValueError: a quote in it is not closed.
        """
        return tuple(shlex.split(self.command) if isinstance(self.command, str) else self.command)


class RecordConfig(Section):
    """What is recorded, and how often."""

    log_interval: PositiveInt = Field(10, description="steps between lines on the display")
    analyze_every: PositiveInt | None = Field(
        None,
        description="steps between analyses beside training: effective ranks, attention entropy, "
        "change since the last one, and what they suggest",
    )
    layers_every: PositiveInt | None = Field(
        None,
        description="steps between records of each layer's gradient norm and update ratio; the "
        "steps that are looked at keep a copy of the weights",
    )
    noise_every: NonNegativeInt | None = Field(
        None,
        description="steps between measurements of the gradient noise scale, each of which computes the "
        "gradient of a small part of the batch once more; 0: none; default: as many as add a hundredth "
        "of the work at most, and none for a custom task",
    )
    sample_every: PositiveInt | None = Field(
        None,
        description="steps between samples of what the model writes, at the evaluation that follows; "
        "one is always taken at the end, where a task can write",
    )
    sample_prompt: str = Field("", description="what samples begin with; empty: a new line")
    sample_tokens: Annotated[int, Field(ge=0, le=10**6)] = Field(
        128, description="longest sample, tokens; 0: take none"
    )
    report: bool = Field(True, description="write report.html when the run ends, for any reason")
    out_dir: str = Field("runs", description="folder in which the run's own folder is created")
    run_dir: str | None = Field(
        None, description="the run's own folder; default: <out_dir>/<name>-<id>"
    )
    trackers: TrackersConfig = subsection(
        TrackersConfig, "other tools that the record is copied into"
    )
    alerts: AlertsConfig = subsection(AlertsConfig, "when to alert, and whom")
