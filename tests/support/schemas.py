"""The JSON Schemas of docs/schemas, for editors.

    python tests/support/schemas.py

writes them anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instar.api.editor_schemas import config_schema, schedule_schema
from instar.config.document import SCHEMA_KEY
from instar.config.fields import known_tasks, root_of
from instar.extensions.fleet.spec import FleetSpec

FOLDER = Path(__file__).parents[2] / "docs/schemas"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[str, dict[str, Any]]:
    """Return the schema of each file: of configs of each task, of schedules, and of fleets."""
    configs = {task: config_schema(root_of(task)) for task in known_tasks()}
    return {**configs, "schedule": schedule_schema(), "fleet": fleet_schema()}


def fleet_schema() -> dict[str, Any]:
    """Return the schema of a fleet file, in which durations, sizes and pruners may be texts, and `${…}` stands for numbers."""
    schema: dict[str, Any] = with_texts(FleetSpec.model_json_schema())
    properties = {SCHEMA_KEY: {"type": "string"}, **schema["properties"]}
    return {SCHEMA_KEY: _DIALECT, **schema, "properties": properties}


def with_texts(node: Any) -> Any:
    """Return a schema in which a text may be in place of a number, a list or a section that stands for one."""
    if isinstance(node, list):
        return [with_texts(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    schema = {key: with_texts(value) for key, value in node.items()}
    if node.get("type") in ("number", "array") or node.get("$ref") == "#/$defs/Pruner":
        about = {key: schema.pop(key) for key in ("description", "default") if key in schema}
        return {"anyOf": [schema, {"type": ["string", "null"]}], **about}
    return schema


def text_of(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (FOLDER / f"{name}.json").write_text(text_of(schema), "utf-8")
