"""The JSON Schemas for editors: kept current, true of everything that is shipped, and false of what Instar refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemas
from jsonschema import Draft202012Validator

from instar.api.editor_schemas import SCHEMA_KEY
from instar.cli.main import main
from instar.config import PRESETS, STARTERS
from instar.config.document import parse
from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.config.sections import Operation
from instar.extensions.fleet.plan import load_fleet
from instar.run.load_config import load_run_config
from instar.schedule.operations import check_operation, operation_names

ROOT = Path(__file__).parents[2]
ALL = schemas.schemas()


def data_of(text: str) -> Any:
    document, problems = parse(text, "")
    assert not problems
    return None if document is None else document.data


def errors(name: str, data: Any) -> list[str]:
    return [error.message for error in Draft202012Validator(ALL[name]).iter_errors(data)]


def shipped_files() -> Iterator[Any]:
    """Every config, schedule and fleet of the repository with the name of its schema."""
    files = [*PRESETS.glob("*.yaml"), *STARTERS.glob("*.yaml"), *(ROOT / "src").rglob("*.yaml")]
    files += [*(ROOT / "examples").rglob("*.y*ml"), *(ROOT / "configs").iterdir()]
    for file in sorted({*files}):
        data = data_of(file.read_text("utf-8"))
        if not isinstance(data, dict) or "schedule" in data.keys() <= {"model", "schedule"}:
            yield pytest.param("schedule", data, id=file.name)
        elif {"jobs", "services"} & data.keys():
            yield pytest.param("fleet", data, id=file.name)
        elif ":" not in (task := data.get("task", "language")):
            yield pytest.param(task, data, id=file.name)


@pytest.mark.parametrize("name", ALL)
def test_the_published_schemas_are_the_present_ones(name: str) -> None:
    Draft202012Validator.check_schema(ALL[name])
    text = (schemas.FOLDER / f"{name}.json").read_text("utf-8")
    assert text == schemas.text_of(ALL[name]), "python tests/support/schemas.py writes them anew"


def test_what_is_published_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ALL["language"]
    assert {path.stem for path in schemas.FOLDER.iterdir()} == ALL.keys()


@pytest.mark.parametrize(("name", "data"), [*shipped_files()])
def test_everything_that_is_shipped_is_valid(name: str, data: Any) -> None:
    assert errors(name, data) == []
    if isinstance(data, dict):
        assert errors(name, {SCHEMA_KEY: "file.json", **data}) == []


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("language", "modle: {n_layer: 2}", "modle"),
        ("language", "model: {n_layers: 2}", "n_layers"),
        ("language", "model: {n_layer: two}", "two"),
        ("language", "train: {batch_size: 0}", "0"),
        ("language", "optimizer: {name: lbfgs}", "lbfgs"),
        ("language", "schedule: [{name: widen_mpl, value: x2}]", "widen_mpl"),
        ("language", "schedule: [{name: widen_mlp, value: [2]}]", "[2]"),
        ("language", "schedule: [{name: widen_mlp}]", "'value' is a required property"),
        ("language", "schedule: [{value: x2}]", "'name' is a required property"),
        ("schedule", "[{name: stack_layers, value: {a: 1}}]", "{'a': 1}"),
        ("schedule", "{schedule: [], modle: {}}", "modle"),
        ("fleet", "{name: f, jobs: {a: {runn: x.yaml}}}", "runn"),
        ("fleet", "{jobs: {}}", "'name' is a required property"),
        ("fleet", "{name: f, engine: moon}", "moon"),
    ],
)
def test_mistakes_are_marked(name: str, text: str, says: str) -> None:
    messages = [
        message
        for error in Draft202012Validator(ALL[name]).iter_errors(data_of(text))
        for message in (error.message, *(inner.message for inner in leaves(error)))
    ]
    assert any(says in message for message in messages), messages


def leaves(error: Any) -> Iterator[Any]:
    for inner in error.context or ():
        yield inner
        yield from leaves(inner)


def test_operations_are_completed_with_the_form_of_their_value() -> None:
    item = ALL["language"]["$defs"]["ScheduledOperation"]
    assert item["properties"]["name"]["anyOf"][0]["enum"] == operation_names()
    forms = {
        rule["if"]["properties"]["name"]["const"]: rule["then"]["properties"]["value"]
        for rule in item["allOf"]
    }
    assert list(forms) == operation_names()
    assert forms["widen_mlp"] == {
        "type": ["integer", "string"],
        "description": "needs a whole number above 0 or a factor such as 'x2'",
    }
    assert forms["merge_lora"]["type"] == ["null", "string"]
    assert forms["fold_masks"] == {"type": ["null"], "description": "takes no value"}
    assert all(form["description"] != "any value" for form in forms.values())


VALUES = (None, True, 1, 2, 0.5, 1.5, "x2", "attn", "even", [0, 0, 1], [0.9, 0.95], ["a.*"])


@pytest.mark.parametrize("name", operation_names())
def test_no_value_is_marked_that_an_operation_takes(name: str) -> None:
    for value in (*VALUES, {"target": "mlp", "rank": 2}, {"axis": "mlp", "size": 9}, {"a": 1}):
        options = {"iters": 1} if name == "branch" else {}
        try:
            check_operation(Operation(name, value, options))
        except ValueError:
            continue
        assert errors("schedule", [{"name": name, "value": value}]) == []


def test_the_key_is_no_part_of_a_config_schedule_or_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = '"$schema": ../docs/schemas/language.json\n'
    Path("plain.yaml").write_text("model: {n_layer: 2}\n")
    Path("with.yaml").write_text(f"{line}model: {{n_layer: 2}}\n")
    loaded_config = load_config("with.yaml")
    assert loaded_config.config == load_config("plain.yaml").config
    assert SCHEMA_KEY not in loaded_config.to_yaml()
    assert SCHEMA_KEY not in loaded_config.to_json()
    entries = [{"name": "change_lr", "value": 0.5, "when": {"at_step": 3}}]
    Path("list.json").write_text(json.dumps(entries))
    Path("grow.json").write_text(
        json.dumps({SCHEMA_KEY: "s", "model": {"n_layer": 1}, "schedule": entries})
    )
    with_key = load_run_config("plain.yaml", ["schedule=grow.json"]).config
    assert (with_key.schedule, with_key.model.n_layer) == (  # type: ignore[attr-defined]
        load_run_config("plain.yaml", ["schedule=list.json"]).config.schedule,
        1,
    )
    Path("keyed.json").write_text(json.dumps({SCHEMA_KEY: "s", "schedule": entries}))
    assert (
        load_run_config("plain.yaml", ["schedule=keyed.json"]).config.schedule == with_key.schedule
    )
    Path("fleet.yaml").write_text(f"{line}name: f\njobs: {{a: {{run: plain.yaml}}}}\n")
    assert load_fleet("fleet.yaml").spec.name == "f"
    Path("wrong.yaml").write_text('"$schema": 3\n')
    with pytest.raises(ConfigError, match="is the address or the path of a schema"):
        load_config("wrong.yaml")
    with pytest.raises(ConfigError, match="unknown key"):
        load_config("plain.yaml", ["$schema=x"])
