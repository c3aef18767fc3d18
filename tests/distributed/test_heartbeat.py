from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from instar.distributed.heartbeat import Heartbeat, Position, Seen, Verdict, judge

SILENCE_S, WAIT_S = 60.0, 600.0


def beat(**facts: object) -> Heartbeat:
    usual = {"count": 1, "step": 120, "where": "step 120", "arrived": 7, "waits_for": 0}
    usual |= {"doing": "", "still_s": 0.0, "line": "", "in_torch": False}
    usual |= {"host": "here", "pid": 1}
    return Heartbeat(**usual | facts)  # type: ignore[arg-type]


def verdict(*seen: Seen) -> Verdict | None:
    return judge(dict(enumerate(seen)), SILENCE_S, WAIT_S)[0]


def test_a_silent_rank_is_named_with_its_last_place() -> None:
    found = verdict(Seen(beat(where="step 121"), 0), Seen(beat(), 1), Seen(beat(), 61))
    assert found == Verdict(
        "rank 2 has not moved for 61 s: last seen in step 120; rank 0 is in step 121", (2,)
    )


def test_a_rank_that_was_never_seen_is_named() -> None:
    found = verdict(Seen(beat(), 0), Seen(None, 60))
    assert found is not None
    assert found.ranks == (1,)
    assert "rank 1 has not moved for 60 s: not seen since the ranks met;" in found.message


def test_who_has_not_come_is_named_with_its_line() -> None:
    waiting = Seen(beat(arrived=8, waits_for=8, doing="gathering answers", still_s=601), 0)
    late = Seen(beat(still_s=600, line="tokens.py:88 in read"), 1)
    found = verdict(waiting, late, waiting)
    assert found is not None
    assert found.ranks == (1,)
    assert found.message == (
        "rank 1 has not come for 601 s to where others wait (gathering answers): "
        "it is in step 120, at tokens.py:88 in read, unmoved for 600 s"
    )


def test_the_earliest_meeting_tells_who_is_missing() -> None:
    """A rank may have posted more before it began to wait for what it posted first."""
    waits_for_the_first = Seen(beat(arrived=9, waits_for=8, still_s=601), 0)
    waits_for_the_second = Seen(beat(arrived=9, waits_for=9, still_s=602), 0)
    found = verdict(waits_for_the_second, waits_for_the_first, Seen(beat(arrived=7), 0))
    assert found is not None
    assert found.ranks == (2,)


def test_a_wait_in_which_nobody_is_missing_blames_nobody() -> None:
    waiting = Seen(beat(arrived=8, waits_for=8, still_s=601), 0)
    assert verdict(waiting, waiting) == Verdict(
        "no rank has moved for 601 s: rank 0 is in step 120; rank 1 is in step 120", ()
    )


def test_in_a_backward_pass_who_is_not_in_it_is_named() -> None:
    backward = Seen(beat(still_s=601, line="graph.py:824 in backward", in_torch=True), 0)
    elsewhere = Seen(beat(still_s=602, line="hooks.py:7 in sleep"), 0)
    assert verdict(backward, elsewhere, backward) == Verdict(
        "rank 1 keeps all others waiting: it is in step 120, at hooks.py:7 in sleep, "
        "unmoved for 602 s",
        (1,),
    )


def test_who_has_left_is_not_silent() -> None:
    assert verdict(Seen(beat(), 0), Seen(beat(ended=""), 1000)) is None


ranks = st.lists(
    st.builds(
        lambda silent, still, waits: Seen(
            beat(still_s=still, arrived=8 if waits else 7, waits_for=8 if waits else 0), silent
        ),
        st.floats(0, 100),
        st.floats(0, 1000),
        st.booleans(),
    ),
    min_size=2,
    max_size=5,
)


@given(ranks)
def test_there_is_a_verdict_exactly_when_a_limit_has_passed(all_seen: list[Seen]) -> None:
    beats = [one.beat for one in all_seen if one.beat]
    passed = any(one.silent_s >= SILENCE_S for one in all_seen)
    passed |= any(one.waits_for and one.still_s >= WAIT_S for one in beats)
    passed |= all(one.still_s >= WAIT_S for one in beats)
    found, due_s = judge(dict(enumerate(all_seen)), SILENCE_S, WAIT_S)
    assert (found is not None) == passed
    assert (due_s <= 0) == passed


@given(ranks)
def test_however_long_a_rank_works_it_is_not_to_blame_while_another_moves(
    all_seen: list[Seen],
) -> None:
    working = [Seen(beat(still_s=one.beat.still_s), 1) for one in all_seen if one.beat]
    assert verdict(*working, Seen(beat(), 1)) is None


@given(st.builds(beat, where=st.text(), line=st.text(), ended=st.none() | st.text()))
def test_heartbeats_travel_whole(one: Heartbeat) -> None:
    assert Heartbeat.decode(one.encode().encode()) == one


def test_only_the_thread_that_made_a_position_moves_it() -> None:
    position = Position()
    position.arrive("gathering answers")
    saver = threading.Thread(target=position.arrive, args=["saving"])
    saver.start()
    saver.join()
    assert (position.arrived, position.waits_for, position.doing) == (1, 1, "gathering answers")
    position.go_on()
    assert position.waits_for == 0
