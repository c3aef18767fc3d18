"""The record of a run: `events.jsonl`, append-only, one JSON object per line.

A line is `{"v":1,"kind":"train","time":…,"segment":…,…}`. Within version 1 fields and kinds may
be added: readers ignore fields they do not know and hand on kinds they do not know as
`Unrecognised`. JSON has no NaN: a non-finite number is one of the words "NaN", "Infinity" and
"-Infinity", and is a number again when read. Absent fields are at their defaults.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from instar.config.errors import InstarError

VERSION = 1
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
Moment = Annotated[float, msgspec.Meta(ge=0.0, lt=253_402_300_800.0)]
"""Unix seconds up to the year 9999."""


class RecordError(InstarError):
    """The record cannot be written, or what should be one is not."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """One line of a run's record. The recorder sets `time` and `segment`, not the caller."""

    v: Literal[1] = 1
    time: Moment = 0.0
    """Unix seconds at which it was written."""
    segment: Count = 0
    """1 for the first start of the run, 2 after the first resume, …"""


class Unrecognised(Event, tag="unrecognised", frozen=True, kw_only=True):
    """A kind that a newer Instar wrote; only ever read, never written."""

    name: str
    fields: dict[str, Any]


class RunStarted(Event, tag="run_started", frozen=True, kw_only=True):
    """A run starts, or goes on from `step`: whatever came after that step is superseded."""

    run_id: str
    step: Count = 0
    resumed_from: str | None = None
    fingerprint: str = ""
    """Of the resolved config."""
    model: str = ""
    """The shape in short, e.g. `12L/768d`."""
    parameters: Count = 0
    devices: str = ""
    """What it runs on in short, e.g. `4×H200 DDP`."""
    world_size: Count = 1
    unit: str = "token"
    """What `tokens` and `tokens_per_s` count in this run."""
    architecture: dict[str, Any] = {}
    versions: dict[str, str] = {}
    machine: dict[str, str | int | float | None] = {}

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "architecture", from_words(self.architecture))


class Placed(Event, frozen=True, kw_only=True):
    """An event at a place in the run, which every x axis can be read from."""

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


class Train(Placed, tag="train", frozen=True, kw_only=True, gc=False):
    """One optimizer step."""

    loss: float
    """Mean per token over the global batch, nats."""
    grad_norm: float | None = None
    """Before clipping."""
    lr: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    """Model FLOPs per second as a share of the measured peak, 0 to 1."""
    data_wait: float | None = None
    """Share of the time in which rank 0 waited for samples, 0 to 1."""
    memory_bytes: Count | None = None
    extra: dict[str, float] = {}


class Eval(Placed, tag="eval", frozen=True, kw_only=True):
    """Held-out metrics."""

    split: str
    loss: float
    """Mean per token, nats."""
    eval_tokens: Count = 0
    """Evaluated now, unlike `tokens`."""
    standard_error: float | None = None
    seconds: float | None = None
    best: bool = False
    """Of some metric whose best is kept, the best so far."""
    extra: dict[str, float] = {}
    """The other metrics, by name."""
    errors: dict[str, float] = {}
    """Their standard errors, as far as they are known."""


class Operation(Placed, tag="operation", frozen=True, kw_only=True):
    """A scheduled change was carried out."""

    name: str
    value: Any = None
    verb: str = "SET"
    """`SET` for settings, `GROW` for the architecture."""
    change: str = ""
    """Before and after in short, e.g. `2048→3072`."""
    reason: str = ""
    """What made it fire, e.g. `val 3.41 < 3.50`."""
    notes: tuple[str, ...] = ()
    preserves: str = ""
    """exact, bounded or lossy; empty where the function was not touched."""
    proof: dict[str, float] = {}
    """What was measured, e.g. val_before, val_after, max_logit_diff."""
    seconds: float | None = None
    architecture: dict[str, Any] = {}
    """The shape from here on, if it changed."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "value", from_words(self.value))
        msgspec.structs.force_setattr(self, "architecture", from_words(self.architecture))


class NewGradients(Placed, tag="new_gradients", frozen=True, kw_only=True):
    """One of the first steps after the model grew."""

    operation: str
    grad_norm_kept: float
    """Of the parameters that were there before, before clipping."""
    grad_norm_new: float
    """Of those that the operation made; 0 in every step: they will never learn."""


class Analysis(Placed, tag="analysis", frozen=True, kw_only=True):
    """What the model made of the room that it has, at `step`; written some steps later."""

    findings: dict[str, Any]
    suggestions: tuple[str, ...] = ()
    """Where rank or width is short, or idle."""
    seconds: float | None = None


class Saved(Placed, tag="checkpoint", frozen=True, kw_only=True):
    """A checkpoint was published."""

    path: str
    reason: str = ""
    seconds: float | None = None
    """From the snapshot to the published folder."""
    stall_s: float | None = None
    """That training stood still for it."""
    size_bytes: Count | None = None


class Skip(Placed, tag="skip", frozen=True, kw_only=True):
    """A step whose update was left out on every rank."""

    reason: str = "non-finite gradient"
    consecutive: Count = 1


class Warn(Event, tag="warning", frozen=True, kw_only=True):
    message: str
    step: Count | None = None


class Layers(Placed, tag="layers", frozen=True, kw_only=True):
    """What one step did to each group of parameters: a block, the embeddings, the head."""

    grad_norm: dict[str, float]
    """Before clipping."""
    update_ratio: dict[str, float]
    """Norm of the change over norm of the parameters before it."""


class Wrote(Placed, tag="sample", frozen=True, kw_only=True):
    """What a language model wrote."""

    prompt: str
    text: str


class Alert(Placed, tag="alert", frozen=True, kw_only=True):
    """Something that a person should look at: `name` says which rule, `message` what was seen."""

    name: str
    message: str


class Failed(Event, tag="failed", frozen=True, kw_only=True):
    """The run ended because a rank failed; a killed process cannot say so itself."""

    message: str
    rank: Count
    step: Count | None = None
    exit_code: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 4


class Stop(Placed, tag="stop", frozen=True, kw_only=True):
    """All ranks agreed to stop."""

    reason: str
    resumable: bool = False


class RunFinished(Placed, tag="run_finished", frozen=True, kw_only=True):
    """The last line of a segment that ended in order."""

    loss: float | None = None
    best_loss: float | None = None
    best_step: Count | None = None
    tokens_per_s: float | None = None
    """Over the active time of this segment."""


def _kind(event: type[Event]) -> str:
    return str(event.__struct_config__.tag)


AnyEvent = (
    RunStarted
    | Train
    | Eval
    | Operation
    | NewGradients
    | Analysis
    | Saved
    | Skip
    | Layers
    | Wrote
    | Alert
    | Warn
    | Failed
    | Stop
    | RunFinished
)
_KINDS = frozenset(_kind(kind) for kind in get_args(AnyEvent))
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent, strict=False)  # not strict: the words become floats


def to_words(value: Any) -> Any:
    """`value` in what JSON can say: non-finite numbers as words, NumPy and torch scalars as
    numbers, tuples as lists, lone surrogates escaped.

    Raises:
        TypeError: a key that is not a string, or a value that JSON has no form for.
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
    """The inverse of `to_words` for free-form values: the three words are numbers again."""
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, dict):
        return {key: from_words(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [from_words(item) for item in value]
    return value


def _word(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def encode(event: Event, now: float, segment: int) -> bytes:
    """`event` as a line of the record, written `now` (Unix seconds) in `segment`."""
    line: dict[str, Any] = {"v": VERSION, "kind": _kind(type(event))}
    line |= {"time": round(now, 3), "segment": segment}
    for name in event.__struct_fields__[3:]:
        if (value := getattr(event, name)) is not None:
            line[name] = to_words(value)
    return _encoder.encode(line) + b"\n"


RUN_STARTED_LINE = b'{"v":%d,"kind":"run_started"' % VERSION
NOT_AN_EVENT = (msgspec.MsgspecError, ValueError, RecursionError)
"""What `decode` raises."""


def read_events(path: Path) -> Iterator[Event]:
    """The events of a record in the order in which they were written, also while it is written.

    A torn last line is passed over in silence: its writer died, or is writing it now.

    Raises:
        RecordError: the file cannot be read, or a line is not an event; names file and line.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, 1):
            try:
                event = decode(line)
            except NOT_AN_EVENT as error:
                if not line.endswith(b"\n"):
                    return
                raise RecordError(f"{path}:{number}: not an event of a run: {error}") from error
            yield event


def decode_lines(block: bytes) -> list[Event]:
    """The events of whole lines, much faster than one by one; blank lines are passed over.

    Raises:
        msgspec.MsgspecError, ValueError, RecursionError: some line is none, or of a kind that
            only `decode` can hand on.
    """
    events: list[Event] = _decoder.decode_lines(block)
    return events


def decode(line: bytes) -> Event:
    """The event of one line.

    Raises:
        msgspec.MsgspecError, ValueError, RecursionError: it is none.
    """
    try:
        event: Event = _decoder.decode(line)
        return event
    except msgspec.ValidationError:
        fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        if not isinstance(version := fields.get("v"), int) or version > VERSION:
            raise ValueError(f"version {version!r}; this Instar reads {VERSION}") from None
        if not isinstance(kind := fields.get("kind"), str) or kind in _KINDS:
            raise
        place = {key: fields.pop(key) for key in ("time", "segment") if key in fields}
        unrecognised = {"kind": "unrecognised", "name": kind, "fields": from_words(fields)}
        return msgspec.convert(unrecognised | place, Unrecognised)
