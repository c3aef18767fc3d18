from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.config.schema import ParallelConfig
from instar.distributed.placement import (
    Placement,
    child_environment,
    placement,
    resolve_ranks,
)

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
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "1",
}


def test_without_variables_there_is_one_process() -> None:
    assert placement({}) == Placement(rank=0, local_rank=0, size=1, local_size=1)


def test_torchrun_says_who_i_am() -> None:
    place = placement(TORCHRUN)
    assert place == Placement(5, 1, 8, 4, "node7", 29500, "MASTER_PORT", is_set=True)


def test_torchrun_comes_before_slurm() -> None:
    assert placement(SLURM | TORCHRUN) == placement(TORCHRUN)


def test_one_rank_of_torchrun_is_told_so() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1"}
    assert placement(environ | {"LOCAL_RANK": "0"}).is_set
    # operators of clusters count machines so
    assert not placement(environ).is_set


def test_slurm_says_who_i_am() -> None:
    place = placement(SLURM)
    assert (place.rank, place.local_rank, place.size, place.local_size) == (2, 0, 4, 2)
    assert (place.host, place.port_key, place.launch) == (
        "node07",
        "SLURM_JOB_ID",
        "slurm-123456.1",
    )
    assert place.is_set
    assert not place.one_host


def test_ranks_of_one_node_meet_on_its_loopback() -> None:
    one_node = {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    place = placement(SLURM | one_node)
    assert (place.host, place.local_size, place.one_host) == ("127.0.0.1", 4, True)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node07", "node07"),
        ("node[07-12,15],gpu1", "node07"),
        ("gpu1,node[07-12]", "gpu1"),
        ("rack[1-2]node[3,5]-ib", "rack1node3-ib"),
        ("c5-2.cluster", "c5-2.cluster"),
    ],
)
def test_rank_0_is_on_the_first_node(nodes: str, first: str) -> None:
    assert placement(SLURM | {"SLURM_STEP_NODELIST": nodes}).host == first


def test_without_nodes_slurm_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither MASTER_ADDR nor SLURM_STEP_NODELIST"):
        placement(SLURM | {"SLURM_STEP_NODELIST": ""})


@given(st.integers(1, 10**7), st.integers(0, 900), st.integers(0, 12), st.integers(0, 12))
def test_steps_and_jobs_near_each_other_have_ports_of_their_own(
    job: int, later: int, first_step: int, other: int
) -> None:
    def port(job: int, step: int) -> int:
        variables = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        return placement(SLURM | variables).port

    same = later == 0 and first_step == other
    assert (port(job, first_step) == port(job + later, other)) is same
    assert 20000 <= port(job, first_step) < 32768


def test_each_task_with_a_gpu_of_its_own() -> None:
    assert placement(SLURM | {"SLURM_GPUS_PER_TASK": "1"}).own_gpu
    assert not placement(SLURM).own_gpu


def test_a_given_rendezvous_is_respected_under_slurm() -> None:
    place = placement(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (place.host, place.port, place.port_key) == ("head", 1234, "MASTER_PORT")


def test_the_config_says_where_to_meet_if_the_environment_does_not() -> None:
    config = ParallelConfig(master_address="10.0.0.1", master_port=29511)
    nowhere = {k: v for k, v in TORCHRUN.items() if not k.startswith("MASTER")}
    for environ in (nowhere, SLURM):
        place = placement(environ, config)
        assert (place.host, place.port) == ("10.0.0.1", 29511)
        assert place.port_key == "parallel.master_port"
    assert placement(TORCHRUN, config).port == 29500
    assert placement(nowhere).port == 0


def test_ranks_of_one_machine_need_no_address() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1234"}
    assert placement(environ, ParallelConfig()).host == "127.0.0.1"


def test_a_batch_script_is_one_process() -> None:
    assert placement({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}).size == 1


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        placement(
            {name: value for name, value in TORCHRUN.items() if name != missing}, ParallelConfig()
        )


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
    for node, local_count in enumerate(per_node):
        place = SLURM | {"SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": form}
        place |= {"SLURM_STEP_NUM_TASKS": str(sum(per_node) + 2), "SLURM_LOCALID": "0"}
        assert placement(place).local_size == local_count


def test_a_child_does_not_take_itself_for_this_rank() -> None:
    own_variables = {
        "SLURM_JOB_ID": "1",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "",
        "OMPI_MCA_btl": "tcp",
    }
    rank_keys = [
        "RANK",
        "GROUP_RANK",
        "ROLE_NAME",
        "TORCHELASTIC_RUN_ID",
        "PMI_RANK",
        "INSTAR_DEVICES",
    ]
    environ = TORCHRUN | SLURM | dict.fromkeys(rank_keys, "7") | own_variables
    assert child_environment(environ) == own_variables
    assert placement(child_environment(environ)) == Placement()


@pytest.mark.parametrize("nproc", [2, 8])
def test_ranks_are_not_started_by_a_rank(nproc: int) -> None:
    """Also not as many as there are: variables of an earlier launch would be waited for."""
    place = placement(TORCHRUN, ParallelConfig())
    with pytest.raises(ConfigError, match=r"already sets 8 ranks, of which this .* 5.* -u RANK"):
        resolve_ranks(ParallelConfig(), place, nproc)
    assert resolve_ranks(ParallelConfig(), place).ranks == 8
