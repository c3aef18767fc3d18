"""Speed of training with masks between packed documents, as a share of plain packing.

    python benchmarks/document_masks.py [--quick]

A GPT, and a Llama of transformers, take turns of steps on the same tokens: 8 documents in each row of 256 tokens, with and without
`positions`. A figure is the median of the ratios of neighbouring turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from instar.config.language import ModelConfig
from instar.models.architecture import resolve_architecture
from instar.models.gpt import GPT
from instar.models.hf.config import complete_config
from instar.models.hf.module import PretrainedModel
from instar.models.hf.pretrained import LoraShape
from report import case, options, parser, publish

ROWS, CONTEXT, DOCUMENTS, VOCABULARY = 8, 256, 8, 512
STEPS = 5


def gpt() -> nn.Module:
    shape = ModelConfig(n_layer=4, n_head=4, n_embd=128, context=CONTEXT)
    model = GPT(resolve_architecture(shape, VOCABULARY))
    model.init_weights(0)
    return model


def llama() -> nn.Module:
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    return PretrainedModel(LoraShape(complete_config({"model_type": "llama", **sizes})), seed=0)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and positions, [rows, context]."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (ROWS, CONTEXT + 1), generator=generator)
    positions = torch.empty(ROWS, CONTEXT, dtype=torch.long)
    for row in range(ROWS):
        cuts = torch.randperm(CONTEXT - 1, generator=generator)[: DOCUMENTS - 1] + 1
        edges = [0, *sorted(cuts.tolist()), CONTEXT]
        for begin, end in pairwise(edges):
            positions[row, begin:end] = torch.arange(end - begin)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions


def turn(model: nn.Module, optimizer: torch.optim.Optimizer, positions: Tensor | None) -> float:
    """Return the seconds of some steps."""
    inputs, targets, _ = batch()
    begin = time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(inputs, targets, positions_BT=positions) / targets.numel()).backward()
        optimizer.step()
    return time.perf_counter() - begin


def shares(make: Callable[[], nn.Module], rounds: int) -> list[float]:
    """Return the speed with masks as a share of that without, of each pair of turns."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    positions = batch()[2]
    for places in (None, positions):
        turn(model, optimizer, places)
    ratios = []
    for number in range(rounds):
        order = (None, positions) if number % 2 else (positions, None)
        seconds = {places is None: turn(model, optimizer, places) for places in order}
        ratios.append(seconds[True] / seconds[False])
    return ratios


def main() -> None:
    run_options = options(parser(__doc__).parse_args())
    rounds = 1 if run_options.quick else 21
    models = {"Instar's GPT": gpt, "a Llama of transformers": llama}
    what = (
        f"{DOCUMENTS} documents in rows of {CONTEXT}: speed with masks, as a share of plain packing"
    )
    cases = [
        case(f"{name}, {what}", shares(make, rounds), "", least=0.8)
        for name, make in models.items()
    ]
    threads = torch.get_num_threads()
    publish("document_masks", cases, run_options, libraries=["transformers"], threads=threads)


if __name__ == "__main__":
    main()
