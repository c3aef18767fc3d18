from __future__ import annotations

from pathlib import Path

import pytest

from instar.config.errors import ConfigError
from instar.config.load import load_config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "parallel: {world_size: 3, devices: [0, 1]}",
            "1:24: parallel.world_size is 3, but parallel.devices are 2",
        ),
        ("parallel: {devices: [0, 1, 0]}", "parallel.devices names 0 more than once"),
        ("device: cpu\nparallel: {devices: [0]}", "choose GPUs, but device is cpu"),
        ("device: cuda:1\nparallel: {devices: [0]}", "choose GPUs, but device is cuda:1"),
        ("device: cuda:1\nparallel: {world_size: 2}", "cuda:1 is one device"),
        ("parallel: {devices: [-1]}", "parallel.devices"),
        ("parallel: {world_size: 0}", "parallel.world_size must be"),
        ("parallel: {master_port: 70000}", "parallel.master_port must be"),
    ],
)
def test_what_cannot_be_is_told_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text + "\n")
    with pytest.raises(ConfigError) as error:
        load_config(str(tmp_path / "a.yaml"))
    assert message in str(error.value)
    assert "a.yaml:" in str(error.value)


def test_what_fits_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "parallel: {world_size: 3, devices: [3, 4, 5], ddp: {find_unused_parameters: true}}\n"
    )
    config = load_config(str(tmp_path / "a.yaml")).config
    assert config.parallel.devices == (3, 4, 5)
    assert config.parallel.ddp.find_unused_parameters
