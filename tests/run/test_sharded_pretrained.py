"""Models of transformers under `fsdp` and `hsdp`: the same runs as with whole models, growth, adapters and exports included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import science
import tiny_run
import torch
from pretrained import write_model, write_place
from small_models import CHANGES, SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from instar.checkpoint.store import load_checkpoint
from instar.cli.main import main
from instar.models.hf.config import complete_config
from instar.models.hf.families import BUILT_IN
from instar.models.hf.module import PretrainedModel
from instar.models.hf.pretrained import LoraShape
from instar.models.module import is_meta, materialize
from instar.run.optimizer import copy_tensors

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

STEPS = 6
GROWTH = [
    {"name": "widen_mlp", "value": "x2", "how": "split"},
    {"name": "insert_layers", "value": 1, "from": "average", "where": [1]},
    {"name": "set_lora_rank", "value": {"target": "attn", "rank": 4}},
    {"name": "freeze", "value": "*embed*"},
]
GPT2_GROWTH = [*GROWTH[:2], {"name": "freeze", "value": "*wte*"}]
"""its weights are stored as (input, output), and have no adapters"""


def schedule(operations: list[dict[str, Any]]) -> str:
    steps = (json.dumps({**op, "when": {"at_step": n}}) for n, op in enumerate(operations, 2))
    return f"schedule=[{', '.join(steps)}]"


KEYS = (
    f"train.until=[{STEPS}it]",
    f"learning_rate.lr_decay_iters={STEPS}",
    "train.batch_size=3",
    "train.gradient_accumulation_steps=5",
    "train.ema=0.9",
    "eval.eval_interval=3",
    "record.sample_tokens=4",
    "record.sample_every=3",
    schedule(GROWTH),
)
ELASTIC = (*KEYS, "reproducible=elastic")
FSDP = ("parallel.strategy=fsdp",)
HSDP = ("parallel.strategy=hsdp", "parallel.fsdp.shards=2")


def place_of(kind: str, folder: Path) -> tiny_run.Place:
    return tiny_run.Place(write_place(kind, folder), science.forks())


def train_run(place: tiny_run.Place, name: str, *keys: str, ranks: int) -> Path:
    children = place.train(place.path / name, *keys, ranks=ranks)
    assert tiny_run.codes(children) == [0] * ranks, tiny_run.output_of(children)
    return place.path / name


def saved_bytes(run: Path) -> dict[str, bytes]:
    """The bytes of every tensor at the end, whoever saved which rows of it."""
    checkpoint = load_checkpoint(run / "checkpoints" / f"step-{STEPS}")
    return {
        f"{component}/{name}": tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for component in ("model", "optimizer", "ema")
        for name, tensor in checkpoint.tensors(component).items()
    }


def curve(run: Path) -> list[float]:
    train, held_out = tiny_run.events(run, "train"), tiny_run.events(run, "eval")
    assert [event["step"] for event in train] == list(range(1, STEPS + 1))
    return [event["loss"] for event in (*train, *held_out)]


@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_a_model_that_began_without_memory_has_its_buffers(kind: str) -> None:
    """Frequencies of rotations, scales of embeddings: what only the module knows that makes them."""
    sizes = {} if kind == "gpt2" else SIZES
    config = AutoConfig.for_model(kind, **{**sizes, "vocab_size": 64, **CHANGES.get(kind, {})})
    shape = LoraShape(complete_config(config.to_dict()))
    reference = PretrainedModel(shape, seed=0).eval()
    with torch.device("meta"):
        bare = PretrainedModel(shape)
    assert is_meta(bare)
    assert all(parameter.is_meta for parameter in bare.parameters())
    assert [*dict(bare.named_parameters())] == [*dict(reference.named_parameters())]
    materialize(bare, torch.device("cpu"))
    bare.inner.tie_weights()  # `fully_shard` keeps tied parameters one
    weights = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    copy_tensors(dict(bare.named_parameters()), weights)
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    assert torch.equal(bare.eval()(tokens), reference(tokens))


@pytest.mark.torture
@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_shards_are_the_same_run_bit_for_bit(kind: str, tmp_path: Path) -> None:
    place = place_of(kind, tmp_path)
    operations = GPT2_GROWTH if kind == "gpt2" else GROWTH
    keys = (*ELASTIC, schedule(operations))
    one_rank = train_run(place, "alone", *keys, ranks=1)
    fsdp_run = train_run(place, "fsdp", *keys, *FSDP, ranks=2)
    assert saved_bytes(fsdp_run) == saved_bytes(one_rank)
    assert curve(fsdp_run) == curve(one_rank)
    proofs = [
        [(op["name"], op["proof"]) for op in tiny_run.events(run, "operation")]
        for run in (one_rank, fsdp_run)
    ]
    assert [name for name, _ in proofs[0]] == [op["name"] for op in operations]
    assert proofs[0] == proofs[1]


@pytest.mark.torture
def test_losses_are_those_of_whole_models_up_to_rounding(tmp_path: Path) -> None:
    place = place_of("llama", tmp_path)
    ddp_run = train_run(place, "ddp", *KEYS, ranks=2)
    fsdp_run = train_run(place, "fsdp", *KEYS, *FSDP, ranks=2)
    assert curve(fsdp_run) == pytest.approx(curve(ddp_run), rel=1e-5)
    files = load_checkpoint(fsdp_run / "checkpoints" / f"step-{STEPS}").manifest.files
    shares = [entry.size_bytes for name, entry in files.items() if name.startswith("model/")]
    assert len(shares) == 2
    assert max(shares) < 0.55 * sum(shares), "each rank holds and saves its rows"


@pytest.mark.torture
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_moe"])
def test_strategies_in_turn_are_one_run(kind: str, tmp_path: Path) -> None:
    """Four ranks with shards; two replicas of shards, whole models, shards, and one process in turn; and what is exported."""
    place = place_of(kind, tmp_path)
    one_rank = train_run(place, "alone", *ELASTIC, ranks=1)
    four = train_run(place, "four", *ELASTIC, *FSDP, ranks=4)
    in_turn = train_run(place, "turns", *ELASTIC, *HSDP, "train.until=[2it]", ranks=4)
    for until, strategy, ranks in ((4, "ddp", 2), (5, "fsdp", 2), (STEPS, "ddp", 1)):
        keys = ("--set", f"parallel.strategy={strategy}", "--set", "parallel.fsdp.shards=null")
        children = place.resume(in_turn, "--until", f"{until}it", *keys, ranks=ranks)
        assert tiny_run.codes(children) == [0] * ranks, tiny_run.output_of(children)
    assert saved_bytes(four) == saved_bytes(in_turn) == saved_bytes(one_rank)
    exports = []
    for run in (one_rank, four):
        folder = run.with_name(f"{run.name}-hf")
        assert main(["checkpoint", "export", str(run), str(folder), "--to", "hf"]) == 0
        exports.append({path.name: path.read_bytes() for path in folder.iterdir()})
        AutoModelForCausalLM.from_pretrained(folder)
    assert exports[0] == exports[1]


def test_adapters_of_peft_are_divided_too(tmp_path: Path) -> None:
    """A run that begins with an adapter, of which each rank reads nothing and receives its rows."""
    place = place_of("llama", tmp_path)
    base = write_model("llama", tmp_path / "model")
    torch.manual_seed(3)
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(base, options).save_pretrained(tmp_path / "adapter")
    keys = (*ELASTIC, "schedule=[]", "model.adapter=adapter")
    one_rank = train_run(place, "alone", *keys, ranks=1)
    fsdp_run = train_run(place, "fsdp", *keys, *FSDP, ranks=2)
    assert any(".lora_a" in name for name in saved_bytes(one_rank))
    assert saved_bytes(fsdp_run) == saved_bytes(one_rank)


@pytest.mark.torture
def test_a_run_without_weights_begins_alike_on_any_ranks(tmp_path: Path) -> None:
    """Rank 0 draws the values as transformers does; a config that is written by hand is completed."""
    place = place_of("llama", tmp_path)
    config = {"model_type": "llama", **SIZES, "vocab_size": 288}
    keys = (*ELASTIC, "model.from=null", f"model.config={json.dumps(config)}")
    keys = (*keys, "data.tokenizer=model/tokenizer.json")
    one_rank = train_run(place, "alone", *keys, ranks=1)
    fsdp_run = train_run(place, "fsdp", *keys, *FSDP, ranks=2)
    assert saved_bytes(fsdp_run) == saved_bytes(one_rank)
    shape = load_checkpoint(one_rank / "checkpoints" / f"step-{STEPS}").manifest.architecture
    assert shape["rms_norm_eps"] == 1e-6
    (child,) = place.instar("resume", one_rank, "--until", f"{STEPS + 1}it")
    assert child.finish() == 0, child.output()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hiden_act": "gelu"}, "hiden_act: did you mean 'hidden_act'?"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a whole number"),
        ({"quantization_config": {}}, "quantization_config"),
    ],
)
def test_a_config_that_is_written_by_hand_is_not_guessed(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    place = place_of("llama", tmp_path)
    values = {"model_type": "llama", **SIZES, "vocab_size": 288, **changes}
    config = {key: value for key, value in values.items() if value is not None}
    keys = ("model.from=null", f"model.config={json.dumps(config)}")
    (child,) = place.train(tmp_path / "none", *keys, "data.tokenizer=model/tokenizer.json")
    assert child.finish() == 2
    assert message in child.output()
