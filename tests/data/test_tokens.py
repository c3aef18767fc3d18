from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.data.text import verify
from instar.data.text.shards import ShardWriter, TokenizerRecord, open_dataset, write_record
from instar.data.text.verify import verify_changed, verify_tokens
from instar.record.atomic import atomic_dir


def write_dataset(folder: Path, tokens: np.ndarray, *, vocab_size: int, shard_tokens: int) -> Path:
    with atomic_dir(folder) as staging:
        writer = ShardWriter(staging, "train", "t", vocab_size, shard_tokens)
        for part in np.array_split(tokens, 7):
            writer.append(part)
        write_record(
            staging,
            tokenizer=TokenizerRecord(kind="byte", fingerprint="t"),
            vocab_size=vocab_size,
            splits={"train": writer.close()},
            source={},
        )
    return folder


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_tokens_come_back_whatever_the_shards(
    tmp_path: Path, vocab_size: int, dtype: type[np.generic]
) -> None:
    tokens = np.arange(1000) * 7 % vocab_size
    folder = write_dataset(tmp_path / "set", tokens, vocab_size=vocab_size, shard_tokens=64)
    dataset = open_dataset(folder)
    split = dataset.split("train")
    verify_tokens(dataset)
    assert split.dtype == dtype
    assert len(split.shards) == 16
    assert np.array_equal(split.read(0, len(split)), tokens)


def test_a_shard_is_plain_safetensors_with_metadata(dataset_folder: Path) -> None:
    shard = dataset_folder / "train-00000.safetensors"
    with safetensors.safe_open(shard, framework="numpy") as file:
        metadata = file.metadata()
        tokens = file.get_tensor("tokens")
    record = json.loads((dataset_folder / "dataset.json").read_text())
    assert metadata == {
        "format": "instar-tokens/1",
        "count": str(tokens.size),
        "dtype": "uint16",
        "tokenizer": record["tokenizer"]["fingerprint"],
        "vocab_size": "256",
        "fingerprint": record["splits"]["train"][0]["fingerprint"],
    }


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), data=st.data())
def test_reading_and_gathering_cross_shards(
    make_split: Any, sizes: list[int], data: st.DataObject
) -> None:
    split = make_split(*sizes)
    start = data.draw(st.integers(0, len(split)))
    stop = data.draw(st.integers(start, len(split)))
    assert split.read(start, stop).tolist() == list(range(start, stop))
    length = data.draw(st.integers(1, len(split)))
    starts = data.draw(st.lists(st.integers(0, len(split) - length), max_size=20))
    windows = split.windows(np.array(starts, dtype=np.int64), length)
    assert windows.tolist() == [list(range(at, at + length)) for at in starts]


@settings(deadline=None, max_examples=60)
@given(
    shards=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    runs=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=3),
    length=st.integers(2, 5),
)
def test_runs_of_consecutive_windows_are_what_single_ones_are(
    make_split: Any, shards: list[int], runs: list[tuple[int, int]], length: int
) -> None:
    split = make_split(*shards, 160)
    starts = [at + number * (length - 1) for at, count in runs for number in range(count)]
    starts = [at for at in starts if at + length <= len(split)]
    windows = split.windows(np.array(starts, dtype=np.int64), length)
    assert windows.tolist() == [list(range(at, at + length)) for at in starts]


def test_a_window_outside_the_split_is_refused(make_split: Any) -> None:
    with pytest.raises(IndexError):
        make_split(5, 5).windows(np.array([0, 7]), 4)


def rewrite(path: Path, content: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    rewrite(path, path.read_bytes()[:-10])


def cut_in_header(path: Path) -> None:
    rewrite(path, path.read_bytes()[:40])


def make_longer(path: Path) -> None:
    rewrite(path, path.read_bytes() + b"\0\0")


def make_text(path: Path) -> None:
    rewrite(path, b"once upon a time there was a file that was no shard")


def make_other_safetensors(path: Path) -> None:
    rewrite(path, safetensors.numpy.save({"weight": np.zeros(4)}))


def change_metadata(path: Path) -> None:
    rewrite(path, path.read_bytes().replace(b'"vocab_size":"256"', b'"vocab_size":"257"'))


def change_dtype(path: Path) -> None:
    rewrite(path, path.read_bytes().replace(b'"dtype":"U16"', b'"dtype":"I16"'))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (Path.unlink, "is missing"),
        (cut_short, r"truncated: [\d,]+ bytes where [\d,]+ are expected"),
        (cut_in_header, r"truncated: 40 bytes where \d+ are expected"),
        (make_longer, "longer than it should be"),
        (make_text, "not a safetensors file"),
        (lambda path: rewrite(path, b""), "not a safetensors file"),
        (lambda path: rewrite(path, b"\x04" + bytes(7) + b"[{]}"), "not a safetensors file"),
        (lambda path: rewrite(path, b"\x02" + bytes(7) + b"[]"), "not a safetensors file"),
        (make_other_safetensors, "not a token shard"),
        (change_metadata, "vocab_size is 257, dataset.json asks for 256"),
        (change_dtype, "does not belong to the data set: tensor is"),
    ],
)
def test_a_damaged_or_foreign_shard_is_named(
    dataset_folder: Path, damage: Callable[[Path], None], says: str
) -> None:
    damage(dataset_folder / "val-00000.safetensors")
    with pytest.raises(ConfigError, match=says) as error:
        open_dataset(dataset_folder)
    assert "val-00000.safetensors" in error.value.problems[0].where


def test_all_damaged_shards_are_named_at_once(dataset_folder: Path) -> None:
    cut_short(dataset_folder / "train-00000.safetensors")
    make_text(dataset_folder / "test-00000.safetensors")
    with pytest.raises(ConfigError) as error:
        open_dataset(dataset_folder)
    assert len(error.value.problems) == 2


def test_a_shard_of_another_data_set_is_refused(tmp_path: Path, dataset_folder: Path) -> None:
    other = write_dataset(tmp_path / "b", np.arange(50), vocab_size=256, shard_tokens=100)
    target = dataset_folder / "train-00000.safetensors"
    target.unlink()
    shutil.copy(other / "train-00000.safetensors", target)
    with pytest.raises(ConfigError, match=r"count is 50, dataset\.json asks for"):
        open_dataset(dataset_folder)


def test_a_flipped_bit_is_found_by_verifying(dataset_folder: Path) -> None:
    shard = dataset_folder / "train-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-7] ^= 1
    rewrite(shard, bytes(content))
    dataset = open_dataset(dataset_folder)
    with pytest.raises(ConfigError, match="not those that were written") as error:
        verify_tokens(dataset)
    assert error.value.problems[0].where == str(shard)


def flip(shard: Path, *, keep_time: bool = False) -> None:
    """Flip a bit in place."""
    before = shard.stat()
    shard.chmod(0o644)
    content = bytearray(shard.read_bytes())
    content[-7] ^= 1
    shard.write_bytes(content)
    if keep_time:
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_shard_is_verified_once_after_each_change(
    dataset_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSTAR_CACHE_DIR", str(tmp_path / "cache"))
    shard, other = (dataset_folder / f"{name}-00000.safetensors" for name in ("train", "val"))
    verify_changed(dataset_folder)
    with monkeypatch.context() as patch:
        patch.setattr(verify, "_damage", lambda *_: pytest.fail("a shard is read again"))
        verify_changed(dataset_folder)
    for path, keep_time in ((other, False), (shard, True)):  # the kernel's ctime tells
        flip(path, keep_time=keep_time)
        with pytest.raises(ConfigError, match="not those that were written") as error:
            verify_changed(dataset_folder)
        assert [problem.where for problem in error.value.problems] == [str(path)]
        flip(path)
        verify_changed(dataset_folder)


def test_shards_are_verified_each_time_where_nothing_can_be_kept(
    dataset_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INSTAR_CACHE_DIR", str(tmp_path / "file"))
    verify_changed(dataset_folder)
    flip(dataset_folder / "train-00000.safetensors", keep_time=True)
    with pytest.raises(ConfigError, match="train-00000"):
        verify_changed(dataset_folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a data set's record"),
        ("[]", "not a data set's record"),
        ('{"format": 3}', "not a data set's record"),
    ],
)
def test_a_broken_record_is_refused(dataset_folder: Path, content: str, says: str) -> None:
    rewrite(dataset_folder / "dataset.json", content.encode())
    with pytest.raises(ConfigError, match=says):
        open_dataset(dataset_folder)


def test_an_edited_record_is_refused(dataset_folder: Path) -> None:
    record = dataset_folder / "dataset.json"
    rewrite(record, record.read_bytes().replace(b'"vocab_size": 256', b'"vocab_size": 255'))
    with pytest.raises(ConfigError, match="fingerprint is not that of what the file lists"):
        open_dataset(dataset_folder)


def test_a_record_cannot_reach_outside_its_folder(dataset_folder: Path) -> None:
    record = dataset_folder / "dataset.json"
    rewrite(record, record.read_bytes().replace(b'"train-00000', b'"../train-00000'))
    with pytest.raises(ConfigError, match="not a name within the folder"):
        open_dataset(dataset_folder)


def test_a_folder_without_a_data_set_is_told_apart_from_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no dataset\.json"):
        open_dataset(tmp_path)
    with pytest.raises(ConfigError, match="is not there"):
        open_dataset(tmp_path / "nowhere")


def test_a_split_that_is_not_there_is_named(dataset_folder: Path) -> None:
    with pytest.raises(ConfigError, match="no dev split, it has: train, val, test"):
        open_dataset(dataset_folder).split("dev")


def test_nothing_is_visible_after_a_failure(tmp_path: Path) -> None:
    def fail_while_publishing() -> None:
        with atomic_dir(tmp_path / "set", key="data.path", first_wins=True) as staging:
            (staging / "half").write_text("half")
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        fail_while_publishing()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_visible_after_a_kill(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from instar.record.atomic import atomic_dir\n"
        "with atomic_dir(Path(sys.argv[1])) as aside:\n"
        "    (aside / 'half').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, tmp_path / "set"], env=environment())
    assert result.returncode == -signal.SIGKILL
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".tmp-")] == []


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_who_publishes_first_stays(tmp_path: Path) -> None:
    with atomic_dir(tmp_path / "set", key="data.path", first_wins=True) as slow:
        (slow / "who").write_text("slow")
        with atomic_dir(tmp_path / "set", key="data.path", first_wins=True) as fast:
            (fast / "who").write_text("fast")
    assert (tmp_path / "set" / "who").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_place_that_cannot_be_written_to_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(ConfigError, match=r"data\.path: cannot write"),
        atomic_dir(tmp_path / "file" / "set", key="data.path", first_wins=True),
    ):
        pass
