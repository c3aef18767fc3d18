from instar.config.explain import FAMILIAR
from instar.config.fields import (
    PATTERNS,
    default,
    editor_schema,
    expected,
    keys,
    properties,
    schedule_keys,
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


def test_every_key_of_an_operation_is_described_and_can_be_put_into_words() -> None:
    assert ("schedule", 0, "when", "plateau", "slope") in schedule_keys()
    for path, field in schedule_keys().items():
        assert field.description, path
        node = schema_node(path)
        assert node is not None, path
        assert "something else" not in expected(node), path


def test_what_a_section_may_have_is_known_where_it_may_be_left_out_too() -> None:
    assert "window" in properties(("schedule", 3, "when", "any", 0, "plateau"))
    assert properties(("seed",)) == []


def test_values_are_scalars_tuples_and_dicts() -> None:
    config = RunConfig.model_validate({"schedule": [{"name": "change_lr", "value": 2, "how": 3}]})
    assert value_of(config, "schedule") == ({"name": "change_lr", "value": 2, "how": 3},)


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
    schedule = editor_schema("schedule")
    assert {"type": "string"} in schedule["anyOf"]
    assert "when" in schedule["$defs"]["ScheduledOperation"]["properties"]
    model = editor_schema()["properties"]["model"]
    assert {"type": "null"} in model["anyOf"]
