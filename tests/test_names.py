"""`make lint` refuses names that say what happened to a value and not what it holds."""

from pathlib import Path

import names
import pytest


def package(folder: Path, text: str) -> str:
    """Write a package with one module in a folder that no limit names."""
    (folder / "room").mkdir()
    (folder / "room" / "module.py").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    "text",
    [
        "found = 1\n",
        "def there(path):\n    return path\n",
        "def rows(path, each):\n    return path\n",
        "print(run.kept)\n",
        "load(wanted=3)\n",
        "resolved = 1\n",
    ],
)
def test_a_vague_name_fails(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert names.main([package(tmp_path, text)]) == 1
    assert "room: " in capsys.readouterr().out


@pytest.mark.parametrize("text", ["rows = 1\n", "seed = kept_bytes = sorted([1])\n", ""])
def test_names_of_values_pass(tmp_path: Path, text: str) -> None:
    assert names.main([package(tmp_path, text)]) == 0


def test_no_folder_of_the_package_is_over_its_limit() -> None:
    assert names.main([]) == 0


def test_the_most_frequent_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "def size(path, each):\n    path = path\n    return path\n"
    assert names.main(["--most", package(tmp_path, text)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["2", "path"],
        ["1", "each", "!"],
    ]
