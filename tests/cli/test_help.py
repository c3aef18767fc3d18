"""The command line as a process: help, exit codes, what is imported, and odd surroundings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from needed import needs
from records import make_runs

from instar import __version__
from instar.cli.logs.commands import COMMANDS as LOGS
from instar.cli.main import COMMANDS, main
from instar.cli.options import DeferredCommand
from instar.cli.train import train
from instar.extensions import extend_commands, load_target

HEAVY = {
    "torch",
    "numpy",
    "pydantic",
    "rich",
    "ruamel",
    "ruamel.yaml",
    "yaml",
    "instar.config.load",
    "instar.api",
}


def instar(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "instar.cli.main", *args]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def modules_after(*args: str) -> set[str]:
    """The modules that a command line leaves imported."""
    code = (
        "import json, sys\n"
        "from instar.cli.main import main\n"
        f"main({list(args)!r})\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(json.loads(process.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["logs", "--help"],
        ["fleet", "--help"],
    ],
)
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    assert modules_after(*args) & HEAVY == set()


@pytest.mark.parametrize("args", [["config", "--help"], ["config", "show"], ["init", "-h"]])
def test_config_commands_import_no_torch(args: list[str]) -> None:
    assert modules_after(*args) & {"torch", "numpy", "rich"} == set()


@pytest.mark.parametrize("group", ["train", "grow", "schedule", "data"])
def test_help_of_a_group_imports_no_torch(group: str) -> None:
    assert modules_after(group, "--help") & {"torch", "numpy"} == set()


def test_help_of_checkpoints_imports_no_schema() -> None:
    assert modules_after("checkpoint", "--help") & HEAVY == set()


def test_a_list_of_runs_imports_neither_arrays_nor_the_schema(tmp_path: Path) -> None:
    make_runs(tmp_path, 2, 20)
    assert modules_after("logs", "list", str(tmp_path)) & (HEAVY - {"instar.api"}) == set()


@needs("fleet")
def test_help_of_a_group_leaves_out_what_only_programs_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["fleet", "--help"])
    command_names = [
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line[2:].strip()
    ]
    assert "up" in command_names
    assert "host" not in command_names


def test_help_lists_every_command_without_importing_it() -> None:
    process = instar("--help")
    assert process.returncode == 0
    commands = extend_commands(COMMANDS)
    for name, (_, about) in commands.items():
        assert name in process.stdout
        assert about in process.stdout
    # the module of `completion` also completes the options of all others
    modules = modules_after("--help") - {"instar.cli.completion"}
    assert modules.isdisjoint(target.partition(":")[0] for target, _ in commands.values())


def test_the_work_of_each_command_exists() -> None:
    commands = [load_target(target) for target, _ in LOGS.values()]
    assert all(isinstance(command, DeferredCommand) for command in commands)
    assert all(callable(command.callback) for command in (*commands, train))


def test_version() -> None:
    assert instar("--version").stdout == f"instar {__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["export"], "Did you mean 'checkpoint export' or 'logs export'?"),
        (["version"], "Did you mean '--version'?"),
        (["--verison"], "--version"),
        (["config", "shwo"], "No such command 'shwo'"),
        (["config", "show", "--orgin"], "--origin"),
        (["config", "validate"], "Missing argument 'CFG'"),
    ],
)
def test_usage_errors_end_in_2_with_a_suggestion(args: list[str], message: str) -> None:
    process = instar(*args)
    assert process.returncode == 2
    assert message in process.stderr
    assert process.stdout == ""
    assert "Traceback" not in process.stderr


def test_a_config_error_is_told_without_a_traceback() -> None:
    process = instar("config", "validate", "none.yaml")
    assert process.returncode == 2
    assert process.stderr.startswith("none.yaml: no such file")
    assert process.stdout == ""
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("redirection", ["<&-", "2>&-", "<&- >&-"])
def test_closed_streams_do_not_matter(redirection: str) -> None:
    line = f'"{sys.executable}" -m instar.cli.main config schema model {redirection}'
    process = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert process.returncode == 0
    assert process.stderr == ""


def test_a_reader_that_goes_away_is_no_error() -> None:
    line = f'"{sys.executable}" -m instar.cli.main config schema --json; echo $? >&2'
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stdout:
        process = subprocess.run(
            ["bash", "-c", line], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
        )
    assert process.stderr == "141\n"


def run_main_with(statement: str) -> subprocess.CompletedProcess[str]:
    """Run `main` where the command `config` raises what is given."""
    code = (
        "import sys, click\n"
        "from instar.cli import config as room, main\n"
        "from instar.config.errors import ConfigError, InstarError\n"
        "class RunFailed(InstarError): exit_code = 4\n"
        "@click.command()\n"
        f"def config(): {statement}\n"
        "room.config = config\n"
        "sys.exit(main.main(['config']))\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("statement", "code", "message"),
    [
        ("raise RunFailed('rank 1 failed at step 7')", 4, "rank 1 failed at step 7\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise BrokenPipeError", 141, ""),
        ("click.get_current_context().exit(75)", 75, ""),
        ("return 75", 75, ""),
        ("return None", 0, ""),
        ("raise ConfigError.of('bad')", 2, "bad\n1 error. Nothing was started.\n"),
    ],
)
def test_every_end_has_its_exit_code(statement: str, code: int, message: str) -> None:
    process = run_main_with(statement)
    assert (process.returncode, process.stderr) == (code, message)


def test_an_unforeseen_error_keeps_its_traceback() -> None:
    process = run_main_with("raise ZeroDivisionError('a bug')")
    assert process.returncode == 1
    assert "Traceback" in process.stderr


def test_shells_can_complete() -> None:
    process = instar(_INSTAR_COMPLETE="bash_complete", COMP_WORDS="instar co", COMP_CWORD="1")
    assert process.stdout == "plain,control\nplain,config\nplain,completion\n"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train", "--gpus", "2"], "Write --nproc for the number of ranks, or --devices 0,1"),
        (["resume", "latest", "--num-gpus", "2"], "Write --nproc for the number of ranks"),
        (["train", "--schedul", "x"], "Did you mean '--schedule'?"),
        (["train", "--lr", "1"], "Write --set optimizer.lr=VALUE."),
        (["grow", "latest", "out", "--schedule", "x"], "Write each operation as --op NAME=VALUE."),
        (["schedule", "check", "--schedule", "x"], "Give the schedule's file without an option."),
        (["train", "task=causal_lm"], "write --set task=causal_lm"),
        (["train", "--set", "task=causl_lm"], "did you mean 'causal_lm'?"),
        (["train", "--set", "task=mine"], "write mine:CLASS"),
        (["train", "--set", "task=mine.Mine"], "write mine:Mine"),
        (["train", "--set", "task=min:Mine"], "did you mean 'mine:Mine'?"),
        (["train", "--set", "task=mine.py:Mine"], "did you mean 'mine:Mine'?"),
        (["train", "--schedule", "growing.yml"], "did you mean 'growing.yaml'?"),
    ],
    ids=lambda argument: " ".join(argument) if isinstance(argument, list) else "",
)
def test_what_was_meant_is_suggested(
    words: list[str],
    hint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    (tmp_path / "growing.yaml").touch()
    assert main(words) == 2
    assert hint in capsys.readouterr().err
