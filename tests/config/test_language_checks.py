"""Every wrong combination in the section `data` is refused by name, with what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instar.config.errors import ConfigError, ConfigProblem
from instar.config.language import DataConfig, LanguageConfig, data_checks, data_rank_checks
from instar.config.load import load_config
from instar.schedule.settings import initial_settings, mixture_names, with_mixture

ROWS = {"kind": "rows", "source": "rows.parquet"}
STREAM = {"kind": "stream", "source": "rows.parquet", "val_source": "held_out.jsonl"}
PYTHON = {"kind": "python", "source": "mine:texts", "val_source": "held_out.jsonl"}
PARTS = [{"source": "a.txt"}, {"source": "b.txt"}]
PAGE = Path(__file__).parents[2] / "docs/data.md"


CASES: list[tuple[dict[str, Any], tuple[str, ...], str, str]] = [
    (
        {"val_fraction": 0.6, "test_fraction": 0.5},
        ("val_fraction", "test_fraction"),
        "data.val_fraction + data.test_fraction must be less than 1, got 1.1: no training "
        "data would be left",
        "",
    ),
    (
        PYTHON | {"source": "texts.py"},
        ("source", "kind"),
        "data.source of kind python names a function, not 'texts.py'",
        "e.g. my_package.my_module:samples",
    ),
    (
        {"kind": "rows"},
        ("source", "kind", "mixture"),
        "data.source of kind rows must be given: files, a folder or a name on the hub",
        "",
    ),
    (
        {"kind": "stream", "val_source": "held_out.jsonl"},
        ("source", "kind", "mixture"),
        "data.source of kind stream must be given: files, a folder or a name on the hub",
        "",
    ),
    (
        {"tokens_field": "ids"},
        ("tokens_field", "kind"),
        "data.tokens_field names a column of rows, and kind tokens prepares text",
        "say data.kind: rows",
    ),
    (
        ROWS | {"max_bytes": 1000},
        ("max_bytes", "kind"),
        "data.max_bytes limits what kind tokens prepares; kind rows reads its source as it is",
        "",
    ),
    (
        STREAM | {"val_source": None},
        ("val_source", "kind"),
        "kind stream cannot be split: data.val_source must name the held-out text",
        "a file, folder or glob of text",
    ),
    (
        PYTHON | {"val_source": None},
        ("val_source", "kind"),
        "kind python cannot be split: data.val_source must name the held-out text",
        "a file, folder or glob of text",
    ),
    (
        STREAM | {"order": "blocks"},
        ("order", "kind"),
        "data.order blocks needs random access, and kind stream is read from its beginning",
        "use sequential, or shuffled (within data.shuffle_window)",
    ),
    (
        PYTHON | {"order": "random"},
        ("order", "kind"),
        "data.order random needs random access, and kind python is read from its beginning",
        "use sequential, or shuffled (within data.shuffle_window)",
    ),
    (
        ROWS | {"order": "random", "packing": False},
        ("order", "packing"),
        "data.order random draws windows of packed text, and data.packing is false",
        "",
    ),
    (
        {"packing": False},
        ("packing", "kind"),
        "token shards hold text end to end: data.packing false needs rows",
        "say data.kind: rows",
    ),
    (
        STREAM | {"tokenizer": "bpe"},
        ("tokenizer", "kind"),
        "a bpe tokenizer must be trained first, and kind stream is not read before the run trains",
        "use byte, or the path of a tokenizer.json",
    ),
    (
        PYTHON | {"tokenizer": "char"},
        ("tokenizer", "kind"),
        "a char tokenizer must be trained first, and kind python is not read before the run trains",
        "use byte, or the path of a tokenizer.json",
    ),
    (
        STREAM | {"mixture": PARTS, "source": "stdlib"},
        ("mixture", "kind"),
        "sources of kind stream cannot be mixed: they are read from their beginning",
        "use rows, or tokens",
    ),
    (
        {"mixture": [*PARTS, {"source": "c.txt", "weight": 2}]},
        ("mixture[0]", "mixture"),
        "either all parts of data.mixture have a weight, or none",
        "data.mixture[0] has none",
    ),
    (
        {"mixture": PARTS, "tokenizer": "bpe"},
        ("tokenizer", "mixture"),
        "a bpe tokenizer would be trained on each part of data.mixture anew",
        "train one with `instar data prepare`, and name its tokenizer.json; or use byte",
    ),
    (
        {"mixture": PARTS, "order": "blocks"},
        ("order", "mixture"),
        "data.order blocks is of one source; those of a mixture are shuffled or sequential",
        "",
    ),
    (
        {"mixture": PARTS, "source": "texts.jsonl"},
        ("source", "mixture"),
        "data.source is not read where data.mixture names the sources",
        "name it as a part of data.mixture, or leave one of them out",
    ),
    (
        {"source_split": "validation"},
        ("source_split", "kind"),
        "data.source_split selects from a Hugging Face data set, and kind tokens reads none",
        "use kind rows or stream, or leave it out",
    ),
    (
        PYTHON | {"workers": 2},
        ("workers", "kind"),
        "an iterable is read by one process: data.workers must be 0 with kind python",
        "",
    ),
]


def data(values: dict[str, Any]) -> DataConfig:
    return DataConfig.model_validate(values)


@pytest.mark.parametrize(("values", "keys", "message", "hint"), CASES)
def test_each_rule_says_what_is_wrong(
    values: dict[str, Any], keys: tuple[str, ...], message: str, hint: str
) -> None:
    expected = ConfigProblem(tuple(f"data.{key}" for key in keys), message, hint)
    assert data_checks(data(values)) == [expected]


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_iterable_is_read_by_rank_0_alone(ranks: int) -> None:
    expected = ConfigProblem(
        ("data.strategy", "data.kind"),
        f"a Python iterable can be read by rank 0 only, not by each of {ranks} ranks",
        "say data.strategy: dispatched",
    )
    assert data_rank_checks(data(PYTHON), ranks) == [expected]


def test_ranks_that_read_lanes_need_one_each() -> None:
    expected = ConfigProblem(
        ("data.lanes", "data.strategy"),
        "4 ranks cannot share 3 lanes: each reads whole ones",
        "say data.lanes: 4 or a multiple, or data.strategy: dispatched",
    )
    assert data_rank_checks(data(STREAM | {"lanes": 3}), 4) == [expected]


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({}, 8),
        (ROWS, 8),
        (ROWS | {"mixture": PARTS, "source": "stdlib", "order": "sequential"}, 8),
        (ROWS | {"tokens_field": "ids", "packing": False, "workers": 2}, 8),
        (ROWS | {"tokenizer": "bpe", "order": "blocks", "workers": 2}, 8),
        ({"mixture": PARTS, "strategy": "dispatched"}, 8),
        (STREAM | {"lanes": 4, "workers": 2}, 4),
        (STREAM | {"lanes": 3, "strategy": "dispatched"}, 4),
        (STREAM | {"lanes": 1}, 1),
        (PYTHON | {"strategy": "dispatched"}, 8),
        (PYTHON | {"order": "sequential"}, 1),
    ],
)
def test_what_fits_raises_no_alarm(values: dict[str, Any], ranks: int) -> None:
    assert data_checks(data(values)) == []
    assert data_rank_checks(data(values), ranks) == []


def test_all_are_told_at_once_each_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data:\n  kind: stream\n  source: rows.parquet\n  order: blocks\n")
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    places = [problem.where for problem in caught.value.problems]
    assert places == [f"{path}:2:9", f"{path}:4:10"]


def test_the_page_has_what_every_rule_says() -> None:
    page = PAGE.read_text("utf-8")
    rules = {keys for _, keys, _, _ in CASES}
    assert rules == {keys for _, keys, message, _ in CASES if f"| {message} |" in page}
    for clash in (
        *data_rank_checks(data(PYTHON), 2),
        *data_rank_checks(data(STREAM | {"lanes": 3}), 4),
    ):
        assert f"| {clash.message} |" in page


def test_parts_of_one_name_are_told_apart() -> None:
    """Runs that began with such a mixture go on, and no loss replaces another's."""
    parts = [{"source": "a.txt"}, {"source": "b.txt", "name": "b"}, {"source": "a.txt"}]
    parts += [{"source": "c.txt", "name": "b"}, {"source": "a.txt"}, {"source": "a.txt (3)"}]
    data = {"mixture": [{**part, "weight": 1} for part in parts], "tokenizer": "byte"}
    config = LanguageConfig.model_validate({"data": data})
    names = ["a.txt", "b", "a.txt (2)", "b (2)", "a.txt (3)", "a.txt (3) (2)"]
    assert config.held_out_parts == mixture_names(config) == names
    weights = dict(zip(names, (1, 0, 2, 3, 4, 5), strict=True))
    assert with_mixture(initial_settings(config), config, weights).mixture == (1, 0, 2, 3, 4, 5)
