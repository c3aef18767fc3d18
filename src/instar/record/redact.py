"""Texts of errors without the secrets that they may repeat: addresses, and keys in the environment.

Libraries put addresses into their errors, as they are, quoted or in parts. Everything that is shown,
recorded or sent of an error of a webhook or a tracker goes through `error_text`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote, unquote, urlsplit

from instar.config.errors import HIDDEN, is_secret, redact_text

_SHORTEST = 4
"""characters of a secret that can be replaced in a text without replacing other words; shorter parts of an
address, but for its password, are none"""
LENGTH = 300


def redacted_error(
    error: BaseException,
    secrets: Iterable[str | None] = (),
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Return the text of an error in one line, of at most `LENGTH` characters, without secrets.

    Args:
        secrets: addresses or keys that it may repeat, also in parts.
        environ: variables whose names are those of secrets are some too.
    """
    text = " ".join(str(error).split())
    secret_texts = [
        *filter(None, secrets),
        *(v for name, v in environ.items() if v and is_secret(name)),
    ]
    parts = {form for secret in secret_texts for part in _parts(secret) for form in _forms(part)}
    for part in sorted(parts - {""}, key=len, reverse=True):
        if part not in text:
            continue
        if len(part) < _SHORTEST:
            return "its text is not shown, since it may hold a secret"
        text = text.replace(part, HIDDEN)
    return redact_text(text)[:LENGTH]


def _parts(secret: str) -> Iterator[str]:
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


def _forms(part: str) -> Iterator[str]:
    """Yield a part as a library may write it."""
    yield from (part, unquote(part), quote(part), quote(part, safe=""), repr(part)[1:-1])
