"""What a mistake is called in plain English, and what was probably meant."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from instar.config.document import show
from instar.config.familiar import INSIDE, familiar
from instar.config.fields import Root, default, expected, keys, properties, schema_node, sections
from instar.config.numerals import meant_number
from instar.config.syntax import odd_space

_YES_NO = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The word that was probably meant, if any is like it."""
    by_lower = {each.lower(): each for each in words}
    close = difflib.get_close_matches(word.lower(), by_lower, 1, cutoff)
    return by_lower[close[0]] if close else None


def near_path(path: str, pattern: str = "*") -> str:
    """A hint for a path that is not there: what stands beside it that was probably meant."""
    folder = Path(path).parent
    there = [each.name for each in folder.glob(pattern)] if folder.is_dir() else []
    meant = nearest(Path(path).name, there)
    return f"did you mean '{folder / meant}'?" if meant else ""


def unknown_key(root: Root, name: str, section: str) -> tuple[str, str]:
    """For a key that `section` does not have: a hint, and the dotted key that was meant ("")."""
    here, called = sections(root)[section].model_fields, familiar(root)
    if "." in name and name in keys(root):
        home, _, last = name.rpartition(".")
        return f"write '{last}:' under '{home}:'", name
    meant = called.get(f"{section}.{name}")
    if meant is None and (owners := _owners(name, keys(root))):
        return f"'{name}' belongs {' or '.join(map(_home, owners))}", owners[0]
    meant = meant or called.get(name.lower().replace("-", "_"))
    if meant is None and (owners := _owners(name, sections(root))):
        return f"'{name}' belongs {' or '.join(map(_home, owners))}", owners[0]
    if meant is None and (close := nearest(name, here)):
        meant = f"{section}.{close}" if section else close
    if meant is None:
        elsewhere = {key.rpartition(".")[2]: key for key in keys(root)} | called
        meant = elsewhere.get(nearest(name, elsewhere, 0.85) or "")
    if meant is None:
        return f"it has {', '.join(here)}" if len(here) <= 8 else "", ""
    home, _, last = meant.rpartition(".")
    return f"did you mean '{last if home == section else meant}'?", meant


def key_meant(root: Root, name: str) -> str:
    """The dotted key, the first of several, that somebody means who knows no sections, or not
    which; empty if nobody can say."""
    owners = [key for key in keys(root) if name in (key, key.rpartition(".")[2])]
    called = familiar(root).get(name.rpartition(".")[2], "")
    return owners[0] if owners else called if called in keys(root) else ""


def no_section(root: Root, name: str) -> str:
    """A hint for a section that was given a value as if it were a key."""
    meant = familiar(root).get(name)
    return f"did you mean '{meant}'?" if meant else ""


def _owners(name: str, known: Iterable[str]) -> list[str]:
    return [key for key in known if key.rpartition(".")[2] == name and key]


def _home(key: str) -> str:
    section = key.rpartition(".")[0]
    return f"in {section}" if section else "at the top level"


def wrong_value(
    root: Root, path: tuple[str | int, ...], given: Any, kind: str, said: str
) -> tuple[str, str]:
    """Message and hint for a value that the schema refuses.

    `kind` and `said` are pydantic's error type and message, used only where the schema has
    no words of its own.
    """
    name = dotted(path)
    node = schema_node(root, path)
    if kind == "extra_forbidden":
        name, there = str(path[-1]), properties(root, path[:-1])
        meant = INSIDE[name] if INSIDE.get(name) in there else nearest(name, there)
        hint = f"did you mean '{meant}'?" if meant else f"it has {', '.join(there)}"
        return f"unknown key '{path[-1]}' in {dotted(path[:-1])}", hint
    if kind == "missing":
        return f"{name} is missing", ""
    if node is None or kind in ("value_error", "assertion_error"):
        said = said.removeprefix("Value error, ")
        return f"{name}: {said[:1].lower()}{said[1:]}, got {show(given)}", ""
    return f"{name} must be {expected(root, node)}, got {show(given)}", _hint(
        root, name, node, given
    )


def dotted(path: tuple[str | int, ...]) -> str:
    """A path as it is written in messages: ("train", "until", 0) is train.until[0]."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")


def _hint(root: Root, name: str, node: dict[str, Any], given: Any) -> str:
    choices = [node, *node.get("anyOf", ())]
    types = {choice.get("type") for choice in choices}
    words = [str(word) for choice in choices for word in choice.get("enum", ())]
    number = _number(given) if isinstance(given, str) else None
    if given is None:
        instead = default(root, name) if name in keys(root) else None
        return "" if instead is None else f"leave the line out for the default, {show(instead)}"
    if isinstance(given, str):
        if "boolean" in types and (word := _YES_NO.get(given.lower())):
            return f"YAML 1.2 reads '{given}' as text, write {word}"
        if odd := odd_space(given):
            return f"{odd}; write ordinary spaces, or none"
        if number is not None and ("number" in types or ("integer" in types and number % 1 == 0)):
            return "drop the quotes"
        if "boolean" in types and given.lower() in ("true", "false"):
            return "drop the quotes"
        if "null" in types and given.lower() in ("none", "nil"):
            return "write null"
        if words and (meant := nearest(given, words)):
            return f"did you mean '{meant}'?"
        if name == "device" and given.lower() in ("gpu", "nvidia"):
            return "did you mean 'cuda'?"
        number = meant_number(given, name)
        if number is not None and ("number" in types or ("integer" in types and number % 1 == 0)):
            return f"write the number out, {show(number)}"
    if name == "device" and type(given) is int:
        return f"write cuda:{given}"
    if name == "schedule":
        return "or the path of a file with it"
    if isinstance(given, int) and name.startswith("train.until"):
        return f"write {given}it for steps"
    if isinstance(given, float) and "integer" in types and given.is_integer():
        return f"write {int(given)}"
    if isinstance(given, bool | int | float) and "string" in types and "pattern" not in node:
        return f"put it in quotes to make it text: {show(show(given))}"
    return ""


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
