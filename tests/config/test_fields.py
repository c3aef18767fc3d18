from instar.config.familiar import CALLED
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
from instar.config.graph import GraphConfig
from instar.config.language import LanguageConfig


def test_nested_sections_are_found() -> None:
    assert list(sections(LanguageConfig))[:2] == ["", "model"]
    assert "parallel.ddp" in sections(LanguageConfig)


def test_keys_hold_values_not_sections() -> None:
    assert "model.n_head" in keys(LanguageConfig)
    assert "parallel.ddp.static_graph" in keys(LanguageConfig)
    assert not set(keys(LanguageConfig)) & set(sections(LanguageConfig))


def test_every_key_is_described() -> None:
    assert [key for key, field in keys(LanguageConfig).items() if not field.description] == []


def test_every_key_can_be_put_into_words() -> None:
    for key in keys(LanguageConfig):
        node = schema_node(LanguageConfig, tuple(key.split(".")))
        assert node is not None
        assert "something else" not in expected(LanguageConfig, node), key


def test_every_key_of_an_operation_is_described_and_can_be_put_into_words() -> None:
    assert ("schedule", 0, "when", "plateau", "slope") in schedule_keys()
    for path, field in schedule_keys().items():
        assert field.description, path
        node = schema_node(LanguageConfig, path)
        assert node is not None, path
        assert "something else" not in expected(LanguageConfig, node), path


def test_what_a_section_may_have_is_known_where_it_may_be_left_out_too() -> None:
    assert "window" in properties(LanguageConfig, ("schedule", 3, "when", "any", 0, "plateau"))
    assert properties(LanguageConfig, ("seed",)) == []


def test_values_are_scalars_tuples_and_dicts() -> None:
    config = LanguageConfig.model_validate(
        {"schedule": [{"name": "change_lr", "value": 2, "how": 3}]}
    )
    assert value_of(config, "schedule") == ({"name": "change_lr", "value": 2, "how": 3},)


def test_every_pattern_of_the_schema_has_words() -> None:
    patterns = {
        str(node["pattern"])
        for key in keys(LanguageConfig)
        if (node := schema_node(LanguageConfig, tuple(key.split(".")))) and "pattern" in node
    }
    assert patterns <= PATTERNS.keys()


def test_defaults_are_those_of_an_empty_config() -> None:
    config = LanguageConfig.model_validate({})
    assert {key: default(LanguageConfig, key) for key in keys(LanguageConfig)} == {
        key: value_of(config, key) for key in keys(LanguageConfig)
    }


def test_what_other_trainers_call_it_leads_to_keys_that_exist() -> None:
    roots = (LanguageConfig, GraphConfig)
    assert set(CALLED) <= {key for root in roots for key in (*keys(root), *sections(root))}


def test_the_editors_schema_takes_what_the_reader_takes() -> None:
    until = editor_schema(LanguageConfig, "train.until")
    assert {"type": "string"} in until["anyOf"]
    schedule = editor_schema(LanguageConfig, "schedule")
    assert {"type": "string"} in schedule["anyOf"]
    assert "when" in schedule["$defs"]["ScheduledOperation"]["properties"]
    model = editor_schema(LanguageConfig)["properties"]["model"]
    assert {"type": "null"} in model["anyOf"]
