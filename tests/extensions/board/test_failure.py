"""What a crashed run is said to have died of."""

from pathlib import Path

import pytest
from recorded import make_run
from scenes import crash, plain, start_event, write

from instar.extensions.board.ending import MAX_LINES, run_failure
from instar.logs.read.record import read_record
from instar.record.events import Failed


def test_an_error_has_its_type_its_place_and_the_end_of_its_log(tmp_path: Path) -> None:
    run = crash(tmp_path)

    failure = run_failure(read_record(run))

    assert failure is not None
    assert (failure.type, failure.rank, failure.step) == ("OutOfMemoryError", 1, 150)
    assert failure.message.startswith("CUDA out of memory. Tried to allocate 2.50 GiB.")
    assert failure.log[0].endswith("rank 1 of 2 on cuda:1")
    assert failure.log[-1].startswith("torch.OutOfMemoryError")


def test_a_killed_run_has_no_type(tmp_path: Path) -> None:
    run = make_run(tmp_path, "killed-aaaaa", steps=3)
    run.log(0).write_bytes(b"line\n" * 100 + b"50%\r100%\n\xff\n")

    failure = run_failure(read_record(run))

    assert failure is not None
    assert (failure.type, failure.rank, failure.step) == ("", None, None)
    assert "killed" in failure.message
    assert len(failure.log) == MAX_LINES
    assert failure.log[-2:] == ("100%", "\ufffd")


@pytest.mark.parametrize(
    ("message", "kind", "rest"),
    [
        ("rank 3 failed at step 1,200: ValueError: no: such key", "ValueError", "no: such key"),
        ("rank 3 failed at step 1,200: KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("rank 2 hangs in all_reduce", "", "rank 2 hangs in all_reduce"),
        ("", "", ""),
    ],
)
def test_sentences_of_ranks_are_taken_apart(
    tmp_path: Path, message: str, kind: str, rest: str
) -> None:
    failed = Failed(message=message, rank=3, step=1200)
    run = write(tmp_path, "run-aaaaa", iter([(start_event(), 1), (failed, 1)]), "")

    failure = run_failure(read_record(run))

    assert failure is not None
    assert (failure.type, failure.rank, failure.step) == (kind, 3, 1200)
    assert failure.message.endswith(rest)


def test_a_run_that_did_not_crash_has_none(tmp_path: Path) -> None:
    assert run_failure(read_record(write(tmp_path, "run-aaaaa", plain(1, last=10), ""))) is None
