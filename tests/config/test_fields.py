from instar.config.explain import FAMILIAR
from instar.config.fields import (
    PATTERNS,
    default,
    editor_schema,
    expected,
    keys,
    schema_node,
    sections,
    value_of,
)
from instar.config.schema import RunConfig


def test_nested_sections_are_found() -> None:
    assert list(sections())[:2] == ["", "model"]
    assert "distributed.ddp" in sections()


def test_keys_hold_values_not_sections() -> None:
    assert "model.n_head" in keys()
    assert "distributed.ddp.static_graph" in keys()
    assert not set(keys()) & set(sections())


def test_every_key_is_described() -> None:
    assert [key for key, field in keys().items() if not field.description] == []


def test_every_key_can_be_put_into_words() -> None:
    for key in keys():
        node = schema_node(tuple(key.split(".")))
        assert node is not None
        assert "something else" not in expected(node), key


def test_every_pattern_of_the_schema_has_words() -> None:
    patterns = {
        str(node["pattern"])
        for key in keys()
        if (node := schema_node(tuple(key.split(".")))) and "pattern" in node
    }
    assert patterns <= PATTERNS.keys()


def test_defaults_are_those_of_an_empty_config() -> None:
    config = RunConfig.model_validate({})
    assert {key: default(key) for key in keys()} == {key: value_of(config, key) for key in keys()}


def test_what_other_trainers_call_it_leads_to_keys_that_exist() -> None:
    assert set(FAMILIAR.values()) <= set(keys())


def test_the_editors_schema_takes_what_the_reader_takes() -> None:
    until = editor_schema("train.until")
    assert {"type": "string"} in until["anyOf"]
    model = editor_schema()["properties"]["model"]
    assert {"type": "null"} in model["anyOf"]
