"""Configs and commands as people get them wrong: the message names the place, and what to write."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from broken_commands import COMMANDS
from broken_configs import CONFIGS, GOOD
from cases import parametrize_first
from forks import forks
from typed import Outcome, run_commands

TEXT = "".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(300))
RUN = """\
name: tiny
model: {n_layer: 2, n_head: 2, n_embd: 32, context: 16}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 8it, batch_size: 4}
learning_rate: {warmup_iters: 2}
"""
OPERATIONS = "- {name: change_lr, value: 2.0, max_wait_iters: 4}\n"

_EXCERPT = re.compile(r" *\d* \| ")
_LAST = re.compile(r"\d+ errors?\. Nothing was started\.")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
    """What `instar config validate` says of every broken config, by its name here."""
    commands = []
    for broken in CONFIGS.values():
        folder = tmp_path_factory.mktemp("config")
        for name, text in GOOD.items():
            (folder / name).write_text(text)
        (folder / broken.base).write_bytes(broken.text().encode())
        file_name = "scheduled.yaml" if broken.base == "grow.yaml" else broken.base
        commands.append((folder, ["config", "validate", file_name]))
    return dict(zip(CONFIGS, run_commands(commands), strict=True))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, its text, its data, a schedule and one run, tiny-kmn42."""
    folder = tmp_path_factory.mktemp("place")
    for name, text in (("squares.txt", TEXT), ("run.yaml", RUN), ("ops.yaml", OPERATIONS)):
        (folder / name).write_text(text)
    train(folder, "run.yaml", "--set", "record.run_dir=runs/tiny-kmn42")
    return folder


@pytest.fixture(scope="module")
def answers(place: Path) -> Mapping[str, Outcome]:
    """What every broken command line came to."""
    return dict(
        zip(COMMANDS, run_commands([(place, shlex.split(line)) for line in COMMANDS]), strict=True)
    )


def train(folder: Path, *words: str) -> None:
    subprocess.run(
        [forks().command, "train", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )


def problems(message: str) -> list[str]:
    """The mistakes that a message lists, without the lines that it shows of a file."""
    lines = [line for line in message.splitlines() if not _EXCERPT.match(line)]
    return [line for line in lines if not _LAST.match(line)]


def says(text: str, word: str) -> bool:
    """Whether a text has a word, not as a part of another one."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def describe(name: str, outcome: Outcome) -> str:
    return f"{name} ({outcome.code}):\n{outcome.out}{outcome.err}"


def test_what_the_configs_are_made_of_is_right(tmp_path: Path) -> None:
    for name, text in GOOD.items():
        (tmp_path / name).write_text(text)
    names = [name for name in GOOD if name != "grow.yaml"]
    for name, outcome in zip(
        names,
        run_commands([(tmp_path, ["config", "validate", name]) for name in names]),
        strict=True,
    ):
        assert outcome.code == 0, describe(name, outcome)


def test_every_broken_config_is_told_its_line_and_nothing_else(
    outcomes: Mapping[str, Outcome],
) -> None:
    wrong = []
    for name, outcome in outcomes.items():
        line, base = CONFIGS[name].expected_line(), CONFIGS[name].base
        where = rf"{re.escape(base)}:{line}:\d+: " if line else rf"{re.escape(base)}: (?!\d)"
        mistakes = problems(outcome.err)
        if outcome.code != 2 or len(mistakes) != 1 or not re.match(where, mistakes[0]):
            wrong.append(f"expected {base}:{line}: {describe(name, outcome)}")
    assert not wrong, "\n".join(wrong)


def test_a_broken_config_is_told_what_to_write(outcomes: Mapping[str, Outcome]) -> None:
    expected_words = {name: broken.suggests for name, broken in CONFIGS.items()}
    _check_suggestions(expected_words, {name: outcomes[name] for name in expected_words})


def test_a_broken_command_is_told_what_to_write(answers: Mapping[str, Outcome]) -> None:
    _check_suggestions(COMMANDS, answers)


def _check_suggestions(
    expected_words: Mapping[str, str | None], answers: Mapping[str, Outcome], min_share: float = 0.9
) -> None:
    assert sum(word is None for word in expected_words.values()) <= (1 - min_share) * len(
        expected_words
    )
    wrong = [
        f"expected {word!r}: {describe(name, answers[name])}"
        for name, word in expected_words.items()
        if word is None or not says("\n".join(problems(answers[name].err)), word)
    ]
    share = 1 - len(wrong) / len(expected_words)
    print(f"right suggestions: {share:.1%} of {len(expected_words)}")
    assert share >= min_share, "\n".join(wrong)


def test_every_broken_command_ends_in_2_or_3_without_a_traceback(
    answers: Mapping[str, Outcome],
) -> None:
    wrong = [
        describe(line, outcome)
        for line, outcome in answers.items()
        if outcome.code not in (2, 3) or outcome.out or "Traceback" in outcome.err
    ]
    assert not wrong, "\n".join(wrong)


def test_no_mistake_costs_the_import_of_torch_or_leaves_anything_behind(
    outcomes: Mapping[str, Outcome], answers: Mapping[str, Outcome]
) -> None:
    wrong = [
        f"{name}: imported {outcome.heavy}, left {outcome.new_paths}"
        for name, outcome in [*outcomes.items(), *answers.items()]
        if outcome.heavy or outcome.new_paths
    ]
    assert not wrong, "\n".join(wrong)


@parametrize_first("name", ["key", "unclosed quote", "heads that do not divide"], first=1)
@pytest.mark.parametrize(
    "command", [["train"], ["train", "--dry-run"], ["config", "show"], ["data", "prepare"]]
)
def test_every_command_that_reads_a_config_says_the_same(
    tmp_path: Path, outcomes: Mapping[str, Outcome], name: str, command: list[str]
) -> None:
    broken = CONFIGS[name]
    (tmp_path / broken.base).write_text(broken.text())
    (outcome,) = run_commands([(tmp_path, [*command, broken.base])])
    assert (outcome.code, outcome.err) == (2, outcomes[name].err)
    assert not outcome.new_paths


@pytest.mark.parametrize(
    ("line", "code"), [("config validate run.yaml", 2), ("trian run.yaml", 2), ("resume tyni", 2)]
)
def test_the_installed_command_says_it_too(tmp_path: Path, line: str, code: int) -> None:
    (tmp_path / "run.yaml").write_text("model: {n_layers: 3}\n")
    process = subprocess.run(
        [Path(sys.executable).with_name("instar"), *line.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == code
    assert process.stdout == ""
    assert "Traceback" not in process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
