"""Nonsense in any file that is read: an error of Instar's own, no hang, no crash."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
import pytest
import savers
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_run import Place, codes, output_of

from instar.checkpoint.listing import latest_checkpoint, latest_intact, list_checkpoints
from instar.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, encode_json, file_entry
from instar.checkpoint.store import load_checkpoint

EXAMPLES = figures.times(100, 10_000)
RESUMES = figures.times(3, 200)
SLOWEST_MS = 5000

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["NaN", "Infinity", "step-10", "../..", "/etc/passwd", "model.safetensors"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
CONTENTS = (
    st.binary(max_size=400)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.integers(1, 30_000).map(lambda depth: b"[" * depth)
)
FIELDS = Manifest.__struct_fields__
PLACES = st.text(max_size=30) | st.sampled_from(
    ["../step-10/state.json", "/etc/passwd", "", ".", "a/b", "manifest.json", "rng", "x\0y"]
)
ENTRIES = VALUES | st.fixed_dictionaries(
    {"size_bytes": st.integers(), "xxh3_128": st.text(max_size=32), "pattern": SCALARS}
)


@dataclass(frozen=True)
class Content:
    """A file has another content; `with_checksum`: and the manifest says that it must be so."""

    name: str
    content: bytes
    with_checksum: bool

    def plant(self, folder: Path) -> None:
        path = folder / self.name
        path.write_bytes(self.content)
        if self.with_checksum and self.name in (files := manifest_of(folder)["files"]):
            entry = file_entry(path, files[self.name]["pattern"])
            entry_json = {field: getattr(entry, field) for field in entry.__struct_fields__}
            write_with_checksum(folder, {"files": files | {self.name: entry_json}})


@dataclass(frozen=True)
class Fields:
    """Fields of the manifest have other values, and its checksum is right."""

    changes: dict[str, Any]

    def plant(self, folder: Path) -> None:
        write_with_checksum(folder, self.changes)


@dataclass(frozen=True)
class Entry:
    """The manifest lists one more file."""

    name: str
    entry: Any

    def plant(self, folder: Path) -> None:
        files = manifest_of(folder)["files"]
        write_with_checksum(folder, {"files": files | {self.name: self.entry}})


NONSENSE = (
    st.builds(Content, st.just(MANIFEST), CONTENTS, st.just(value=False))
    | st.builds(
        Content, st.sampled_from(["state.json", "model.safetensors"]), CONTENTS, st.booleans()
    )
    | st.builds(Content, st.just("../latest"), CONTENTS, st.just(value=False))
    | st.builds(Fields, st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
    | st.builds(Entry, PLACES, ENTRIES)
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nonsense") / "run"
    root.mkdir()
    savers.save(root, 10, rows=2)
    savers.save(root, 20, rows=2)
    return root


@pytest.mark.timeout(3600)
def test_nonsense_in_a_file_is_an_error_and_the_one_before_is_used(run: Path) -> None:
    trials, refusals = 0, 0

    @settings(
        max_examples=EXAMPLES,
        deadline=SLOWEST_MS,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(nonsense=NONSENSE)
    def plant_and_read(nonsense: Content | Fields | Entry) -> None:
        nonlocal trials, refusals
        with restore_files(run / "checkpoints"):
            nonsense.plant(run / "checkpoints" / "step-20")
            trials += 1
            refusals += read_everything(run)

    plant_and_read()
    figures.write(
        "nonsense",
        [
            figures.none_of(trials, "nonsense in manifest, state, weights, latest: untyped", []),
            figures.count("of these refused", refusals),
        ],
    )
    assert refusals > trials // 2


def read_everything(run: Path) -> bool:
    """Whether something was refused; nothing but refusals may happen."""
    has_refused = False
    for path in [*list_checkpoints(run), latest_checkpoint(run)]:
        try:
            checkpoint = load_checkpoint(path)
            for component in checkpoint.components:
                checkpoint.tensors(component)
        except CheckpointError:
            has_refused = True
    newest, errors = latest_intact(run)
    assert newest.path.name in ("step-10", "step-20")
    assert all(isinstance(error, CheckpointError) for error in errors)
    return has_refused


@contextmanager
def restore_files(folder: Path) -> Iterator[None]:
    """Every file is afterwards what it was before."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    try:
        yield
    finally:
        for path, content in before.items():
            if path.read_bytes() != content:
                path.write_bytes(content)


def manifest_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    return content


def write_with_checksum(folder: Path, changes: dict[str, Any]) -> None:
    """The manifest with some fields changed, and the checksum that belongs to it."""
    body = manifest_of(folder) | changes
    del body["xxh3_128"]
    checksum = xxhash.xxh3_128_hexdigest(encode_json(body))
    (folder / MANIFEST).write_bytes(encode_json({**body, "xxh3_128": checksum}))


@pytest.mark.timeout(3600)
def test_resume_refuses_a_state_that_says_nonsense(place: Place) -> None:
    """Whole by its checksums, and still no state of a run."""
    intact_run, run_dir, chance = place.path / "whole", place.path / "run", random.Random(0)
    ranks = place.train(intact_run, "train.until=[4it]")
    assert codes(ranks) == [0], output_of(ranks)
    state = json.loads((intact_run / "checkpoints" / "step-4" / "state.json").read_bytes())
    refusals, other_errors = 0, []
    # what is looked at before the state is restored
    early = [state | {"progress": value} for value in (1e300, state["progress"] | {"step": None})]
    for nonsense in [*early, *(spoil(state, chance) for _ in range(RESUMES))]:
        shutil.copytree(intact_run, run_dir)
        text = json.dumps(nonsense)
        damage = Content("state.json", text.encode(), with_checksum=True)
        damage.plant(run_dir / "checkpoints" / "step-4")
        (child,) = place.resume(run_dir, "--until", "5it")
        code = child.finish()
        refusals += code == 3
        if code not in (0, 3, 4) or "Traceback" in child.output():
            other_errors.append(f"{text}: {code} {child.output()}")
        shutil.rmtree(run_dir)
    figures.write(
        "nonsense-state",
        [
            figures.none_of(RESUMES, "nonsense in the state, resume: untyped", other_errors),
            figures.count("of these refused", refusals),
        ],
    )
    assert refusals


def spoil(state: Any, chance: random.Random) -> Any:
    """One value somewhere in it gone, or another."""
    if isinstance(state, dict) and state and chance.random() < 0.85:
        key = chance.choice(sorted(state))
        if chance.random() < 0.3:
            return {name: value for name, value in state.items() if name != key}
        return state | {key: spoil(state[key], chance)}
    return chance.choice([None, "nonsense", -1, 1e300, "NaN", [], {}, [1, 2], True])
