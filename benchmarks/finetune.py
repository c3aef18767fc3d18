"""Is fine-tuning a model of transformers by `instar train` that of its own `Trainer`, and as fast?

    python benchmarks/finetune.py [--quick]

A small Llama and a small Qwen3 with random weights are trained by both on the same samples in the same order, with the same
settings of AdamW, in float32 on one thread. Said are the largest difference of the two losses of a step, and the ratio of the speeds:
tokens per second of processor time, which other work on the machine disturbs less than the clock's, in the median step of each run, in turns;
and of the pairs' ratios the median.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from instar.api.training import train
from instar.data.text.tokenizer import train_bpe
from instar.record.events import Train, read_events
from instar.run.load_config import load_run_config
from instar.run.start.preflight import preflight, prepare_run_data
from report import Case, case, options, parser, publish

FAMILIES = ("llama", "qwen3")
LR, CLIP, DECAY, BETAS = 1e-3, 1.0, 0.1, (0.9, 0.95)


@dataclass(frozen=True)
class Effort:
    width: int
    layers: int
    vocabulary: int
    context: int
    batch: int
    steps: int
    pairs: int


FULL = Effort(width=128, layers=4, vocabulary=2048, context=128, batch=4, steps=50, pairs=4)
QUICK = replace(FULL, width=32, layers=1, vocabulary=300, context=32, batch=2, steps=50, pairs=1)


def main() -> None:
    run_options = options(parser(__doc__).parse_args())
    effort = QUICK if run_options.quick else FULL
    torch.set_num_threads(1)
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in FAMILIES:
            cases += compare_trainers(kind, effort, Path(folder) / kind)
    publish("finetune", cases, run_options, libraries=("transformers", "accelerate"), threads=1)


def compare_trainers(kind: str, effort: Effort, place: Path) -> list[Case]:
    write_model(kind, effort, place / "model")
    settings = settings_of(effort, place)
    samples = samples_in_order(settings, effort)
    ratios, loss_gaps = [], []
    for pair in range(effort.pairs):
        instar_losses, our_step = by_instar(settings, place / f"run-{pair}")
        trainer_losses, their_step = by_trainer(place, effort, samples)
        loss_gaps.append(
            max(abs(a - b) for a, b in zip(instar_losses, trainer_losses, strict=True))
        )
        ratios.append(their_step / our_step)
    return [
        case(f"{kind}: losses of a step differ by, at most", [max(loss_gaps)], "nats", most=1e-4),
        case(f"{kind}: speed of Instar / Trainer", ratios, "×", least=1.0),
    ]


def write_model(kind: str, effort: Effort, folder: Path) -> None:
    text = Path(json.__file__).with_name("decoder.py").read_text() + Path(os.__file__).read_text()
    tokenizer = train_bpe([text], effort.vocabulary)
    config = AutoConfig.for_model(
        kind,
        hidden_size=effort.width,
        intermediate_size=3 * effort.width,
        num_hidden_layers=effort.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=effort.width // 4,
        vocab_size=effort.vocabulary,
        max_position_embeddings=2 * effort.context,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=tokenizer.end_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())


def settings_of(effort: Effort, place: Path) -> list[str]:
    return [
        "task=causal_lm",
        f"model.from={place / 'model'}",
        f"model.context={effort.context}",
        "data.source=stdlib",
        f"data.max_bytes={24 * effort.steps * effort.batch * effort.context}",
        f"data.path={place / 'tokens'}",
        "data.order=sequential",
        f"train.until=[{effort.steps}it]",
        f"train.batch_size={effort.batch}",
        f"train.clip={CLIP}",
        f"optimizer.lr={LR}",
        f"optimizer.weight_decay={DECAY}",
        'optimizer.no_decay=["*.bias", "*norm*"]',  # Trainer decays embeddings
        f"optimizer.beta1={BETAS[0]}",
        f"optimizer.beta2={BETAS[1]}",
        "learning_rate.shape=constant",
        "learning_rate.warmup_iters=0",
        "eval.eval_interval=100000",
        "eval.at_start=false",
        "record.log_interval=1",
        "record.sample_tokens=0",
        "record.report=false",
        "device=cpu",
        "precision=fp32",
    ]


def samples_in_order(settings: Sequence[str], effort: Effort) -> list[dict[str, torch.Tensor]]:
    """All samples of a run, as transformers takes them: tokens, of which the first is no target."""
    loaded_config = load_run_config(None, settings)
    prepare_run_data(loaded_config, 1, lambda _: None)
    prepared_run = preflight(loaded_config, 1)
    source, order = prepared_run.spec.task(prepared_run.config).train_samples()
    samples: list[dict[str, torch.Tensor]] = []
    for place in range(effort.steps * effort.batch):
        epoch, at = divmod(place, order.samples_per_epoch)
        read = source.read(order.indices(epoch, at, at + 1))
        tokens = np.append(read["inputs"][0], read["targets"][0, -1])
        labels = np.append(-100, read["targets"][0])
        samples.append({"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)})
    return samples


def by_instar(settings: Sequence[str], run: Path) -> tuple[list[float], float]:
    """The loss of each step, and the processor's seconds of the median step."""
    times: list[float] = []

    class Timed:
        def on_step_end(self, _: Any) -> None:
            times.append(time.process_time())

    train(None, [*settings, f"record.run_dir={run}"], hooks=[Timed()])
    steps = [event for event in read_events(run / "events.jsonl") if isinstance(event, Train)]
    return [event.loss for event in steps], statistics.median(np.diff(times).tolist())


def by_trainer(
    place: Path, effort: Effort, samples: list[dict[str, torch.Tensor]]
) -> tuple[list[float], float]:
    """The same of transformers' `Trainer`."""
    losses: list[float] = []
    times: list[float] = []

    class Sequential(Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(samples, batch_size=effort.batch)  # type: ignore[arg-type]

        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super().compute_loss(*arguments, **keywords)
            losses.append(float(loss.detach()))
            return loss

    class Timed(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.process_time())

    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=str(place / "trainer"),
        max_steps=effort.steps,
        per_device_train_batch_size=effort.batch,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Sequential(model, arguments, callbacks=[Timed()]).train()
    return losses, statistics.median(np.diff(times).tolist())


if __name__ == "__main__":
    main()
