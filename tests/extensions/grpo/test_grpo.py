"""GRPO on the tiny model, in this process: reproducible, resumable, recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forks import forks_for_grpo
from safetensors.torch import load_file

from instar.cli.main import main as instar
from instar.config.errors import ConfigError
from instar.distributed.failure import Interrupted, StoppedUnsaved
from instar.extensions.delta.chain import load_state
from instar.extensions.delta.events import Delta
from instar.extensions.delta.format.folder import links
from instar.extensions.grpo.cli import train_grpo
from instar.extensions.grpo.data import load_questions
from instar.extensions.grpo.evaluate import pass_at_k
from instar.extensions.grpo.options import Options
from instar.record.events import (
    Eval,
    Event,
    RunFinished,
    RunStarted,
    Saved,
    Stop,
    Train,
    read_events,
)

STEPS = 6
NAME = "trl_arithmetic_seed42"
Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def options(**changes: Any) -> Options:
    tiny = {"max_steps": STEPS, "micro_batch": 64, "max_tokens": 3, "lr": 1e-3, "save_every": 3}
    quick = {"eval_every": 3, "eval_prompts": 5, "eval_samples": 4, "delta_every": 0}
    return Options(**{**tiny, **quick, **changes})


def train_in(folder: Path, resume: Any = None, **changes: Any) -> Options:
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_options = options(**changes)
        train_grpo(run_options, resume)
    return run_options


def weights(folder: Path, step: int = STEPS, name: str = NAME) -> Weights:
    return load_file(folder / f"outputs/{name}/checkpoint-{step}/model.safetensors")


def events(folder: Path, name: str = NAME) -> list[Event]:
    return [*read_events(folder / "outputs" / name / "events.jsonl")]


def same(first: Weights, other: Weights) -> bool:
    return first.keys() == other.keys() and all(
        torch.equal(first[key], other[key]) for key in first
    )


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from start to end."""
    folder = tmp_path_factory.mktemp("whole")
    train_in(folder)
    return folder


def measurements(folder: Path, name: str = NAME) -> list[tuple[int, float, dict[str, float]]]:
    """What the steps and evaluations of a run measured, without times."""
    return [
        (event.step, event.loss, event.extra)
        for event in events(folder, name)
        if isinstance(event, Train | Eval)
    ]


def check_bests(folder: Path) -> None:
    """Over all starts, an evaluation is the best if it is above all before it, and the end names the last such."""
    run_events = events(folder)
    best = (-1.0, -1)
    for event in run_events:
        if isinstance(event, Eval):
            value = event.extra["pass@1"]
            assert event.best == (value > best[0]), event
            best = (value, event.step) if event.best else best
    finish = run_events[-1]
    assert isinstance(finish, RunFinished)
    assert (finish.best_value, finish.best_value_step) == best


def test_a_seed_gives_the_same_weights_and_measurements_every_time(
    full_run: Path, tmp_path: Path
) -> None:
    train_in(tmp_path)
    assert same(weights(full_run), weights(tmp_path))
    assert measurements(full_run) == measurements(tmp_path)


def test_another_seed_gives_other_questions_and_samples(full_run: Path, tmp_path: Path) -> None:
    train_in(tmp_path, seed=1337, max_steps=3)
    name = "trl_arithmetic_seed1337"
    assert not same(weights(full_run, 3), weights(tmp_path, 3, name))
    assert measurements(full_run)[:2] != measurements(tmp_path, name)[:2]


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_a_resumed_run_equals_one_without_interruption(
    full_run: Path, tmp_path: Path, num_iterations: int
) -> None:
    """With two iterations it is interrupted between two steps on the same completions."""
    reference = full_run
    if num_iterations > 1:
        reference = tmp_path / "uninterrupted"
        train_in(reference, num_iterations=num_iterations)
    cut = tmp_path / "cut"
    train_in(cut, max_steps=3, num_iterations=num_iterations, eval_every=1)
    marker = cut / f"outputs/{NAME}/checkpoint-3/instar.json"
    content = json.loads(marker.read_text())
    best = content.pop("best")
    if num_iterations > 1:  # as older checkpoints are
        marker.write_text(json.dumps(content))
    train_in(cut, "latest", num_iterations=num_iterations, eval_every=1)
    assert same(weights(reference), weights(cut))
    if num_iterations == 1:
        check_bests(cut)
        assert best[1] <= 3


def test_a_stop_signal_saves_and_the_resumed_run_equals_one_without_it(
    full_run: Path, tmp_path: Path
) -> None:
    """With the command line, and W&B offline."""
    words = (
        "--micro-batch 64 --max-tokens 3 --lr 1e-3 --eval-every 3 --eval-prompts 5 --eval-samples 4"
    )
    words += f" --max-steps {STEPS} --save-every 100 --delta-every 0 --wandb"
    process = subprocess.Popen(
        [forks_for_grpo().python, "-m", "instar.recipes.grpo", *words.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.split()[:2] == ["2", "reward"]:
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 75
    (wandb_folder,) = (tmp_path / "logs" / NAME / "wandb").glob("offline-run-*")
    assert wandb_folder.name.endswith("-trl_arithmetic_grpo_tiny_seed42")
    (stop,) = (event for event in events(tmp_path) if isinstance(event, Stop))
    assert (stop.reason, stop.resumable) == ("SIGTERM", True)
    assert stop.step < STEPS
    train_in(tmp_path, "latest", save_every=100)
    assert same(weights(full_run), weights(tmp_path))


@pytest.mark.parametrize(
    ("max_steps", "resumable", "kind", "says"),
    [
        (2, True, Interrupted, "SIGINT at step 1; continue with --resume; its end failed: OSError"),
        (2, False, StoppedUnsaved, "SIGINT before the first checkpoint; its end failed: OSError"),
        (1, True, OSError, "no space left"),
    ],
)
def test_a_save_that_fails_at_a_stop_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_steps: int,
    resumable: bool,
    kind: type[Exception],
    says: str,
) -> None:
    stop = SimpleNamespace(requested=None, resumable=False)

    def fail(*_: Any) -> None:
        stop.requested, stop.resumable = "SIGINT", resumable
        raise OSError("no space left")

    monkeypatch.setattr("instar.extensions.grpo.cli.StopSignal", lambda **_: nullcontext(stop))
    monkeypatch.setattr("instar.extensions.grpo.callbacks.save_rest", fail)
    with pytest.raises(kind, match=says) as error:
        train_in(tmp_path, save_every=1, eval_every=9, max_steps=max_steps)
    assert type(error.value) is kind
    assert "no space left" in str(error.value)


def test_every_step_is_a_delta_of_bf16_weights(tmp_path: Path) -> None:
    train_in(tmp_path, delta_every=1, max_steps=3)
    train_in(tmp_path, "latest", delta_every=1)
    chain = tmp_path / "checkpoints/deltas_arithmetic_seed42"
    assert [link.step for link in links(chain)] == [*range(STEPS + 1)]
    last, expected = load_state(chain), weights(tmp_path)
    assert all(torch.equal(last[name], expected[name].bfloat16()) for name in expected)
    deltas = [event for event in events(tmp_path) if isinstance(event, Delta)]
    assert [event.step for event in deltas] == [*range(STEPS + 1)]
    assert all(event.density is None or 0 < event.density <= 1 for event in deltas)


def test_the_record_is_that_of_a_run(
    full_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_events = events(full_run)
    start, *_, finish = run_events
    assert isinstance(start, RunStarted)
    assert start.launch["seed"] == 42
    assert isinstance(finish, RunFinished)
    assert finish.step == STEPS
    assert finish.samples == 8 * STEPS
    assert finish.epoch == pytest.approx(8 * STEPS / 25)
    assert [event.step for event in run_events if isinstance(event, Train)] == [
        *range(1, STEPS + 1)
    ]
    assert [event.step for event in run_events if isinstance(event, Eval)] == [0, 3, 6]
    assert [event.step for event in run_events if isinstance(event, Saved)] == [3, 6]
    last = [event for event in run_events if isinstance(event, Eval)][-1]
    assert last.extra.keys() == last.errors.keys() == {"pass@1", "pass@4"}
    assert last.eval_tokens > 0
    assert (full_run / "logs" / NAME / "train.log").read_text().count("reward") == STEPS

    monkeypatch.chdir(full_run)
    run = f"outputs/{NAME}"
    assert instar(["logs", "summary", run]) == 0
    assert "pass@1" in capsys.readouterr().out
    assert instar(["logs", "list", "outputs"]) in (0, 2)
    assert instar(["report", run, "-o", "report.html"]) == 0
    assert "reward" in Path("report.html").read_text()


def test_a_finished_run_is_left_as_it_is(full_run: Path) -> None:
    before = events(full_run)
    train_in(full_run, "auto")
    assert events(full_run) == before


def test_a_run_is_not_overwritten_or_resumed_with_other_options(full_run: Path) -> None:
    for resume, changes, says in (
        (None, {}, "holds a run"),
        ("latest", {"lr": 0.5, "max_steps": 9}, "--lr: .*trained with 0.001, not 0.5"),
        ("latest", {"run_suffix": "new"}, "has no checkpoint"),
    ):
        with pytest.raises(ConfigError, match=says):
            train_in(full_run, resume, **changes)


def test_names_are_those_of_the_instance() -> None:
    run_options = Options(
        dataset="gsm8k", model="Qwen/Qwen2.5-1.5B-Instruct", run_suffix="instance0_seed42"
    )
    assert run_options.output_dir == Path("outputs/trl_gsm8k_instance0_seed42")
    assert run_options.delta_dir == Path("checkpoints/deltas_gsm8k_instance0_seed42")
    assert run_options.log_dir == Path("logs/trl_gsm8k_instance0_seed42")
    assert run_options.wandb_name == "trl_gsm8k_grpo_qwen2.5-1.5b-instruct_instance0_seed42"


@pytest.mark.parametrize(
    ("n", "correct", "k"), [(8, 3, 1), (8, 3, 4), (8, 0, 4), (8, 6, 4), (4, 4, 4)]
)
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(n: int, correct: int, k: int) -> None:
    from itertools import combinations

    draws = [*combinations([True] * correct + [False] * (n - correct), k)]
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_files_in_both_shapes_are_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(20)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [len(part) for part in _parts(tmp_path / "q.jsonl")] == [18, 2]
    rows = [{"problem": f"{i}?", "solution": f"\\boxed{{{i}}}", "level": i} for i in range(3)]
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
    assert [len(part) for part in _parts(tmp_path)] == [3, 3]


def _parts(path: Path) -> tuple[Any, Any]:
    questions = load_questions(str(path))
    return questions.train, questions.test


BAD = """\
import sys
from instar.cli.main import run_command
from instar.extensions.grpo.cli import main

for words, says in {cases!r}:
    code = run_command(lambda: main.main(words.split(), standalone_mode=False) or 0)
    assert code == 2, (words, code)
    print(says, flush=True, file=sys.stderr)
assert "torch" not in sys.modules
"""


def test_bad_input_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "columns.jsonl").write_text('{"q": "1", "a": "2"}\n' * 2)
    (tmp_path / "torn.jsonl").write_text('{"question": "1", "ans')
    (tmp_path / "one.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    cases = [
        ("--dataset gsm9k", "there is no data set 'gsm9k'"),
        ("--dataset columns.jsonl", "columns q, a"),
        ("--dataset torn.jsonl", "torn.jsonl:1: not a JSON object"),
        ("--dataset one.jsonl", "one for training and one for evaluation"),
        ("--dataset .", "has no train.jsonl or train.parquet"),
        ("--prompts 3 --generations 3", "multiple of --micro-batch"),
        ("--pass-k 99", "pass@99 needs as many samples"),
        ("--run-suffix ../x", "leave out slashes"),
        ("--generation vllm", "not installed: vllm"),
        ("--generation server --vllm-port 1", "no server answers at http://127.0.0.1:1"),
        ("--resume", "has no checkpoint"),
        ("--seed -1", "--seed"),
    ]
    result = subprocess.run(
        [sys.executable, "-c", BAD.format(cases=cases)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    output = result.stderr
    for _, says in cases:
        assert output.count(says) >= 2, (says, output)
    assert not (tmp_path / "outputs").exists()
