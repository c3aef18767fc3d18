"""A checkpoint of nanoGPT goes on here as it would have gone on there; what is no such checkpoint is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import parametrize_first
from forks import Forks
from nano_gpt import TEXT, Training, ids_of, learning_rate, random_steps, write_data
from torch import Tensor

import instar
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import load_checkpoint
from instar.cli.main import main
from instar.config.errors import ConfigError
from instar.data.order import plan_step
from instar.extensions.foreign.nanogpt.checkpoint import import_checkpoint
from instar.extensions.foreign.nanogpt.settings import shape_of
from instar.extensions.foreign.nanogpt.states import as_gpt2
from instar.models.hf.tensors import from_tensors, parts_of_tensors
from instar.record.events import Eval, RunFinished, Train, read_events
from instar.run.load_config import load_run_config
from instar.run.start.preflight import preflight

MORE = 20
"""steps after the import"""


@pytest.fixture(autouse=True)
def _forked_reader(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the process that reads a file, which imports torch."""
    monkeypatch.setattr("instar.processes.child.sys.executable", str(forks.python))


def import_run(
    folder: Path, content: object, *, data: Path | None = None, **options: Any
) -> tuple[Path, list[str]]:
    """Import a checkpoint of nanoGPT; return the run's checkpoint and what was said."""
    torch.save(content, folder / "ckpt.pt")
    messages: list[str] = []
    options = {"tokenizer": None, "data": data or write_data(folder / "squares"), **options}
    path = import_checkpoint(folder / "ckpt.pt", folder / "run", say=messages.append, **options)
    return path, messages


def events(run: Path, kind: type) -> list[Any]:
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, kind)]


def steps_here(run: Path, first: int, count: int) -> list[Tensor]:
    """Return the windows of the run's steps, [samples, T + 1] each."""
    preparation = preflight(load_run_config(str(run / "run.yaml"), resuming=True), 1)
    source, order = preparation.spec.task(preparation.config).train_samples()
    steps = []
    for step in range(first, first + count):
        plan = plan_step(8 * step, order.samples_per_epoch, 8)
        numbers = order.indices(plan.epoch, plan.start, plan.start + plan.count)
        columns = source.read(numbers)
        windows = np.concatenate([columns["inputs"], columns["targets"][:, -1:]], axis=1)
        steps.append(torch.from_numpy(windows))
    return steps


def held_out_loss(training: Training) -> float:
    """Return the mean loss of the held-out text, in windows of 16 tokens, the last of which is shorter."""
    ids = torch.from_numpy(ids_of(TEXT[int(0.9 * len(TEXT)) :]).astype(np.int64))
    total = 0.0
    for first in range(0, len(ids) - 1, 16):
        window = ids[None, first : first + 17]
        total += training.model.loss(window).item() * (window.shape[1] - 1)
    return total / (len(ids) - 1)


@parametrize_first(
    ("training", "prefix"),
    [
        (Training(), ""),
        (Training(bias=False), "_orig_mod."),
        (Training(earlier=True), ""),
        (Training(masks=True), "module."),
    ],
    ids=["as saved now", "compiled, without biases", "before May 2023", "masks saved, DDP"],
    first=2,
)
def test_a_run_goes_on_as_it_would_have_there(
    training: Training, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batches: logits, validation losses, rates, weights and both moments."""
    monkeypatch.chdir(tmp_path)
    training.train(random_steps(20, seed=3))
    path, _ = import_run(tmp_path, training.checkpoint(prefix))
    run = path.parent.parent
    assert path.name == "step-20"
    tokens = random_steps(1, seed=4)[0][:, :-1]
    with torch.no_grad():
        torch.testing.assert_close(
            instar.load_model(run)(tokens), training.model(tokens), rtol=0, atol=1e-5
        )

    assert main(["resume", str(run), "--until", f"{20 + MORE}it"]) == 0
    at_import = held_out_loss(training)
    training.train(steps_here(run, 20, MORE))
    losses = {event.step: event.loss for event in events(run, Eval)}
    assert losses[20] == pytest.approx(at_import, abs=1e-5)
    assert losses[20 + MORE] == pytest.approx(held_out_loss(training), abs=1e-4)
    assert losses[20 + MORE] < losses[20] - 0.01, "these steps change nothing that a loss shows"
    rates = [(event.step, event.lr) for event in events(run, Train)]
    assert rates == [(n, pytest.approx(learning_rate(n - 1))) for n in range(21, 21 + MORE)]

    (end,) = events(run, RunFinished)
    tokens_here = end.tokens * MORE / (20 + MORE)
    assert end.tokens_per_s == pytest.approx(tokens_here / end.active_s)

    last = load_checkpoint(run / "checkpoints" / f"step-{20 + MORE}")
    arch = instar.load_model(run).arch
    for kind, expected in states_by_name(training).items():
        tensors = last.tensors("optimizer" if kind else "model")
        for name, tensor in from_tensors(arch, as_gpt2(expected)).items():
            actual = tensors[f"{name}/{kind}" if kind else name]
            torch.testing.assert_close(actual, tensor, rtol=1e-3, atol=1e-5, msg=f"{name} {kind}")
    for name in arch.parameters():
        assert last.tensors("optimizer")[f"{name}/step"].item() == 20 + MORE


def states_by_name(training: Training) -> dict[str, dict[str, Tensor]]:
    """Return the weights, under an empty name, and both moments by nanoGPT's names."""
    parameters = dict(training.model.named_parameters())
    states = training.optimizer.state
    return {
        "": {name: parameter.detach() for name, parameter in parameters.items()},
        **{
            kind: {name: states[parameter][kind] for name, parameter in parameters.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        },
    }


def test_moments_of_another_parameter_are_seen(tmp_path: Path) -> None:
    """What the test above compares tells moments of equal shapes apart."""
    training = Training()
    training.train(random_steps(3, seed=3))
    content = training.checkpoint()
    states = content["optimizer"]["state"]
    same_shape = [n for n, state in states.items() if state["exp_avg"].shape == (48, 16)]
    states[same_shape[0]], states[same_shape[1]] = states[same_shape[1]], states[same_shape[0]]
    path, _ = import_run(tmp_path, content)
    moments = load_checkpoint(path).tensors("optimizer")
    arch = instar.load_model(path).arch
    expected = from_tensors(arch, as_gpt2(states_by_name(training)["exp_avg"]))
    wrong = {
        n for n, tensor in expected.items() if not torch.equal(moments[f"{n}/exp_avg"], tensor)
    }
    assert wrong == {
        f"blocks.{n}.attn.{part}.weight" for n in (0, 1) for part in ("query", "key", "value")
    }


def test_the_arguments_become_keys_and_the_rest_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training = Training()
    training.train(random_steps(2, seed=3))
    torch.save(training.checkpoint(), "ckpt.pt")
    write_data(Path("squares"))
    assert main(["checkpoint", "import", "ckpt.pt", "--data", "squares", "--to", "run"]) == 0
    output = capsys.readouterr()
    assert output.out.strip() == "run/checkpoints/step-2"
    assert output.err.splitlines() == [
        "imported step 2, with its weights and AdamW's state",
        "its best validation loss, 2.5000, is a mean over batches that it drew: best values begin anew here",
        "arguments that are not taken over: always_save_checkpoint, compile",
        "next: instar resume run",
    ]
    config = load_run_config("run/run.yaml", resuming=True).config
    assert config.train.until == ("20it",)
    assert (config.train.batch_size, config.train.gradient_accumulation_steps) == (4, 2)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (3e-3, 0.1)
    assert (config.learning_rate.warmup_iters, config.learning_rate.lr_decay_iters) == (5, 40)
    assert config.learning_rate.min_lr_ratio == pytest.approx(0.1)
    assert (config.precision, config.data.order) == ("fp32", "random")
    assert "lr: 0.003" in (text := Path("run/run.yaml").read_text())
    assert all("# ckpt.pt" in line for line in text.splitlines() if "lr: 0.003" in line)


def of_another_optimizer(content: dict[str, Any], kind: str) -> None:
    optimizer = content["optimizer"]
    match kind:
        case "amsgrad":
            optimizer["param_groups"][0]["amsgrad"] = True
        case "one group":
            groups = optimizer["param_groups"]
            optimizer["param_groups"] = [
                {**groups[0], "params": groups[0]["params"] + groups[1]["params"]}
            ]
        case "another shape":
            optimizer["state"][0]["exp_avg"] = torch.zeros(3)
        case "a state that is missing":
            del optimizer["state"][4]["exp_avg_sq"]
        case "a step that is no number":
            optimizer["state"][2]["step"] = torch.tensor([1.0, 2.0])
        case "a step of NaN":
            optimizer["state"][2]["step"] = torch.tensor(torch.nan)
        case "another state":
            optimizer["state"][1]["momentum_buffer"] = torch.zeros(16, 16)
        case "none":
            del content["optimizer"]


@pytest.mark.parametrize(
    "kind",
    [
        *("amsgrad", "one group", "another shape", "a state that is missing", "another state"),
        *("a step that is no number", "a step of NaN", "none"),
    ],
)
def test_states_of_another_optimizer_are_left_and_said(kind: str, tmp_path: Path) -> None:
    training = Training()
    training.train(random_steps(2, seed=3))
    content = training.checkpoint()
    of_another_optimizer(content, kind)
    path, messages = import_run(tmp_path, content)
    assert any("warning: moments begin at zero" in text for text in messages), messages
    checkpoint = load_checkpoint(path)
    assert "optimizer" not in checkpoint.components
    assert checkpoint.manifest.left_out == ["optimizer", "rng"]


class Program:
    """Runs a program when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


def hostile(kind: str, folder: Path) -> object:
    """Return a checkpoint that is none."""
    training = Training()
    content = training.checkpoint()
    wte = "transformer.wte.weight"
    match kind:
        case "a program":
            content["config"] = Program(folder / "ran")
        case "a program in the model":
            content["model"][wte] = Program(folder / "ran")
        case "weights alone":
            return training.model.state_dict()
        case "a list":
            return [1, 2]
        case "a tensor of repeated rows":
            content["model"]["x"] = torch.zeros(1).expand(10**11)
        case "layers without end":
            content["model_args"] = {**training.args, "n_layer": 10**9}
        case "heads that do not divide":
            content["model_args"] = {**training.args, "n_head": 3}
        case "a vocabulary that is text":
            content["model_args"] = {**training.args, "vocab_size": "many"}
        case "another shape":
            content["model_args"] = {**training.args, "n_embd": 32}
        case "NaN":
            content["model"][wte] = torch.full_like(content["model"][wte], torch.nan)
        case "a tensor that is missing":
            del content["model"]["transformer.ln_f.weight"]
        case "another tensor":
            content["model"]["transformer.h.0.attn.q_norm.weight"] = torch.ones(8)
        case "a head of its own":
            content["model"]["lm_head.weight"] = content["model"]["lm_head.weight"] + 1
        case "a step before the first":
            content["iter_num"] = -5
        case "a rate that is text":
            content["config"] = {**content["config"], "learning_rate": "fast"}
        case "a name with a path":
            content["model"]["../../x"] = torch.zeros(1)
        case "moments of NaN":
            training.train(random_steps(1, seed=3))
            content = training.checkpoint()
            content["optimizer"]["state"][0]["exp_avg"].fill_(torch.nan)
    return content


REFUSED = {
    "a program": "cannot be read",
    "a program in the model": "cannot be read",
    "weights alone": "not a checkpoint of nanoGPT, which has model, model_args, iter_num: it has",
    "a list": "it is a list",
    "a tensor of repeated rows": "more elements than the file",
    "layers without end": "no model can have its model_args",
    "heads that do not divide": "3 heads for a width of 16",
    "a vocabulary that is text": "no whole number vocab_size",
    "another shape": "but model_args says (32, 96)",
    "NaN": "transformer.wte.weight: holds values that are not finite",
    "a tensor that is missing": "transformer.ln_f.weight: missing",
    "another tensor": "transformer.h.0.attn.q_norm.weight: unknown",
    "a head of its own": "lm_head.weight: differs",
    "a step before the first": "not a checkpoint of nanoGPT",
    "a rate that is text": "its arguments cannot be used: optimizer.lr",
    "a name with a path": "is no name of a tensor",
    "moments of NaN": "transformer.wte.weight: holds values that are not finite",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_checkpoint_of_nanogpt_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        import_run(tmp_path, hostile(kind, tmp_path))
    assert REFUSED[kind] in str(error.value)
    assert "ckpt.pt" in str(error.value)
    assert not (tmp_path / "ran").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt.pt", "squares"}


@pytest.mark.parametrize("size", [0, 1, 1000, -1000])
def test_a_file_that_is_cut_is_refused(size: int, tmp_path: Path) -> None:
    torch.save(Training().checkpoint(), tmp_path / "whole.pt")
    content = (tmp_path / "whole.pt").read_bytes()[:size]
    (tmp_path / "ckpt.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"ckpt\.pt: it cannot be read"):
        import_checkpoint(
            tmp_path / "ckpt.pt",
            tmp_path / "run",
            tokenizer="byte",
            data=None,
            say=print,
        )
    assert not (tmp_path / "run").exists()


def test_nothing_says_the_vocabulary(tmp_path: Path) -> None:
    training = Training()
    data = write_data(tmp_path / "squares")
    (data / "meta.pkl").rename(tmp_path / "meta.pkl")
    with pytest.raises(ConfigError, match="nothing says which tokens the model has learned"):
        import_run(tmp_path, training.checkpoint(), data=data)
    (tmp_path / "meta.pkl").rename(data / "meta.pkl")
    with pytest.raises(ConfigError, match="--tokenizer is for data without"):
        import_run(tmp_path, training.checkpoint(), data=data, tokenizer="byte")
    (data / "train.bin").unlink()
    with pytest.raises(ConfigError, match=r"there is no train\.bin"):
        import_run(tmp_path, training.checkpoint(), data=data)


def test_a_tokenizer_of_more_tokens_is_another_ones(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    torch.save(Training().checkpoint(), path)
    with pytest.raises(CheckpointError, match="256 tokens, and the model's table 24 rows"):
        import_checkpoint(path, tmp_path / "run", tokenizer="byte", data=None, say=print)


def test_every_parameter_has_its_tensor() -> None:
    """The names that moments are given cover the model once."""
    arch = shape_of(Training().args)
    parts = [part for parts in parts_of_tensors(arch).values() for part in parts]
    assert sorted(parts) == sorted(arch.parameters())
