"""Real ranks: any number of them is the same run; they stop together, and fail together by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import science
import tiny_run
from cases import parametrize_first
from forks import forks
from started import INSTALLED, run_ranks, start_instar

from instar.config.load import Loaded
from instar.data.order import plan_step
from instar.record.events import Eval, Stop, Train, read_events
from instar.run.start.preflight import preflight

Config = Callable[..., Loaded]
"""see conftest.py"""


@pytest.fixture
def cfg(config: Config, tmp_path: Path) -> Callable[..., Path]:
    def write(*overrides: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(config(*overrides).to_yaml(origin=False), encoding="utf-8")
        return path

    return write


def curve(run_dir: Path) -> tuple[list[float], list[float]]:
    events = list(read_events(run_dir / "events.jsonl"))
    return (
        [event.loss for event in events if isinstance(event, Train)],
        [event.loss for event in events if isinstance(event, Eval)],
    )


def last_step(run_dir: Path, rank: int) -> str:
    log = (run_dir / "logs" / f"rank_{rank}.log").read_text(encoding="utf-8")
    return re.findall(r"step (\d+): loss", log)[-1]


def test_one_two_or_four_ranks_are_one_run(
    cfg: Callable[..., Path], config: Config, tmp_path: Path
) -> None:
    """Uneven division, and a partial last batch with fewer samples than ranks."""
    keys = ["model.context=64", "train.batch_size=13", "train.gradient_accumulation_steps=1"]
    keys += ["train.until=[20it]", "eval.eval_interval=10", "optimizer.lr=3e-3"]
    prepared_run = preflight(config(*keys), 4)
    _, order = prepared_run.spec.task(prepared_run.config).train_samples()
    cursor, counts = 0, []
    for _ in range(20):
        counts.append(plan_step(cursor, order.samples_per_epoch, 13).count)
        cursor += counts[-1]
    assert min(counts) < 4, "the corpus no longer ends an epoch with fewer samples than ranks"

    path = cfg(*keys)
    curves = {}
    for ranks in (1, 4):
        run_dir = tmp_path / f"w{ranks}"
        run_ranks(ranks, tmp_path, "train", path, "--set", f"record.run_dir={run_dir}")
        curves[ranks] = curve(run_dir)
    run_dir = tmp_path / "torchrun"
    command = [forks().bin / "torchrun", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "instar.train"]
    start_instar(path, run_dir=run_dir, command=command).finish(0)
    curves["torchrun"] = curve(run_dir)
    train, validation = curves[1]
    assert len(train) == 20
    for other in (4, "torchrun"):
        assert curves[other][0] == pytest.approx(train, rel=1e-4)
        assert curves[other][1] == pytest.approx(validation, rel=1e-4)


@parametrize_first(
    ("ranks", "batch_size", "accumulation"),
    [
        pytest.param(2, 4, 6, id="both ranks accumulate"),
        pytest.param(3, 2, 4, id="one rank does not accumulate"),
        pytest.param(2, 4, 2, id="no rank accumulates"),
    ],
    first=1,
)
def test_a_static_graph_gives_the_same_curve(
    tmp_path: Path, ranks: int, batch_size: int, accumulation: int
) -> None:
    """Also after growth, around which a new graph begins."""
    place = tiny_run.Place(tmp_path, science.forks())
    (tmp_path / "squares.txt").write_text(tiny_run.TEXT, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(tiny_run.CONFIG, encoding="utf-8")
    keys = [
        "model.dropout=0.0",
        "train.until=[6it]",
        "optimizer.name=adamw",
        f"train.batch_size={batch_size}",
        f"train.gradient_accumulation_steps={accumulation}",
        "schedule=[{name: widen_mlp, value: x2, when: {at_step: 3}}]",
    ]
    curves = []
    for static in ("false", "true"):
        run_dir = tmp_path / f"static-{static}"
        static_graph = f"parallel.ddp.static_graph={static}"
        children = place.train(run_dir, *keys, static_graph, ranks=ranks)
        assert tiny_run.codes(children) == [0] * ranks, tiny_run.output_of(children)
        curves.append(curve(run_dir))
    assert curves[1][0] == pytest.approx(curves[0][0], rel=1e-5)
    assert curves[1][1] == pytest.approx(curves[0][1], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_in_training_stops_all_at_the_same_step_and_the_run_goes_on(
    cfg: Callable[..., Path], tmp_path: Path, ranks: int
) -> None:
    run_dir = tmp_path / "run"
    path = cfg("train.until=[100000it]", "learning_rate.lr_decay_iters=100000")
    run = start_instar(path, "--nproc", str(ranks), run_dir=run_dir)
    run.wait_for(r"^ +3 .*loss")
    run.interrupt()
    output = run.finish(75)
    assert output.splitlines()[-1] == f"resume with: instar resume {run_dir}"
    steps = {last_step(run_dir, rank) for rank in range(ranks)}
    assert len(steps) == 1
    stops = [e for e in read_events(run_dir / "events.jsonl") if isinstance(e, Stop)]
    assert [(stop.step, stop.resumable) for stop in stops] == [(int(steps.pop()), True)]

    more = str(stops[0].step + 5)
    run_ranks(1, tmp_path, "resume", run_dir, "--until", f"{more}it")
    train, _ = curve(run_dir)
    assert len(train) == int(more)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_in_an_evaluation_stops_all(
    cfg: Callable[..., Path], tmp_path: Path, ranks: int
) -> None:
    run_dir = tmp_path / "run"
    path = cfg("eval.at_start=true", "eval.batch_size=1", "model.context=2", "model.n_layer=24")
    run = start_instar(path, "--nproc", str(ranks), run_dir=run_dir)
    run.wait_for(r"^run ")
    run.interrupt()
    output = run.finish(75)
    assert output.splitlines()[-1] == f"resume with: instar resume {run_dir}"
    assert curve(run_dir) == ([], [])


@pytest.mark.parametrize(
    ("ranks", "moment"), [(1, "^preparing"), (2, "^preparing"), (2, "^same as: torchrun")]
)
def test_ctrl_c_at_start_up_leaves_nothing_behind(
    cfg: Callable[..., Path], tmp_path: Path, ranks: int, moment: str
) -> None:
    """While data are prepared, and while ranks import torch."""
    run_dir = tmp_path / "run"
    fresh = ["--set", f"data.path={tmp_path / 'tokens'}", "--set", "data.source=stdlib"]
    data = fresh if "preparing" in moment else []
    run = start_instar(cfg(), "--nproc", ranks, *data, run_dir=run_dir, command=INSTALLED)
    run.wait_for(moment)
    run.interrupt()
    output = run.finish(130)
    assert re.search("start again with|starts again", output.splitlines()[-1])
    assert not run_dir.exists()
    assert not (tmp_path / "tokens").exists()


def test_a_rank_that_cannot_read_ends_all_by_name(cfg: Callable[..., Path], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    path = cfg("train.until=[100000it]", "learning_rate.lr_decay_iters=100000")
    script = Path(__file__).parents[1] / "support" / "rank_1_cannot_read.py"
    run = start_instar(path, run_dir=run_dir, command=[forks().python, script])
    output = run.finish(4)
    assert re.search(r"rank 1 failed at step 6: OSError: the disk is gone", output)
    assert "last lines of" in output
    other = (run_dir / "logs" / "rank_0.log").read_text(encoding="utf-8")
    assert "rank 1 failed while in step 6: OSError: the disk is gone" in other
    assert "step 5: loss" in other
