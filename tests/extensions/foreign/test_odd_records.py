"""Records that are cut off, damaged, hostile or of nobody: refused in a sentence, or read with what is left out said."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cases import parametrize_first
from tool_records import Written
from typed import run_commands as typed_elsewhere

from instar.cli.main import main
from instar.config import files
from instar.config.errors import ConfigError
from instar.extensions.foreign.records import table
from instar.extensions.foreign.records.formats import FORMATS, find_records
from instar.extensions.foreign.records.importing import ImportedRun, import_runs
from instar.logs.read.record import RunRecord, read_record
from instar.record.events import Event, RunStarted, encode_event
from instar.record.rundir import RunDir

RecordOf = Callable[[str], Written]
CSV = "epoch,step,train_loss,val_loss\n0,1,4.0,\n0,2,3.0,3.5\n1,3,2.0,\n"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _packages() -> Iterator[None]:
    """The packages of the tools, whose warnings while they are imported are theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import wandb.proto.wandb_internal_pb2  # noqa: F401

        yield


def import_one(*paths: str | Path, **options: Any) -> ImportedRun:
    """The one run that these paths become."""
    (run,) = import_runs([Path(path) for path in paths], Path("runs"), **options)
    return run


def record(run: ImportedRun) -> RunRecord:
    return read_record(RunDir(run.path))


def points(run: ImportedRun, name: str) -> list[tuple[int, float]]:
    series = record(run).series(name)
    return list(zip(series.step.tolist(), series.value.tolist(), strict=True))


def state(history: object, **more: object) -> str:
    """Write a state of transformers; return its name."""
    Path("trainer_state.json").write_text(json.dumps({"log_history": history, **more}))
    return "trainer_state.json"


# What is left out is said.


def test_odd_rows_are_counted_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Any] = [
        {"step": 1, "loss": "4.5", "epoch": 0.1},
        {"step": 2, "loss": math.nan, "note": "spike", "flag": True, "list": [1]},
        {"step": 2, "loss": 3.0},
        {"loss": 1.0},
        {"step": -1, "loss": 1.0},
        {"step": 2.5, "loss": 1.0},
        {"step": 10**400, "loss": 1.0},
        {"step": 10**9, "loss": math.inf},
        {"step": 5, "eval_loss": 10**400},
        "no row",
        None,
    ]
    assert main(["logs", "import", state(rows)]) == 0
    output = capsys.readouterr().err
    assert "6 rows without a step left out" in output
    assert "1 value left out, for a later one at the same step" in output
    assert "4 values without a number left out: note, flag, list, eval_loss" in output
    assert "2 NaN or infinite values kept" in output
    assert output.count("without a step") == 1
    (run,) = Path("runs").iterdir()
    series = read_record(RunDir(run)).series("loss")
    assert series.step.tolist() == [1, 2, 10**9]
    assert series.value.tolist() == [4.5, 3.0, math.inf]


def test_a_last_line_that_is_cut_off_is_no_measurement() -> None:
    Path("metrics.csv").write_text(CSV + "1,4,0.")
    run = import_one("metrics.csv")
    assert points(run, "loss") == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert run.notes == ("the last line is cut off and left out",)
    Path("metrics.csv").write_text(CSV + "1,4,0.5,\n")
    run = import_one("metrics.csv")
    assert points(run, "loss")[-1] == (4, 0.5)
    assert run.notes == ()


def test_a_log_of_forgather_is_read_up_to_any_cut() -> None:
    lines = [
        json.dumps({"global_step": n, "timestamp": 1e9 + n, "loss": 5.0 / n}) for n in (1, 2, 3)
    ]
    text = "[\n" + ",\n".join(lines) + "\n]"
    starts = [text.index(line) for line in lines]
    for cut in range(starts[1], len(text) + 1):
        Path("trainer_logs.json").write_text(text[:cut])
        run = import_one("trainer_logs.json")
        complete = sum(start + len(line) <= cut for start, line in zip(starts, lines, strict=True))
        assert points(run, "loss") == [(n, 5.0 / n) for n in range(1, complete + 1)], cut
        assert bool(run.notes) == (cut < len(text)), cut


def flip_bit(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 64]) + content[position + 1 :]


@pytest.mark.usefixtures("_packages")
@parametrize_first("tool", ["wandb", "tensorboard"], first=1)
def test_a_binary_log_is_read_up_to_any_damage(tool: str, record_of: RecordOf) -> None:
    pattern = {"wandb": "*.wandb", "tensorboard": "*tfevents*"}[tool]
    (path,) = record_of(tool).path.rglob(pattern)
    content = path.read_bytes()
    figures = [(step, value) for step, value in record_of(tool).curves["loss"] if value == value]
    counts = set()
    early_positions = range(100, 1200, 50)  # histograms, which are long, come after the losses
    for position in (*early_positions, *range(1200, len(content), len(content) // 23)):
        for broken_content in (content[:position], flip_bit(content, position)):
            Path(path.name).write_bytes(broken_content)
            with suppress(ConfigError):  # nothing is left
                run = import_one(path.name, format_name=tool)
                values = [(step, value) for step, value in points(run, "loss") if value == value]
                assert values == figures[: len(values)], position
                is_said = any("cut off" in note or "no end" in note for note in run.notes)
                # a log of TensorBoard has no end, so that one may also end where it is cut
                assert is_said or (tool, broken_content) == ("tensorboard", content[:position]), (
                    position
                )
                counts.add(len(values))
    assert len(counts) > 3


def test_rows_that_are_still_in_sqlites_log_are_read_without_a_trace(record_of: RecordOf) -> None:
    source = record_of("trackio").path / "demo.db"
    path = Path("project.db")
    path.write_bytes(source.read_bytes())
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    row = ("id-first", "2026-01-01T00:01:00+00:00", "first", 99, '{"train_loss": 0.125}')
    connection.execute(
        "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?, ?)",
        row,
    )
    connection.commit()
    before = {
        entry.name: entry.read_bytes() for entry in Path().iterdir() if "shm" not in entry.name
    }
    assert Path("project.db-wal").stat().st_size > 0
    first, _ = import_runs([path], Path("runs"))
    assert points(first, "loss")[-1] == (99, 0.125)
    after = {entry.name: entry.read_bytes() for entry in Path().iterdir() if entry.is_file()}
    assert {name: after[name] for name in before} == before
    connection.close()


# What is no record is refused.


def refusal_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said where nothing is imported."""
    assert main(["logs", "import", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    assert not [run for run in Path("runs").glob("*") if run.name.startswith(".tmp")]
    return output.err


GARBAGE = {
    "empty": b"",
    "random": bytes((n * n * 37 + 11) % 256 for n in range(5000)),
    "nul": b"\0" * 5000,
    "deep": b"[" * 100_000,
    "deep object": b'{"log_history":' * 50_000,
    "long line": b"step,loss\n" + b"1" * 3_000_000,
    "sqlite": b"SQLite format 3\0" + b"\xff" * 5000,
    "wandb": b":W&B\xe1\xbe\0" + b"\xff" * 5000,
    "events": b"\x18" + b"\0" * 7 + b"abcd" + b"brain.Event:2" + b"\xff" * 100,
    "csv without rows": b"epoch,step,train_loss\n",
    "csv with quotes": b'loss,step\n"' + b"x,1\n" * 100_000,
}


@pytest.mark.usefixtures("_packages")
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_refused_whatever_it_is_said_to_be(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_bytes(GARBAGE[kind])
    for name in FORMATS:
        assert "file" in refusal_of(capsys, "file", "--from", name), name
    assert "file" in refusal_of(capsys, "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"log_history": 3}', "has no log_history"),
        ('{"log_history": [{"step": 1, "loss": 2.0}', "is not JSON"),
        ('{"log_history": []}', "has no number at a step"),
        ('{"log_history": [' + "[" * 300 + "]" * 300 + "]}", "nested more than 200 levels deep"),
    ],
)
def test_a_state_that_is_none_is_refused(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("trainer_state.json").write_text(text)
    assert message in refusal_of(capsys, "trainer_state.json")


def test_a_record_without_a_number_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """As of a run that ended before its first line."""
    for name, text in (("a", CSV), ("b", "epoch,step,train_loss,val_loss\n"), ("c", CSV)):
        Path(name).mkdir()
        Path(name, "metrics.csv").write_text(text)
    assert main(["logs", "import", "a", "b", "c"]) == 0
    output = capsys.readouterr()
    assert len(output.out.split()) == 2
    assert "b/metrics.csv has no number at a step: left out" in output.err


def test_what_is_too_large_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("large.json").open("wb") as file:
        file.write(b'{"log_history": [')
        file.truncate(files.SMALL_BYTES + 1)
    assert "larger than 67,108,864 bytes" in refusal_of(capsys, "large.json")
    rows = [{"step": n, "loss": 1.0, f"m{n}": 1.0} for n in range(200)]
    monkeypatch.setattr(table, "MAX_METRICS", 100)
    assert "more than 100 metrics" in refusal_of(capsys, state(rows))
    monkeypatch.setattr(table, "MAX_VALUES", 50)
    assert "more than 50 values" in refusal_of(capsys, state(rows))


def test_a_file_of_no_known_format_is_refused_with_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("notes.txt").write_text("nothing of a run\n")
    output = refusal_of(capsys, "notes.txt")
    assert all(f"  {name}: " in output for name in FORMATS)
    assert "no file or folder nots.txt; did you mean 'notes.txt'?" in refusal_of(capsys, "nots.txt")
    os.mkfifo("pipe")
    assert "pipe is neither a file nor a folder" in refusal_of(capsys, "pipe")
    Path("folder").mkdir()
    assert "folder is no record" in refusal_of(capsys, "folder")
    assert "nothing in" in refusal_of(capsys, "folder", "--from", "wandb")


def test_a_folder_with_records_of_two_tools_is_asked_about(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("both").mkdir()
    Path("both/metrics.csv").write_text(CSV)
    Path("both/trainer_state.json").write_text('{"log_history": [{"step": 1, "loss": 2.0}]}')
    output = refusal_of(capsys, "both")
    assert "has records of transformers and lightning" in output
    assert "--from transformers" in output
    assert points(import_one("both", format_name="lightning"), "loss")[0] == (1, 4.0)
    assert points(import_one("both/trainer_state.json"), "loss") == [(1, 2.0)]


def test_the_contents_decide_and_not_the_name() -> None:
    Path("trainer_state.json").write_text(CSV)
    assert find_records(Path("trainer_state.json"))[0] == "lightning"
    Path("metrics.csv").write_text("iter 5: loss 2.5, time 12.00ms, mfu 1.00%\n")
    assert find_records(Path("metrics.csv"))[0] == "nanogpt"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("lightning_logs/version_3/metrics.csv", "lightning_logs-version_3"),
        ("gpt/metrics.csv", "gpt"),
        ("gpt/first run.csv", "first-run"),
    ],
)
def test_a_run_is_named_after_its_source(path: str, name: str) -> None:
    Path(path).parent.mkdir(parents=True)
    Path(path).write_text(CSV)
    run = RunDir(import_one(path).path)
    assert (run.name, len(run.id)) == (name, 5)


@pytest.mark.parametrize("tool", ["wandb", "tensorboard"])
def test_a_missing_package_is_named_with_its_extra(
    tool: str,
    record_of: RecordOf,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = str(record_of(tool).path)
    for name in [name for name in sys.modules if name.partition(".")[0] == tool]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, tool, None)
    output = refusal_of(capsys, path)
    assert f"is read by the library `{tool}`, which is not installed" in output
    assert f"pip install 'instar[{tool}]'" in output


def test_nothing_heavy_is_imported_for_what_needs_nothing() -> None:
    Path("metrics.csv").write_text(CSV)
    (outcome,) = typed_elsewhere([(Path.cwd(), ["logs", "import", "metrics.csv"])])
    assert outcome.code == 0, outcome.err
    assert outcome.heavy == []


# Nothing that a record says leads anywhere.


def test_names_of_runs_lead_out_of_no_folder(record_of: RecordOf) -> None:
    path = Path("project.db")
    path.write_bytes((record_of("trackio").path / "demo.db").read_bytes())
    names = ["../../evil", "/etc/evil", "..", "", "a" * 400, "é\x1b[31m\n"]
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM metrics")
        for number, name in enumerate(names):
            row = (f"id{number}", "2026-01-01T00:00:00", name, 1, '{"loss": 1.0}')
            connection.execute(
                "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) "
                "VALUES (?, ?, ?, ?, ?)",
                row,
            )
    connection.close()
    runs = [run.path for run in import_runs([path], Path("runs"))]
    assert len(runs) == len(names)
    assert {run.parent for run in runs} == {Path("runs")}
    assert all(run.name.isascii() and len(run.name) < 80 and run.name[0] != "." for run in runs)


def test_a_view_that_would_compute_for_ever_is_no_project(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with sqlite3.connect("view.db") as connection:
        connection.execute(
            "CREATE VIEW metrics AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
            "SELECT x AS id, 'a' AS run_id, 'a' AS run_name, x AS step, '' AS timestamp, '' AS metrics "
            "FROM n"
        )
    connection.close()
    assert "is no record" in refusal_of(capsys, "view.db")
    assert "has no table `metrics`" in refusal_of(capsys, "view.db", "--from", "trackio")


def test_a_link_in_a_folder_is_not_followed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "secret.csv").write_text(CSV)
    Path("given").mkdir()
    Path("given/metrics.csv").symlink_to(tmp_path / "secret.csv")
    assert "a symbolic link, which is not followed" in refusal_of(capsys, "given")


def write_events(folder: Path, *events: Event) -> None:
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_bytes(b"".join(encode_event(event, 1e9, 1) for event in events))


def test_an_imported_config_does_not_say_where_an_export_goes() -> None:
    """Neither one that was recorded nor one that somebody wrote into a record by hand."""
    Path("elsewhere").mkdir()
    where = {"trackers": {"tensorboard": {"dir": str(Path("elsewhere").absolute())}}}
    start = RunStarted(
        run_id="a", imported_from="W&B", imported_config={"record": where, "lr": 0.1}
    )
    write_events(Path("runs/theirs"), start)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["logs", "export", "theirs", "--to", "tensorboard"]) == 0
    assert not [*Path("elsewhere").iterdir()]


def test_a_record_that_was_imported_once_needs_nothing_of_its_source() -> None:
    Path("metrics.csv").write_text(CSV)
    run = import_one("metrics.csv")
    Path("metrics.csv").unlink()
    assert points(run, "val/loss") == [(2, 3.5)]
    assert record(run).series("val/loss").better == "min"
