from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from instar.distributed.heartbeat import (
    Diagnosis,
    Heartbeat,
    LastHeartbeat,
    Position,
    diagnose_hang,
    silent_ranks,
    wait_after_stop,
)

SILENCE_S, WAIT_S = 60.0, 600.0


def beat(**facts: object) -> Heartbeat:
    usual = {"count": 1, "step": 120, "where": "step 120", "n_arrived": 7, "waits_for": 0}
    usual |= {"doing": "", "still_s": 0.0, "line": "", "in_torch": False}
    usual |= {"host": "here", "pid": 1}
    return Heartbeat(**usual | facts)  # type: ignore[arg-type]


def verdict(*heartbeats: LastHeartbeat) -> Diagnosis | None:
    return diagnose_hang(dict(enumerate(heartbeats)), SILENCE_S, WAIT_S)[0]


def test_a_silent_rank_is_named_with_its_last_place() -> None:
    diagnosis = verdict(
        LastHeartbeat(beat(where="step 121"), 0),
        LastHeartbeat(beat(), 1),
        LastHeartbeat(beat(), 61),
    )
    assert diagnosis == Diagnosis(
        "rank 2 has sent no heartbeat for 61 s: last seen in step 120; rank 0 is in step 121", (2,)
    )


def test_a_host_none_of_whose_ranks_is_heard_is_named() -> None:
    alive, silent = (
        LastHeartbeat(beat(host="a pid:[1]"), 0),
        LastHeartbeat(beat(host="b pid:[1]"), 61),
    )
    later = LastHeartbeat(beat(host="b pid:[1]"), 59)
    diagnosis = verdict(alive, silent, LastHeartbeat(beat(host="a pid:[1]"), 61), later)
    assert diagnosis is not None
    assert diagnosis.ranks == (1, 2, 3)
    assert (
        "no heartbeat arrives from host b: it is down or frozen, or the network"
        in diagnosis.message
    )
    assert "rank 1 on host b has sent no heartbeat" in diagnosis.message
    assert "rank 2 on host a has sent no heartbeat" in diagnosis.message
    assert "arrives from host a" not in diagnosis.message


def test_of_a_lost_host_a_rank_that_spoke_just_before_the_end_is_silent_too() -> None:
    """1 is on the host of the one that looks, busy and alive; 2 and 3 are on a lost host, 4 has left."""
    host_fields = {"host": "there", "count": 5}
    beats = {3: beat(**host_fields), 2: beat(**host_fields), 1: beat(count=5), 4: beat(end="")}
    before, since = {1: 4, 2: 5, 3: 4, 4: 1}, {1: 5, 2: 5, 3: 5, 4: 1}
    assert silent_ranks(beats, before, since, "here") == [2, 3]
    assert silent_ranks(beats, before, since, "there") == [2]
    assert silent_ranks(beats, before | {2: 4}, since, "here") == []


def test_a_rank_that_was_never_seen_is_named() -> None:
    diagnosis = verdict(LastHeartbeat(beat(), 0), LastHeartbeat(None, 60))
    assert diagnosis is not None
    assert diagnosis.ranks == (1,)
    assert (
        "rank 1 has sent no heartbeat for 60 s: not seen since the rendezvous;" in diagnosis.message
    )


def test_who_has_not_come_is_named_with_its_line() -> None:
    waiting = LastHeartbeat(
        beat(n_arrived=8, waits_for=8, doing="gathering answers", still_s=601), 0
    )
    late = LastHeartbeat(beat(still_s=600, line="tokens.py:88 in read"), 1)
    diagnosis = verdict(waiting, late, waiting)
    assert diagnosis is not None
    assert diagnosis.ranks == (1,)
    assert diagnosis.message == (
        "rank 1 has not entered a collective (gathering answers) for 601 s: "
        "it is in step 120, at tokens.py:88 in read, without progress for 600 s"
    )


def test_who_has_not_come_is_named_with_its_host_where_there_are_several() -> None:
    waiting = beat(n_arrived=8, waits_for=8, still_s=601, host="a pid:[1]")
    backward = beat(still_s=601, in_torch=True, host="a pid:[1]")
    absent = beat(still_s=601, host="b pid:[1]")
    for present, reason in ((waiting, " has not entered"), (backward, ": it is in step 120")):
        diagnosis = verdict(LastHeartbeat(present, 0), LastHeartbeat(absent, 0))
        assert diagnosis is not None
        assert f"rank 1 on host b{reason}" in diagnosis.message


def test_the_earliest_meeting_tells_who_is_missing() -> None:
    """A rank may have posted more before it began to wait for what it posted first."""
    waits_for_the_first = LastHeartbeat(beat(n_arrived=9, waits_for=8, still_s=601), 0)
    waits_for_the_second = LastHeartbeat(beat(n_arrived=9, waits_for=9, still_s=602), 0)
    diagnosis = verdict(
        waits_for_the_second, waits_for_the_first, LastHeartbeat(beat(n_arrived=7), 0)
    )
    assert diagnosis is not None
    assert diagnosis.ranks == (2,)


def test_a_wait_in_which_nobody_is_missing_blames_nobody() -> None:
    waiting = LastHeartbeat(beat(n_arrived=8, waits_for=8, still_s=601), 0)
    assert verdict(waiting, waiting) == Diagnosis(
        "no rank has made progress for 601 s: rank 0 is in step 120; rank 1 is in step 120", ()
    )


def test_in_a_backward_pass_who_is_not_in_it_is_named() -> None:
    backward = LastHeartbeat(beat(still_s=601, line="graph.py:824 in backward", in_torch=True), 0)
    sleeper = LastHeartbeat(beat(still_s=602, line="hooks.py:7 in sleep"), 0)
    assert verdict(backward, sleeper, backward) == Diagnosis(
        "all other ranks wait for rank 1: it is in step 120, at hooks.py:7 in sleep, "
        "without progress for 602 s",
        (1,),
    )


def test_ranks_that_hang_in_a_step_have_less_time_after_a_stop() -> None:
    """But as much as three times what a step took, and saves have the time that they had."""
    hung = [LastHeartbeat(beat(still_s=25.0), 0), LastHeartbeat(beat(still_s=25.0, waits_for=8), 0)]
    heartbeats = dict(enumerate(hung))
    assert diagnose_hang(heartbeats, SILENCE_S, WAIT_S)[0] is None
    assert wait_after_stop(heartbeats, WAIT_S, 1.0) == 20.0
    diagnosis = diagnose_hang(heartbeats, SILENCE_S, wait_after_stop(heartbeats, WAIT_S, 1.0))[0]
    assert diagnosis is not None
    assert diagnosis.ranks == (0,)
    assert wait_after_stop(heartbeats, WAIT_S, 50.0) == 150.0
    assert wait_after_stop(heartbeats, 10.0, 50.0) == 10.0
    saving = heartbeats | {2: LastHeartbeat(beat(where="saving step 120"), 0)}
    assert wait_after_stop(saving, WAIT_S, 1.0) == WAIT_S
    assert wait_after_stop(heartbeats | {2: LastHeartbeat(None, 0)}, WAIT_S, 1.0) == WAIT_S
    assert wait_after_stop(heartbeats | {2: LastHeartbeat(beat(end=""), 0)}, WAIT_S, 1.0) == 20.0


def test_who_has_left_is_not_silent() -> None:
    assert verdict(LastHeartbeat(beat(), 0), LastHeartbeat(beat(end=""), 1000)) is None


ranks = st.lists(
    st.builds(
        lambda silent, still_s, waits: LastHeartbeat(
            beat(still_s=still_s, n_arrived=8 if waits else 7, waits_for=8 if waits else 0), silent
        ),
        st.floats(0, 100),
        st.floats(0, 1000),
        st.booleans(),
    ),
    min_size=2,
    max_size=5,
)


@given(ranks)
def test_there_is_a_verdict_exactly_when_a_limit_has_passed(all_seen: list[LastHeartbeat]) -> None:
    beats = [heartbeat.beat for heartbeat in all_seen if heartbeat.beat]
    is_due = any(heartbeat.silent_s >= SILENCE_S for heartbeat in all_seen)
    is_due |= any(heartbeat.waits_for and heartbeat.still_s >= WAIT_S for heartbeat in beats)
    is_due |= all(heartbeat.still_s >= WAIT_S for heartbeat in beats)
    diagnosis, due_s = diagnose_hang(dict(enumerate(all_seen)), SILENCE_S, WAIT_S)
    assert (diagnosis is not None) == is_due
    assert (due_s <= 0) == is_due


@given(ranks)
def test_however_long_a_rank_works_it_is_not_to_blame_while_another_moves(
    all_seen: list[LastHeartbeat],
) -> None:
    working = [
        LastHeartbeat(beat(still_s=heartbeat.beat.still_s), 1)
        for heartbeat in all_seen
        if heartbeat.beat
    ]
    assert verdict(*working, LastHeartbeat(beat(), 1)) is None


@given(st.builds(beat, where=st.text(), line=st.text(), end=st.none() | st.text()))
def test_heartbeats_travel_whole(heartbeat: Heartbeat) -> None:
    assert Heartbeat.decode(heartbeat.encode().encode()) == heartbeat


def test_only_the_thread_that_made_a_position_moves_it() -> None:
    position = Position()
    position.arrive("gathering answers")
    saver = threading.Thread(target=position.arrive, args=["saving"])
    saver.start()
    saver.join()
    assert (position.n_arrived, position.waits_for, position.doing) == (1, 1, "gathering answers")
    position.leave()
    assert position.waits_for == 0
