"""What is shown on terminals of all kinds, and in pipes; and how commands end when nobody listens."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from cases import marked_after, parametrize_first
from forks import forks
from terminal import HANG_UP, Shown, environment, into_pipes, on_terminal, run_on_terminal

from instar.cli.main import instar

TEXT = "".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(300))
CONFIG = """\
name: tiny
model: {n_layer: 2, n_head: 2, n_embd: 32, context: 16}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 8it, batch_size: 4}
learning_rate: {warmup_iters: 2}
eval: {eval_interval: 4}
record: {log_interval: 1, sample_tokens: 4, report: false}
"""
OPERATIONS = "- {name: widen_mlp, value: 160, max_wait_iters: 4}\n"

TABLES = [
    "config schema",
    "config schema schedule",
    "config diff run.yaml other.yaml",
    "checkpoint inspect tiny-kmn42 --tensors",
    "checkpoint diff tiny-kmn42 tiny-kmn42",
    "data inspect tokens",
    "data inspect tokens --sample 0",
]
"""Of which nothing may be lost or stand beyond the edge, however narrow it is."""

DATA = [
    "config show run.yaml --json",
    "config show run.yaml --json --origin",
    "config schema --json",
    "config diff run.yaml other.yaml --json",
    "checkpoint list tiny-kmn42 --json",
    "checkpoint inspect tiny-kmn42 --json",
    "checkpoint verify tiny-kmn42 --json",
    "schedule check ops.yaml --config run.yaml --json",
    "data inspect tokens --json",
    "control tiny-kmn42 status --json",
    "train run.yaml --dry-run --json",
    "logs list --json",
    "logs summary tiny-kmn42 --json",
    "logs compare tiny-kmn42 tiny-pqr73 --json",
]

OTHERS = [
    "--version",
    "config show run.yaml",
    "config show run.yaml --origin",
    "config validate run.yaml",
    "checkpoint list tiny-kmn42",
    "checkpoint verify tiny-kmn42",
    "schedule check ops.yaml --config run.yaml",
    "control tiny-kmn42 status",
    "train run.yaml --dry-run",
    "sample tiny-kmn42 --tokens 12",
    "logs list",
    "logs summary tiny-kmn42",
    "logs summary tiny-kmn42 tiny-pqr73",
    "logs summary tiny-kmn42 --format md",
    "logs summary tiny-kmn42 --format one-line",
    "logs compare tiny-kmn42 tiny-pqr73",
    "logs events tiny-kmn42",
    "logs plot tiny-kmn42",
]

FAILING = {
    "config validate broken.yaml": 2,
    "config shwo": 2,
    "resume tyni": 2,
    "train nothing.yaml": 2,
    "checkpoint list nothing": 3,
    "control tiny-kmn42 save": 3,
    "resume tiny-kmn42 --from 77": 3,
}

TRAINING = "train run.yaml --schedule ops.yaml --set record.out_dir=more"


def _commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))


HELPS = ["--help", *(f"{' '.join(path)} --help" for path in _commands(instar))]
LINES = [*HELPS, *TABLES, *DATA, *OTHERS, *FAILING, TRAINING]
KINDS = {
    "pipes": (None, {}),
    "pipes, LC_ALL=C": (None, {"LC_ALL": "C"}),
    "80 columns": (80, {}),
    "40 columns": (40, {}),
    "NO_COLOR, LC_ALL=C": (200, {"NO_COLOR": "1", "LC_ALL": "C"}),
    "TERM=dumb": (80, {"TERM": "dumb"}),
}
_STEP = re.compile(r" *[\d,]+  ")
_CSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_COLOR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:[349][0-9]|10[0-7])(?:;[0-9;]*)?m")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with configs, data, a schedule and the runs tiny-kmn42 and tiny-pqr73."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "squares.txt").write_text(TEXT)
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "other.yaml").write_text(CONFIG + "optimizer: {lr: 0.01, no_decay: ['é*']}\n")
    (folder / "broken.yaml").write_text("name: 'ï né'\nmodel: {n_layers: 3}\n")
    (folder / "ops.yaml").write_text(OPERATIONS)
    trained = [
        ["train", "run.yaml", "--set", "record.run_dir=runs/tiny-kmn42"],
        ["train", "run.yaml", "--set", "record.run_dir=runs/tiny-pqr73", "--set", "seed=3"],
    ]
    for shown in into_pipes(folder, trained, environment(), forks().python):
        assert shown.code == 0, shown.text
    return folder


@pytest.fixture(scope="module", params=marked_after(3, KINDS))
def seen(request: pytest.FixtureRequest, place: Path) -> tuple[str, dict[str, Shown]]:
    """What every command line showed there, by the line."""
    return request.param, _seen(place, request.param)


@pytest.fixture(scope="module")
def piped(place: Path) -> dict[str, Shown]:
    return _seen(place, "pipes")


_SEEN: dict[tuple[Path, str], dict[str, Shown]] = {}


def _seen(place: Path, kind: str) -> dict[str, Shown]:
    if (place, kind) not in _SEEN:
        columns, changes = KINDS[kind]
        env, lines = environment(**changes), list(map(shlex.split, LINES))
        # an interpreter finds the encoding of its streams where it starts, which forked ones do not
        python = sys.executable if "LC_ALL" in changes else forks().python
        if columns is None:
            shown = into_pipes(place, lines, env, python)
        else:
            shown = on_terminal(place, lines, env, python, columns)
        _SEEN[place, kind] = dict(zip(LINES, shown, strict=True))
    return _SEEN[place, kind]


def words(text: str) -> Counter[str]:
    """How often each character but spaces and lines drawn is there."""
    return Counter(re.sub(r"[\dhms.]+\s+ago|[\s─━-]", "", text))


def test_commands_end_as_the_house_says(seen: tuple[str, dict[str, Shown]]) -> None:
    _, shown = seen
    wrong = {line: each for line, each in shown.items() if each.code != FAILING.get(line, 0)}
    assert not wrong, "\n".join(f"{line}: {each.code}\n{each.text}" for line, each in wrong.items())
    assert not [line for line, each in shown.items() if "Traceback" in each.text]


def test_no_escape_code_is_where_nobody_understands_it(
    seen: tuple[str, dict[str, Shown]],
) -> None:
    kind, shown = seen
    for line, each in shown.items():
        if kind.startswith(("pipes", "TERM")):
            assert "\x1b" not in each.text, line
            assert "\r" not in each.text, line
        if "NO_COLOR" in kind:
            assert not _COLOR.search(each.text), line


def test_a_terminal_has_colour_where_it_may(place: Path) -> None:
    assert _COLOR.search(_seen(place, "80 columns")[TRAINING].text)


def test_without_unicode_there_is_ascii_alone(seen: tuple[str, dict[str, Shown]]) -> None:
    kind, shown = seen
    if "LC_ALL" in kind:
        assert [line for line, each in shown.items() if not each.text.isascii()] == []


def test_data_is_one_json_document_in_any_pipe(
    seen: tuple[str, dict[str, Shown]], piped: dict[str, Shown]
) -> None:
    kind, shown = seen
    if not kind.startswith("pipes"):
        return
    for line in DATA:
        assert same(json.loads(shown[line].out), json.loads(piped[line].out)), line


def same(one: Any, other: Any) -> bool:
    """Whether two documents have the same keys and kinds of values: some are times."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other)


def test_messages_are_on_stderr_and_data_on_stdout(piped: dict[str, Shown]) -> None:
    assert [line for line in FAILING if piped[line].out or not piped[line].err] == []
    quiet = [*HELPS, *TABLES, *DATA]
    assert {line: piped[line].err for line in quiet if piped[line].err} == {}
    assert piped[TRAINING].out == ""
    assert piped[TRAINING].err.count("tok/s") >= 8


@pytest.mark.parametrize("kind", ["40 columns", "80 columns"])
def test_nothing_stands_beyond_the_edge_that_could_be_wrapped(place: Path, kind: str) -> None:
    columns, _ = KINDS[kind]
    shown = _seen(place, kind)
    assert columns is not None
    wide = [
        f"{line}: {row}"
        for line in [*HELPS, *TABLES, TRAINING]
        for row in re.split("[\r\n]", _CSI.sub("", shown[line].text))
        # what a run says of paths and commands stays in one piece, to be copied
        if (line != TRAINING or _STEP.match(row))
        and len(row.rstrip()) > columns
        and re.search(r"\S \S", row[:columns])
        and not row.startswith("  -")  # an option and what may stand behind it
    ]
    assert not wide, "\n".join(wide)


def test_nothing_is_lost_where_it_is_narrow(place: Path, piped: dict[str, Shown]) -> None:
    narrow = _seen(place, "40 columns")
    for line in [*HELPS, *TABLES]:
        assert not words(piped[line].text) - words(_CSI.sub("", narrow[line].text)), line


def test_a_run_leaves_the_terminal_as_it_was(place: Path) -> None:
    for kind in ("40 columns", "80 columns", "NO_COLOR, LC_ALL=C"):
        text = _seen(place, kind)[TRAINING].text
        assert -1 < text.rfind("\x1b[?25l") < text.rfind("\x1b[?25h")
        assert re.split("[\r\n]", _CSI.sub("", text))[-1] == ""


INSTALLED = f'"{sys.executable}" -m instar.cli.main'


def shell(
    place: Path, line: str, instar: str | Path = INSTALLED
) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `instar` is the command."""
    start = f'instar() {{ {instar} "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", start], cwd=place, env=environment(), capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip


PRINTING = ["--help", "config schema", "config show run.yaml --json", "checkpoint list tiny-kmn42"]


@parametrize_first("line", ["logs list", *PRINTING], first=2)
def test_a_full_disk_behind_stdout_is_told(place: Path, line: str) -> None:
    done = shell(place, f"instar {line} >/dev/full")
    assert (done.returncode, done.stderr) == (
        4,
        "cannot write to stdout: No space left on device\n",
    )


@parametrize_first("line", ["logs list", *PRINTING], first=2)
def test_a_reader_that_has_gone_ends_it_quietly(place: Path, line: str) -> None:
    gone = "{ sleep 0.01; exec <&-; while [ ! -e gone ]; do sleep 0.02; done; }"
    done = shell(place, f"rm -f gone; {{ instar {line}; echo $? >code; touch gone; }} | {gone}")
    assert ((place / "code").read_text(), done.stderr) == ("141\n", "")


@parametrize_first("closed", ["<&- >&- 2>&-", ">&-", "2>&-", "<&-", "<&- >&-"], first=3)
@parametrize_first("line", ["config schema", "config validate broken.yaml"], first=1)
def test_closed_streams_change_nothing(place: Path, line: str, closed: str) -> None:
    done = shell(place, f"instar {line} {closed}")
    assert done.returncode == (2 if "broken" in line else 0)
    assert "Traceback" not in done.stderr
    if ">&-" not in closed:
        assert done.stdout + done.stderr == shell(place, f"instar {line}").stdout + done.stderr


@pytest.mark.parametrize("how", ["<&- >&- 2>&-", "</dev/null >/dev/full 2>/dev/full"])
def test_a_run_needs_nobody_who_listens(place: Path, tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    # a process that is forked for another takes over its streams, which must be there for it
    instar = INSTALLED if "-" in how else forks().command
    done = shell(place, f"instar train run.yaml --set record.run_dir={run} {how}", instar)
    assert done.returncode == 0
    assert (run / "checkpoints" / "latest").read_text().strip() == "step-8"


def test_ctrl_c_on_a_terminal_stops_a_run_that_can_go_on(place: Path, tmp_path: Path) -> None:
    typed = []

    def press(seen: str) -> bytes:
        if "tok/s" in seen and not typed:
            typed.append("^C")
            return b"\x03"
        return b""

    argv = [forks().command, "train", "run.yaml", "--until", "100000it"]
    argv += ["--set", f"record.run_dir={tmp_path / 'run'}"]
    code, seen = run_on_terminal(argv, place, environment(), 80, press)
    assert code == 75, seen
    assert "instar resume" in _CSI.sub("", seen)
    assert "Traceback" not in seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_terminal_that_is_closed_stops_a_run_that_can_go_on(
    place: Path, tmp_path: Path, ranks: int
) -> None:
    argv = [forks().command, "train", "run.yaml", "--until", "100000it"]
    argv += ["--set", f"record.run_dir={tmp_path / 'run'}", "--nproc", str(ranks)]
    code, seen = run_on_terminal(
        argv, place, environment(), 80, lambda seen: HANG_UP if "tok/s" in seen else b""
    )
    assert code == 75, seen
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    (stop,) = [event for event in map(json.loads, lines) if event["kind"] == "stop"]
    assert stop["resumable"]
    assert stop["reason"] == ("SIGHUP" if ranks == 1 else "SIGTERM")
    assert (tmp_path / "run" / "checkpoints" / f"step-{stop['step']}").is_dir()
