from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.distributed.agree import (
    Flag,
    FlagReducer,
    Json,
    agree,
    gather,
    raise_on_all_ranks,
    reduce_sums,
)
from instar.distributed.failure import RunFailed
from instar.distributed.world import World

Answers = list[dict[str, Any]]
ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="none")

PROGRAM = """
import math
from instar.config.errors import ConfigError
from instar.distributed.agree import *
from instar.distributed.agree import Json

with join_group(ParallelConfig(timeout_s=30), "cpu") as world:
    r, last = world.rank, world.size - 1
    facts = {"size": world.size}

    def failing(who, error, what="reading the shards"):
        with raise_on_all_ranks(world, what):
            if r in who:
                raise error

    def failing_nested():
        with raise_on_all_ranks(world, "building the run"):
            failing([last], OSError("gone"))

    def peer_error(call):
        try:
            call()
        except Exception as error:
            return {"text": f"{type(error).__name__}: {error}",
                    "code": getattr(error, "exit_code", None),
                    "secondary": getattr(error, "secondary", None),
                    "cause": type(error.__cause__).__name__}

    facts["agreed"] = agree(world, {"from": r, "pair": (1, 2)} if r == 0 else None)
    facts["long"] = agree(world, "é" * 5000 if r == 0 else None)
    facts["nan"] = error_of(lambda: agree(world, {"loss": [1.0, math.nan]} if r == 0 else None))
    facts["key"] = error_of(lambda: gather(world, {r: 1} if r == last else None))
    facts["still"] = agree(world, r)
    facts["gathered"] = gather(world, {"rank": r})
    facts["uneven"] = [len(text) for text in gather(world, "x" * (3000 * r))]
    facts["sums"] = reduce_sums(world, {"a": [1e16, 1.0, -1e16, 1.0][r], "b": r + 0.5})
    facts["inf"] = str(reduce_sums(world, {"a": math.inf if r == last else 1.0})["a"])
    facts["keys"] = error_of(lambda: reduce_sums(world, {"loss": 1.0, f"of{r}": 1.0}))

    pulse = FlagReducer(world)
    first = pulse.send(Flag.STOP if r == last else Flag.NONE, [r + 1.0, 0.5])
    second = pulse.send(Flag.ERROR, [math.nan if r == last else 0.0, 1.0])
    beats = [first.wait(), second.wait(), first.wait()]
    facts["beats"] = [[beat.stop, beat.errors, [str(s) for s in beat.sums]] for beat in beats]
    facts["width"] = error_of(lambda: pulse.send(Flag.NONE, [1.0]))

    facts["one"] = peer_error(lambda: failing([last], OSError("gone")))
    facts["all"] = peer_error(lambda: failing(range(4), OSError("gone")))
    facts["two"] = peer_error(lambda: failing([0, last], OSError(f"gone on {r}")))
    facts["config"] = peer_error(lambda: failing([last], ConfigError.of("no such file")))
    facts["nested"] = peer_error(failing_nested)
    facts["none"] = peer_error(lambda: failing([], None))

    gather(world, None)
    if world.size > 1:
        if r == last:
            answer(**facts)
            os._exit(0)
        facts["lost"] = error_of(lambda: gather(world, None))
        facts["lost_pulse"] = error_of(lambda: pulse.send(0, [0.0, 0.0]).wait())
        facts["lost_together"] = peer_error(lambda: failing([r], KeyError("mine")))
    answer(**facts)
"""


@pytest.fixture(scope="module", params=[1, 2, 4])
def answers(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    ranks_in: Callable[[str, int, Path], Answers],
) -> Answers:
    return ranks_in(PROGRAM, request.param, tmp_path_factory.mktemp("agree"))


def test_all_ranks_hear_rank_0(answers: Answers) -> None:
    assert all(fact["agreed"] == {"from": 0, "pair": [1, 2]} for fact in answers)


def test_a_long_value_arrives_whole(answers: Answers) -> None:
    assert all(fact["long"] == "é" * 5000 for fact in answers)


def test_nan_is_refused_on_every_rank_by_its_place(answers: Answers) -> None:
    refusal = (
        "RunFailed: ranks can only agree on JSON: value.loss[1] is nan, which JSON does not have"
    )
    assert [fact["nan"] for fact in answers] == [refusal] * len(answers)


def test_a_key_that_is_no_string_is_refused_on_every_rank(answers: Answers) -> None:
    assert all("which is not a string" in fact["key"] for fact in answers)


def test_ranks_are_still_in_step_after_a_refusal(answers: Answers) -> None:
    assert [fact["still"] for fact in answers] == [0] * len(answers)


def test_every_rank_gets_every_value(answers: Answers) -> None:
    expected = [{"rank": rank} for rank in range(len(answers))]
    assert all(fact["gathered"] == expected for fact in answers)


def test_values_of_different_lengths_arrive_whole(answers: Answers) -> None:
    assert all(fact["uneven"] == [3000 * r for r in range(len(answers))] for fact in answers)


def test_sums_are_rounded_once(answers: Answers) -> None:
    terms = [1e16, 1.0, -1e16, 1.0][: len(answers)]
    expected = {"a": math.fsum(terms), "b": sum(r + 0.5 for r in range(len(answers)))}
    assert all(fact["sums"] == expected for fact in answers)


def test_an_infinite_sum_is_infinite(answers: Answers) -> None:
    assert all(fact["inf"] == "inf" for fact in answers)


def test_different_sums_are_refused_by_name(answers: Answers) -> None:
    for fact in answers:
        if len(answers) == 1:
            assert fact["keys"] is None
        else:
            assert "rank 0 has of0; rank 1 has of1" in fact["keys"]


def test_the_pulse_counts_requests_and_adds_sums(answers: Answers) -> None:
    size = len(answers)
    total, halves = float(sum(range(1, size + 1))), 0.5 * size
    for fact in answers:
        first, second, third = fact["beats"]
        assert first == [1, 0, [str(total), str(halves)]]
        assert second == [0, size, ["nan", str(float(size))]]
        assert third == first


def test_a_pulse_keeps_its_width(answers: Answers) -> None:
    assert all("expected 2 sums" in fact["width"] for fact in answers)


def test_if_one_rank_fails_all_do_and_name_it(answers: Answers) -> None:
    last = len(answers) - 1
    for rank, fact in enumerate(answers):
        error = fact["one"]
        if last == 0:
            assert error["text"] == "OSError: gone"
        else:
            assert error["text"] == (
                f"PeerError: rank {last} failed while reading the shards: OSError: gone"
            )
            assert error["secondary"] is (rank != last)
            assert error["cause"] == ("OSError" if rank == last else "NoneType")
            assert error["code"] == 4


def test_if_all_fail_alike_each_raises_its_own(answers: Answers) -> None:
    assert all(fact["all"]["text"] == "OSError: gone" for fact in answers)


def test_of_several_the_first_is_told(answers: Answers) -> None:
    if len(answers) > 2:
        expected = "ranks 0, 3 failed while reading the shards: rank 0: OSError: gone on 0"
        assert all(expected in fact["two"]["text"] for fact in answers)


def test_a_mistake_in_a_config_keeps_its_exit_code(answers: Answers) -> None:
    assert all(fact["config"]["code"] == 2 for fact in answers)
    assert all("no such file" in fact["config"]["text"] for fact in answers)


def test_a_failure_passes_outer_blocks_unchanged(answers: Answers) -> None:
    assert [fact["nested"]["text"] for fact in answers] == [fact["one"]["text"] for fact in answers]


def test_nothing_happens_if_none_fails(answers: Answers) -> None:
    assert all(fact["none"] is None for fact in answers)


def test_a_rank_that_is_gone_is_noticed(answers: Answers) -> None:
    for fact in answers[:-1]:
        assert fact["lost"].startswith("PeerLost: rank")
        assert fact["lost_pulse"].startswith("PeerLost: rank")
        assert fact["lost_together"]["text"] == "KeyError: 'mine'"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(json_values)
def test_json_comes_back_as_it_went(value: Json) -> None:
    assert agree(ALONE, value) == value
    assert gather(ALONE, value) == [value]


@pytest.mark.parametrize("value", [math.nan, -math.inf, {1: 2}, {"a": {3}}, [b"bytes"]])
def test_one_process_refuses_what_many_would(value: Any) -> None:
    with pytest.raises(RunFailed, match="only agree on JSON"):
        agree(ALONE, value)


@given(st.dictionaries(st.text(), st.floats()))
def test_alone_sums_are_what_they_were(sums: dict[str, float]) -> None:
    assert str(reduce_sums(ALONE, sums)) == str({key: 0.0 + sums[key] for key in sorted(sums)})


def test_alone_an_error_stays_itself() -> None:
    with (
        pytest.raises(ConfigError, match="no such file"),
        raise_on_all_ranks(ALONE, "opening the data"),
    ):
        raise ConfigError.of("no such file")


def test_alone_a_beat_is_its_own_answer() -> None:
    result = FlagReducer(ALONE).send(Flag.STOP, [2.0]).wait()
    assert (result.stop, result.errors, result.sums) == (1, 0, (2.0,))
