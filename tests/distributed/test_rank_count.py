from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.config.schema import ParallelConfig
from instar.distributed.placement import Placement, RankCount, resolve_ranks
from instar.distributed.world import chosen_devices, device_of

ALONE = Placement()
ONE_OF_FOUR = Placement(1, 1, 4, 2, is_set=True)


def parallel(world_size: int | None = None, devices: tuple[int, ...] = ()) -> ParallelConfig:
    return ParallelConfig(world_size=world_size, devices=devices)


@pytest.mark.parametrize(
    ("config", "nproc", "devices", "start"),
    [
        (parallel(), None, None, RankCount(1)),
        (parallel(3), None, None, RankCount(3)),
        (parallel(None, (3, 4, 5)), None, None, RankCount(3, (3, 4, 5))),
        (parallel(3), 2, None, RankCount(2)),
        (parallel(3), None, [6, 7], RankCount(2, (6, 7))),
        (parallel(None, (3, 4, 5)), 2, None, RankCount(2, (3, 4))),
        (parallel(None, (3, 4, 5)), None, [6, 7], RankCount(2, (6, 7))),
        (parallel(3, (3, 4, 5)), 1, [6, 7], RankCount(1, (6,))),
    ],
)
def test_what_is_typed_comes_before_the_config(
    config: ParallelConfig, nproc: int | None, devices: list[int] | None, start: RankCount
) -> None:
    assert resolve_ranks(config, ALONE, nproc, devices) == start


def test_the_environment_comes_before_the_config() -> None:
    assert resolve_ranks(parallel(3), ONE_OF_FOUR) == RankCount(4)
    assert resolve_ranks(parallel(3), Placement(is_set=True)) == RankCount(1)
    assert resolve_ranks(parallel(None, (3, 4)), ONE_OF_FOUR) == RankCount(4, (3, 4))


def test_another_number_than_the_environment_says_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--nproc 2, but .* sets 4 ranks"):
        resolve_ranks(parallel(), ONE_OF_FOUR, 2)


@pytest.mark.parametrize(
    ("config", "place", "nproc", "devices", "message"),
    [
        (parallel(), ALONE, 3, [0, 1], "--devices: 3 ranks on this machine, but devices 0,1 only"),
        (parallel(None, (0, 1)), ALONE, 3, None, "parallel.devices: 3 ranks"),
        (parallel(None, (3,)), ONE_OF_FOUR, None, None, "2 ranks on this machine"),
    ],
)
def test_fewer_devices_than_ranks_are_refused(
    config: ParallelConfig,
    place: Placement,
    nproc: int | None,
    devices: list[int] | None,
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_ranks(config, place, nproc, devices)


@given(
    st.none() | st.integers(1, 8),
    st.lists(st.integers(0, 9), unique=True, max_size=8).map(tuple),
    st.none() | st.integers(1, 8),
    st.none() | st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=8),
)
def test_every_rank_has_a_device_or_none_has(
    size: int | None,
    config_devices: tuple[int, ...],
    nproc: int | None,
    cli_devices: list[int] | None,
) -> None:
    try:
        start = resolve_ranks(parallel(size, config_devices), ALONE, nproc, cli_devices)
    except ConfigError:
        return
    assert len(start.devices) in (0, start.ranks)
    assert start.ranks == (
        nproc or (len(cli_devices) if cli_devices else size or len(config_devices) or 1)
    )


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torch says that there are four."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    return monkeypatch


def device_name(devices: tuple[int, ...], place: Placement, device: str = "auto") -> str:
    try:
        return str(device_of(device, place, devices))
    except ConfigError as error:
        return str(error).splitlines()[0]


@pytest.mark.usefixtures("four_gpus")
def test_each_rank_has_the_device_of_its_local_rank() -> None:
    second = Placement(3, 1, 4, 2)
    assert device_name((), second) == "cuda:1"
    assert device_name((3, 2), second) == "cuda:2"
    assert device_name((2,), ALONE) == "cuda:2"
    assert device_name((), ALONE, "cuda:3") == "cuda:3"
    assert device_name((), second, "cpu") == "cpu"


def test_a_device_that_is_not_there_is_named(four_gpus: pytest.MonkeyPatch) -> None:
    three = Placement(0, 0, 3, 3)
    assert "cuda:5 does not exist: this host has 4 GPUs" in device_name((3, 4, 5)[::-1], three)
    four_gpus.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert (
        "cuda:4 does not exist: CUDA_VISIBLE_DEVICES=4,5,6,7 leaves 4 GPUs, counted from 0 to 3"
        in (device_name((0, 1, 4), three))
    )
    assert "the device is cpu" in device_name((0, 1, 2), three, "cpu")


def test_a_rank_that_sees_one_gpu_of_its_own_takes_it(four_gpus: pytest.MonkeyPatch) -> None:
    four_gpus.setattr(torch.cuda, "device_count", lambda: 1)
    second = {"rank": 1, "local_rank": 1, "size": 2, "local_size": 2}
    assert device_name((), Placement(**second, own_gpu=True)) == "cuda:0"
    assert "cuda:1 does not exist: this host has 1 GPU" in device_name((), Placement(**second))


def test_devices_of_the_environment_come_before_the_configs() -> None:
    assert chosen_devices({"INSTAR_DEVICES": "6,7"}, (0, 1)) == (6, 7)
    assert chosen_devices({}, (0, 1)) == (0, 1)
    with pytest.raises(ConfigError, match="indices such as 0,1"):
        chosen_devices({"INSTAR_DEVICES": "0,first"}, ())


def test_more_ranks_than_any_machine_runs_are_not_started() -> None:
    for nproc, config, where in ((60_000, 1, "--nproc"), (None, 60_000, "parallel.world_size")):
        with pytest.raises(ConfigError, match="60,000 ranks on this machine") as error:
            resolve_ranks(parallel(config), ALONE, nproc)
        assert error.value.problems[0].where == where
