"""The loops that `throughput.py` compares, each in a process of its own.

    python benchmarks/contenders.py bare '{"overrides": ["…"], "warmup": 10, "steps": 100}'

All take the same samples in the same order through the same module into the same optimizer. Told
to by a line on stdin, a contender warms up and says on stdout which losses it saw; for every
further line it makes `round` steps and says how many seconds they took, and the most memory that
it had so far. At the end of stdin it leaves. So no two of them ever compute at the same time.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset

from instar.config.load import load_config
from instar.data.text.shards import open_dataset
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal
from instar.distributed.world import join_group
from instar.models.gpt import GPT
from instar.record.console import open_console
from instar.record.events import Event, Train
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir
from instar.run.optimizer import group_parameters
from instar.run.start.build import RunOutputs, build_trainer
from instar.run.start.preflight import Prepared, preflight, prepare_run_data
from instar.tasks.language import LanguageSpec, LanguageTask


class Pace:
    """Holds a contender after its warm-up and after every round, and takes the time between.

    That is the processor's time of all threads of a process that computes with one thread, which
    other work on the machine hardly changes; else wall-clock time.
    """

    def __init__(
        self, output: TextIO, commands: TextIO, warmup: int, length: int, cuda: bool
    ) -> None:
        self._output, self._commands = output, commands
        self._warmup, self._length, self._cuda = warmup, length, cuda
        single_thread = not cuda and torch.get_num_threads() == 1
        self._now = time.process_time if single_thread else time.perf_counter
        self._losses: list[Tensor] = []
        self._start = 0.0

    def watch(self, model: nn.Module) -> nn.Module:
        """Note the loss of every forward pass until the warm-up is over."""

        def note(_: nn.Module, __: object, loss: Tensor) -> None:
            self._losses.append(loss.detach())

        self._hook = model.register_forward_hook(note)
        return model

    def count_steps(self, steps: int) -> None:
        """So many steps have been made since the start. Raises SystemExit when it was enough."""
        timed_steps = steps - self._warmup
        if timed_steps < 0 or timed_steps % self._length:
            return
        if self._cuda:
            torch.cuda.synchronize()
        now = self._now()
        if timed_steps == 0:
            self._hook.remove()
            self._say([loss.item() for loss in self._losses])
        else:
            self._say([now - self._start, self._peak_bytes()])
        self.wait()

    def wait(self) -> None:
        """Until the next line. Raises SystemExit when there is none."""
        if not self._commands.readline():
            raise SystemExit(0)
        self._start = self._now()

    def _peak_bytes(self) -> int:
        if self._cuda:
            return torch.cuda.max_memory_allocated()
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return kilobytes if sys.platform == "darwin" else 1024 * kilobytes

    def _say(self, value: object) -> None:
        self._output.write(json.dumps(value) + "\n")
        self._output.flush()


@dataclass(frozen=True)
class Work:
    """What every contender does: this model, on these samples, so many steps at most."""

    prepared_run: Prepared
    steps: int

    @property
    def device(self) -> torch.device:
        return torch.device(self.prepared_run.config.device)

    @property
    def batch_size(self) -> int:
        return self.prepared_run.config.train.batch_size

    @property
    def clip(self) -> float:
        assert self.prepared_run.config.train.clip is not None
        return self.prepared_run.config.train.clip

    @property
    def bf16(self) -> bool:
        return self.prepared_run.config.precision == "bf16"

    def model(self) -> GPT:
        return self._task.build().to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Fused AdamW, decaying what Instar decays."""
        config = self.prepared_run.config.optimizer
        parameters = dict(model.named_parameters())
        shapes = {name: parameter.ndim for name, parameter in parameters.items()}
        groups = [
            {"params": [parameters[n] for n in group.names], "weight_decay": group.weight_decay}
            for group in group_parameters(shapes, config)
        ]
        betas = config.beta1, config.beta2
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)

    def prepared_model(self, model: nn.Module) -> nn.Module:
        """The model as the config wants it called."""
        return cast(nn.Module, torch.compile(model)) if self.prepared_run.config.compile else model

    def autocast(self) -> AbstractContextManager[object]:
        if not self.bf16:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def windows(self) -> Windows:
        """The samples of all the steps, in Instar's order."""
        _, order = self._task.train_samples()
        sample_count = self.steps * self.batch_size
        if sample_count > order.samples_per_epoch:
            raise ValueError(
                f"{sample_count} samples wanted, {order.samples_per_epoch} in an epoch"
            )
        split = open_dataset(self.text.opened.path).split("train")
        tokens = split.read(0, len(split))
        return Windows(tokens, order.indices(0, 0, sample_count), self.text.architecture.context)

    @property
    def text(self) -> LanguageSpec:
        return text_of(self.prepared_run)

    @property
    def _task(self) -> LanguageTask:
        return self.text.task(self.prepared_run.config)


def text_of(prepared_run: Prepared) -> LanguageSpec:
    """A run's text, all of which is there."""
    spec = prepared_run.spec
    assert isinstance(spec, LanguageSpec)
    return spec


class Windows(Dataset[dict[str, Tensor]]):
    """Windows cut from one memory-mapped sequence of tokens, as people write it."""

    def __init__(self, tokens: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], length: int):
        self.tokens, self.ids, self.length = tokens, ids, length

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = int(self.ids[index]) * self.length
        window = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        inputs, targets = window[:-1], window[1:]
        short = self.length - len(targets)  # of the last window of a text
        return {
            "inputs": F.pad(inputs, (0, short)),
            "targets": F.pad(targets, (0, short), value=-1),
        }


class PlainGPT2(nn.Module):
    """GPT-2 as a single file has it: queries, keys and values in one product, all logits at once."""

    def __init__(self, gpt: GPT) -> None:
        """
        Args:
            gpt: whose sizes and initial weights it has.
        """
        super().__init__()
        arch = gpt.arch
        self.tokens = nn.Embedding(arch.vocab_size, arch.n_embd)
        self.positions = nn.Embedding(arch.context, arch.n_embd)
        self.blocks = nn.ModuleList(PlainBlock(arch.n_embd, arch.n_head) for _ in gpt.blocks)
        self.norm = nn.LayerNorm(arch.n_embd)
        self.load_state_dict(dict(self._weights_of(gpt)))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
        )

    @staticmethod
    def _weights_of(gpt: GPT) -> Iterator[tuple[str, Tensor]]:
        """Ours, under the names here."""
        same = {
            "token_embedding": "tokens",
            "position_embedding": "positions",
            "final_norm": "norm",
            "attn_norm": "norm_1",
            "mlp_norm": "norm_2",
            "attn.output": "output",
            "mlp.up": "up",
            "mlp.down": "down",
        }
        state = gpt.state_dict()
        for name, tensor in state.items():
            for our_name, plain_name in same.items():
                if name.rpartition(".")[0].endswith(our_name):
                    yield name.replace(our_name, plain_name), tensor
            if ".query." in name:
                parts = [state[name.replace("query", part)] for part in ("query", "key", "value")]
                yield name.replace("attn.query", "heads"), torch.cat(parts)


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.heads(self.norm_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def instar(work: Work, pace: Pace) -> None:
    """`Trainer.train`, with all that a run has around it."""

    class Paced(Recorder):
        def write(self, event: Event) -> None:
            super().write(event)
            if isinstance(event, Train):
                pace.count_steps(event.step)

    with (
        tempfile.TemporaryDirectory() as folder,
        RankLog(0) as log,
        StopSignal() as signal,
        join_group(work.prepared_run.config.parallel, work.prepared_run.config.device) as world,
        closing(open_console()) as console,
    ):
        log.open(Path(folder))
        with Paced(Path(folder) / "events.jsonl") as sink:
            run_dir = RunDir(Path(folder))
            trainer = build_trainer(
                work.prepared_run, world, RunOutputs(signal, sink, console, log, run_dir)
            )
            pace.watch(trainer.parts.stepper.strategy.model)
            with closing(trainer):
                trainer.train()


def bare(work: Work, pace: Pace) -> None:
    """PyTorch and nothing else: batches lie ready as tensors, nobody looks at the loss."""
    train_bare(work, pace, work.model())


def plain(work: Work, pace: Pace) -> None:
    """The same with a model that is not Instar's."""
    train_bare(work, pace, PlainGPT2(work.model()).to(work.device))


def train_bare(work: Work, pace: Pace, gpt: nn.Module) -> None:
    loader = DataLoader(work.windows(), work.batch_size)
    batches = [(b["inputs"].to(work.device), b["targets"].to(work.device)) for b in loader]
    model = pace.watch(work.prepared_model(gpt))
    optimizer = work.optimizer(gpt)
    for step, (inputs, targets) in enumerate(batches, 1):
        with work.autocast():
            loss = model(inputs, targets) / targets.numel()
        loss.backward()
        clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pace.count_steps(step)


def hf(work: Work, pace: Pace) -> None:
    """HF `Trainer`: no evaluation, no saving, no logging, no progress bar."""
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
    from transformers import TrainingArguments as Arguments

    class Wrapped(nn.Module):
        def __init__(self, gpt: GPT) -> None:
            super().__init__()
            self.gpt = gpt

        def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            return {"loss": self.gpt(inputs, targets) / targets.numel()}

    class Paced(TrainerCallback):
        def on_step_end(
            self,
            args: Arguments,  # noqa: ARG002
            state: TrainerState,
            control: TrainerControl,  # noqa: ARG002
            **kwargs: Any,  # noqa: ARG002
        ) -> None:
            pace.count_steps(state.global_step)

    model = work.model()
    pace.watch(model)
    on_gpu = work.device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            Wrapped(model),
            Arguments(
                output_dir=folder,
                per_device_train_batch_size=work.batch_size,
                max_steps=work.steps,
                learning_rate=work.prepared_run.config.optimizer.lr,
                lr_scheduler_type="constant",
                max_grad_norm=work.clip,
                bf16=work.bf16,
                torch_compile=work.prepared_run.config.compile,
                use_cpu=not on_gpu,
                train_sampling_strategy="sequential",
                dataloader_pin_memory=on_gpu,
                dataloader_num_workers=2 if on_gpu else 0,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=work.windows(),
            optimizers=(work.optimizer(model), None),
            callbacks=[Paced()],
        ).train()


def fabric(work: Work, pace: Pace) -> None:
    """A loop on Lightning Fabric, as its documentation writes it."""
    from lightning.fabric import Fabric

    on_gpu = work.device.type == "cuda"
    runtime = Fabric(
        accelerator=work.device.type,
        devices=1,
        precision="bf16-mixed" if work.bf16 else "32-true",
    )
    gpt = work.model()
    pace.watch(gpt)
    model, optimizer = runtime.setup(work.prepared_model(gpt), work.optimizer(gpt))
    loader = runtime.setup_dataloaders(
        DataLoader(
            work.windows(), work.batch_size, pin_memory=on_gpu, num_workers=2 if on_gpu else 0
        )
    )
    for step, batch in enumerate(loader, 1):
        loss = model(batch["inputs"], batch["targets"]) / batch["targets"].numel()
        runtime.backward(loss)
        runtime.clip_gradients(model, optimizer, max_norm=work.clip)
        optimizer.step()
        optimizer.zero_grad()
        pace.count_steps(step)


CONTENDERS: dict[str, Callable[[Work, Pace], None]] = {
    "instar": instar,
    "bare": bare,
    "plain": plain,
    "hf": hf,
    "fabric": fabric,
}


def main(name: str, request: str) -> None:
    # what libraries print goes to stderr: stdout is for whoever keeps the pace
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    words = json.loads(request)
    loaded_config = load_config(None, words["overrides"])
    prepare_run_data(loaded_config, 1, lambda _: None)
    work = Work(preflight(loaded_config, world_size=1), words["steps"])
    pace = Pace(output, sys.stdin, words["warmup"], words["round"], work.device.type == "cuda")
    pace.wait()
    CONTENDERS[name](work, pace)


if __name__ == "__main__" and len(sys.argv) == 3:
    main(*sys.argv[1:])
