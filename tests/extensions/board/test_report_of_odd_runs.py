"""What the report says of runs that failed, and of runs whose losses are not comparable."""

from __future__ import annotations

from pathlib import Path

from scenes import crash
from written_runs import write_run

from instar.extensions.board.report import report_html
from instar.logs.read.record import read_record


def test_a_crash_has_the_end_of_its_log(tmp_path: Path) -> None:
    assert "logits = self.head(x)" in report_html([read_record(crash(tmp_path))])


def test_losses_on_different_data_stand_under_a_warning(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0}

    def page(**settings: object) -> str:
        config = {key.replace("__", "."): value for key, value in settings.items()}
        runs = [
            write_run(tmp_path / f"{len(config)}-a", losses, losses, config={}),
            write_run(tmp_path / f"{len(config)}-b", losses, losses, config=config),
        ]
        return report_html([read_record(run) for run in runs])

    assert "not comparable" not in page()
    warning = "the runs differ in data.tokenizer: their losses, which"
    assert warning in page(data__tokenizer="char")
