"""Errors for users: what is wrong, where, and what to write instead.

What may be a secret is shown in none: neither the value of such a key, nor the line that it is in. Libraries
put addresses into their errors, as they are, quoted or in parts: what is shown, recorded or sent of an error of
a webhook or a tracker goes through `redacted_error`.

Errors that users may see derive from `InstarError`; the command line prints `str(error)` without
a traceback and exits with its `exit_code`.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

SHOWN_COLUMNS = 72
_NEAR_COLUMNS = 2000
"""around a place in a line: what of the line may tell that a secret is shown"""
HIDDEN = "[hidden]"
SHOWN = frozenset(
    {
        *(f"record.alerts.{name}" for name in ("divergence", "stall", "nan_skips")),
        *(f"record.trackers.wandb.{name}" for name in ("project", "mode", "group", "system_stats")),
        "record.trackers.trackio.project",
        "record.trackers.mlflow.experiment",
    }
)
"""Keys of alerts and trackers that are shown; all others are hidden: URLs, programs, accounts."""
_SECTIONS = ("record.alerts", "record.trackers")
_HOLDERS = frozenset(
    ["alerts", "trackers", "wandb", "trackio", "mlflow", "command", "webhook", "uri", "entity"]
)
"""names of keys in these sections whose line may hold what is not shown"""
# Texts, which `re` compiles at first use: every command imports this file, and few use them.
_SECRET = r"(?i)(?:.*[._])?(?:token|api_?key|secret|password|passwd|credentials?)"
_USER = r"(?i)\b([a-z][a-z0-9+.-]{0,20}://)[^\s/@\"']{1,1000}@"  # texts may be long
_NAME = r"([\w.]+)\s*:(?=\s|$)"
_QUERY = r"(?i)([?&][\w.-]{0,64}(?:token|key|secret|passw|sig|auth|credential)[\w.-]{0,64}=)[^&\s\"'#,\]}]+"
_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
"""C0, DEL and C1 without tab and newline; bidirectional controls; Unicode line separators."""
_SHORTEST = 4
"""characters of a secret that can be replaced in a text without replacing other words; shorter parts of an
address, but for its password, are none"""
_ERROR_LENGTH = 300


class InstarError(Exception):
    """Base of errors with a message for users and an exit code for the shell (4: a run failed)."""

    exit_code: int = 4


@dataclass(frozen=True)
class SourceLocation:
    """A position in a source; line and column count from 1; line 0 is the source as a whole."""

    source: str
    line: int = 0
    column: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    def excerpt(self) -> str:
        """Return the line with its number, and a caret under the column; empty if it may hold a secret."""
        near = slice(max(0, self.column - _NEAR_COLUMNS), self.column + _NEAR_COLUMNS)
        if not self.line or may_hold_secret(self.text[near]):
            return ""
        start = max(0, self.column - SHOWN_COLUMNS // 2) if self.column > SHOWN_COLUMNS else 0
        excerpt = self.text[start : start + SHOWN_COLUMNS]
        excerpt = "\t".join(map(printable_text, excerpt.split("\t")))
        before = excerpt[: self.column - 1 - start]
        pad = "".join("\t" if char == "\t" else " " * _cells(char) for char in before)
        number = f"{self.line:>3}"
        return f"{number} | {excerpt}\n{' ' * len(number)} | {pad}^"


@dataclass(frozen=True)
class ConfigProblem:
    """One problem in a config, an input or a command line."""

    keys: tuple[str, ...]
    """Dotted keys of the problem, the most likely cause first; may be empty."""
    message: str
    """A sentence without a full stop."""
    hint: str = ""
    """Continues the sentence, e.g. "did you mean 'n_head'?\""""
    place: str | SourceLocation = ""
    """A position in a file, or a place such as "--set model.n_head=3" or a key."""
    task: str = ""
    """The task of the keys, if not a language model."""

    @property
    def key(self) -> str:
        """The first of `keys`; empty if there is none."""
        return next(iter(self.keys), "")

    @property
    def where(self) -> str:
        """The place as text, without the value of a secret key."""
        text = str(self.place)
        if text.startswith("--set "):
            text = redacted_option(text)
        return printable_text(text)

    @property
    def excerpt(self) -> str:
        """The line of the file with a caret; empty if there is none, or if it may hold a secret."""
        if any(map(is_secret, self.keys)):
            return ""
        return self.place.excerpt() if isinstance(self.place, SourceLocation) else ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        hint = f"; {self.hint}" if self.hint else ""
        excerpt = f"\n{self.excerpt}" if self.excerpt else ""
        return f"{place}{self.message}{hint}{excerpt}"


class ConfigError(InstarError):
    """Invalid config, input or usage: all problems found, before anything is started."""

    exit_code = 2

    def __init__(self, *problems: ConfigProblem) -> None:
        super().__init__(*problems)
        self.problems = problems

    @classmethod
    def of(cls, message: str, where: str = "", hint: str = "", *, key: str = "") -> ConfigError:
        return cls(ConfigProblem((key,) if key else (), message, hint, where))

    @classmethod
    def at(cls, key: str, message: str, hint: str = "") -> ConfigError:
        """Return the error of a key's value."""
        return cls(ConfigProblem((key,), message, hint, key))

    def __str__(self) -> str:
        count = len(self.problems)
        last = f"{count} error{'' if count == 1 else 's'}. Nothing was started."
        with_key = next((problem for problem in self.problems if problem.key), None)
        if with_key is not None:
            # name the list of an item's key
            name, bracket, _ = with_key.key.partition("[")
            words = [name if bracket else with_key.key.rpartition(".")[0]]
            words += ["--task", with_key.task] if with_key.task else []
            last += f"   Keys: instar config schema {' '.join(filter(None, words))}".rstrip()
        return "\n".join([*map(str, self.problems), last])


def nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar word, if any is similar enough."""
    from difflib import get_close_matches

    by_lower = {word.lower(): word for word in words}
    close = get_close_matches(word.lower(), by_lower, 1, cutoff)
    return by_lower[close[0]] if close else None


def nearest_hint(word: str, words: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return a hint for an unknown word: the most similar one, if any is similar enough."""
    similar = nearest(word, words, cutoff)
    return f"did you mean {similar!r}?" if similar else otherwise


def near_path(path: str, pattern: str = "*") -> str:
    """Return a hint for a path that does not exist: a similarly named file next to it; none for one that does."""
    folder = Path(path).parent
    is_absent = folder.is_dir() and not Path(path).exists()
    candidates = [entry.name for entry in folder.glob(pattern)] if is_absent else []
    suggestion = nearest(Path(path).name, candidates)
    return f"did you mean '{folder / suggestion}'?" if suggestion else ""


def sentence_of(error: OSError) -> str:
    """Return the operating system's message with the file's name, and a hint if there is one."""
    name = error.filename if isinstance(error.filename, str | bytes) else ""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    text = shorten_text(text, 200)
    text_of_error = f"{text}: {error.strerror or error}" if text else str(error.strerror or error)
    hints = {
        errno.EMFILE: "raise the limit of open files: ulimit -n 1024",
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some space of your quota",
    }
    hint = hints.get(error.errno or 0)
    return f"{text_of_error}; {hint}" if hint else text_of_error


def is_secret(key: str) -> bool:
    """Return whether the value of a dotted key may be a secret."""
    inner = key.startswith(tuple(f"{section}." for section in _SECTIONS))
    is_private = inner and key not in SHOWN
    return is_private or key in ("record", *_SECTIONS) or bool(re.fullmatch(_SECRET, key))


def may_hold_secret(line: str) -> bool:
    """Return whether a line of a config has a key of a secret, or a URL with a user or a key."""
    names = re.findall(_NAME, line)
    return bool(_HOLDERS & {*names}) or any(map(is_secret, names)) or redact_text(line) != line


def redacted_option(text: str) -> str:
    """Return an option such as "--set key=value" without the value of a secret key."""
    key = text.partition("=")[0]
    return key if is_secret(key.rpartition(" ")[2]) else redact_text(text)


def redact_text(text: str) -> str:
    """Remove user and password of URLs in `text`, and keys in their queries."""
    return re.sub(_QUERY, rf"\1{HIDDEN}", re.sub(_USER, rf"\1{HIDDEN}@", text))


def visible(text: str) -> str:
    """Escape control and bidirectional characters as `\\u001b`, so that a terminal shows them and
    JSON reads them back equal."""
    return _ACTING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


@contextmanager
def without_filter(stream: Any) -> Iterator[None]:
    """Let `stream` pass escape sequences; text from outside must be `visible` already."""
    before = getattr(stream, "is_filtered", None)
    if before is not None:
        stream.is_filtered = False
    try:
        yield
    finally:
        if before is not None:
            stream.is_filtered = before


def printable_text(text: str) -> str:
    """Replace unprintable characters, which could control a terminal or end a comment."""
    return "".join(char if char.isprintable() else "�" for char in text)


def odd_space(text: str) -> str:
    """Name a space character that YAML treats as a letter; empty if there is none."""
    match = re.search(r"[^\S \t\r\n]", text)
    return f"the space U+{ord(match[0]):04X} is a letter to YAML" if match else ""


def shorten_text(text: str, length: int = 1000) -> str:
    """Return at most `length` characters of a text, with an ellipsis if it is cut."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def value_text(data: Any) -> str:
    """Format data as a short text for a message: strings quoted, constants as in YAML."""
    return shorten_text(printable_text(json.dumps(data, ensure_ascii=False, default=str)), 60)


def _cells(char: str) -> int:
    """Return the width of a character in terminal columns."""
    if char.isascii():
        return 1
    from unicodedata import (
        combining,
        east_asian_width,
    )  # a library that `instar --help` does not wait for

    return 0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1


def redacted_error(
    error: BaseException,
    secrets: Iterable[str | None] = (),
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Return the text of an error in one line, cut if it is long, without secrets.

    Args:
        secrets: addresses or keys that it may repeat, also in parts.
        environ: variables whose names are those of secrets are some too.
    """
    text = " ".join(str(error).split())
    secret_texts = [
        *filter(None, secrets),
        *(v for name, v in environ.items() if v and is_secret(name)),
    ]
    parts = {
        form
        for secret in secret_texts
        for part in _secret_parts(secret)
        for form in _written_forms(part)
    }
    for part in sorted(parts - {""}, key=len, reverse=True):
        if part not in text:
            continue
        if len(part) < _SHORTEST:
            return "its text is not shown, since it may hold a secret"
        text = text.replace(part, HIDDEN)
    return redact_text(text)[:_ERROR_LENGTH]


def _secret_parts(secret: str) -> Iterator[str]:
    """Yield a secret, and of an address what is secret in it: all but scheme, host and port."""
    yield secret
    try:
        parts = urlsplit(secret)
    except ValueError:
        return
    if parts.scheme and parts.netloc:
        user, _, password = parts.netloc.rpartition("@")[0].partition(":")
        path = parts.path.strip("/")
        pieces = [user, path, *path.split("/"), parts.query, parts.fragment]
        pieces += [value for pair in parts.query.split("&") for value in pair.split("=")[1:]]
        yield from (password, *(piece for piece in pieces if len(piece) >= _SHORTEST))


def _written_forms(part: str) -> Iterator[str]:
    """Yield a part as a library may write it."""
    yield from (part, unquote(part), quote(part), quote(part, safe=""), repr(part)[1:-1])
