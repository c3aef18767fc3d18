"""The writer beside a training: what is saved, what waits, what a failure does, what a resume does."""

from __future__ import annotations

import errno
import fcntl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta import writer as writing
from instar.extensions.delta.chain import Link, append, links, load_state, verify_chain
from instar.extensions.delta.format.folder import missing_steps
from instar.extensions.delta.format.statistics import statistics
from instar.extensions.delta.replay import squash_links
from instar.extensions.delta.writer import COPIES, DeltaWriter

Open = Callable[..., DeltaWriter]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Open]:
    """Writers of one chain, one after another."""
    with ExitStack() as stack:

        def opened(**options: object) -> DeltaWriter:
            stack.close()
            made = DeltaWriter(tmp_path / "deltas", **options)  # type: ignore[arg-type]
            stack.callback(made.close)
            return made

        yield opened


def weights(*values: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"weight": torch.tensor(values, dtype=dtype)}


def steps(folder: Path) -> list[tuple[int, int, bool]]:
    """Of each link its number, its step, and whether it is an anchor."""
    return [(link.number, link.step, link.kind == "anchor") for link in links(folder)]


def test_weights_are_those_of_the_moment_of_the_save(writer: Open, tmp_path: Path) -> None:
    made, live = writer(), weights(0.0, 0.0)
    for step in range(4):
        live["weight"][0] = step
        made.save(step, live)
    live["weight"][:] = 9.0
    made.flush()
    assert [load_state(tmp_path / "deltas", n)["weight"].tolist() for n in range(4)] == [
        [float(n), 0.0] for n in range(4)
    ]


def test_the_first_every_nth_and_the_last_weights_are_due(writer: Open) -> None:
    made = writer(every=3)
    due = []
    for step in range(2, 9):
        if made.due(step, last=step == 8):
            due.append(step)
            made.save(step, weights(step))
    assert due == [2, 3, 6, 8]
    assert not made.due(8, last=True)


def test_an_anchor_comes_every_so_many_links_and_after_another_shape(
    writer: Open, tmp_path: Path
) -> None:
    made = writer(anchor_every=2)
    for step in range(5):
        made.save(step, weights(step))
    for step in range(5, 8):
        made.save(step, weights(step, step))
    made.flush()
    anchors = [step for _, step, is_anchor in steps(tmp_path / "deltas") if is_anchor]
    assert anchors == [0, 2, 4, 5, 7]


def test_wide_weights_are_rounded_and_others_are_not(writer: Open, tmp_path: Path) -> None:
    made = writer(dtype=torch.bfloat16)
    given = {
        "wide": torch.tensor([1.001]),
        "narrow": torch.tensor([1.5], dtype=torch.float16),
        "count": torch.tensor([2**40]),
    }
    made.save(0, given)
    made.flush()
    expected = {**given, "wide": given["wide"].bfloat16()}
    stored = load_state(tmp_path / "deltas", 0)
    assert stored == expected
    assert all(stored[name].dtype == tensor.dtype for name, tensor in expected.items())


def test_a_writer_goes_on_with_the_same_weights_at_the_same_step(
    writer: Open, tmp_path: Path
) -> None:
    for first in (0, 2):
        made = writer(anchor_every=4)
        for step in range(first, first + 3):
            made.save(step, weights(step))
        made.flush()
    assert steps(tmp_path / "deltas") == [(n, n, n in (0, 4)) for n in range(5)]


@pytest.mark.parametrize(("step", "value"), [(1, 1.0), (3, 2.0), (2, 7.0)])
def test_other_weights_or_another_step_start_an_anchor_and_lose_nothing(
    writer: Open, tmp_path: Path, step: int, value: float
) -> None:
    made = writer()
    for before in range(3):
        made.save(before, weights(before))
    made.flush()
    made = writer()
    made.save(step, weights(value))
    made.save(step + 1, weights(value + 1))
    made.flush()
    folder = tmp_path / "deltas"
    assert steps(folder)[2:] == [(2, 2, False), (3, step, True), (4, step + 1, False)]
    stored = [load_state(folder, number)["weight"].item() for number in range(5)]
    assert stored == [0.0, 1.0, 2.0, value, value + 1]
    verify_chain(folder)


def test_a_failure_is_kept_and_nothing_is_written_after_it(writer: Open, tmp_path: Path) -> None:
    made = writer()
    (tmp_path / "deltas").touch()
    made.save(3, weights(1.0))
    with pytest.raises(CheckpointError, match=r"cannot save step 3 in .*deltas"):
        made.flush()
    (tmp_path / "deltas").unlink()
    assert not made.due(4, last=True)
    assert made.finished_links() == []
    assert not (tmp_path / "deltas").exists()


def test_a_training_waits_when_two_copies_are_not_written_and_a_disk_that_hangs_is_a_failure(
    writer: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    append = writing.append

    def slow(*arguments: object, **options: object) -> object:
        goes_on.wait()
        return append(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(writing, "append", slow)
    made = writer(limit_s=0.05)
    for step in range(COPIES):
        made.save(step, weights(step))
        assert made.failure is None
    made.save(COPIES, weights(COPIES))
    assert made.failure is not None
    assert "within 0.05 s" in made.failure
    goes_on.set()


def test_what_is_written_is_told_with_its_statistics(writer: Open, tmp_path: Path) -> None:
    made = writer(anchor_every=4)
    states = [[0.0, 1.0, 2.0, 3.0], [-0.0, 1.0, 5.0, 3.0], [-0.0, 6.0, 7.0, 3.0], [0.0] * 4]
    for step, values in enumerate([*states, states[-1]]):
        made.save(step, {**weights(*values), "frozen": torch.ones(4)})
    made.flush()
    first, *deltas, anchor = made.finished_links()
    assert first.statistics is anchor.statistics is None
    assert [one.statistics for one in deltas] == statistics(tmp_path / "deltas")
    found = [one.statistics.whole for one in deltas if one.statistics is not None]
    assert [share.density for share in found] == [2 / 8, 2 / 8, 4 / 8]
    assert [share.overlap for share in found] == [None, 1 / 3, 2 / 4]
    assert all(0 <= one.stall_s <= one.seconds for one in [first, *deltas, anchor])
    assert made.finished_links() == []


@pytest.mark.parametrize("last", [2, 3], ids=["the link before", "the new link"])
def test_a_squash_meanwhile_leaves_out_statistics_and_ends_nothing(
    writer: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    folder = tmp_path / "deltas"

    def append_and_squash(*arguments: Any, **options: Any) -> Link:
        link = append(*arguments, **options)
        if link.number == 3:
            squash_links(folder, 1, last)
        return link

    monkeypatch.setattr(writing, "append", append_and_squash)
    made = writer()
    for step in range(5):
        made.save(step, weights(step, step + 1, step % 2))
    made.flush()
    told = [made_link.event(step=0) for made_link in made.finished_links()]
    assert [event.anchor for event in told] == [True, *[False] * 4]
    assert [event.density is None for event in told[1:]] == [False, False, last == 3, False]
    assert [event.overlap is None for event in told[1:]] == [True, False, True, last == 3]
    verify_chain(folder)


def test_steps_that_were_never_saved_are_named_by_the_anchor_after_them(
    writer: Open, tmp_path: Path
) -> None:
    made = writer()
    for step in range(4):
        made.save(step, weights(step))
    made.flush()
    for step, missing in ((4, None), (7, (5, 6)), (2, None)):
        resumed = writer()
        resumed.save(step, weights(step))
        resumed.flush()
        last = links(tmp_path / "deltas")[-1]
        assert (last.kind, last.step, last.missing) == ("anchor", step, missing)
    assert missing_steps(6, 12, 3) == (9, 9)
    assert missing_steps(9, 12, 3) is None


def test_a_barrier_waits_for_the_weights_before_it_only(
    writer: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, append = threading.Event(), writing.append

    def slowly(*arguments: Any, **options: Any) -> Any:
        go_on.wait(10)
        return append(*arguments, **options)

    monkeypatch.setattr(writing, "append", slowly)
    made = writer()
    made.barrier()()
    made.save(0, weights(0.0))
    waiting = threading.Thread(target=made.barrier())
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    go_on.set()
    waiting.join(10)
    assert [written.link.step for written in made.finished_links()] == [0]


def test_a_chain_on_a_file_system_without_locks_is_written_with_a_warning(
    writer: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    made = writer()
    for step in range(3):
        made.save(step, weights(step))
    made.flush()
    assert [step for _, step, _ in steps(tmp_path / "deltas")] == [0, 1, 2]
    assert caplog.text.count("has no locks (Function not implemented)") == 1
