"""Describes failures of user code."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from pathlib import Path

import instar

_INSTAR = str(Path(instar.__file__).parent)
_NOT_THE_USERS = (_INSTAR, str(Path(os.__file__).parent), "<frozen")


def what_happened(error: BaseException) -> str:
    """Describe an exception of the user's code: its type, message and place.

    E.g. "KeyError: 'x' (spirals.py:40 in loss)".
    """
    frames = traceback.extract_tb(error.__traceback__)
    text = "; ".join(filter(None, [str(error).strip(), *getattr(error, "__notes__", ())]))
    if isinstance(error, SystemExit):
        cause = f"sys.exit({'' if error.code is None else repr(error.code)}) was called"
    elif isinstance(error, ValueError | TypeError) and frames[-1].filename.startswith(_INSTAR):
        return text  # Instar's own message about what the user's code returned
    else:
        cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = _place(frames)
    return f"{cause} ({place})" if place else cause


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost frame in user code, e.g. "spirals.py:40 in loss"; "" if there is none."""
    for frame in reversed(frames):
        if not (frame.filename.startswith(_NOT_THE_USERS) or "-packages" in frame.filename):
            path = Path(frame.filename)
            if path.is_relative_to(cwd := Path.cwd()):
                path = path.relative_to(cwd)
            return f"{path}:{frame.lineno} in {frame.name}"
    return ""
