"""A pipe, a device or a folder where a file of data is expected is told at once, and never waited for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from instar.config.errors import ConfigError, InstarError
from instar.config.language import DataConfig
from instar.config.load import load_config
from instar.data.split import divide_samples
from instar.data.text.corpus import open_corpus
from instar.data.text.prepare import prepare_dataset
from instar.data.text.shards import open_dataset
from instar.data.text.tokenizer import load_saved_tokenizer, named_tokenizer
from instar.models.hf.folder import import_folder

SOON_S = 10.0


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """Waiting for a writer that never comes is interrupted."""

    def stop(*_: Any) -> None:
        raise AssertionError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SOON_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def device(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


KINDS = {"pipe": pipe, "device": device, "folder": folder}


def dataset(place: Path) -> Path:
    (place / "text.txt").write_text("some text to be tokens " * 99)
    data = DataConfig(source=str(place / "text.txt"), path=str(place / "tokens"))
    prepare_dataset(data, 0)
    return place / "tokens"


def odd_shard(place: Path, make: Callable[[Path], Path]) -> None:
    dataset_folder = dataset(place)
    shard = next(dataset_folder.glob("*.safetensors"))
    shard.unlink()
    make(shard)
    open_dataset(dataset_folder)


def odd_record(place: Path, make: Callable[[Path], Path]) -> None:
    dataset_folder = dataset(place)
    record = dataset_folder / "dataset.json"
    record.unlink()
    make(record)
    open_dataset(dataset_folder)


def odd_tokenizer(place: Path, make: Callable[[Path], Path]) -> None:
    make(place / "tokenizer.json")
    load_saved_tokenizer(place)


def odd_named_tokenizer(place: Path, make: Callable[[Path], Path]) -> None:
    named_tokenizer(str(make(place / "mine.json")))


def odd_config(place: Path, make: Callable[[Path], Path]) -> None:
    load_config(str(make(place / "run.yaml")))


def odd_schedule(place: Path, make: Callable[[Path], Path]) -> None:
    load_config(None, [f"schedule={make(place / 'grow.yaml')}"])


def odd_source(place: Path, make: Callable[[Path], Path]) -> None:
    open_corpus(str(make(place / "text.txt")), "text")


def odd_rows(place: Path, make: Callable[[Path], Path]) -> None:
    open_corpus(str(make(place / "text.jsonl")), "text")


def odd_in_folder(place: Path, make: Callable[[Path], Path]) -> None:
    make(place / "text.txt")
    open_corpus(str(place), "text")


def odd_numbers(place: Path, make: Callable[[Path], Path]) -> None:
    divide_samples(9, val=str(make(place / "val.txt")), test=0, seed=0)


def odd_import(place: Path, make: Callable[[Path], Path]) -> None:
    make(place / "config.json")
    import_folder(place, place / "new")


READERS = [reader for name, reader in list(globals().items()) if name.startswith("odd_")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_what_is_no_regular_file_is_told_at_once(
    reader: Callable[[Path, Callable[[Path], Path]], None], kind: str, tmp_path: Path
) -> None:
    with pytest.raises(InstarError) as error:
        reader(tmp_path, KINDS[kind])
    assert str(tmp_path) in str(error.value)
    assert "Traceback" not in str(error.value)


def test_a_named_pipe_is_called_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a regular file"):
        load_config(str(pipe(tmp_path / "run.yaml")))


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in it would else be left out without a word. Root may list all, so the system's answer is replaced."""
    locked_folder = tmp_path / "locked"
    locked_folder.mkdir()
    (tmp_path / "a.txt").write_text("some text")
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path) == locked_folder:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match=f"cannot list {locked_folder}: Permission denied"):
        open_corpus(str(tmp_path), "text")
