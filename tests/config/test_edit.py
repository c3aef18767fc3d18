"""A config's text with other values: it loads as the file with `--set` does, and keeps what people wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.config import STARTERS
from instar.config.document import merge_data, parse, parse_option
from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.config.writers.edit import check_replaceable, edited_config, is_written_by

AUTHOR = "instar find lr"
SETTINGS = (
    "optimizer.lr=0.00312",
    "train.until=[300it, 5min]",
    "model.context=64",
    "name=best",
    "eval.sets=[]",
    "learning_rate.plateau.factor=0.5",
    "schedule=[{name: change_lr, value: 0.5, when: {at_step: 3}}]",
)


@pytest.mark.parametrize("starter", sorted(path.name for path in STARTERS.glob("*.yaml")))
def test_it_loads_as_the_file_with_the_settings_and_keeps_all_comments(
    starter: str, tmp_path: Path
) -> None:
    file = STARTERS / starter
    text = edited_config(file.read_text(), SETTINGS, AUTHOR, ["of 3 trainings"])
    (tmp_path / "best.yaml").write_text(text)
    expected = load_config(str(file), SETTINGS, import_task=False, checks=()).config
    assert load_config(str(tmp_path / "best.yaml"), import_task=False, checks=()).config == expected
    comments = [line.strip() for line in file.read_text().splitlines() if line.strip()[:1] == "#"]
    output = [line.strip() for line in text.splitlines()]
    assert [line for line in comments if line not in output] == []
    assert output[:2] == ["# written by instar find lr", "# of 3 trainings"]


KEYS = st.sampled_from(["a", "b.c", "b.d", "b.e.f", "g"])
VALUES = st.sampled_from(
    ["1", "3e-4", "text", "[1, 2]", "{x: 1}", "null", "true", '"5"', "[{n: 1}]"]
)


@given(st.dictionaries(KEYS, VALUES), st.lists(st.tuples(KEYS, VALUES)))
def test_values_are_those_of_the_settings_whatever_was_there(
    before: dict[str, str], changes: list[tuple[str, str]]
) -> None:
    data: object = {}
    for key, value in before.items():
        document, _ = parse_option(f"{key}={value}")
        assert document is not None
        data = merge_data(data, document.data)
    options = [f"{key}={value}" for key, value in changes]
    text = edited_config("", [f"{k}={v}" for k, v in before.items()], AUTHOR, [])
    for option in options:
        document, _ = parse_option(option)
        assert document is not None
        data = merge_data(data, document.data)
    result, problems = parse(edited_config(text, options, AUTHOR, []), "")
    assert not problems
    assert (result.data if result is not None else {}) == data


def test_a_form_that_cannot_be_kept_is_said() -> None:
    text = edited_config("a: 1 # one\nb: 2\n", ["a.c=3"], AUTHOR, [])
    document, _ = parse(text, "")
    assert document is not None
    assert document.data == {"a": {"c": 3}, "b": 2}


def test_texts_that_are_no_config_are_refused() -> None:
    with pytest.raises(ConfigError):
        edited_config("a: [1", [], AUTHOR, [])
    with pytest.raises(ConfigError):
        edited_config("a: 1", ["b"], AUTHOR, [])


def test_a_remark_cannot_leave_its_comment() -> None:
    text = edited_config("a: 1\n", [], AUTHOR, ["evil\nb: 2"])
    document, _ = parse(text, "")
    assert document is not None
    assert document.data == {"a": 1}


def test_only_a_file_of_ones_own_is_written_again(tmp_path: Path) -> None:
    file = tmp_path / "best.yaml"
    check_replaceable(file, AUTHOR, "--write")
    file.write_text("name: mine\n")
    assert not is_written_by(file, AUTHOR)
    with pytest.raises(ConfigError, match="exists, and is not replaced; move it"):
        check_replaceable(file, AUTHOR, "--write")
    file.write_text(edited_config("", ["a=1"], AUTHOR, []))
    check_replaceable(file, AUTHOR, "--write")
    assert not is_written_by(file, "instar fleet")
    with pytest.raises(ConfigError, match="no such folder"):
        check_replaceable(tmp_path / "none" / "best.yaml", AUTHOR, "--write")
