"""`instar logs compare`, typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from needed import needs
from written_runs import write_run, written_fleet

from instar.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two arms of two seeds each."""
    monkeypatch.chdir(tmp_path)
    for name, lr, end in (("base", 0.1, 40), ("grow", 0.2, 20)):
        for seed, ids in ((1, "abcde"), (2, "fghjk")):
            write_run(
                Path("runs", f"{name}-{ids}"),
                {10: 4.0, end: 2.0},
                {10: 4.0, end + seed: 2.0},
                {"name": name, "seed": seed, "optimizer.lr": lr},
            )
    return Path("runs")


def test_runs_are_set_side_by_side(capsys: Capture) -> None:
    assert main(["logs", "compare", "base-abcde", "grow-abcde", "--at", "step=20"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["base-abcde", "3.3333"] in lines
    assert ["grow-abcde", "2.0000"] in lines
    assert ["optimizer.lr", "0.1", "0.2"] in lines


def test_several_places_and_metrics(capsys: Capture) -> None:
    places = ("step=15", "tokens=1k", "flops=2e7", "wall=16", "active=8")
    asked = [word for place in places for word in ("--at", place)]
    assert main(["logs", "compare", "base", *asked, "--metric", "loss", "--metric", "lr"]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == ["loss", "lr", "configs"]
    header = blocks[0].splitlines()[1]
    assert header.split("  ")[-5:] == [
        "step 15",
        "1.00k tok",
        "2.0e7 FLOPs",
        "16s wall",
        "8.0s active",
    ]


def test_what_is_saved_is_told_over_seeds(capsys: Capture) -> None:
    assert main(["logs", "compare", "base", "grow", "--by", "seed", "--at-loss", "2.0"]) == 0
    out = capsys.readouterr().out
    assert "grow reaches val/loss 2 with 48% ±1% fewer FLOPs" in out
    assert "(2 pairs of equal seed)" in out


@pytest.mark.parametrize(
    ("keys", "told"),
    [({}, True), ({"data.seed": 7}, False), ({"data.path": "tokens"}, False)],
    ids=["nothing", "data.seed", "data.path"],
)
def test_seeds_that_also_change_the_data_are_told(
    runs: Path, capsys: Capture, keys: dict[str, object], told: bool
) -> None:
    for seed, ids in ((1, "abcde"), (2, "fghjk")):
        config = {"name": "other", "seed": seed, **keys}
        write_run(runs / f"other-{ids}", {10: 4.0}, {10: 4.0}, config)
    assert main(["logs", "compare", "other", "--by", "seed", "--at", "step=10"]) == 0
    note = "its 2 runs also differ in their data, because data.seed follows seed"
    assert (note in capsys.readouterr().err) == told


def test_json_and_markdown(capsys: Capture) -> None:
    assert main(["logs", "compare", "base", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [arm["name"] for arm in said["arms"]] == ["base-abcde", "base-fghjk"]
    assert said["config"] == {"seed": {"base-abcde": 1, "base-fghjk": 2}}
    assert main(["logs", "compare", "base", "--format", "md", "-o", "c.md"]) == 0
    assert Path("c.md").read_text().startswith("# Comparison\n\n## val/loss\n\n|  | step")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "a comparison needs two runs"),
        (["base", "gorw"], "no run 'gorw' in runs; did you mean 'grow'?"),
        (["base", "--metric", "los"], "no metric 'los' in base-abcde, base-fghjk; did you mean"),
        (["base", "--at", "stpe=3"], "unknown axis 'stpe'; did you mean 'step'?"),
        (["base", "--x", "flosp"], "did you mean 'flops'?"),
        (["base", "--at", "3"], "'3' is not a place in a run; write one like step=1000"),
        (["base", "--at-loss", "low"], "'low' is not a valid float"),
        (["base", "--at-loss", "3", "--of", "val/acuracy"], "no metric 'val/acuracy'"),
        (["base", "--by", "sede"], "'sede' is not one of 'run', 'name', 'seed'"),
        (["base", "--format", "one-line"], "'one-line' is not one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_told(capsys: Capture, words: list[str], told: str) -> None:
    assert main(["logs", "compare", *words]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert said.out == ""


def test_a_run_that_cannot_be_read_is_left_out_and_told(runs: Path, capsys: Capture) -> None:
    (runs / "base-abcde" / "events.jsonl").write_text("no record\n")
    assert main(["logs", "compare", "base", "grow", "--at", "step=20"]) == 4
    said = capsys.readouterr()
    assert "base-abcde" not in said.out
    assert "base-fghjk" in said.out
    assert said.err.startswith("runs/base-abcde/events.jsonl")


def test_one_run_is_compared_with_nobody_but_shown(capsys: Capture) -> None:
    assert main(["logs", "compare", "base-abcde", "--at", "step=10"]) == 0
    assert capsys.readouterr().out.startswith("val/loss")


@needs("fleet")
def test_a_fleet_is_compared_in_the_groups_of_its_matrix(capsys: Capture, tmp_path: Path) -> None:
    written_fleet(tmp_path)
    asked = ["logs", "compare", "fleets/rates", "base-abcde", "--at", "step=20", "--json"]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    names = [each["name"] for each in found["arms"]]
    assert names == ["rates lr=0.1", "rates lr=0.2", "base-abcde"]
    (cell,) = found["metrics"]["val/loss"]["rates lr=0.1"]
    assert (cell["mean"], cell["low"], cell["high"], cell["runs"]) == (3.5, 3.0, 4.0, 2)
    assert main(["logs", "compare", "fleets/rates", "--by", "run", "--at", "step=20"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["lr0.1-s2", "4.0000"] in lines
    assert main(["logs", "summary", "fleets/rates", "--format", "one-line"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@needs("fleet")
def test_a_fleet_without_runs_is_named(capsys: Capture, tmp_path: Path) -> None:
    folder = written_fleet(tmp_path)
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert main(["logs", "compare", str(folder)]) == 2
    assert "no instance of this fleet has a run yet" in capsys.readouterr().err
