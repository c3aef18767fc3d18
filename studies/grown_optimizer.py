"""What a plain loop sees of a growth: the losses of the next 20 steps, with the optimizer's state kept and reset.

    python benchmarks/grown_optimizer.py [--quick]

A Llama of transformers trains under AdamW on bytes of Python's standard library, at a constant rate after
a warm-up. Copies of it grow by `instar.growth.grow` by operations that keep the function, and make 20
steps; one copy is not grown. All make them on the same batches, in several orders of batches and with
several seeds. Said is how far the mean of their losses is from that of the copy that is not grown,
against the range of the latter's own mean over the orders, and how far the worst step is above its.
"""

from __future__ import annotations

import copy
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from instar.growth import grow
from report import case, options, parser, publish

OPERATIONS: Mapping[str, Mapping[str, Any]] = {
    "widen_mlp x2": {"name": "widen_mlp", "value": "x2"},
    "widen_mlp x2, split": {"name": "widen_mlp", "value": "x2", "how": "split"},
    "insert_layers 2": {"name": "insert_layers", "value": 2},
    "widen_hidden x1.5": {"name": "widen_hidden", "value": "x1.5"},
    "add_heads 4": {"name": "add_heads", "value": 4},
}
STATES: Mapping[str, Mapping[str, Any]] = {"state kept": {}, "state reset": {"moments": "reset"}}


@dataclass(frozen=True)
class Effort:
    """How large and how long everything is."""

    width: int
    layers: int
    context: int
    batch: int
    before: int
    """steps"""
    after: int
    orders: int
    seeds: tuple[int, ...]
    operations: tuple[str, ...]


FULL = Effort(64, 3, 64, 16, 400, 20, 4, (1, 2, 3), tuple(OPERATIONS))
QUICK = replace(
    FULL, width=16, context=16, batch=2, before=3, after=2, orders=2, seeds=(1,),
    operations=("insert_layers 2",),
)  # fmt: skip


class Run:
    """A model in training."""

    def __init__(self, effort: Effort, seed: int) -> None:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=effort.width,
            intermediate_size=2 * effort.width,
            num_hidden_layers=effort.layers,
            num_attention_heads=4,
            max_position_embeddings=effort.context,
        )
        self.model = LlamaForCausalLM(config)
        self.optimizer = AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)

    def steps(self, batches: Iterable[Tensor]) -> Tensor:
        """Make a step on each batch; return their losses."""
        losses = []
        for ids in batches:
            self.optimizer.zero_grad()
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return torch.tensor(losses)

    def warm_up(self, batches: Iterable[Tensor], steps: int) -> None:
        for number, ids in enumerate(batches):
            for group in self.optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, (number + 1) / steps)
            self.steps([ids])


def main() -> None:
    run_options = options(parser(__doc__).parse_args())
    effort = QUICK if run_options.quick else FULL
    text = torch.cat([*map(read, sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))])
    ranges: list[float] = []
    off: dict[str, list[float]] = {}
    worst: dict[str, list[float]] = {}
    for seed in effort.seeds:
        trunk = Run(effort, seed)
        trunk.warm_up(batches(text, effort, seed, effort.before), max(1, effort.before // 8))
        orders = [
            [*batches(text, effort, 1000 * seed + order, effort.after)]
            for order in range(1, effort.orders + 1)
        ]
        ungrown_losses = [copy.deepcopy(trunk).steps(order) for order in orders]
        means = torch.stack(ungrown_losses).mean(1)
        ranges.append(float(means.max() - means.min()))
        print(f"seed {seed}: loss {means.mean():.3f}, range {ranges[-1]:.3f}", file=sys.stderr)
        for operation, state in product(effort.operations, STATES):
            for order, ungrown in zip(orders, ungrown_losses, strict=True):
                run = copy.deepcopy(trunk)
                entry = {**OPERATIONS[operation], **STATES[state]}
                grow(run.model, entry, optimizer=run.optimizer)
                above = run.steps(order) - ungrown
                what = f"{operation}, {state}"
                off.setdefault(what, []).append(abs(float(above.mean())) / ranges[-1])
                worst.setdefault(what, []).append(max(0.0, float(above.max())))
    cases = [case("not grown: range of the mean loss over orders of batches", ranges, "nats")]
    for what in off:
        bar = 1.0 if what.endswith("kept") else None
        cases += [
            case(f"{what}: mean loss off / range", off[what], "ratio", most=bar),
            case(f"{what}: worst step above", worst[what], "nats"),
        ]
    threads = torch.get_num_threads()
    publish("grown_optimizer", cases, run_options, libraries=["transformers"], threads=threads)


def read(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes() or b"\n"), dtype=torch.uint8)


def batches(text: Tensor, effort: Effort, seed: int, count: int) -> Iterable[Tensor]:
    """Windows of bytes at places drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        places = torch.randint(0, len(text) - effort.context, (effort.batch,), generator=generator)
        yield text[places[:, None] + torch.arange(effort.context)].long()


if __name__ == "__main__":
    main()
