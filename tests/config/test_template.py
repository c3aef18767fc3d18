import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.config import PRESETS, names_in
from instar.config.document import parse
from instar.config.errors import ConfigError
from instar.config.fields import known_tasks, root_of, schema_keys
from instar.config.growing import DIVISORS
from instar.config.load import load_config
from instar.config.origins import in_yaml, plain_text
from instar.config.writers.starter import starter, starter_files

TASKS = {
    kind: parse(path.read_text(), kind)[0].data.get("task", "language")
    for kind, path in starter_files().items()
}
LANGUAGE_KINDS = [kind for kind in TASKS if TASKS[kind] == "language"]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from(["yes", "null", "~", "1e5", "0x10", "2024-01-01", "a: b", "#", "", " x", "-"]),
)


values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=6,
)


@given(values)
def test_any_value_is_read_back_equal(value: object) -> None:
    document, mistakes = parse(f"key: {in_yaml(value)}  # comment\n", "x.yaml")
    assert not mistakes
    assert document is not None
    back = document.data["key"]
    assert back == value
    assert type(back) is type(value)


def test_simple_texts_need_no_quotes() -> None:
    assert in_yaml(("2000it", "loss<3.0")) == "[2000it, loss<3.0]"
    assert in_yaml("data/books") == "data/books"
    assert in_yaml("*.bias") == '"*.bias"'
    assert in_yaml("1e5") == '"1e5"'


def uncomment(text: str) -> str:
    """The template with every '#key: value' line set."""
    return re.sub(r"^( *)#(\w+:)", r"\1\2", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("kind", "preset"),
    [(kind, None) for kind in TASKS]
    + [
        (kind, preset)
        for kind in LANGUAGE_KINDS
        for preset in names_in(PRESETS)
        if kind == "gpt" or preset not in DIVISORS  # the others have a schedule of their own
    ],
)
def test_the_template_loads_and_shows_the_values_in_force(
    tmp_path: Path, preset: str | None, kind: str
) -> None:
    text = starter(kind, "gpt.yaml", [preset] if preset else [])
    path, full = tmp_path / "gpt.yaml", tmp_path / "full.yaml"
    path.write_text(text, encoding="utf-8")
    full.write_text(uncomment(text), encoding="utf-8")
    loaded_config, all_set = load_config(str(path)), load_config(str(full))
    assert all_set.config == loaded_config.config
    assert "default" not in all_set.origins.values()


def test_the_template_is_a_small_gpt_on_the_built_in_corpus(tmp_path: Path) -> None:
    path = tmp_path / "gpt.yaml"
    path.write_text(starter("gpt", str(path)), encoding="utf-8")
    config = load_config(str(path)).config
    model, data = config.model, config.data
    assert (model.n_layer, model.n_head, model.n_embd, model.context) == (4, 4, 128, 128)
    assert (data.source, data.tokenizer, data.vocab_size) == ("stdlib", "bpe", 2048)
    assert config.train.until == ("600it",)


def test_the_template_leaves_to_a_preset_what_the_preset_sets(tmp_path: Path) -> None:
    path = tmp_path / "gpt.yaml"
    path.write_text(starter("gpt", str(path), ["llama", "plain"]), encoding="utf-8")
    loaded_config = load_config(str(path))
    assert loaded_config.config.preset == ("llama", "plain")
    assert loaded_config.origins["model.norm"] == "preset plain"
    assert loaded_config.origins["optimizer.lr"] == "preset plain"
    assert loaded_config.config.optimizer.beta2 == 0.99


def test_the_template_of_growth_has_a_schedule_line_by_line(tmp_path: Path) -> None:
    text = starter("growth", "growth.yaml")
    path = tmp_path / "growth.yaml"
    path.write_text(text, encoding="utf-8")
    names = [operation.name for operation in load_config(str(path)).config.schedule]
    assert names == ["insert_layers", "widen_mlp", "change_lr"]
    assert [line for line in text.splitlines() if line.startswith("  - {name: change_lr,")]


def comments_of(text: str) -> str:
    """What the comments say, on one line."""
    comments = " ".join(re.sub(r"^\s*#", "", line) for line in text.splitlines())
    return re.sub(r"\s+", " ", comments)


@pytest.mark.parametrize("kind", starter_files())
def test_every_key_stands_in_the_template_with_its_description(kind: str) -> None:
    text, root = starter(kind, "a.yaml"), root_of(TASKS[kind])
    comments = comments_of(text)
    for key, field in schema_keys(root).items():
        assert re.search(rf"^ *#?{key.rpartition('.')[2]}:( |$)", text, re.MULTILINE), key
        assert field.description
        assert field.description in comments


def test_a_kind_names_a_task_of_its_own_or_none() -> None:
    assert set(TASKS.values()) == set(known_tasks())


def test_presets_are_of_language_models() -> None:
    with pytest.raises(ConfigError, match="for language models, not for task causal_lm"):
        starter("finetune", "a.yaml", ["plain"])


def test_the_template_names_the_next_commands_whatever_the_path() -> None:
    text = starter("gpt", "my run\n.yaml")
    assert "instar train 'my run�.yaml'" in text
    assert "instar sample latest" in text
    assert all(line.startswith("#") for line in text.split("\n\n")[0].splitlines())


def test_a_table_quotes_only_texts_that_look_like_other_values() -> None:
    assert plain_text("imgs:Img") == "imgs:Img"
    assert plain_text(["a: b", "#c"]) == "[a: b, #c]"
    for text in ("null", "~", "True", "1e-3", "-.5", ".inf", ".nan", "[1]", "{a", "", " a", "a\nb"):
        assert plain_text(text) == in_yaml(text)
        assert plain_text(text)[0] in "\"'", text
    assert (plain_text(None), plain_text(1e-3), plain_text(True)) == ("null", in_yaml(1e-3), "true")
