"""Links among the folders of a run: those in it are not followed, those on the way to it are."""

from __future__ import annotations

from pathlib import Path

import pytest

from instar.config.files import open_regular

INSIDE = ("checkpoints", "step-1", "a", "b", "c", "d")
"""as deep as files of a run are"""


@pytest.mark.parametrize("depth", range(len(INSIDE)))
def test_a_link_at_any_depth_of_a_run_is_not_followed(tmp_path: Path, depth: int) -> None:
    outside = tmp_path / "outside"
    outside.joinpath(*INSIDE[depth + 1 :]).mkdir(parents=True)
    outside.joinpath(*INSIDE[depth + 1 :], "file").write_text("secret")
    link = tmp_path.joinpath("run", *INSIDE[: depth + 1])
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    file = tmp_path.joinpath("run", *INSIDE, "file")
    with pytest.raises(OSError, match="not followed") as refusal:
        open_regular(file)
    assert refusal.value.filename == str(link)
    with open_regular(file, follow=True) as content:
        assert content.read() == b"secret"


def test_a_run_reached_by_a_link_is_read(tmp_path: Path) -> None:
    folder = tmp_path.joinpath("disk", *INSIDE)
    folder.mkdir(parents=True)
    (folder / "file").write_text("weights")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with open_regular(tmp_path.joinpath("run", *INSIDE, "file")) as content:
        assert content.read() == b"weights"


def test_a_name_of_a_runs_folder_alone_makes_no_run(tmp_path: Path) -> None:
    """`logs` of anything but a run may be a link; where a record lies beside it, it may not."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("text")
    (tmp_path / "logs").symlink_to(tmp_path / "elsewhere")
    with open_regular(tmp_path / "logs" / "file") as content:
        assert content.read() == b"text"
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(OSError, match="not followed"):
        open_regular(tmp_path / "logs" / "file")
