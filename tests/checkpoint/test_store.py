import json
import math
import os
import resource
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from forks import Forks
from safetensors.torch import load_file

from instar.checkpoint.compare import verify_checkpoint
from instar.checkpoint.listing import latest_checkpoint, resolve_checkpoint
from instar.checkpoint.manifest import (
    CheckpointError,
    Facts,
    encode_manifest,
    identify,
    read_manifest,
)
from instar.checkpoint.store import CheckpointContent, load_checkpoint, publish_checkpoint
from instar.config.errors import ConfigError
from instar.record import atomic

ARCHITECTURE = {"n_layer": 2, "n_embd": 8, "rope_base": 10000.0}
STATE = {"cursor": 6400, "best": math.inf, "rng": 2**127 + 1, "name": "Größe", "none": None}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding.weight": torch.randn(16, 8, generator=generator),
        "head.bias": torch.randn(16, generator=generator).to(torch.bfloat16),
    }


def save(root: Path, step: int, seed: int = 0) -> Path:
    return publish_checkpoint(
        root, step, CheckpointContent({"model": tensors(seed)}, STATE, ARCHITECTURE)
    )


def test_what_is_published_is_what_is_loaded(tmp_path: Path) -> None:
    history = [{"step": 5, "name": "change_lr", "value": 1e-4}]
    path = publish_checkpoint(
        tmp_path, 10, CheckpointContent({"model": tensors()}, STATE, ARCHITECTURE, history=history)
    )
    assert path == tmp_path / "checkpoints" / "step-10"
    checkpoint = load_checkpoint(path)
    assert checkpoint.state == STATE
    assert checkpoint.manifest.step == 10
    assert checkpoint.manifest.architecture == ARCHITECTURE
    assert checkpoint.manifest.history == history
    assert checkpoint.manifest.versions["torch"] == torch.__version__
    actual = checkpoint.tensors()
    assert actual.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor)


def test_a_text_that_is_the_word_of_a_number_stays_a_text(tmp_path: Path) -> None:
    """In a config, such as `missing: NaN`, and in what a hook keeps."""
    config = {
        "model.missing": "NaN",
        "name": "-Infinity",
        "model.limit": math.inf,
        "odd": ["\\NaN"],
    }
    state = {**STATE, "hooks": {"text": "NaN", "list": ["Infinity", math.inf]}}
    content = CheckpointContent(
        {"model": tensors()}, state, ARCHITECTURE, facts=Facts(config=config)
    )
    checkpoint = load_checkpoint(publish_checkpoint(tmp_path, 10, content))
    assert checkpoint.manifest.config == config
    assert checkpoint.state == state
    assert identify(checkpoint.path).manifest in (checkpoint.path / "manifest.json").read_text()


def test_it_reads_without_instar(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    assert load_file(path / "model.safetensors").keys() == tensors().keys()
    state = json.loads((path / "state.json").read_bytes(), parse_constant=pytest.fail)
    assert state["best"] == "Infinity"
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["files"]["model.safetensors"]["pattern"] == "REPLICATED"
    assert manifest["files"]["state.json"]["size_bytes"] == (path / "state.json").stat().st_size


def test_nothing_else_is_left_lying_about(tmp_path: Path) -> None:
    save(tmp_path, 10)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-10"]


def test_a_tied_head_is_saved_once(tmp_path: Path) -> None:
    table = torch.nn.Embedding(16, 8)
    head = torch.nn.Linear(8, 16, bias=False)
    head.weight = table.weight
    model = torch.nn.ModuleDict({"table": table, "head": head})
    path = publish_checkpoint(
        tmp_path, 1, CheckpointContent({"model": dict(model.named_parameters())}, {}, {})
    )
    assert load_checkpoint(path).tensors().keys() == {"table.weight"}
    with pytest.raises(ValueError, match="share memory"):
        publish_checkpoint(tmp_path, 2, CheckpointContent({"model": model.state_dict()}, {}, {}))
    assert latest_checkpoint(tmp_path) == path


def test_a_transposed_parameter_keeps_its_values(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3).T
    actual = load_checkpoint(
        publish_checkpoint(tmp_path, 1, CheckpointContent({"model": {"weight": weight}}, {}, {}))
    ).tensors()
    assert torch.equal(actual["weight"], weight)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_wrappers_names_are_refused(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(ValueError, match="not its wrapper"):
        publish_checkpoint(
            tmp_path, 1, CheckpointContent({"model": {prefix + "weight": torch.ones(1)}}, {}, {})
        )


def test_state_that_json_would_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="keys are strings"):
        publish_checkpoint(
            tmp_path, 1, CheckpointContent({"model": tensors()}, {"by_rank": {0: 1}}, {})
        )
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_latest_is_the_last_one_published(tmp_path: Path) -> None:
    save(tmp_path, 20)
    rewound = save(tmp_path, 10)
    assert latest_checkpoint(tmp_path) == rewound


@pytest.mark.parametrize("pointer", [None, "step-99", "../step-10", "", "\xff"])
def test_without_a_pointer_that_points_the_last_one_saved_is_the_latest(
    tmp_path: Path, pointer: str | None
) -> None:
    for step in (9, 100, 20):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "latest").unlink()
    if pointer is not None:
        (tmp_path / "checkpoints" / "latest").write_text(pointer)
    assert latest_checkpoint(tmp_path).name == "step-20"


def test_the_same_saved_twice_is_there_once(tmp_path: Path) -> None:
    assert save(tmp_path, 10) == save(tmp_path, 10)
    assert len(list((tmp_path / "checkpoints").glob("*step-10*"))) == 1


def test_another_save_of_the_same_step_replaces_nothing(tmp_path: Path) -> None:
    first = save(tmp_path, 10, seed=0)
    second = save(tmp_path, 10, seed=1)
    assert second.name == "step-10.1"
    assert latest_checkpoint(tmp_path) == second
    assert torch.equal(load_checkpoint(first).tensors()["head.bias"], tensors(0)["head.bias"])
    assert torch.equal(load_checkpoint(second).tensors()["head.bias"], tensors(1)["head.bias"])


def test_a_damaged_checkpoint_is_no_reason_not_to_save_again(tmp_path: Path) -> None:
    first = save(tmp_path, 10)
    flip(first / "model.safetensors", -1)
    second = save(tmp_path, 10)
    assert second != first
    load_checkpoint(second)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FAULTS: dict[str, Callable[[Path], object]] = {
    "first bit": lambda path: flip(path, 0),
    "middle bit": lambda path: flip(path, path.stat().st_size // 2),
    "last bit": lambda path: flip(path, -1),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "deleted": lambda path: path.unlink(),
    "a folder": make_folder,
}


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_every_fault_in_every_file_is_found_and_named(
    tmp_path: Path, name: str, fault: Callable[[Path], object]
) -> None:
    path = save(tmp_path, 10)
    fault(path / name)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert str(caught.value).startswith(f"{path / name}: ")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_file_of_another_checkpoint_is_found(tmp_path: Path, name: str) -> None:
    first, other = (
        save(tmp_path, 10),
        publish_checkpoint(tmp_path, 20, CheckpointContent({"model": tensors(1)}, {}, {})),
    )
    (other / name).replace(first / name)
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(first)


def test_no_bit_of_a_manifest_can_flip_unseen(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    content = (path / "manifest.json").read_bytes()
    for at in range(0, len(content) * 8, 5):
        corrupt_content = bytearray(content)
        corrupt_content[at // 8] ^= 1 << at % 8
        (path / "manifest.json").unlink()
        (path / "manifest.json").write_bytes(corrupt_content)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(path)


def test_a_newer_format_is_refused_by_its_number(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    manifest = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 2}))
    with pytest.raises(CheckpointError, match="format 2; this Instar reads up to 1"):
        load_checkpoint(path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": "x"}', "[" * 10_000, "NaN"])
def test_nonsense_is_no_manifest(tmp_path: Path, content: str) -> None:
    path = save(tmp_path, 10)
    (path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json: (not|content has changed)"):
        load_checkpoint(path)


def test_a_run_a_name_or_a_checkpoint_is_resolved(tmp_path: Path) -> None:
    root = tmp_path / "grow-abcde"
    root.mkdir()
    (root / "run.yaml").touch()
    old, new = save(root, 10), save(root, 20)
    assert resolve_checkpoint(str(old)) == old
    assert [
        resolve_checkpoint(text, tmp_path) for text in (str(root), "grow", "abcde", "latest")
    ] == [new] * 4


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "grow-abcde"
    (root / "checkpoints" / "step-5").mkdir(parents=True)
    (root / "run.yaml").touch()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        resolve_checkpoint(str(root), tmp_path)
    with pytest.raises(CheckpointError, match=r"step-5 is not a checkpoint: it has no manifest"):
        resolve_checkpoint(str(root / "checkpoints" / "step-5"), tmp_path)
    with pytest.raises(ConfigError, match="no run 'nothing'"):
        resolve_checkpoint("nothing", tmp_path)


class PowerCut(BaseException):
    """Not an Exception: a dead process cleans nothing up."""


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Cut the power instead of the nth system call that makes, syncs or renames something."""
    calls = {os: ["fsync"], Path: ["mkdir", "rename", "replace", "open", "unlink"]}
    countdown = [-1]

    def watch(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: object, **options: object) -> object:
            countdown[0] -= 1
            if countdown[0] == 0:
                raise PowerCut
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, names in calls.items():
        for name in names:
            watch(owner, name)
    return lambda at: countdown.__setitem__(0, at)


def test_a_crash_at_any_call_leaves_the_old_or_the_new(
    tmp_path: Path, cut: Callable[[int], None]
) -> None:
    steps = []
    for at in range(1, 100):
        root = tmp_path / str(at)
        save(root, 10, seed=0)
        cut(at)
        try:
            save(root, 20, seed=1)
            died = False
        except PowerCut:
            died = True
        cut(-1)
        checkpoint = load_checkpoint(latest_checkpoint(root))
        expected = tensors({10: 0, 20: 1}[checkpoint.manifest.step])
        assert torch.equal(checkpoint.tensors()["head.bias"], expected["head.bias"])
        assert save(root, 30).name == "step-30"
        assert not list((root / "checkpoints").glob(".*"))
        steps.append(checkpoint.manifest.step)
        if not died:
            break
    assert not died
    assert steps == sorted(steps)
    assert steps.count(10) > 8


SAVER = """
import itertools, sys
from pathlib import Path
import torch
from instar.checkpoint.store import CheckpointContent, publish_checkpoint
for step in itertools.count(int(sys.argv[2])):
    tensors = {"weight": torch.full((1 << 18,), float(step))}
    publish_checkpoint(Path(sys.argv[1]), step, CheckpointContent({"model": tensors}, {}, {}))
    print(step, flush=True)
"""


def test_sigkill_takes_no_acknowledged_checkpoint(tmp_path: Path, forks: Forks) -> None:
    for kill_after in (1, 4):
        command = [forks.python, "-c", SAVER, str(tmp_path), str(kill_after * 1000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as saver:
            assert saver.stdout is not None
            lines = [saver.stdout.readline() for _ in range(kill_after)]
            saver.kill()
            lines += saver.stdout.readlines()
        last = int([line for line in lines if line.endswith(b"\n")][-1])
        checkpoint = load_checkpoint(latest_checkpoint(tmp_path))
        assert checkpoint.manifest.step in (last, last + 1)
        assert (checkpoint.tensors()["weight"] == checkpoint.manifest.step).all()
        for path in (tmp_path / "checkpoints").glob("step-*"):
            load_checkpoint(path)


@contextmanager
def small_disk() -> Iterator[None]:
    """No file may grow beyond 300 bytes, as on a full disk; pytest's own output neither."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(), pytest.raises(CheckpointError, match="cannot save step 10"):
        save(tmp_path, 10)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_an_unknown_sharing_pattern_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    manifest = read_manifest(path)
    entry = msgspec.structs.replace(manifest.files["model.safetensors"], pattern="SCATTERED")
    files = {**manifest.files, "model.safetensors": entry}
    (path / "manifest.json").write_bytes(
        encode_manifest(msgspec.structs.replace(manifest, files=files))
    )
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors has the sharing pattern 'SCATTERED'"
    ):
        load_checkpoint(path)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_of_a_checkpoint_honour_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.rglob("*.*")}
    assert len(modes) == 3
    assert set(modes.values()) == {mode}
    assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~mask


def test_what_is_being_deleted_is_waited_for(tmp_path: Path) -> None:
    start, go_on = threading.Event(), threading.Event()

    def slowly(path: Path) -> None:
        start.set()
        go_on.wait(30)
        remove(path)

    remove = atomic.remove_tree
    folder = tmp_path / "step-1"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic, "remove_tree", slowly)
        atomic.discard(folder)
    assert start.wait(30)
    atomic.finish_deleting(0.05)
    assert any(tmp_path.iterdir())
    go_on.set()
    atomic.finish_deleting(30)
    assert not any(tmp_path.iterdir())


def test_a_run_in_a_folder_that_may_not_be_listed_is_saved() -> None:
    """As of each user in a shared `/scratch` of mode 0711."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "run")
        root.mkdir()
        root.chmod(0o777)
        Path(scratch).chmod(0o711)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            path = save(root, 1)
            assert latest_checkpoint(root) == path
        finally:
            if is_root:
                os.seteuid(0)


def test_a_file_that_may_not_be_read_is_not_called_broken() -> None:
    """As a member of a group sees the checkpoint of somebody who shares nothing."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        path = save(root, 1)
        (path / "model.safetensors").chmod(0)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            report = verify_checkpoint(path)
        finally:
            if is_root:
                os.seteuid(0)
    assert report.broken == ()
    assert [text.rpartition("/")[2] for text in report.unreadable] == [
        "model.safetensors: cannot be read: Permission denied"
    ]
