"""`task: causal_lm`: models of transformers are trained, grown, killed, resumed, sampled and exported."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from cases import parametrize_first
from forks import Forks
from pretrained import CONFIG, write_place
from safetensors.torch import load_file
from started import run_ranks
from tiny_run import Place, acknowledged_step, codes, events, weights
from tokenizer_layouts import write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from instar.api import evaluate, load_model, load_tokenizer
from instar.cli.main import main

Captured = pytest.CaptureFixture[str]

STEPS = 40
SCHEDULE = (
    "schedule=[{name: widen_mlp, value: x1.5, when: {at_step: 10}}, "
    "{name: insert_layers, value: 1, when: {at_step: 25}}]"
)


def train(run_dir: str, *overrides: str) -> int:
    """`instar train` in this process, which has imported transformers."""
    sets = [word for text in (f"record.run_dir={run_dir}", *overrides) for word in ("--set", text)]
    return main(["train", "run.yaml", *sets])


@parametrize_first("kind", ["llama", "gemma2"], first=1)
def test_a_run_that_grows_is_killed_resumed_sampled_and_exported(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Forks, capsys: Captured
) -> None:
    monkeypatch.chdir(write_place(kind, tmp_path))
    assert train("whole", SCHEDULE) == 0
    place = Place(tmp_path, forks)
    child = place.train(Path("killed"), SCHEDULE, body="failures:killed_at_step_18")
    assert codes(child) == [-signal.SIGKILL]
    assert acknowledged_step(Path("killed")) in (10, 15)  # the last save is told at the next step
    shutil.rmtree("model")
    assert main(["resume", "killed"]) == 0
    assert weights(Path("killed"), STEPS) == weights(Path("whole"), STEPS)
    operations = [event["name"] for event in events(Path("whole"), "operation")]
    assert operations == ["widen_mlp", "insert_layers"]
    losses = [event["loss"] for event in events(Path("whole"), "eval")]
    assert losses[-1] < losses[0] - 0.5

    capsys.readouterr()
    assert main(["sample", "whole", "--prompt", "12 sq", "--max-tokens", "6"]) == 0
    assert capsys.readouterr().out.startswith("12 sq")
    assert main(["checkpoint", "export", "whole", "tuned", "--to", "hf"]) == 0
    ids = torch.arange(24)[None] * 7
    hf_model = AutoModelForCausalLM.from_pretrained("tuned").eval()
    with torch.no_grad():
        torch.testing.assert_close(hf_model(ids).logits, load_model("whole", "cpu")(ids))
    tokens = AutoTokenizer.from_pretrained("tuned")("12 squared").input_ids
    assert tokens == load_tokenizer("whole").encode("12 squared").tolist()

    assert train("next", "model.from=tuned", "train.until=1it") == 0
    assert events(Path("next"), "eval")[0]["loss"] == pytest.approx(losses[-1], abs=1e-4)
    assert main(["grow", "whole", "larger", "--op", "widen_mlp=x2"]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "inspect", "larger"]) == 0
    family = {"llama": "Llama", "gemma2": "Gemma 2"}[kind]
    assert f"{family}: layers 4, embed 48, mlp 144," in capsys.readouterr().out


def test_a_run_makes_a_model_of_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Whose class is another: it is grown, resumed and exported as such."""
    monkeypatch.chdir(write_place("qwen3", tmp_path))
    keys = ("train.until=8it", "optimizer.lr=0.003")
    assert train("run", "schedule=[{name: upcycle, value: 4, when: {at_step: 5}}]", *keys) == 0
    (growth,) = events(Path("run"), "operation")
    assert growth["proof"]["max_logit_diff_relative"] <= 1e-5
    assert growth["change"] == "qwen3→qwen3_moe"
    assert main(["resume", "run", "--until", "10it"]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "export", "run", "tuned", "--to", "hf"]) == 0
    hf_model = AutoModelForCausalLM.from_pretrained("tuned").eval()
    assert type(hf_model).__name__ == "Qwen3MoeForCausalLM"
    ids = torch.arange(16)[None] * 7
    with torch.no_grad():
        torch.testing.assert_close(hf_model(ids).logits, load_model("run", "cpu")(ids))


def test_a_model_sees_the_beginning_of_a_text_that_its_tokenizer_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """In training, in samples, and in `instar.evaluate`; the run and its export keep the ends of documents."""
    monkeypatch.chdir(write_place("gemma2", tmp_path))
    vocabulary = write_tokenizer("gemma2", tokenizer_dir := Path("other")).get_vocab()
    rows = json.loads(Path("model/config.json").read_text())
    sizes = {**rows, "vocab_size": len(vocabulary), "eos_token_id": 1, "bos_token_id": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).save_pretrained("model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_dir / name, "model")
    assert train("run", "train.until=1it") == 0
    hf_tokenizer = AutoTokenizer.from_pretrained("other")
    ids = hf_tokenizer("12 squared")["input_ids"]
    assert ids[0] == hf_tokenizer.bos_token_id
    assert load_tokenizer("run").encode("12 squared").tolist() == ids
    assert load_tokenizer("run").end_token == "<eos>"
    evaluation = evaluate("run", "12 squared", "cpu")
    assert (evaluation.tokens, evaluation.bits_per_byte) == (len(ids) - 1, None)
    model = load_model("run", "cpu")
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            model(torch.tensor([ids]))[0, :-1], torch.tensor(ids[1:])
        )
    assert evaluation.loss == pytest.approx(losses.item(), rel=1e-5)
    capsys.readouterr()
    command = ["sample", "run", "--prompt", "12 sq", "--max-tokens", "4", "--temperature", "0"]
    assert main(command) == 0
    output = capsys.readouterr().out
    tokens = torch.tensor([hf_tokenizer("12 sq")["input_ids"]])
    for _ in range(4):
        with torch.no_grad():
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), 1)
    assert output == hf_tokenizer.decode(tokens[0, 1:]) + "\n"


def test_two_ranks_are_the_same_run(tmp_path: Path) -> None:
    write_place("qwen3", tmp_path)
    runs = [tmp_path / "one", tmp_path / "two"]
    for count, run in enumerate(runs, 1):
        sets = ("--set", SCHEDULE, "--set", f"record.run_dir={run}", "--set", "train.until=14it")
        run_ranks(count, tmp_path, "train", tmp_path / "run.yaml", *sets)
    one, two = ([event["loss"] for event in events(run, "train")] for run in runs)
    assert len(one) == 14
    assert two == pytest.approx(one, abs=1e-4)


def test_conversations_are_learned_resumed_answered_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Only the answers count: what is asked is random, and the answer is always the same."""
    monkeypatch.chdir(write_place("llama", tmp_path))
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"{n} squared"},
                {"role": "assistant", "content": "is cubed"},
            ]
        }
        for n in range(60)
    ]
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    Path("turns.jinja").write_text(
        "{% for each in messages %}{{ '<' if each.role == 'user' else '>' }}{{ each.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    data = ["data.kind=chat", "data.source=chats.jsonl", "data.packing=false", "model.context=32"]
    data += ["data.chat_template=turns.jinja"]
    assert train("whole", *data, "train.until=12it", "optimizer.lr=1e-2") == 0
    losses = [event["loss"] for event in events(Path("whole"), "eval")]
    assert losses[-1] < 1.0 < 4.0 < events(Path("whole"), "train")[0]["loss"]
    assert (
        train(
            "half",
            *data,
            "train.until=12it",
            "optimizer.lr=1e-2",
            "train.until=5it",
            "learning_rate.lr_decay_iters=12",
        )
        == 0
    )
    assert main(["resume", "half", "--until", "12it"]) == 0
    assert weights(Path("half"), 12) == weights(Path("whole"), 12)

    capsys.readouterr()
    command = ["sample", "half", "--chat", "--prompt", "7 squared", "--temperature", "0"]
    assert main(command) == 0
    assert capsys.readouterr().out == "is cubed\n"
    assert main(["checkpoint", "export", "half", "tuned", "--to", "hf"]) == 0
    tokenizer = AutoTokenizer.from_pretrained("tuned")
    messages = [{"role": "user", "content": "7 squared"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt"
    )
    generation = AutoModelForCausalLM.from_pretrained("tuned").generate(**prompt, max_new_tokens=20)
    assert tokenizer.decode(generation[0]) == "<7 squared<|end|>>is cubed<|end|>"


def test_adapters_train_grow_resume_and_are_merged_in_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_place("mixtral", tmp_path))
    adapters = (
        "schedule=[{name: set_lora_rank, value: {target: attn, rank: 2}, when: {at_step: 0}}, "
        "{name: freeze, value: ['*.weight'], when: {at_step: 0}}, "
        "{name: insert_layers, value: 1, when: {at_step: 6}}, "
        "{name: set_lora_rank, value: {target: attn, rank: 4}, when: {at_step: 8}}]"
    )
    keys = [adapters, "optimizer.lr=1e-2", "learning_rate.lr_decay_iters=12"]
    assert train("whole", *keys, "train.until=12it") == 0
    assert train("half", *keys, "train.until=7it") == 0
    assert main(["resume", "half", "--until", "12it"]) == 0
    assert weights(Path("half"), 12) == weights(Path("whole"), 12)
    before = AutoModelForCausalLM.from_pretrained("model").state_dict()
    after = load_file("whole/checkpoints/step-12/model.safetensors")
    original = before["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(after["blocks.0.self_attn.q_proj.weight"], original, rtol=0, atol=0)
    factors = {name: after[name] for name in after if name.endswith("lora_b")}
    assert len(factors) == 4 * 4
    assert all(factor.shape[1] == 4 and factor.any() for factor in factors.values())

    assert main(["checkpoint", "export", "whole", "tuned", "--to", "hf"]) == 0
    ids = torch.arange(24)[None] * 7
    hf_model = AutoModelForCausalLM.from_pretrained("tuned").eval()
    with torch.no_grad():
        torch.testing.assert_close(hf_model(ids).logits, load_model("whole", "cpu")(ids))
    # whose adapters the next run goes on with
    assert train("next", "model.from=whole", "train.until=1it") == 0
    losses = [event["loss"] for event in events(Path("whole"), "eval")]
    assert events(Path("next"), "eval")[0]["loss"] == pytest.approx(losses[-1], abs=1e-4)


def test_a_loss_of_routers_that_is_not_trained_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(write_place("mixtral", tmp_path))
    model_config = Path("model/config.json")
    config = json.loads(model_config.read_text()) | {"router_aux_loss_coef": 0.25}
    says = "router_aux_loss_coef (0.25) of the model's config has no effect"
    for asks in (False, True):
        model_config.write_text(json.dumps(config | {"output_router_logits": asks}))
        assert train(f"asks-{asks}", "train.until=1it") == 0
        assert capsys.readouterr().err.count(says) == asks


REFUSED = {
    "missing folder": ("model: {from: model", "model: {from: modle", "no folder 'modle'"),
    "no folder": ("model: {from: model, ", "model: {", "model.from must name the folder of a model"),
    "long context": ("context: 16", "context: 33", "model.context is 33, but the model reads at most 32"),
    "unknown key": ("context: 16", "n_layer: 16", "unknown key 'n_layer' in model"),
    "long samples": (
        "device: cpu",
        "schedule: [{name: set_context, value: 48, when: {at_step: 2}}]",
        "is more than the 32 tokens",
    ),
}  # fmt: skip


def test_a_bad_config_or_folder_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(write_place("llama", tmp_path))

    def refuses(message: str) -> None:
        capsys.readouterr()
        assert train("refused") == 2
        assert message in " ".join(capsys.readouterr().err.split())
        assert sorted(map(str, Path().iterdir())) == ["model", "run.yaml", "squares.txt"]

    for was, now, message in REFUSED.values():
        assert was in CONFIG
        Path("run.yaml").write_text(CONFIG.replace(was, now))
        refuses(message)
    Path("run.yaml").write_text(CONFIG)
    tokens, config = Path("model/tokenizer.json"), Path("model/config.json")
    text, values = tokens.read_text(), config.read_text()
    config.write_text(values.replace('"model_type": "llama"', '"model_type": "bloom"'))
    refuses("model_type 'bloom' is not a known family")
    config.write_text(values)
    tokens.unlink()
    refuses("model has no tokenizer.json")
    tokens.write_text(text.replace('"<|end|>":0', '"<|end|>":300').replace('"id": 0', '"id": 300'))
    refuses("301 tokens, and the model's table 288 rows")
