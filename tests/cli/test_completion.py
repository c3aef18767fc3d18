"""Completion as bash asks for it, with the script that the command prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import parametrize_first
from forks import Forks
from written_runs import writing

ASK = """\
eval "$(instar completion bash)"
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
compopt() {{ :; }}  # bash has it only while it completes
_instar_completion instar
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two runs, one with checkpoints, a fleet; and a module that must not be imported."""
    for name in ("demo-ab1", "other-cd2"):
        with writing(tmp_path / "runs" / name) as writer:
            writer.start()
            if name == "demo-ab1":
                writer.save(8)
                writer.save(16)
    (tmp_path / "fleets" / "seeds").mkdir(parents=True)
    for module in ("instar", "torch", "click", "sitecustomize"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('a foreign module was run')\n")
    return tmp_path


def completed(words: str, place: Path, forks: Forks) -> list[str]:
    """What bash offers for the last of these words; '' is an empty one."""
    done = subprocess.run(
        ["bash", "-c", ASK.format(words=words)],
        cwd=place,
        env=os.environ | {"PATH": f"{forks.bin}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@parametrize_first(
    ("words", "offered"),
    [
        ("instar com", ["completion"]),
        ("instar logs su", ["summary"]),
        ("instar resume ''", ["latest", "demo-ab1", "other-cd2"]),
        ("instar logs plot demo-ab1 o", ["other-cd2"]),
        ("instar logs tail l", ["latest"]),
        ("instar checkpoint verify d", ["demo-ab1"]),
        ("instar checkpoint verify runs/d", [f"runs/demo-ab1/checkpoints/step-{n}" for n in (8, 16)]),
        ("instar resume demo-ab1 --from ''", ["latest", "8", "16"]),
        ("instar resume demo-ab1 --from 1", ["16"]),
        ("instar train --set model.n_l", ["model.n_layer"]),
        ("instar resume demo-ab1 --set train.unt", ["train.until"]),
        ("instar fleet status s", ["seeds"]),
        ("instar delta log ot", ["other-cd2"]),
    ], first=4,
)  # fmt: skip
def test_bash_offers(words: str, offered: list[str], place: Path, forks: Forks) -> None:
    assert completed(words, place, forks) == offered


def test_the_keys_of_a_config_are_offered_from_a_cache_too(
    place: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSTAR_CACHE_DIR", str(place / "cache"))
    first = completed("instar train --set opt", place, forks)
    assert "optimizer.lr" in first
    kept = next((place / "cache").rglob("keys.json"))
    kept.write_text(kept.read_text().replace('"optimizer.lr"', '"optimizer.cached"'))
    assert "optimizer.cached" in completed("instar train --set opt", place, forks)
    kept.write_text("{")
    assert completed("instar train --set opt", place, forks) == first


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str, place: Path, forks: Forks) -> None:
    done = subprocess.run(
        [forks.command, "completion", shell], cwd=place, capture_output=True, text=True, check=True
    )
    assert "_INSTAR_COMPLETE" in done.stdout


COMPLETED = (
    *("resume", "test", "control", "sample", "train --resume", "grow"),
    *(
        f"logs {name}"
        for name in ["tag", "note", "summary", "plot", "compare", "tail", "events", "export"]
    ),
    *(
        f"checkpoint {name}"
        for name in ["list", "inspect", "verify", "diff", "analyze", "export", "average"]
    ),
)
"""commands that complete the names of runs"""


def test_completion_imports_neither_torch_nor_the_schema(place: Path) -> None:
    show = (
        "import os, sys\n"
        "from instar.cli.main import main\n"
        f"for words in {COMPLETED!r}:\n"
        "    print(words, end=': ', flush=True)\n"
        "    os.environ['COMP_WORDS'] = f'instar {words} o'\n"
        "    os.environ['COMP_CWORD'] = str(1 + len(words.split()))\n"
        "    assert main([]) == 0\n"
        "sys.stderr.write(' '.join(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", show],
        cwd=place,
        env=os.environ | {"_INSTAR_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"{words}: plain,other-cd2" for words in COMPLETED]
    assert not {"torch", "numpy", "pydantic", "rich"} & set(done.stderr.split())
