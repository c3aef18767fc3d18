"""What of a config is not shown to others."""

from __future__ import annotations

import pytest

from instar.config.load import load
from instar.config.origins import HIDDEN, lines_of, redacted, redacted_lines, redacted_value

SETS = [
    "record.alerts.webhook=https://hooks.example.org/T0/SECRET-1",
    'record.alerts.command=[curl, -H, "Authorization: SECRET-2", "http://x"]',
    "record.trackers.mlflow.uri=https://me:SECRET-3@mlflow.example.org/",
    "record.trackers.wandb.entity=SECRET-4",
    "data.source=https://me:SECRET-5@data.example.org/a.txt?X-Amz-Signature=SECRET-6&part=7",
    "name=shown",
]


def shown(text: str) -> str:
    return "\n".join(f"{line.text}  # {line.origin}" for line in redacted_lines(lines_of(text)))


def test_a_resolved_config_is_shown_without_secrets() -> None:
    text = shown(load(None, SETS, checks=()).to_yaml())
    assert "SECRET" not in text
    assert text.count(HIDDEN) >= 6
    for kept in ("name: shown", "data.example.org/a.txt", "part=7", "divergence: 0.2", "n_layer"):
        assert kept in text
    lines = lines_of(load(None, [], checks=()).to_yaml())
    assert redacted_lines(lines) == lines


@pytest.mark.parametrize(
    "text",
    [
        "record: {alerts: {webhook: SECRET}}\n",
        "record:\n  alerts: {command: SECRET}\n",
        "record:\n  alerts:\n    command:\n    - curl\n    - SECRET\n",
        "record:\n  trackers:\n    later: {key: SECRET}\n",
        "record:\n  alerts:\n    webhook: >-\n      https://SECRET\n",
        "samples:\n  api_key: SECRET\n",
        "samples:\n  at: ftp://SECRET@host/x\n",
    ],
)
def test_secrets_are_hidden_however_a_config_is_written(text: str) -> None:
    assert "SECRET" not in shown(text)


def test_values_are_hidden_by_key_and_by_what_they_are() -> None:
    assert redacted_value("record.alerts.webhook", "https://x") == HIDDEN
    assert redacted_value("record.alerts.webhook", None) is None
    assert redacted_value("data.sources", ({"path": "s3://a:b@c"},)) == (
        {"path": f"s3://{HIDDEN}@c"},
    )
    assert redacted_value("model.n_layer", 3) == 3
    assert redacted("see https://a.org/b?c=d") == "see https://a.org/b?c=d"
