"""Training steps read many at once: each step a row of numbers, without a look at its fields."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import reduce
from itertools import starmap
from operator import or_
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import msgspec
import numpy as np
from msgspec.structs import astuple

from instar.record.events import AnyEvent, Event, Train
from instar.record.metrics import TRAIN_METRICS

if TYPE_CHECKING:
    import numpy.typing as npt

AXIS_TYPES = {
    "step": "<i8",
    "samples": "<i8",
    "tokens": "<i8",
    "segment": "<i8",
    "epoch": "<f8",
    "flops": "<f8",
    "wall_s": "<f8",
    "active_s": "<f8",
    "time": "<f8",
}
ABSENT_BITS = 0x7FF8_0000_000A_B5E7
ABSENT: float = np.array([ABSENT_BITS], "<i8").view("<f8")[0].item()
"""A NaN of its own: no value was written there. `present` tells it from one that was measured."""

_types = get_type_hints(Train, include_extras=True)
_Step: Any = msgspec.defstruct(
    "_Step",
    [(name, _types[name], ABSENT) for name in TRAIN_METRICS if name != "loss"],
    bases=(Train,),
    tag="train",
    frozen=True,
    kw_only=True,
    gc=False,
)
"""A `Train` in which what was not written is `ABSENT`, so that all of it is numbers."""
_kinds = [_Step if kind is Train else kind for kind in get_args(AnyEvent)]
_decoder = msgspec.json.Decoder(reduce(or_, _kinds), strict=False)

_form = {
    name: "d" if AXIS_TYPES.get(name) == "<f8" or name in TRAIN_METRICS else "q"
    for name in Train.__struct_fields__
} | {"extra": "?"}
_row = struct.Struct("@" + "".join(_form.values()) + "0q")
"""One step: eight bytes for each field."""


def decode_lines(block: bytes) -> list[Event]:
    """The events of whole lines as `record.events.decode_lines` has them, raising what that raises;
    in a training step, a metric that was not written is `ABSENT`.
    """
    events: list[Event] = _decoder.decode_lines(block)
    return events


def table_of(steps: Sequence[Train]) -> dict[str, npt.NDArray[Any]]:
    """Every field of all steps, `ABSENT` for a None; of `extra`, whether there is any."""
    try:
        rows = b"".join(starmap(_row.pack, map(astuple, steps)))
    except struct.error:  # a None, where one was written or told
        rows = b"".join(
            _row.pack(*[ABSENT if field is None else field for field in astuple(step)])
            for step in steps
        )
    columns = np.frombuffer(rows, "f8").reshape(len(steps), len(_form)).T.copy()
    return {
        name: column if code == "d" else column.view("i8")
        for (name, code), column in zip(_form.items(), columns, strict=True)
    }
