"""Runs with `data.document_masks` on a GPU, whose kernel computes documents apart; the kernel of the pretended device is
that of tests/support/flash.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fake_gpu
import pytest
import torch
from cases import parametrize_first
from flash import Flash, flash_on_cpu
from torch.overrides import TorchFunctionMode

from instar.api.training import train
from instar.data.text.tokenizer import train_bpe
from instar.models import documents
from instar.models.documents import Attention, kernel_fault
from instar.run.step.hooks import HookContext

TEXTS = [f"{n} squared is {n * n}" + ", and so on" * (n % 4) for n in range(400)]
CONFIG = """\
name: masked
precision: bf16
preset: llama
model: {n_layer: 2, n_head: 4, n_kv_head: 2, n_embd: 32, context: 48, conv_size: 3}
data: {source: squares.jsonl, path: tokens, tokenizer: bpe.json, document_masks: true}
train: {until: 6it, batch_size: 3, gradient_accumulation_steps: 2}
learning_rate: {warmup_iters: 2}
eval: {eval_interval: 3}
record: {log_interval: 1, sample_tokens: 0, report: false}
"""

Trained = Callable[..., list[float]]


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    monkeypatch.chdir(tmp_path)
    Path("squares.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8"
    )
    Path("bpe.json").write_text(train_bpe(TEXTS, 300).to_json(), encoding="utf-8")
    Path("masked.yaml").write_text(CONFIG, encoding="utf-8")

    def train_run(name: str, *overrides: str, hooks: Sequence[object] = ()) -> list[float]:
        train("masked.yaml", [*overrides, f"record.run_dir={name}"], hooks=hooks)
        return [event["loss"] for event in events(name, "train", "eval")]

    return train_run


def events(name: str, *kinds: str) -> list[dict[str, float]]:
    lines = map(json.loads, Path(name, "events.jsonl").read_text(encoding="utf-8").splitlines())
    return [event for event in lines if event["kind"] in kinds]


def warnings_of(name: str) -> str:
    return json.dumps(events(name, "warning"))


@pytest.fixture
def flash() -> Iterator[Flash]:
    documents._trial_fault.cache_clear()
    with flash_on_cpu() as kernel, fake_gpu.device():
        yield kernel
    documents._trial_fault.cache_clear()


GROWS = json.dumps(
    [
        {"name": "insert_layers", "value": 1, "when": {"at_step": 1}},
        {"name": "widen_hidden", "value": 48, "when": {"at_step": 2}, "mask": 2},
    ]
)
WAYS = {
    "plain": [],
    "checkpointed": ["train.gradient_checkpointing=true"],
    "grows": [f"schedule={GROWS}"],
    "experts": ["model.num_experts=3"],
}


@parametrize_first("way", WAYS, first=1)
def test_a_run_follows_that_with_masks(way: str, losses: Trained, flash: Flash) -> None:
    curve = losses("kernel", *WAYS[way])
    calls = flash.calls
    assert calls > 6 * 2 * 2
    assert "documents" not in warnings_of("kernel")
    documents._trial_fault.cache_clear()
    flash.missing = True
    masked = losses("masks", *WAYS[way])
    assert flash.calls < calls + 9, "tried, and not used"
    assert curve == pytest.approx(masked, rel=2e-3)
    assert "kernel is not used: RuntimeError: FlashAttention only supports" in warnings_of("masks")


@pytest.mark.torture
def test_what_the_kernel_cannot_do_is_said(losses: Trained, flash: Flash) -> None:
    losses("fp32", "precision=fp32")
    assert flash.calls == 0
    assert "16-bit values alone" in warnings_of("fp32")
    losses("dropout", "model.dropout=0.1")
    assert flash.calls > 2, "evaluations are without dropout"
    assert "it has no dropout" in warnings_of("dropout")


def test_a_step_reads_nothing_from_the_device(losses: Trained, flash: Flash) -> None:
    class Reads(TorchFunctionMode):
        number = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            del types
            on_gpu = bool(args) and isinstance(args[0], fake_gpu.PretendedTensor)
            names = {"item", "tolist", "cpu", "nonzero", "__bool__", "__float__", "__int__"}
            self.number += on_gpu and func.__name__ in names
            return func(*args, **(kwargs or {}))

    counts = {}

    class Watches:
        def on_step_begin(self, run: HookContext) -> None:
            counts[run.step] = reads.number

    quiet = ["record.log_interval=100", "eval.eval_interval=100"]
    with Reads() as reads:
        losses("run", *quiet, hooks=[Watches()])
    assert flash.calls > 0
    assert counts[1] > counts[0]  # the first step is recorded
    assert counts[5] == counts[1]


@pytest.mark.gpu
def test_a_gpu_computes_documents_apart(losses: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    for heads, kv_heads, head_dim in ((12, 12, 64), (8, 2, 128)):
        for window in (None, 100):
            for dtype in (torch.bfloat16, torch.float16):
                attention = Attention(dtype, heads, kv_heads, head_dim, window)
                assert kernel_fault(attention, device) == ""
    for compiled in ("false", "true"):
        how = ("device=cuda", f"compile={compiled}", "model.n_embd=256")
        curve = losses(f"kernel-{compiled}", *how)
        assert "documents" not in warnings_of(f"kernel-{compiled}")
        with monkeypatch.context() as patch:
            patch.setattr(documents, "KERNEL_DEVICES", ())
            assert curve == pytest.approx(losses(f"masks-{compiled}", *how), rel=2e-2)
