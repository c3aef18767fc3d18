"""What of a config is not shown to others."""

from __future__ import annotations

from pathlib import Path

import pytest

from instar.config.errors import HIDDEN, ConfigError, redact_text
from instar.config.load import load_config
from instar.config.origins import lines_of, redacted_lines, redacted_value

SETS = [
    "record.alerts.webhook=https://hooks.example.org/T0/SECRET-1",
    'record.alerts.command=[curl, -H, "Authorization: SECRET-2", "http://x"]',
    "record.trackers.mlflow.uri=https://me:SECRET-3@mlflow.example.org/",
    "record.trackers.wandb.entity=SECRET-4",
    "data.source=https://me:SECRET-5@data.example.org/a.txt?X-Amz-Signature=SECRET-6&part=7",
    "name=shown",
]


def redacted_text(text: str) -> str:
    return "\n".join(f"{line.text}  # {line.origin}" for line in redacted_lines(lines_of(text)))


def test_a_resolved_config_is_shown_without_secrets() -> None:
    text = redacted_text(load_config(None, SETS, checks=()).to_yaml())
    assert "SECRET" not in text
    assert text.count(HIDDEN) >= 6
    for word in ("name: shown", "data.example.org/a.txt", "part=7", "divergence: 0.2", "n_layer"):
        assert word in text
    lines = lines_of(load_config(None, [], checks=()).to_yaml())
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
    assert "SECRET" not in redacted_text(text)


def test_values_are_hidden_by_key_and_by_what_they_are() -> None:
    assert redacted_value("record.alerts.webhook", "https://x") == HIDDEN
    assert redacted_value("record.alerts.webhook", None) is None
    assert redacted_value("data.sources", ({"path": "s3://a:b@c"},)) == (
        {"path": f"s3://{HIDDEN}@c"},
    )
    assert redacted_value("model.n_layer", 3) == 3
    assert redact_text("see https://a.org/b?c=d") == "see https://a.org/b?c=d"
    long = ["a." * 200_000, "?" + "token" * 100_000, "://" + "a" * 400_000]
    assert [redact_text(text) for text in long] == long  # in milliseconds


BAD = {
    "record: {alerts: {webhook: 'https://hooks.example.org/SECRET x'}}": "an address without spaces",
    "record: {alerts: {webhook: 'https://hooks.example.org/SECRET\u00a0'}}": "letters beyond ASCII",
    'record: {alerts: {webhook: "https://a/SECRET\\n"}}': "control characters",
    "record: {alerts: {webhook: 'https://me:SECRET/x@host/'}}": "an address of http or https",
    "record: {alerts: {webhook: 'https://host:SECRET/'}}": "an address of http or https",
    "record: {alerts: {webhook: 'ftp://host/SECRET'}}": "an address of http or https",
    "record: {alerts: {webhook: 'https:///SECRET'}}": "an address of http or https",
    "record: {alerts: {webhook: [SECRET]}}": "must be text",
    "record: {alerts: SECRET}": "is a section",
    "record:\n  alerts:\n    hook: https://hooks.example.org/SECRET": "unknown key",
    "record: {log_interval: 0, alerts: {webhook: 'https://x/SECRET'}}": "log_interval must be",
    "record: {trackers: {mlflow: {uri: 'http://me:SECRET@host /'}}}": "without spaces",
    "record:\n  trackers:\n    wandb: {entity: [SECRET]}": "must be text",
    "data: {source: 'http://me:SECRET@host/x', val_fraction: 7}": "val_fraction must be",
}


@pytest.mark.parametrize("text", BAD)
def test_a_mistake_in_a_secret_is_named_without_it(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{text}\n")
    with pytest.raises(ConfigError) as error:
        load_config(str(file), (), checks=())
    assert BAD[text] in str(error.value)
    assert "SECRET" not in str(error.value)


def test_an_option_with_a_secret_is_named_without_it() -> None:
    for option in SETS[:4]:
        key = option.partition("=")[0]
        with pytest.raises(ConfigError, match=f"--set {key}: ") as error:
            load_config(None, [f"{key}={{a: SECRET}}"], checks=())
        assert "SECRET" not in str(error.value)


def test_a_line_without_secrets_is_shown_where_it_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {n_layer: many}\n")
    with pytest.raises(ConfigError, match=r"1 \| model: {n_layer: many}"):
        load_config(str(file), (), checks=())
