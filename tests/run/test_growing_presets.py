"""Runs of `preset: moult` and `preset: family`, killed, resumed and repeated from their own configs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from cases import parametrize_first
from forks import INSTAR, children_as_ranks, forks
from started import run_ranks

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.manifest import read_manifest
from instar.record.events import OperationEvent, read_events
from instar.run.start.preflight import prepare_run_data
from instar.schedule.checks import load_checked

STEPS = 24
ENDS = {"trunk": 24, "trunk.1L": 13, "trunk.2L": 24}
"""The last step of each run of a family: branches at 9 and 17 decay over 30 % of their steps."""

CONFIG = """\
name: tiny
preset: family
model: {{n_layer: 4, n_head: 2, n_embd: 32, context: 16}}
data: {{source: {corpus}/squares.txt, path: {corpus}/tokens, tokenizer: char}}
train: {{until: {steps}it, batch_size: 4}}
learning_rate: {{warmup_iters: 2}}
eval: {{eval_interval: 8}}
checkpoint: {{every_steps: 4, keep_last: 9}}
record: {{sample_tokens: 0, report: false, log_interval: 1}}
"""


@pytest.fixture(scope="module")
def cfg(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("growing") / "run.yaml"
    path.write_text(CONFIG.format(corpus=corpus, steps=STEPS), encoding="utf-8")
    prepare_run_data(load_checked(str(path)), 1, lambda _: None)
    return path


def words(cfg: Path, run: Path, *settings: str) -> list[str]:
    overrides = (f"record.run_dir={run}", *settings)
    return ["train", str(cfg), *(word for text in overrides for word in ("--set", text))]


@pytest.fixture(scope="module")
def family(cfg: Path) -> Path:
    """The trunk of a family after its training; not to be changed."""
    run_ranks(1, cfg.parent, *words(cfg, cfg.parent / "trunk"))
    return cfg.parent / "trunk"


@pytest.fixture(scope="module")
def moult_run(cfg: Path) -> Path:
    """A run of the other preset; not to be changed."""
    run_ranks(1, cfg.parent, *words(cfg, cfg.parent / "moulted", "preset=moult"))
    return cfg.parent / "moulted"


def weights(run: Path) -> dict[str, bytes]:
    """What the last step left of the model and of its optimizer."""
    folder = latest_checkpoint(run)
    files = [*folder.glob("model*.safetensors"), *folder.glob("optimizer*.safetensors")]
    assert len(files) >= 2
    return {file.name: file.read_bytes() for file in files}


def operations(run: Path) -> list[tuple[str, object, int]]:
    events = read_events(run / "events.jsonl")
    return [(e.name, e.value, e.step) for e in events if isinstance(e, OperationEvent)]


def layers(run: Path) -> int:
    layers: int = read_manifest(latest_checkpoint(run)).architecture["n_layer"]
    return layers


def test_a_run_moults_twice_at_the_stable_rate(moult_run: Path) -> None:
    assert operations(moult_run) == [("stack_layers", 2, 9), ("stack_layers", 2, 17)]
    assert (latest_checkpoint(moult_run).name, layers(moult_run)) == ("step-24", 4)
    config = load_checked(str(moult_run / "run.yaml")).config
    assert (config.preset, len(config.schedule)) == ((), 2)
    assert "n_layer: 1" in (moult_run / "run.yaml").read_text("utf-8")
    assert "# preset moult" in (moult_run / "run.yaml").read_text("utf-8")


def test_a_family_has_a_decayed_model_of_each_size(family: Path) -> None:
    assert sorted(path.name for path in family.parent.glob("trunk*")) == sorted(ENDS)
    for (name, step), size in zip(ENDS.items(), (4, 1, 2), strict=True):
        run = family.with_name(name)
        assert (latest_checkpoint(run).name, layers(run)) == (f"step-{step}", size)
    stacks = [operation for operation in operations(family) if operation[0] == "stack_layers"]
    assert stacks == [("stack_layers", 2, 9), ("stack_layers", 2, 17)]


def test_a_run_of_its_own_config_is_the_same_run(
    moult_run: Path, family: Path, tmp_path: Path
) -> None:
    for run, ends in ((moult_run, ("again",)), (family, ("again", "again.1L", "again.2L"))):
        place = tmp_path / run.name
        place.mkdir()
        run_ranks(1, place, *words(run / "run.yaml", place / "again"))
        for name in ends:
            former = run.with_name(name.replace("again", run.name))
            assert weights(place / name) == weights(former)


@parametrize_first("line", [r"^ *14 .*loss", r"^run trunk\.1L "], first=1)
def test_a_killed_family_ends_as_one_that_was_not(
    cfg: Path, family: Path, tmp_path: Path, line: str
) -> None:
    """Where none of its branches was made yet, tests/torture/test_killed_branches.py kills it."""
    trunk = tmp_path / "trunk"
    (rank,) = children_as_ranks(forks(), 1, INSTAR, words(cfg, trunk), place=tmp_path)
    assert rank.wait_for(line)
    rank.signal(signal.SIGKILL)
    assert rank.finish() != 0
    # the config of the start begins it again, and finds what it made
    run_ranks(1, tmp_path, *words(cfg, trunk, "resume=auto"))
    for name in ENDS:
        assert weights(tmp_path / name) == weights(family.with_name(name))
    assert operations(trunk)[-1] == ("stack_layers", 2, 17)


def test_a_resume_may_move_the_end_and_not_the_shape(moult_run: Path, tmp_path: Path) -> None:
    run_ranks(1, tmp_path, *words(moult_run / "run.yaml", tmp_path / "short", "train.until=[8it]"))
    short = tmp_path / "short"
    assert layers(short) == 4
    for setting, message in (
        ("model.n_layer=8", "cannot become 8"),
        ("preset=moult", "has its own"),
    ):
        argv = ["resume", str(short), "--set", setting]
        (rank,) = children_as_ranks(forks(), 1, INSTAR, argv, place=tmp_path)
        assert rank.finish() == 2
        assert message in rank.output()
    argv = ["resume", str(short), "--set", "train.until=[12it]"]
    (rank,) = children_as_ranks(forks(), 1, INSTAR, argv, place=tmp_path)
    assert rank.finish() == 0, rank.output()
    assert (latest_checkpoint(short).name, layers(short)) == ("step-12", 4)
    assert [operation[0] for operation in operations(short)] == [
        "stack_layers",
        "stack_layers",
        "override",
    ]
