"""Files and `--set` options as values with their places, and what is found wrong on the way."""

from __future__ import annotations

import re
from pathlib import Path

from instar.config.document import UNREADABLE, Mistake, Place, Value, parse, show
from instar.config.errors import ConfigError
from instar.config.explain import near_path

MAX_BYTES = 1 << 20
START = "`instar init gpt` writes a config to start from"


class Findings:
    """What is found wrong on the way, and the keys whose true value is therefore not known."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []
        self.doubtful: set[str] = set()
        self.files: list[str] = []
        """in the order in which they are read"""
        self.task = ""
        """whose keys they are, if not language's"""

    def note(self, place: Place, message: str, hint: str = "", key: str = "") -> None:
        self.mistakes.append(Mistake(place, message, hint, key))

    def error(self) -> ConfigError:
        """All of it, file by file, a file's mistakes in their order there, before those of options."""
        # what stands behind an anchor is one mistake, however often it is merged
        once: dict[tuple[str, str], Mistake] = {}
        for each in self.mistakes:
            said = re.sub(r"\[\d+\]", "", each.message) if each.place.line else each.message
            once.setdefault((str(each.place), said), each)
        mistakes = sorted(once.values(), key=self._order)
        return ConfigError(*(each.problem(self.task) for each in mistakes))

    def _order(self, mistake: Mistake) -> tuple[bool, int, int, int]:
        place = mistake.place
        file = self.files.index(place.source) if place.source in self.files else 0
        return not place.line, file, place.line, place.column


def read_file(path: str, findings: Findings) -> Value | None:
    """The mapping in a file; None after a mistake that leaves none."""
    document = read_document(path, START, findings)
    if document is not None and not isinstance(document.data, dict):
        message = f"a config is made of 'key: value' lines, got {show(document.plain())}"
        findings.note(document.place, message)
        return None
    return document


def read_document(
    path: str, start: str, findings: Findings, named: Place | None = None
) -> Value | None:
    """What a file holds, `start` being a hint where there is none; None after a mistake.

    `named`: where its path was written, if it was in another file.
    """
    findings.files.append(path)
    text = _read_text(path, start, findings, named)
    if text is None:
        return None
    document, found = parse(text, path)
    findings.mistakes.extend(found)
    if document is None or document.data is None or document.data is UNREADABLE:
        if not found:
            findings.note(Place(path), "the file is empty", start)
        return None
    return document


def _read_text(path: str, start: str, findings: Findings, named: Place | None) -> str | None:
    whole = Place(path)
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) <= MAX_BYTES:
            return raw.decode("utf-8-sig")
        findings.note(whole, f"larger than {MAX_BYTES >> 20} MiB; this is no config")
    except FileNotFoundError:
        hint = near_path(path, "*.y*ml") or start
        if named is not None and named.line:
            findings.note(named, f"no such file: {path}", hint)
        else:
            findings.note(whole, "no such file", hint)
    except IsADirectoryError:
        there = ", ".join(str(each) for each in sorted(Path(path).glob("*.y*ml"))[:3])
        findings.note(whole, "is a folder, not a config file", there and f"it holds {there}")
    except UnicodeDecodeError as error:
        lines = raw[: error.start].decode("utf-8").split("\n")
        place = Place(path, len(lines), len(lines[-1]) + 1, lines[-1] + "�")
        message = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        findings.note(place, message, "save the file as UTF-8")
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        findings.note(whole, f"cannot be read: {said}")
    return None


def read_option(text: str, findings: Findings) -> Value | None:
    """`a.b=v` as the mapping {a: {b: v}}."""
    shown = text if len(text) <= 80 else f"{text[:79]}…"
    place = Place(f"--set {shown}")
    key, equals, given = text.partition("=")
    key = key.strip()
    if not equals or not key:
        hint = "e.g. --set model.n_layer=6"
        findings.note(place, "--set expects key=value", hint)
        return None
    value, found = parse(given, place.source, numbered=False)
    findings.mistakes.extend(found)
    if value is None and found:
        return None
    value = value or Value(None, place)
    for name in reversed(key.split(".")):
        value = Value({name: (place, value)}, place)
    return value
