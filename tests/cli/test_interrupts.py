"""Ctrl-C at a terminal in the middle of each kind of long work.

The inputs are large but take no space: files with holes, and records of one line again and again.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from cases import parametrize_first
from forks import INSTAR, forks
from needed import needs
from safetensors.torch import save_file
from terminal import environment, run_on_terminal
from tiny_run import CONFIG, TEXT
from torch import zeros
from written_runs import writing

from instar.checkpoint.layout import TensorEntry, encode_header
from instar.checkpoint.manifest import MANIFEST, encode_manifest, read_manifest
from instar.checkpoint.store import CheckpointContent, publish_checkpoint
from instar.cli.main import INTERRUPTED
from instar.extensions import built_in

LARGE = 1 << 36
"""bytes of a file with a hole: more than a disk gives in ten seconds"""
HEARD_S = 3.0
"""on a busy machine; without being heard, everything here takes longer"""
_CSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Prepare = Callable[[Path], Sequence[str]]


def hole(path: Path, size: int = LARGE, begin: bytes = b"") -> None:
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(len(begin) + size)


def fill_file(path: Path, line: bytes, times: int, begin: bytes = b"") -> None:
    with path.open("wb") as file:
        file.write(begin)
        for _ in range(times // 100_000):
            file.write(line * 100_000)


def tokens(place: Path) -> Sequence[str]:
    hole(place / "text.txt")
    return ["data", "prepare", "--source", "text.txt", "--tokenizer", "byte", "--path", "new"]


def tokenizer(place: Path) -> Sequence[str]:
    """Words of a million letters: the library does not return for minutes."""
    chance = random.Random(0)
    (place / "text.txt").write_text("".join(chance.choices("abcdefgh", k=1 << 20)))
    return ["data", "prepare", "--source", "text.txt", "--tokenizer", "bpe", "--path", "new"]


def lines(place: Path) -> list[str]:
    line = json.dumps({"text": "so it goes " * 10}) + "\n"
    fill_file(place / "text.jsonl", line.encode(), 5_000_000)
    words = ["--source", "text.jsonl", "--tokenizer", "byte", "--path", "new"]
    return ["data", "prepare", *words, "--set"]


def rows(place: Path) -> Sequence[str]:
    return [*lines(place), "data.kind=rows"]


def stream(place: Path) -> Sequence[str]:
    (place / "held.txt").write_text("a text that is held out\n" * 100)
    return [*lines(place), "data.kind=stream", "--val-source", "held.txt", "--nproc", "2"]


def checkpoint(place: Path) -> Path:
    """A checkpoint whose model is very large."""
    path = publish_checkpoint(
        place / "run", 1, CheckpointContent({"model": {"w": zeros(4)}}, {}, {})
    )
    manifest = read_manifest(path)
    file = path / "model.safetensors"
    hole(file, begin=file.read_bytes())
    entry = msgspec.structs.replace(
        manifest.files[file.name], size_bytes=file.stat().st_size, xxh3_128="0" * 32
    )
    files = manifest.files | {file.name: entry}
    new_manifest = msgspec.structs.replace(manifest, files=files)
    (path / MANIFEST).write_bytes(encode_manifest(new_manifest))
    return path


def verify_command(place: Path) -> Sequence[str]:
    return ["checkpoint", "verify", str(checkpoint(place))]


def list_command(place: Path) -> Sequence[str]:
    return ["checkpoint", "list", str(checkpoint(place).parents[1]), "--verify"]


def chain(place: Path) -> Sequence[str]:
    large = TensorEntry("U8", (LARGE,), LARGE)
    hole(place / "a.safetensors", begin=encode_header({"w": large}))
    hole(place / "b.safetensors", begin=encode_header({"w": large}))
    return ["delta", "create", "a.safetensors", "b.safetensors", "new"]


def export_command(place: Path) -> Sequence[str]:
    with writing(place / "run") as writer:
        writer.start()
        writer.train(1, 2.0)
    events = place / "run" / "events.jsonl"
    start, step = events.read_bytes().splitlines(keepends=True)
    fill_file(events, step, 5_000_000, begin=start)
    return ["logs", "export", "run", "--to", "csv", "-o", "new"]


CASES: dict[str, tuple[Prepare, str]] = {
    "a tokenizer": (tokenizer, "training a tokenizer"),
    "verify": (verify_command, "verifying"),
    "rows": (rows, "downloading and converting"),
    "a stream": (stream, "counting lane"),
    "list --verify": (list_command, "verifying"),
    **({"deltas": (chain, "comparing")} if "delta" in built_in() else {}),
    "export": (export_command, "exporting|reading|writing"),
    "tokens": (tokens, "tokenising"),
}


@parametrize_first("case", CASES, first=2)
def test_ctrl_c_is_heard_in_the_middle(case: str, tmp_path: Path) -> None:
    prepare, doing = CASES[case]
    argv = prepare(tmp_path)
    before = files(tmp_path)
    code, output, seconds = interrupt(argv, tmp_path, doing)
    assert code == 130, output
    assert seconds < HEARD_S, output
    assert re.search(rf"interrupted while [^\r\n]*({doing})", output), output
    assert "again" in output or "go" in output
    assert "Traceback" not in output
    assert files(tmp_path) - before <= (
        {"new"} if case == "a stream" else set()
    )  # what a stream holds out is prepared before
    shutil.rmtree(tmp_path)


FOREVER = "train.until=1000000it"
FINDER = [
    (["find", "lr", "run.yaml", "--steps", "100000"], "training with", 130, "nothing was written")
] * ("lab" in built_in())
LAUNCH = f"import instar; instar.launch('run.yaml', ['{FOREVER}'])"


@pytest.fixture(scope="module")
def trained_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a tiny model, and its config."""
    place = tmp_path_factory.mktemp("trained")
    (place / "squares.txt").write_text(TEXT)
    (place / "run.yaml").write_text(CONFIG)
    words = ["train", "run.yaml", "--set", "record.run_dir=runs/tiny-kmn42"]
    code, output = run_on_terminal([forks().command, *words], place, environment(), 80)
    assert code == 0, output
    return place


@parametrize_first(
    ("argv", "pattern", "code", "message"),
    [
        (["sample", "tiny-kmn42", "--max-tokens", "1000000"], r"\w{9}", 130, ""),
        (["train", "run.yaml", "--set", FOREVER], "loss", 75, "resume with"),
        *FINDER,
        (["-c", LAUNCH], "loss", 1, "Interrupted"),
    ], first=1,
)  # fmt: skip
def test_ctrl_c_ends_what_a_model_computes(
    argv: list[str], pattern: str, code: int, message: str, trained_place: Path
) -> None:
    program = forks().python if argv[0] == "-c" else forks().command
    exit_code, output, seconds = interrupt(argv, trained_place, pattern, program)
    assert exit_code == code, output
    assert seconds < HEARD_S, output
    assert message in output


@needs("delta")
def test_ctrl_c_is_heard_while_another_process_has_the_lock(tmp_path: Path) -> None:
    from chains import save

    save(tmp_path / "chain", 3)
    descriptor = os.open(tmp_path / "chain", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        code, output, seconds = interrupt(["delta", "gc", "chain"], tmp_path, "waiting for")
    finally:
        os.close(descriptor)
    assert (code, seconds < HEARD_S) == (130, True), output
    assert "interrupted while waiting" in output


def test_ctrl_c_is_heard_while_a_rank_waits_for_others(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text to train on\n" * 100)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env = ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    argv = ["train", "--set", "data.source=text.txt", "--set", "data.tokenizer=byte"]
    child = forks().start(INSTAR, argv, place=tmp_path, environment=env)

    def is_waiting() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    assert child.wait_until(is_waiting)
    child.signal(signal.SIGINT)
    assert child.ended_within(HEARD_S)
    assert child.code == 130
    assert "start again with the same command" in child.output()
    assert files(tmp_path) == {"text.txt", child.output_path.name}


@pytest.mark.torture
def test_the_second_run_of_an_interrupted_command_begins_anew(tmp_path: Path) -> None:
    argv = tokens(tmp_path)
    interrupt(argv, tmp_path, "tokenising")
    (tmp_path / "text.txt").write_text("a text\n" * 100)
    code, output = run_on_terminal([forks().command, *argv], tmp_path, environment(), 80)
    assert code == 0, output
    assert (tmp_path / "new" / "dataset.json").is_file()


def test_saved_states_are_whole_after_an_interrupted_verify(tmp_path: Path) -> None:
    state = {"w": zeros(4)}
    save_file(state, tmp_path / "a.safetensors")
    argv = verify_command(tmp_path)
    path = Path(argv[-1])
    stamps = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    interrupt(argv, tmp_path, "verifying")
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == stamps


def files(place: Path) -> set[str]:
    """What is in a folder; caches of the interpreter apart."""
    return {path.name for path in place.iterdir()} - {"__pycache__", "cache"}


def interrupt(
    argv: Sequence[str], place: Path, doing: str, program: Path | None = None
) -> tuple[int, str, float]:
    """Press Ctrl-C once what is done is shown; the exit code, what was seen, and the seconds after
    which the process had ended."""
    press_times: list[float] = []

    def press(output: str) -> bytes:
        if not press_times and re.search(doing, _CSI.sub("", output)):
            press_times.append(time.monotonic())
            return b"\x03"
        return b""

    env = environment() | {"HF_HOME": str(place / "cache"), "HF_DATASETS_OFFLINE": "1"}
    code, output = run_on_terminal([program or forks().command, *argv], place, env, 100, press)
    assert press_times, output
    return code, _CSI.sub("", output), time.monotonic() - press_times[0]


WAITS = """
import sys, time
import instar.cli.main as command
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("instar.record.atomic", "instar.distributed.signals"):
            {finds}
def main():
    try:
        print("waits", flush=True)
        time.sleep(1000)
    except KeyboardInterrupt:
        {interrupted}
sys.meta_path.insert(0, Finder())
command.main, command.LEAVE_S = main, 0.5
command.entry()
"""
HANGS = "time.sleep(1000)"


@pytest.mark.parametrize("finds", [HANGS, "raise ImportError(name)"])
@pytest.mark.parametrize("interrupted", [HANGS, "return command.INTERRUPTED"])
def test_ctrl_c_ends_a_command_although_what_ends_it_cannot_be_imported(
    tmp_path: Path, finds: str, interrupted: str
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS.format(finds=finds, interrupted=interrupted))
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(30) == INTERRUPTED
        finally:
            process.kill()
