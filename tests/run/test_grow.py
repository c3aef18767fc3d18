"""A checkpoint grown on the disk is what the same operations make of the run under way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import parametrize_first
from growing import grow_optimizer
from safetensors.torch import load_file, save
from spoilt import DAMAGES
from torch import Tensor

from instar.checkpoint.listing import latest_intact
from instar.checkpoint.manifest import CheckpointError, Facts
from instar.checkpoint.store import (
    Checkpoint,
    CheckpointContent,
    load_checkpoint,
    publish_checkpoint,
)
from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.config.sections import Operation
from instar.growth import operators
from instar.growth.apply import apply, moments_mode
from instar.growth.offline import NotProven
from instar.growth.states import Role
from instar.models.architecture import Architecture, resolve_architecture
from instar.models.gpt import GPT
from instar.record.atomic import WriteError
from instar.run.offline import grow as offline
from instar.run.offline.grow import grow_checkpoint
from instar.schedule.operations import history_from_json

SEED, STEP, CURSOR = 7, 20, 320
GPT2 = ["model.n_layer=2", "model.n_head=2", "model.n_embd=32"]
LLAMA = ["preset=llama", *GPT2, "model.n_head=4", "model.n_kv_head=2"]

EVERYTHING = (
    Operation("widen_mlp", "x2"),
    Operation("insert_layers", 1, {"where": "start"}),
    Operation("widen_hidden", 48),
    Operation("set_lora_rank", {"target": "attn", "rank": 2}),
    Operation("add_heads", 4, {"moments": "mapped"}),
    Operation("set_lr", 1e-4),
    Operation("merge_lora"),
    Operation("stack_layers", [0, 1, 2, 1]),
    Operation("resize_vocab", 64),
)


def save_run(folder: Path, settings: Sequence[str] = GPT2, *, has_nan: bool = False) -> Checkpoint:
    """A checkpoint of a run, with an optimizer that remembers much, an average, and generators."""
    folder.mkdir()
    vocabulary = ("model.vocab_size=50", "model.context=16", f"seed={SEED}")
    loaded_config = load_config(None, [*settings, *vocabulary])
    (folder / "run.yaml").write_text(loaded_config.to_yaml())
    arch = resolve_architecture(loaded_config.config.model, 50)
    model = GPT(arch)
    model.init_weights(3)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(5)
    for weight in weights.values():
        weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    if has_nan:
        weights["final_norm.weight"][0] = torch.nan
    moments = {}
    for name, weight in weights.items():
        moments[f"{name}/exp_avg"] = torch.randn(weight.shape, generator=generator)
        moments[f"{name}/exp_avg_sq"] = torch.rand(weight.shape, generator=generator)
        moments[f"{name}/step"] = torch.tensor(float(STEP))
    path = publish_checkpoint(
        folder,
        STEP,
        CheckpointContent(
            {
                "model": weights,
                "optimizer": moments,
                "ema": {name: 0.9 * weight for name, weight in weights.items()},
                "rng": {"torch": torch.get_rng_state()},
            },
            {
                "progress": {"step": STEP, "samples": CURSOR},
                "evaluated_at": STEP,
                "judged_at": STEP,
            },
            arch.to_dict(),
            facts=Facts(data="f00d", loss=3.0, progress={"step": STEP}),
        ),
    )
    return load_checkpoint(path)


def grown_in_memory(source: Checkpoint, operations: Sequence[Operation]) -> dict[str, Any]:
    """What the operations make of a whole model at once: its architecture and components."""
    arch = Architecture.from_dict(source.manifest.architecture)
    parts = {name: source.tensors(name) for name in ("model", "ema", "optimizer")}
    for number, operation in enumerate(operations):
        if operators.is_growth(operation.name):
            key = (SEED, number)
            arch, plan = operators.plan(arch, operation, step=STEP)
            parts["optimizer"] = grow_optimizer(
                plan, parts["optimizer"], key, moments_mode(operation)
            )
            for name in ("model", "ema"):
                parts[name] = apply(plan, parts[name], Role.PARAMETER, key)
    return {"architecture": arch.to_dict(), **parts}


def bytes_of(tensors: Mapping[str, Tensor]) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


@pytest.mark.parametrize("settings", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_every_file_is_that_of_a_model_grown_in_memory(settings: list[str], tmp_path: Path) -> None:
    source = save_run(tmp_path / "run", settings)

    checkpoint = load_checkpoint(grow_checkpoint(source, tmp_path / "out", EVERYTHING).path)

    expected = grown_in_memory(source, EVERYTHING)
    assert checkpoint.manifest.architecture == expected["architecture"]
    for component in ("model", "ema", "optimizer"):
        file = checkpoint.path / f"{component}.safetensors"
        assert file.read_bytes() == bytes_of(expected[component]), component
    assert set(expected["optimizer"]) < {
        f"{name}/{state}"
        for name in expected["model"]
        for state in ("exp_avg", "exp_avg_sq", "step")
    }


def test_what_has_no_part_in_growth_stays_as_it_was(tmp_path: Path) -> None:
    source = save_run(tmp_path / "run")

    checkpoint = load_checkpoint(
        grow_checkpoint(source, tmp_path / "out", [Operation("widen_mlp", 256)]).path
    )

    assert checkpoint.state == source.state
    for name in ("rng/rank-0.safetensors",):
        assert (checkpoint.path / name).read_bytes() == (source.path / name).read_bytes()
    assert (tmp_path / "out/run.yaml").read_bytes() == (tmp_path / "run/run.yaml").read_bytes()
    for fact in ("data", "loss", "progress", "step", "world_size"):
        assert getattr(checkpoint.manifest, fact) == getattr(source.manifest, fact), fact


def test_an_operation_that_changes_the_function_forgets_its_loss(tmp_path: Path) -> None:
    source = save_run(tmp_path / "run")

    checkpoint = load_checkpoint(
        grow_checkpoint(source, tmp_path / "out", [Operation("stack_layers", 2)]).path
    )

    assert checkpoint.manifest.loss is None
    assert checkpoint.state["evaluated_at"] == -1
    assert checkpoint.state["judged_at"] == -1  # or a resume would make it the best


def test_operations_become_history_in_their_order(tmp_path: Path) -> None:
    source = save_run(tmp_path / "run")

    checkpoint = load_checkpoint(grow_checkpoint(source, tmp_path / "out", EVERYTHING[:2]).path)

    history = history_from_json(checkpoint.manifest.history)
    assert [change.operation for change in history] == list(EVERYTHING[:2])
    assert {(change.step, change.cursor, change.entry) for change in history} == {
        (STEP, CURSOR, None)
    }


def test_growing_twice_is_growing_by_both_at_once(tmp_path: Path) -> None:
    source = save_run(tmp_path / "run")
    at_once = grow_checkpoint(source, tmp_path / "at-once", EVERYTHING).path

    first = grow_checkpoint(source, tmp_path / "first", EVERYTHING[:4]).path
    second = grow_checkpoint(load_checkpoint(first), tmp_path / "second", EVERYTHING[4:]).path

    for file in ("model", "ema", "optimizer"):
        name = f"{file}.safetensors"
        assert (second / name).read_bytes() == (at_once / name).read_bytes(), file


def test_a_mask_opens_from_the_step_of_the_checkpoint_on(tmp_path: Path) -> None:
    source = save_run(tmp_path / "run")
    masked = Operation("insert_layers", 1, {"mask": 10})

    growth = grow_checkpoint(source, tmp_path / "out", [masked], check=True)

    mask = load_checkpoint(growth.path).manifest.architecture["mask"]
    assert (mask["begin"], mask["steps"]) == (STEP, 10)
    assert growth.proof is not None
    assert growth.proof.label == "exact"
    with pytest.raises(ConfigError, match=f"until step {STEP + 10}"):
        grow_checkpoint(
            load_checkpoint(growth.path), tmp_path / "again", [Operation("widen_mlp", 256)]
        )


def test_labels_are_proven_and_add_up(tmp_path: Path) -> None:
    source = save_run(tmp_path / "run", LLAMA)
    exact_proof = grow_checkpoint(source, tmp_path / "exact", EVERYTHING[:7], check=True).proof
    bounded_proof = grow_checkpoint(
        source, tmp_path / "bounded", [EVERYTHING[0], EVERYTHING[-1]], check=True
    ).proof
    lossy_proof = grow_checkpoint(source, tmp_path / "lossy", EVERYTHING, check=True).proof

    assert exact_proof is not None
    assert bounded_proof is not None
    assert lossy_proof is not None
    assert (exact_proof.label, bounded_proof.label, lossy_proof.label) == (
        "exact",
        "bounded",
        "lossy",
    )
    assert 0 < exact_proof.max_logit_diff_relative < 1e-5 < lossy_proof.max_logit_diff_relative


def test_weights_that_prove_nothing_make_nothing(tmp_path: Path) -> None:
    source = save_run(tmp_path / "run", has_nan=True)

    with pytest.raises(CheckpointError, match="not finite"):
        grow_checkpoint(source, tmp_path / "out", [Operation("widen_mlp", 256)], check=True)

    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", DAMAGES)
@parametrize_first("component", ["model", "optimizer", "ema"], first=1)
def test_a_file_that_was_written_wrongly_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, component: str
) -> None:
    """Under any label: a stack may change the outputs as it likes."""
    source, stack = save_run(tmp_path / "run"), [Operation("stack_layers", 2)]
    real = offline.write_tensors

    def write_damaged(path: Path, shapes: Any, read: Callable[[str], Tensor]) -> None:
        def spoilt_read(name: str) -> Tensor:
            damages = path.name.startswith(component) and "blocks.3.mlp.down.weight" in name
            tensor = read(name)
            return DAMAGES[kind](tensor) if damages and tensor.ndim else tensor

        real(path, shapes, spoilt_read)

    monkeypatch.setattr(offline, "write_tensors", write_damaged)
    with pytest.raises(NotProven, match=r"blocks\.3\.mlp\.down\.weight.* is not the tensor"):
        grow_checkpoint(source, tmp_path / "out", stack, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    monkeypatch.undo()
    grow_checkpoint(source, tmp_path / "out", stack, check=True)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (Operation("widen_mlp", 64), "only grows"),
        (Operation("widen_mpl", 256), "widen_mlp"),
        (Operation("freeze", "nothing.*"), "no parameter matches"),
    ],
)
def test_an_impossible_operation_makes_nothing(
    operation: Operation, message: str, tmp_path: Path
) -> None:
    source = save_run(tmp_path / "run")

    with pytest.raises(ConfigError, match=message):
        grow_checkpoint(source, tmp_path / "out", [Operation("widen_mlp", 256), operation])

    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    source = save_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")

    with pytest.raises(WriteError, match="not empty, it holds mine"):
        grow_checkpoint(source, tmp_path / "out", [Operation("widen_mlp", 256)])


def test_a_config_of_another_model_is_refused(tmp_path: Path) -> None:
    source = save_run(tmp_path / "run")
    (tmp_path / "run/run.yaml").write_text("model: {n_layer: 3, vocab_size: 50}\n")

    with pytest.raises(CheckpointError, match="another architecture"):
        grow_checkpoint(source, tmp_path / "out", [Operation("widen_mlp", 256)])


MEMORY = """
import json, sys, threading
from pathlib import Path
import torch
from instar.checkpoint.listing import latest_intact
from instar.config.sections import Operation
from instar.run.offline import grow as offline
from instar.run.offline.grow import grow_checkpoint

def own_bytes():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))

torch.set_num_threads(1)
source, _ = latest_intact(Path("run"))
grow_checkpoint(source, Path("warm-up"), [Operation("set_lr", 1e-3)])
before, peak, done = own_bytes(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, own_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
operations = [Operation("widen_mlp", "x2"), Operation("insert_layers", 16, {"where": "even"})]
grow_checkpoint(source, Path("out"), operations)
done.set()
watcher.join()
print(json.dumps(max(peak, own_bytes()) - before))
"""


@pytest.mark.torture
def test_memory_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    settings = ["model.n_layer=16", "model.n_head=4", "model.n_embd=128"]
    source = save_run(tmp_path / "run", settings)

    result = subprocess.run(
        [sys.executable, "-c", MEMORY],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    checkpoint, _ = latest_intact(tmp_path / "out")
    largest = max(tensor.nbytes for tensor in checkpoint.tensors("model").values())
    total = sum(path.stat().st_size for path in checkpoint.path.glob("*.safetensors"))
    assert total > 200 * largest
    assert json.loads(result.stdout) < 20 * largest
    assert source.path.is_dir()


def test_copies_that_stay_equal_are_told_of(tmp_path: Path) -> None:
    source = save_run(tmp_path / "run")
    for number, (options, warns) in enumerate(
        [({}, False), ({"moments": "mapped"}, True), ({"moments": "reset"}, True)]
    ):
        split = Operation("widen_mlp", "x2", {"how": "split", **options})
        growth = grow_checkpoint(source, tmp_path / str(number), [split])
        assert growth.warning.startswith("the copies that widen_mlp made have") is warns


def test_adapters_that_cannot_learn_are_told_of(tmp_path: Path) -> None:
    adapt = Operation("set_lora_rank", {"target": "mlp", "rank": 3})
    lora_growth = grow_checkpoint(save_run(tmp_path / "run"), tmp_path / "adapted", [adapt])
    assert lora_growth.warning == ""
    source = load_checkpoint(lora_growth.path)
    file = source.path / "model.safetensors"
    weights = load_file(file)
    weights["blocks.0.mlp.up.lora_a"][1:] = 0.0  # as B is
    file.write_bytes(save(weights))
    growth = grow_checkpoint(source, tmp_path / "out", [Operation("insert_layers", 1)])
    assert growth.warning.startswith(
        "2 ranks of adapters (blocks.0.mlp.up) are zero in both factors"
    )
