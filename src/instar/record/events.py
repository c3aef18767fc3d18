"""The record of a run: `events.jsonl`, append-only, one JSON object per line.

A line is `{"v":1,"kind":"train","time":…,"segment":…,…}`. Fields and kinds may be added within
version 1: readers ignore unknown fields and return unknown kinds as `Unrecognised`. JSON has no
NaN: non-finite numbers are written as the words "NaN", "Infinity" and "-Infinity" and converted
when read. Absent fields have their defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args

import msgspec

from instar.config.budget import Counters
from instar.config.errors import InstarError
from instar.config.files import open_regular
from instar.extensions import event_type, event_types

VERSION = 1
_WORD = re.compile(r"\\*(NaN|-?Infinity)")
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
Moment = Annotated[float, msgspec.Meta(ge=0.0, lt=253_402_300_800.0)]
"""Unix seconds up to the year 9999."""
AXES = ("samples", "tokens", "epoch", "flops", "wall_s", "active_s")
"""x axes other than the step and the time."""
_encoder = msgspec.json.Encoder()
RUN_STARTED_LINE = b'{"v":%d,"kind":"run_started"' % VERSION
NOT_AN_EVENT = (msgspec.MsgspecError, ValueError, RecursionError)
"""What `decode_event` raises."""
TRAIN_METRICS = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "data_wait", "memory_bytes")
"""Metrics that are fields of `Train`; others are in `extra`."""


class RecordError(InstarError):
    """The record cannot be written or read."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """One line of a run's record. The recorder sets `time` and `segment`."""

    v: Literal[1] = 1
    time: Moment = 0.0
    """Unix seconds at which it was written."""
    segment: Count = 0
    """1 for the first start of the run, 2 after the first resume, …"""


class Unrecognised(Event, tag="unrecognised", frozen=True, kw_only=True):
    """An event of a kind that only a newer Instar knows; never written."""

    name: str
    fields: dict[str, Any]


class RunStarted(Event, tag="run_started", frozen=True, kw_only=True):
    """A run starts, or resumes from `step`: events after that step are superseded."""

    run_id: str
    step: Count = 0
    resumed_from: str | None = None
    fingerprint: str = ""
    """Fingerprint of the resolved config."""
    model: str = ""
    """Short form of the shape, e.g. `12L/768d`."""
    parameters: Count = 0
    devices: str = ""
    """Short form of the devices, e.g. `4×H200 DDP`."""
    world_size: Count = 1
    unit: str = "token"
    """Unit of `tokens` and `tokens_per_s`."""
    better: dict[str, str] = {}
    """`min` or `max` for each held-out metric, whichever is better; empty in older records."""
    best_metric: str = "loss"
    """The held-out metric that `checkpoints/best` follows."""
    architecture: dict[str, Any] = {}
    splits: dict[str, Count | None] = {}
    """Samples of each split, None if unknown; empty in older records."""
    drawing: str = ""
    """How training samples are drawn, in words; empty: as `data.order` says."""
    versions: dict[str, str] = {}
    machine: dict[str, str | int | float | None] = {}
    launch: dict[str, Any] = {}
    """Config keys that apply to this start only."""
    imported_from: str | None = None
    """What another tool recorded of it, e.g. `Lightning's metrics.csv`; None: Instar trained it."""
    imported_config: dict[str, Any] | None = None
    """The config that this tool recorded, by dotted keys, without secrets."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "architecture", from_words(self.architecture))


class Branched(Event, tag="branched", frozen=True, kw_only=True):
    """The run is a branch of another: the first event of its record, from before its first start."""

    name: str
    """Of the branch, in its parent's schedule."""
    parent: str
    """Name of the parent's folder, which is beside its own."""
    step: Count
    """After which it begins with the parent's state."""
    checkpoint: str
    """Its first checkpoint, which has that state."""
    iters: Count
    decay: Count


class Placed(Event, frozen=True, kw_only=True):
    """An event at a step of the run, with the values of all x axes."""

    step: Count
    samples: Count = 0
    """Consumed since the run began: the cursor."""
    tokens: Count = 0
    """Trained on since the run began."""
    epoch: float = 0.0
    flops: Finite = 0.0
    """Spent on training since the run began, counted."""
    wall_s: Finite = 0.0
    """Since the run began, pauses between segments included."""
    active_s: Finite = 0.0
    """Spent on training steps alone, over all segments."""

    @property
    def counters(self) -> Counters:
        """What the run had done, as far as a record can be believed."""
        flops, active_s = max(0.0, self.flops), max(0.0, self.active_s)
        return Counters(self.step, self.samples, self.tokens, flops, active_s)


class Train(Placed, tag="train", frozen=True, kw_only=True, gc=False):
    """An interval of steps up to this one. Intervals overlap only if a run was stopped inside one:
    the part is recorded at the stop, and the whole interval after the resume."""

    loss: float
    """Mean per token over `steps` global batches, nats."""
    steps: Count | None = None
    """Number of steps that the loss is the mean of; None in older records."""
    grad_norm: float | None = None
    """Before clipping."""
    lr: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    """Model FLOPs utilization: FLOPs per second as a fraction of the measured peak, 0 to 1."""
    data_wait: float | None = None
    """Fraction of the time that rank 0 waited for samples, 0 to 1."""
    memory_bytes: Count | None = None
    extra: dict[str, float] = {}


class Eval(Placed, tag="eval", frozen=True, kw_only=True):
    """Held-out metrics."""

    split: str
    loss: float
    """Mean per token, nats."""
    eval_tokens: Count = 0
    """Tokens of this evaluation."""
    standard_error: float | None = None
    seconds: float | None = None
    best: bool = False
    """The best so far by the metric that `checkpoints/best` follows."""
    best_of: tuple[str, ...] = ()
    """All metrics of `checkpoint.best_of` that are the best so far; empty in older records."""
    extra: dict[str, float] = {}
    """The other metrics, by name."""
    errors: dict[str, float] = {}
    """Known standard errors of the other metrics."""
    drawn: dict[str, int] = {}
    """Training samples of each part of a mixture so far, of this length."""


class BeginsAnew(Placed, tag="begins_anew", frozen=True, kw_only=True):
    """Evaluations that follow cannot be compared with earlier ones: best values, early stopping, plateaus
    and triggers begin anew."""

    reasons: tuple[str, ...]
    """What evaluations depend on, before and after, e.g. `tokens per sample 64 → 128`."""


class OperationEvent(Placed, tag="operation", frozen=True, kw_only=True):
    """A scheduled change was carried out."""

    name: str
    value: Any = None
    verb: str = "SET"
    """`SET` for settings, `GROW` for the architecture."""
    change: str = ""
    """Short form of before and after, e.g. `2048→3072`."""
    reason: str = ""
    """What made it fire, e.g. `val 3.41 < 3.50`."""
    notes: tuple[str, ...] = ()
    preserves: str = ""
    """exact, bounded or lossy; empty if the architecture did not change."""
    proof: dict[str, float] = {}
    """Measurements, e.g. val_before, val_after, max_logit_diff."""
    seconds: float | None = None
    architecture: dict[str, Any] = {}
    """The new architecture, if it changed."""
    id: str = ""
    """of the request, if somebody asked for it"""
    by: str = ""
    """who did"""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "value", from_words(self.value))
        msgspec.structs.force_setattr(self, "architecture", from_words(self.architecture))


class Asked(Placed, tag="asked", frozen=True, kw_only=True):
    """What became of an operation that somebody asked for, unless it was carried out at once."""

    id: str
    by: str
    outcome: Literal["waits", "refused", "cancelled"]
    operation: str
    value: Any = None
    reason: str = ""
    """why it was refused, or what it waits for"""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "value", from_words(self.value))


class NewGradients(Placed, tag="new_gradients", frozen=True, kw_only=True):
    """One of the first steps after the model grew."""

    operation: str
    grad_norm_kept: float
    """Of kept elements, before clipping."""
    grad_norm_new: float
    """Of new elements; they cannot learn if it is 0 in every step."""


class AnalysisEvent(Placed, tag="analysis", frozen=True, kw_only=True):
    """Weight analysis of the model at `step`; written some steps later."""

    findings: dict[str, Any]
    suggestions: tuple[str, ...] = ()
    """Where rank or width is exhausted or unused."""
    seconds: float | None = None


class Saved(Placed, tag="checkpoint", frozen=True, kw_only=True):
    """A checkpoint was published."""

    path: str
    reason: str = ""
    seconds: float | None = None
    """From the snapshot to the published folder."""
    stall_s: float | None = None
    """For which training paused."""
    size_bytes: Count | None = None


class ExtensionEvent(Placed, frozen=True, kw_only=True):
    """Base of the events of extensions; what they measure are rows of a table of their own."""

    table: ClassVar[str] = ""
    """Name of the table, if the event measures anything."""

    def metrics(self) -> dict[str, float]:
        """Return what was measured, by the names of metrics."""
        return {}

    def line(self) -> str:
        """Return the event as `instar logs events` prints it; empty: not at all."""
        return ""


class Skip(Placed, tag="skip", frozen=True, kw_only=True):
    """A step whose update was skipped on every rank."""

    reason: str = "non-finite gradient"
    consecutive: Count = 1


class Warn(Event, tag="warning", frozen=True, kw_only=True):
    message: str
    step: Count | None = None


class Layers(Placed, tag="layers", frozen=True, kw_only=True):
    """Gradients and updates of one step by parameter group: a block, the embeddings, the head."""

    grad_norm: dict[str, float]
    """Before clipping."""
    update_ratio: dict[str, float]
    """Norm of the update over norm of the parameters before it."""


class SampleText(Placed, tag="sample", frozen=True, kw_only=True):
    """Text that a language model generated."""

    prompt: str
    text: str


class ImageEvent(Placed, tag="image", frozen=True, kw_only=True):
    """An image that the task's code logged."""

    name: str
    split: str = "train"
    """`train`, or the split of an evaluation."""
    path: str
    """In the run's folder; see `instar.record.media`."""
    width: Count = 0
    height: Count = 0


class TableEvent(Placed, tag="table", frozen=True, kw_only=True):
    """A table that the task's code logged."""

    name: str
    split: str = "train"
    """`train`, or the split of an evaluation."""
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    """Texts, numbers, booleans or null."""

    def __post_init__(self) -> None:
        rows = tuple(tuple(map(from_words, row)) for row in self.rows)
        msgspec.structs.force_setattr(self, "rows", rows)


class Alert(Placed, tag="alert", frozen=True, kw_only=True):
    """An alert of the rule `name`."""

    name: str
    message: str


class Failed(Event, tag="failed", frozen=True, kw_only=True):
    """The run ended because a rank failed. A killed process writes none."""

    message: str
    rank: Count
    step: Count | None = None
    exit_code: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 4


class Stop(Placed, tag="stop", frozen=True, kw_only=True):
    """All ranks agreed to stop."""

    reason: str
    resumable: bool = False


class RunFinished(Placed, tag="run_finished", frozen=True, kw_only=True):
    """The last event of a segment that ended normally."""

    loss: float | None = None
    best_loss: float | None = None
    best_step: Count | None = None
    best_metric: str = "loss"
    """The held-out metric that `checkpoints/best` follows."""
    best_value: float | None = None
    best_value_step: Count | None = None
    tokens_per_s: float | None = None
    """Over the active time of the whole run."""


def _kind(event: type[Event]) -> str:
    return str(event.__struct_config__.tag)


AnyEvent = (
    RunStarted
    | Branched
    | Train
    | Eval
    | BeginsAnew
    | OperationEvent
    | Asked
    | NewGradients
    | AnalysisEvent
    | Saved
    | Skip
    | Layers
    | SampleText
    | ImageEvent
    | TableEvent
    | Alert
    | Warn
    | Failed
    | Stop
    | RunFinished
)


def event_kind(event: Event) -> str:
    """Return the kind's name, as `train` or `eval`, also for kinds that only a newer Instar knows."""
    return event.name if isinstance(event, Unrecognised) else str(event.__struct_config__.tag)


@cache
def event_kinds() -> Mapping[str, type[Event]]:
    """Return the classes of events by kind, those of Instar's extensions among them."""
    return {**{_kind(event): event for event in get_args(AnyEvent)}, **event_types()}


@cache
def _decoder() -> Any:
    # not strict: it converts the words to floats
    return msgspec.json.Decoder(Union[tuple(event_kinds().values())], strict=False)  # noqa: UP007


def to_words(value: Any) -> Any:
    """Convert a value for JSON: non-finite numbers to words, NumPy and torch scalars to numbers,
    tuples to lists, lone surrogates to escapes.

    Raises:
        TypeError: a key is not a string, or JSON cannot represent a value.
    """
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else _word(value)
    if kind is int or kind is bool or value is None:
        return value
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"JSON keys are strings, not {wrong[0]!r}")
        return {to_words(key): to_words(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_words(item) for item in value]
    if hasattr(value, "item"):
        return to_words(value.item())
    raise TypeError(f"JSON has no form for {kind.__name__}: {value!r}")


def from_words(value: Any) -> Any:
    """Inverse of `to_words` for free-form values: converts the three words to numbers."""
    return _mapped(value, lambda text: _WORDS.get(text, text))


def escape_words(value: Any) -> Any:
    """Return a value in which texts that are words of numbers, such as `NaN`, come back from `from_words` as texts:
    with a backslash, which `unescape_words` removes."""
    return _mapped(value, lambda text: f"\\{text}" if _WORD.fullmatch(text) else text)


def unescape_words(value: Any) -> Any:
    """Inverse of `escape_words`, after `from_words`."""
    return _mapped(value, lambda text: text.removeprefix("\\") if _WORD.fullmatch(text) else text)


def _mapped(value: Any, change: Callable[[str], Any]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list | tuple) else value


def _word(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def encode_event(event: Event, now: float, segment: int) -> bytes:
    """Return `event` as a line of the record, written at `now` (Unix seconds) in `segment`."""
    line: dict[str, Any] = {"v": VERSION, "kind": _kind(type(event))}
    line |= {"time": round(now, 3), "segment": segment}
    for name in event.__struct_fields__[3:]:
        if (value := getattr(event, name)) is not None:
            line[name] = to_words(value)
    return _encoder.encode(line) + b"\n"


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a record in order, also while it is written.

    An incomplete last line is ignored: its writer died, or is writing it now.

    Raises:
        RecordError: the file cannot be read, or a line is not an event; has file and line.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, 1):
            try:
                event = decode_event(line)
            except NOT_AN_EVENT as error:
                if not line.endswith(b"\n"):
                    return
                raise RecordError(f"{path}:{number}: not an event of a run: {error}") from error
            yield event


def events_in(lines: Iterable[bytes]) -> Iterator[tuple[bytes, Event]]:
    """Yield the lines that are events, and their events; skip others."""
    for line in lines:
        try:
            event = decode_event(line)
        except NOT_AN_EVENT:
            continue
        yield line, event


def decode_event(line: bytes) -> Event:
    """Decode the event of one line.

    Raises:
        msgspec.MsgspecError, ValueError, RecursionError: it is not an event.
    """
    try:
        event: Event = _decoder().decode(line)
        return event
    except msgspec.ValidationError:
        fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        if not isinstance(version := fields.get("v"), int) or version > VERSION:
            raise ValueError(f"version {version!r}; this Instar reads {VERSION}") from None
        if not isinstance(kind := fields.get("kind"), str) or kind in event_kinds():
            raise
        if (event_class := event_type(kind)) is not None:
            decoded_event: Event = msgspec.json.decode(line, type=event_class, strict=False)
            return decoded_event
        place = {key: fields.pop(key) for key in ("time", "segment") if key in fields}
        unknown_event = {"kind": "unrecognised", "name": kind, "fields": from_words(fields)}
        return msgspec.convert(unknown_event | place, Unrecognised)


def metrics(event: Event) -> dict[str, float]:
    """Return `loss`, `lr`, … of a `train` event, `val/loss`, `val/loss:error`, … of `eval`,
    `grad_norm/<group>`, `update_ratio/<group>` of `layers`, and what extensions measure; empty for
    other events."""
    if isinstance(event, Train):
        values = ((name, getattr(event, name)) for name in TRAIN_METRICS)
        return {name: value for name, value in values if value is not None} | extra(event)
    if isinstance(event, Eval):
        metric_values = {"loss": event.loss}
        if event.standard_error is not None:
            metric_values["loss:error"] = event.standard_error
        metric_values |= {name: value for name, value in event.extra.items() if name != "loss"}
        metric_values |= {f"{name}:error": value for name, value in event.errors.items()}
        return {f"{event.split}/{name}": value for name, value in metric_values.items()}
    if isinstance(event, Layers):
        norms = {f"grad_norm/{group}": value for group, value in event.grad_norm.items()}
        return norms | {f"update_ratio/{group}": v for group, v in event.update_ratio.items()}
    return event.metrics() if isinstance(event, ExtensionEvent) else {}


def extra(event: Train) -> dict[str, float]:
    """Return the metrics of a step that are not fields of `Train`."""
    return {name: value for name, value in event.extra.items() if name not in TRAIN_METRICS}
