from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.config.document import Document, parse
from instar.config.errors import SourceLocation, value_text


def read(text: str) -> Any:
    value, mistakes = parse(text, "x.yaml")
    assert not mistakes
    assert value is not None
    return value.data


def document_of(text: str, problems: int = 0) -> Document:
    document, mistakes = parse(text, "x.yaml")
    assert document is not None
    assert len(mistakes) == problems
    return document


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("3e-4", 0.0003),
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("1_000", 1000),
        ("-7", -7),
        ("0x1F", 31),
        ("0o17", 15),
        ("010", 10),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("null", None),
        ("~", None),
        ("2024-01-01", "2024-01-01"),
        ("12:30:45", "12:30:45"),
        ("'3'", "3"),
        ("!!str 3", "3"),
        ("loss<3.0", "loss<3.0"),
        ("[2kit, loss<3]", ["2kit", "loss<3"]),
    ],
)
def test_scalars_are_yaml_1_2(text: str, data: Any) -> None:
    assert read(f"key: {text}") == {"key": data}
    assert type(read(f"key: {text}")["key"]) is type(data)


def test_anchors_and_merge_keys() -> None:
    text = "base: &b {x: 1, y: 2}\nmore: &m {z: 3}\nuse:\n  <<: [*b, *m]\n  y: 5\nagain: *b\n"
    assert read(text)["use"] == {"x": 1, "y": 5, "z": 3}
    assert read(text)["again"] == {"x": 1, "y": 2}


def test_an_anchor_may_be_given_anew() -> None:
    assert read("a: &x 1\nb: &x 2\nc: *x\n")["c"] == 2


def test_keys_and_values_know_their_places() -> None:
    document = document_of("model:\n  heads: [1, 22]\n")
    assert str(document.place(("model",), key=True)) == "x.yaml:1:1"
    assert str(document.place(("model", "heads"))) == "x.yaml:2:10"
    assert str(document.place(("model", "heads", 1))) == "x.yaml:2:14"
    assert str(document.place(("model", "heads", 7))) == "x.yaml:2:10"


def test_what_is_merged_has_the_place_where_it_was_written() -> None:
    document = document_of("a: &a {x: 1, y: !t 2, z: [1, 2]}\nb: {<<: *a, y: 3, z: 4}\n", 2)
    assert document.data["b"] == {"x": 1, "y": 3, "z": 4}
    assert str(document.place(("b", "x"))) == "x.yaml:1:11"
    assert str(document.place(("b", "y"))) == "x.yaml:2:16"
    assert document.place(("b",)).column == 4
    assert document.unreadable == {("a", "y")}


def test_windows_line_ends_count_as_one() -> None:
    value = document_of("a: 1\r\nb: 2\r\n")
    place = value.place(("b",))
    assert str(place) == "x.yaml:2:4"
    assert place.excerpt() == "  2 | b: 2\n    |    ^"


def test_the_caret_stands_under_the_column() -> None:
    assert (
        SourceLocation("x", 4, 3, "  d_modle: 768").excerpt() == "  4 |   d_modle: 768\n    |   ^"
    )
    assert SourceLocation("x", 1234, 1, "ab").excerpt() == "1234 | ab\n     | ^"


def test_the_caret_knows_tabs_and_wide_characters() -> None:
    assert SourceLocation("x", 1, 3, "\t漢b").excerpt() == "  1 | \t漢b\n    | \t  ^"


def test_a_long_line_is_cut_around_the_caret() -> None:
    text = "x" * 500 + "!" + "y" * 500
    line, caret = SourceLocation("x", 1, 501, text).excerpt().splitlines()
    assert line[caret.index("^")] == "!"
    assert len(line) < 80


def test_an_excerpt_carries_no_control_characters() -> None:
    assert "\x1b" not in SourceLocation("x", 1, 1, "a\x1b[31mb").excerpt()
    assert "\x1b" not in value_text("\x1b[31m")


def test_a_source_of_one_text_is_named_as_a_whole() -> None:
    document, _ = parse("[1, x]", "--set a.b=[1, x]", ("a", "b"))
    assert document is not None
    assert document.data == {"a": {"b": [1, "x"]}}
    assert str(document.place(("a", "b", 1))) == "--set a.b=[1, x]"


@given(st.text())
def test_any_text_is_read_or_refused_with_a_place(text: str) -> None:
    value, mistakes = parse(text, "x.yaml")
    lines = text.count("\n") + text.count("\r") + text.count("\x85") + 3
    for mistake in mistakes:
        assert mistake.message
        assert 0 <= mistake.place.line <= lines
    assert value is None or mistakes or not value.unreadable


def test_a_key_has_a_place_of_its_own() -> None:
    document = document_of("a: [1, {b: 2}]\n")
    assert document.place(("a", 1, "b"), key=True).column == 9
    assert document.place(("a", 1, "b")).column == 12
    assert document.place(("a", 1, "z"), key=True).column == 8
    assert document.place((), key=True).column == 1


def test_what_cannot_be_read_is_left_out_and_named() -> None:
    document, problems = parse("a: !x 1\nb: [2, .nan]\nc: 3\n", "x.yaml")
    assert document is not None
    assert document.data == {"b": [2, None], "c": 3}
    assert document.unreadable == {("a",), ("b", 1)}
    assert [problem.where for problem in problems] == ["x.yaml:1:4", "x.yaml:2:8"]
    assert "b[1] must be a finite number" in problems[1].message
