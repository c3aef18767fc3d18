from instar.config.fields import (
    choices,
    default,
    editor_schema,
    flatten_config,
    known_tasks,
    nested,
    root_of,
    schedule_keys,
    schema_keys,
    section_types,
    values,
)
from instar.config.language import LanguageConfig
from instar.config.suggestions import ALIASES, PATTERNS, expected
from instar.extensions import BUILT_IN, built_in


def test_nested_sections_are_found() -> None:
    assert list(section_types(LanguageConfig))[:2] == ["", "model"]
    assert "parallel.ddp" in section_types(LanguageConfig)


def test_keys_hold_values_not_sections() -> None:
    assert "model.n_head" in schema_keys(LanguageConfig)
    assert "parallel.ddp.static_graph" in schema_keys(LanguageConfig)
    assert not set(schema_keys(LanguageConfig)) & set(section_types(LanguageConfig))


def test_every_key_is_described() -> None:
    assert [
        key for key, field in schema_keys(LanguageConfig).items() if not field.description
    ] == []


def test_every_key_can_be_put_into_words() -> None:
    for key in schema_keys(LanguageConfig):
        phrase = expected(LanguageConfig, tuple(key.split(".")))
        assert phrase, key
        assert "something else" not in phrase, key


def test_every_key_of_an_operation_is_described_and_can_be_put_into_words() -> None:
    assert ("schedule", 0, "when", "plateau", "slope") in schedule_keys()
    for path, field in schedule_keys().items():
        assert field.description, path
        assert expected(LanguageConfig, path), path
        assert "something else" not in expected(LanguageConfig, path), path


def test_what_a_section_may_have_is_known_where_it_may_be_left_out_too() -> None:
    (plateau, null) = choices(LanguageConfig, ("schedule", 3, "when", "any", 0, "plateau"))
    assert "window" in plateau["properties"]
    assert null["type"] == "null"
    assert "properties" not in choices(LanguageConfig, ("seed",))[0]
    assert choices(LanguageConfig, ("seed", "x")) == []


def test_values_are_those_of_json() -> None:
    config = LanguageConfig.model_validate(
        {"schedule": [{"name": "change_lr", "value": 2, "how": 3}]}
    )
    assert values(config)["schedule"] == [{"name": "change_lr", "value": 2, "how": 3}]
    assert list(values(config)) == list(schema_keys(LanguageConfig))


def test_nested_data_is_flattened_to_its_keys_and_back() -> None:
    tree = {"seed": 1, "parallel": {"ddp": {"static_graph": True}, "devices": [0, 1]}}
    paths = dict(flatten_config(LanguageConfig, tree))
    assert list(paths) == [("seed",), ("parallel", "devices"), ("parallel", "ddp", "static_graph")]
    assert nested(paths) == tree


def test_every_pattern_of_the_schema_has_words() -> None:
    patterns = {
        str(node["pattern"])
        for key in schema_keys(LanguageConfig)
        for node in choices(LanguageConfig, tuple(key.split(".")))
        if "pattern" in node
    }
    assert patterns <= PATTERNS.keys()


def test_defaults_are_those_of_an_empty_config() -> None:
    config = LanguageConfig.model_validate({})
    defaults = {key: default(field) for key, field in schema_keys(LanguageConfig).items()}
    assert defaults == values(config)


def test_what_other_trainers_call_it_leads_to_keys_that_exist() -> None:
    roots = map(root_of, known_tasks())
    keys = {key for root in roots for key in (*schema_keys(root), *section_types(root))}
    assert set(ALIASES) <= keys or len(built_in()) < len(BUILT_IN)


def test_the_editors_schema_takes_what_the_reader_takes() -> None:
    until = editor_schema(LanguageConfig, "train.until")
    assert {"type": "string"} in until["anyOf"]
    schedule = editor_schema(LanguageConfig, "schedule")
    assert {"type": "string"} in schedule["anyOf"]
    assert "when" in schedule["$defs"]["ScheduledOperation"]["properties"]
    model = editor_schema(LanguageConfig)["properties"]["model"]
    assert {"type": "null"} in model["anyOf"]
