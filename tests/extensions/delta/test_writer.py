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

        def open_writer(**options: object) -> DeltaWriter:
            stack.close()
            delta_writer = DeltaWriter(tmp_path / "deltas", **options)  # type: ignore[arg-type]
            stack.callback(delta_writer.close)
            return delta_writer

        yield open_writer


def weights(*values: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"weight": torch.tensor(values, dtype=dtype)}


def steps(folder: Path) -> list[tuple[int, int, bool]]:
    """Of each link its number, its step, and whether it is an anchor."""
    return [(link.number, link.step, link.kind == "anchor") for link in links(folder)]


def test_weights_are_those_of_the_moment_of_the_save(writer: Open, tmp_path: Path) -> None:
    delta_writer, live = writer(), weights(0.0, 0.0)
    for step in range(4):
        live["weight"][0] = step
        delta_writer.save(step, live)
    live["weight"][:] = 9.0
    delta_writer.flush()
    assert [load_state(tmp_path / "deltas", n)["weight"].tolist() for n in range(4)] == [
        [float(n), 0.0] for n in range(4)
    ]


def test_the_first_every_nth_and_the_last_weights_are_due(writer: Open) -> None:
    delta_writer = writer(every=3)
    due = []
    for step in range(2, 9):
        if delta_writer.due(step, last=step == 8):
            due.append(step)
            delta_writer.save(step, weights(step))
    assert due == [2, 3, 6, 8]
    assert not delta_writer.due(8, last=True)


def test_an_anchor_comes_every_so_many_links_and_after_another_shape(
    writer: Open, tmp_path: Path
) -> None:
    delta_writer = writer(anchor_every=2)
    for step in range(5):
        delta_writer.save(step, weights(step))
    for step in range(5, 8):
        delta_writer.save(step, weights(step, step))
    delta_writer.flush()
    anchors = [step for _, step, is_anchor in steps(tmp_path / "deltas") if is_anchor]
    assert anchors == [0, 2, 4, 5, 7]


def test_wide_weights_are_rounded_and_others_are_not(writer: Open, tmp_path: Path) -> None:
    delta_writer = writer(dtype=torch.bfloat16)
    original = {
        "wide": torch.tensor([1.001]),
        "narrow": torch.tensor([1.5], dtype=torch.float16),
        "count": torch.tensor([2**40]),
    }
    delta_writer.save(0, original)
    delta_writer.flush()
    expected = {**original, "wide": original["wide"].bfloat16()}
    actual = load_state(tmp_path / "deltas", 0)
    assert actual == expected
    assert all(actual[name].dtype == tensor.dtype for name, tensor in expected.items())


def test_a_writer_goes_on_with_the_same_weights_at_the_same_step(
    writer: Open, tmp_path: Path
) -> None:
    for first in (0, 2):
        delta_writer = writer(anchor_every=4)
        for step in range(first, first + 3):
            delta_writer.save(step, weights(step))
        delta_writer.flush()
    assert steps(tmp_path / "deltas") == [(n, n, n in (0, 4)) for n in range(5)]


@pytest.mark.parametrize(("step", "value"), [(1, 1.0), (3, 2.0), (2, 7.0)])
def test_other_weights_or_another_step_start_an_anchor_and_lose_nothing(
    writer: Open, tmp_path: Path, step: int, value: float
) -> None:
    delta_writer = writer()
    for before in range(3):
        delta_writer.save(before, weights(before))
    delta_writer.flush()
    delta_writer = writer()
    delta_writer.save(step, weights(value))
    delta_writer.save(step + 1, weights(value + 1))
    delta_writer.flush()
    folder = tmp_path / "deltas"
    assert steps(folder)[2:] == [(2, 2, False), (3, step, True), (4, step + 1, False)]
    stored_values = [load_state(folder, number)["weight"].item() for number in range(5)]
    assert stored_values == [0.0, 1.0, 2.0, value, value + 1]
    verify_chain(folder)


def test_a_failure_is_kept_and_nothing_is_written_after_it(writer: Open, tmp_path: Path) -> None:
    delta_writer = writer()
    (tmp_path / "deltas").touch()
    delta_writer.save(3, weights(1.0))
    with pytest.raises(CheckpointError, match=r"cannot save step 3 in .*deltas"):
        delta_writer.flush()
    (tmp_path / "deltas").unlink()
    assert not delta_writer.due(4, last=True)
    assert delta_writer.finished_links() == []
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
    delta_writer = writer(limit_s=0.05)
    for step in range(COPIES):
        delta_writer.save(step, weights(step))
        assert delta_writer.failure is None
    delta_writer.save(COPIES, weights(COPIES))
    assert delta_writer.failure is not None
    assert "within 0.05 s" in delta_writer.failure
    goes_on.set()


def test_what_is_written_is_told_with_its_statistics(writer: Open, tmp_path: Path) -> None:
    delta_writer = writer(anchor_every=4)
    states = [[0.0, 1.0, 2.0, 3.0], [-0.0, 1.0, 5.0, 3.0], [-0.0, 6.0, 7.0, 3.0], [0.0] * 4]
    for step, values in enumerate([*states, states[-1]]):
        delta_writer.save(step, {**weights(*values), "frozen": torch.ones(4)})
    delta_writer.flush()
    first, *deltas, anchor = delta_writer.finished_links()
    assert first.statistics is anchor.statistics is None
    assert [link.statistics for link in deltas] == statistics(tmp_path / "deltas")
    shares = [link.statistics.whole for link in deltas if link.statistics is not None]
    assert [share.density for share in shares] == [2 / 8, 2 / 8, 4 / 8]
    assert [share.overlap for share in shares] == [None, 1 / 3, 2 / 4]
    assert all(0 <= link.stall_s <= link.seconds for link in [first, *deltas, anchor])
    assert delta_writer.finished_links() == []


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
    delta_writer = writer()
    for step in range(5):
        delta_writer.save(step, weights(step, step + 1, step % 2))
    delta_writer.flush()
    events = [finished_link.event(step=0) for finished_link in delta_writer.finished_links()]
    assert [event.anchor for event in events] == [True, *[False] * 4]
    assert [event.density is None for event in events[1:]] == [False, False, last == 3, False]
    assert [event.overlap is None for event in events[1:]] == [True, False, True, last == 3]
    verify_chain(folder)


def test_steps_that_were_never_saved_are_named_by_the_anchor_after_them(
    writer: Open, tmp_path: Path
) -> None:
    delta_writer = writer()
    for step in range(4):
        delta_writer.save(step, weights(step))
    delta_writer.flush()
    for step, missing in ((4, None), (7, (5, 6)), (2, None)):
        second_writer = writer()
        second_writer.save(step, weights(step))
        second_writer.flush()
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
    delta_writer = writer()
    delta_writer.barrier()()
    delta_writer.save(0, weights(0.0))
    waiting = threading.Thread(target=delta_writer.barrier())
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    go_on.set()
    waiting.join(10)
    assert [link.link.step for link in delta_writer.finished_links()] == [0]


def test_a_chain_on_a_file_system_without_locks_is_written_with_a_warning(
    writer: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    delta_writer = writer()
    for step in range(3):
        delta_writer.save(step, weights(step))
    delta_writer.flush()
    assert [step for _, step, _ in steps(tmp_path / "deltas")] == [0, 1, 2]
    assert caplog.text.count("has no locks (Function not implemented)") == 1
