from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.distributed.placement import Placement, placement, share_cores

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "123456",
}


def test_without_variables_there_is_one_process() -> None:
    assert placement({}) == Placement(rank=0, local_rank=0, size=1, local_size=1)


def test_torchrun_says_who_i_am() -> None:
    assert placement(TORCHRUN) == Placement(5, 1, 8, 4, "node7", 29500)


def test_torchrun_comes_before_slurm() -> None:
    assert placement(SLURM | TORCHRUN) == placement(TORCHRUN)


def test_slurm_says_who_i_am() -> None:
    assert placement(SLURM) == Placement(2, 0, 4, 2, "node07", 23456)


def test_a_given_rendezvous_is_respected_under_slurm() -> None:
    found = placement(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (found.host, found.port) == ("head", 1234)


def test_a_batch_script_is_one_process() -> None:
    assert placement({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}).size == 1


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        placement({name: value for name, value in TORCHRUN.items() if name != missing})


def test_a_rank_beyond_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 8 of 8"):
        placement(TORCHRUN | {"RANK": "8"})


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="MASTER_PORT must be a number, but is 'high'"):
        placement(TORCHRUN | {"MASTER_PORT": "high"})


@given(st.integers(1, 4), st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_every_slurm_task_knows_how_many_share_its_host(repeat: int, counts: list[int]) -> None:
    form = ",".join(f"{count}(x{repeat})" for count in counts)
    per_node = [count for count in counts for _ in range(repeat)]
    for node, here in enumerate(per_node):
        place = SLURM | {"SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": form}
        place |= {"SLURM_STEP_NUM_TASKS": str(sum(per_node) + 2), "SLURM_LOCALID": "0"}
        assert placement(place).local_size == here


def test_waiting_threads_leave_the_cores_to_others_unless_told() -> None:
    environ: dict[str, str] = {}
    share_cores(environ)
    assert environ == {"GOMP_SPINCOUNT": "1000"}
    for chosen in ({"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "ACTIVE"}):
        told = dict(chosen)
        share_cores(told)
        assert told == chosen
