"""Every key of a fleet's file is applied or refused, and no path in it is an address."""

from __future__ import annotations

from pathlib import Path

import pytest

from instar.config.errors import ConfigError
from instar.config.origins import in_yaml
from instar.extensions.fleet.plan import load_fleet
from instar.extensions.fleet.spec import FleetSpec

FLEET = """\
name: f
max_parallel: 3
stagger: {jobs: 5s}
failure: {policy: fail_fast}
ray: {restarts: 7}
slurm: {partition: gpu}
vars: {a: 1}
matrix: {seed: [1, 2]}
jobs: {a: {command: "true", resources: {gpus: 2}}}
"""
MAPPINGS = ("vars", "matrix", "services", "jobs")


@pytest.mark.parametrize("key", FleetSpec.model_fields)
def test_a_key_of_a_fleets_file_is_applied_or_refused(key: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET, encoding="utf-8")
    usual = FleetSpec(name="f").model_dump(mode="json")[key]
    for value in (None, {}, usual, [["no", "list"]]):
        override = f"{key}={in_yaml(value)}"
        if fleet_refuses(path, override, key):
            assert value is None or value != usual, key
        else:
            actual = load_fleet(str(path), [override]).spec.model_dump(mode="json")[key]
            assert actual == (usual if value == {} else value), (key, value)


def fleet_refuses(path: Path, override: str, key: str) -> bool:
    """Whether a value is refused, by its key."""
    try:
        load_fleet(str(path), [override])
    except ConfigError as error:
        return all(problem.message.startswith(key) for problem in error.problems)
    return False


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        ("output_dir: s3://b/${run_name}", True),
        ("jobs: {train: {run: 's3://b/run.yaml'}}", True),
        ("jobs: {train: {run: run.yaml, set: {data.source: 'gs://b'}}}", True),
        ("jobs: {train: {run: run.yaml, set: {record.alerts.webhook: 'https://b'}}}", False),
        ("jobs: {train: {command: 'curl https://example.org', cwd: 's3://b'}}", True),
        ("jobs: {train: {command: 'curl https://b', env: {URL: 'https://b'}}}", False),
        ("matrix: {data.source: ['a', 's3://b']}", True),
    ],
)
def test_paths_of_a_fleet_are_no_addresses(
    line: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = "" if line.startswith("jobs") else "jobs: {train: {run: run.yaml}}\n"
    Path("fleet.yaml").write_text(f"name: f\n{jobs}{line}\n")
    if is_refused:
        with pytest.raises(ConfigError, match=r"fleet\.yaml:\d+:\d+: .*is an address, not a path"):
            load_fleet("fleet.yaml")
    else:
        load_fleet("fleet.yaml")


@pytest.mark.parametrize("path", ["s3://bucket/fleet.yaml", "file:///fleet.yaml"])
def test_a_fleets_file_is_no_address(path: str) -> None:
    with pytest.raises(ConfigError, match="is an address, not a path"):
        load_fleet(path)
