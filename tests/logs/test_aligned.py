"""Tables as plain lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from instar.logs.text.stdout import align_columns, wrap_line

words = st.text("abcde12", min_size=1, max_size=12)
tables = st.integers(1, 6).flatmap(
    lambda columns: st.lists(
        st.lists(words, min_size=columns, max_size=columns), min_size=1, max_size=5
    )
)


def test_numbers_are_flush_right() -> None:
    rows = [("", "step", "loss"), ("a", "5", "3.25"), ("longer", "1,000", "2")]
    assert align_columns(rows, right=(1, 2)) == [
        "         step  loss",
        "a           5  3.25",
        "longer  1,000     2",
    ]


def test_columns_that_are_too_many_follow_below() -> None:
    rows = [("run", "first", "second"), ("a", "1", "2")]
    assert align_columns(rows, width=12) == ["run  first", "a    1", "", "run  second", "a    2"]


@given(tables, st.integers(1, 60))
def test_nothing_is_lost_however_narrow(rows: list[list[str]], width: int) -> None:
    lines = align_columns(rows, width=width)
    shown_words = sorted(word for line in lines for word in line.split())
    assert set(shown_words) == {cell for row in rows for cell in row}
    widest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    at_least = widest[0] + max([2 + other for other in widest[1:]], default=0)
    assert max(map(len, lines)) <= max(width, at_least)


@given(st.lists(words, min_size=1, max_size=30), st.integers(13, 80))
def test_wrapped_lines_keep_their_words(parts: list[str], width: int) -> None:
    lines = wrap_line(" ".join(parts), width, indent="")
    assert " ".join(lines).split() == parts
    assert max(map(len, lines)) <= width
