"""What libyaml reads is what ruamel.yaml reads, with all positions; whatever it does not read alike, it does not read."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from figures import times
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML, ScalarNode
from ruamel.yaml.resolver import VersionedResolver

from instar.config import document
from instar.config.load import load_config
from instar.config.yaml_nodes import simple

ROOT = Path(__file__).parents[2]
TEXTS = [
    path.read_text("utf-8")
    for folder in ("configs", "examples", "src/instar/config")
    for path in sorted((ROOT / folder).rglob("*.y*ml"))
]
ODD = [
    "", "a", "'", '"', "#", " # x", ":", ": ", ",", "- ", "-", "[", "]", "{", "}", "\n", "\n  ", "  ", "\t",
    "?", "? ", "!", "!!int 3", "&a ", "*a", "|", ">", "%", "@", "`", "~", "=", "<<: ", "\\", "é", "😀", "\x85", "\u2028",
    "\ufeff", "\r", "0o17", "017", "1_000", "1e3", "1.", ".5", "-.inf", ".nan", "0x1F", "0b1", "-_1", "yes", "No",
    "true", "TRUE", "null", "Null", "2026-01-01", "12:30:45", "'it''s'", '"a\\n"', "don't", "---", "...", "--- a",
]  # fmt: skip


def by_ruamel(text: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simple, "_is_simple", lambda _: False)
        return document.parse(text, "run.yaml")


def assert_same(text: str) -> bool:
    """Return whether the text was read by libyaml."""
    actual = document.parse(text, "run.yaml")
    assert actual == by_ruamel(text), text
    try:
        simple.compose_simple(text)
    except simple.NotSimpleError:
        return False
    return True


def test_configs_are_read_alike_and_those_of_runs_by_libyaml() -> None:
    assert assert_same(load_config(None, []).to_yaml())
    read_by_libyaml = [assert_same(text) for text in TEXTS]
    assert sum(read_by_libyaml) > len(TEXTS) // 2


@settings(max_examples=times(150, 20_000), deadline=None)
@given(
    st.sampled_from(TEXTS),
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from(ODD), st.integers(0, 9)), max_size=4),
)
def test_texts_with_any_damage_are_read_alike(
    text: str, changes: list[tuple[float, str, int]]
) -> None:
    lines = text.split("\n")
    first = int(changes[0][0] * len(lines)) if changes else 0
    text = "\n".join(lines[first : first + 25])
    for place, part, n_cut in changes:
        index = int(place * len(text))
        text = text[:index] + part + text[index + n_cut :]
    assert_same(text)


@settings(max_examples=times(150, 20_000), deadline=None)
@given(
    st.lists(st.sampled_from([*ODD, "a: ", "b:\n", "c: 1\n", "- d\n", "    "]), max_size=14).map(
        "".join
    )
)
def test_any_text_is_read_alike(text: str) -> None:
    assert_same(text)


@settings(max_examples=times(300, 20_000), deadline=None)
@given(st.text("-+.0123456789_eExobnaifINFtrulsTRUSNn~<=: ", min_size=1, max_size=8))
def test_plain_words_have_the_types_of_yaml_1_2(word: str) -> None:
    resolver = VersionedResolver(loader=YAML(typ="safe", pure=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tag = str(resolver.resolve(ScalarNode, word, (True, False)).trval)
    kind = re.sub(
        r"^.*:(timestamp|value)$", "tag:yaml.org,2002:str", tag
    )  # which are texts to a config
    assert simple._Parser("").resolve(simple.yaml.ScalarNode, word, (True, False)) == kind


@pytest.mark.parametrize(
    "text",
    [
        "[" * 60,
        "a:\n" + "".join(" " * n + "a:\n" for n in range(1, 60)),
        "- " * 100_000,
        "[" * 100_000,
    ],
    ids=["brackets", "indents", "items", "many brackets"],
)
def test_depth_is_bounded(text: str) -> None:
    assert not assert_same(text)
