import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from instar.cli.main import main
from instar.config.load import load_config

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def cfg(tmp_path: Path) -> str:
    path = tmp_path / "grow.yaml"
    path.write_text("name: grow\npreset: llama\nmodel:\n  n_layer: 2\n")
    return str(path)


def test_show_prints_a_config_that_loads_equal(cfg: str, tmp_path: Path, capsys: Captured) -> None:
    assert main(["config", "show", cfg, "--set", "seed=3"]) == 0
    config_file = tmp_path / "shown.yaml"
    config_file.write_text(capsys.readouterr().out)
    assert load_config(str(config_file)).config == load_config(cfg, ["seed=3"]).config


def test_show_without_a_file_prints_the_defaults(capsys: Captured) -> None:
    assert main(["config", "show"]) == 0
    assert "\n  n_layer: 4\n" in capsys.readouterr().out


def test_show_tells_origins(cfg: str, capsys: Captured) -> None:
    main(["config", "show", cfg, "--origin", "--set", "seed=3"])
    lines = {line.split(":")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["  n_layer"].endswith(f"# {cfg}:4:3")
    assert lines["  norm"].endswith("# preset llama")
    assert lines["seed"].endswith("# --set")
    assert lines["device"].endswith("# default")


def test_show_as_json(cfg: str, capsys: Captured) -> None:
    main(["config", "show", cfg, "--json"])
    assert json.loads(capsys.readouterr().out)["model"]["n_layer"] == 2
    main(["config", "show", cfg, "--json", "--origin"])
    values = json.loads(capsys.readouterr().out)
    assert values["model.n_layer"] == {"value": 2, "origin": f"{cfg}:4:3"}
    assert values["train.until"] == {"value": ["2000it"], "origin": "default"}


def test_schema_lists_keys_with_type_default_and_meaning(capsys: Captured) -> None:
    assert main(["config", "schema"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["key", "type", "default", "meaning"]
    row = next(line for line in lines if line.startswith("model.norm "))
    assert "layernorm, rmsnorm" in row
    assert row.endswith("normalisation")


@pytest.mark.parametrize(
    ("section", "rows"),
    [("parallel.ddp", 6), ("parallel", 25), ("model.n_head", 1), ("schedule", 34)],
)
def test_schema_of_a_section_or_key(section: str, rows: int, capsys: Captured) -> None:
    main(["config", "schema", section])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == rows
    assert all(line.startswith(section) for line in lines)


def test_schema_of_what_there_is_not(capsys: Captured) -> None:
    assert main(["config", "schema", "modle"]) == 2
    assert "unknown section or key 'modle'; did you mean 'model'?" in capsys.readouterr().err


def test_schema_as_json_is_a_json_schema(capsys: Captured) -> None:
    main(["config", "schema", "--json"])
    schema = json.loads(capsys.readouterr().out)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["ModelConfig"]["properties"]["norm"]["enum"] == ["layernorm", "rmsnorm"]
    main(["config", "schema", "model", "--json"])
    assert "n_head" in json.loads(capsys.readouterr().out)["properties"]


def test_validate_says_ok(cfg: str, capsys: Captured) -> None:
    assert main(["config", "validate", cfg]) == 0
    assert capsys.readouterr().out.startswith(f"{cfg}: ok, 8 of ")


def test_validate_lists_all_mistakes(cfg: str, capsys: Captured) -> None:
    Path(cfg).write_text("model:\n  n_hed: 2\n  norm: rms\n")
    assert main(["config", "validate", cfg, "--set", "sede=1"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        f"{cfg}:2:3: unknown key 'n_hed' in model; did you mean 'n_head'?\n"
        "  2 |   n_hed: 2\n"
        "    |   ^\n"
        f'{cfg}:3:9: model.norm must be one of layernorm, rmsnorm, got "rms"; '
        "did you mean 'rmsnorm'?\n"
        "  3 |   norm: rms\n"
        "    |         ^\n"
        "--set sede=1: unknown key 'sede'; did you mean 'seed'?\n"
        "3 errors. Nothing was started.   Keys: instar config schema model\n"
    )


@pytest.fixture
def other(tmp_path: Path) -> str:
    path = tmp_path / "other.yaml"
    path.write_text("name: grow\npreset: llama\nmodel:\n  n_layer: 3\n  qk_norm: true\n")
    return str(path)


def test_a_schedule_is_shown_and_checked(cfg: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "ops.yaml"
    path.write_text("- {name: change_lr, value: 2.0, trigger_loss: 6.0}\n")
    assert main(["config", "show", cfg, "--set", f"schedule={path}"]) == 0
    line = "  - {name: change_lr, value: 2.0, trigger_loss: 6.0}"
    assert line in capsys.readouterr().out.splitlines()
    main(["config", "show", cfg, "--set", f"schedule={path}", "--json", "--origin"])
    schedule = json.loads(capsys.readouterr().out)["schedule"]
    assert schedule["value"] == [{"name": "change_lr", "value": 2.0, "trigger_loss": 6.0}]
    path.write_text("- {name: change_rl, value: 2.0, trigger_loss: 6.0}\n")
    assert main(["config", "validate", cfg, "--set", f"schedule={path}"]) == 2
    assert f"{path}:1:10" in capsys.readouterr().err


def test_diff_lists_the_keys_that_differ(cfg: str, other: str, capsys: Captured) -> None:
    assert main(["config", "diff", cfg, other]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["key", cfg, other],
        ["model.n_layer", "2", "3"],
        ["model.qk_norm", "false", "true"],
    ]


def test_diff_as_json(cfg: str, other: str, capsys: Captured) -> None:
    main(["config", "diff", cfg, other, "--json"])
    assert json.loads(capsys.readouterr().out) == {
        "model.n_layer": {"a": 2, "b": 3},
        "model.qk_norm": {"a": False, "b": True},
    }


def test_diff_of_equals(cfg: str, capsys: Captured) -> None:
    assert main(["config", "diff", cfg, cfg]) == 0
    assert capsys.readouterr() == ("", "no differences\n")


def test_diff_tells_the_mistakes_of_both_files(cfg: str, tmp_path: Path, capsys: Captured) -> None:
    Path(cfg).write_text("sede: 1\n")
    bad = tmp_path / "bad.yaml"
    bad.write_text("nmae: 1\n")
    assert main(["config", "diff", cfg, str(bad)]) == 2
    assert capsys.readouterr().err.count("did you mean") == 2


def on_a_terminal(args: list[str], **environment: str) -> str:
    """What a command line prints when stdout is a terminal of 80 columns."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "instar.cli.main", *args],
        stdout=slave,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **environment},
    )
    os.close(slave)
    output = b""
    try:
        while chunk := os.read(master, 4096):
            output += chunk
    except OSError:  # Linux reports the terminal's end as an error
        pass
    os.close(master)
    assert process.wait() == 0
    return output.decode()


def test_a_terminal_gets_a_drawn_table_within_its_width() -> None:
    output = on_a_terminal(["config", "schema", "model"])
    assert "\x1b[" in output
    assert "model.n_kv_head" in output


def test_no_color_is_honoured_on_a_terminal() -> None:
    output = on_a_terminal(["config", "schema", "model"], NO_COLOR="1")
    assert "\x1b" not in output
    assert all(len(line) <= 80 for line in output.split("\r\n"))


def test_a_pipe_gets_neither_escape_codes_nor_wrapped_lines(capsys: Captured) -> None:
    main(["config", "schema", "train"])
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) > 80
