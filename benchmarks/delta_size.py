"""How small deltas of real training are, and how fast they are made and applied.

    python benchmarks/delta_size.py [--quick]

A GPT learns the text of docs/ and is then fine-tuned with AdamW at each of three rates. Its bf16
weights go into a chain at every step from the first on: those of a training in bf16 throughout, and
bf16 copies of fp32 weights, as reinforcement learning hands them to an inference server. The speed is
that of a core: bytes of the full weights by processor time, files and hashes included.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from instar.config.language import ModelConfig
from instar.extensions.delta.chain import append
from instar.extensions.delta.format.statistics import statistics
from instar.extensions.delta.replay import apply_file, create_file
from instar.models.architecture import resolve_architecture
from instar.models.gpt import GPT
from report import Case, case, options, parser, publish

RATES = {1e-6: 80, 3e-6: 40, 1e-5: 20}
"""Learning rates, and how many times smaller a delta is to be than the weights."""
DOCS = Path(__file__).parents[1] / "docs"
CONTEXT, BATCH = 64, 4
DENSITY = 0.01
"""of the weights whose speed is measured"""


def main() -> None:
    run_options = options(parser(__doc__).parse_args())
    torch.set_num_threads(1)
    # matrices of 262,144 elements and more: in small ones, headers and tables count
    shape, warm_up, steps = ((2, 512), 100, 50) if not run_options.quick else ((1, 32), 2, 3)
    size_mib, repeats = (256, 5) if not run_options.quick else (4, 1)
    cases = [entry for rate in RATES for entry in sizes(rate, shape, warm_up, steps)]
    publish(
        "delta_size", [*cases, *speeds(size_mib, repeats)], run_options, libraries=["zstandard"]
    )


def sizes(rate: float, shape: tuple[int, int], warm_up: int, steps: int) -> list[Case]:
    """Ratios of the links of a fine-tuning, for both kinds of bf16 weights."""
    cases = []
    for kind, dtype in (("bf16 throughout", torch.bfloat16), ("bf16 of fp32", torch.float32)):
        with tempfile.TemporaryDirectory() as folder:
            chain = Path(folder)
            before = None
            for step, weights in enumerate(fine_tuned(rate, shape, warm_up, steps, dtype)):
                append(chain, step, weights, before)
                before = weights
            link_statistics = statistics(chain)
        name = f"AdamW at {rate:g}, {kind}"
        density = [100 * link.whole.density for link in link_statistics]
        overlap = [link.whole.overlap for link in link_statistics if link.whole.overlap is not None]
        cases += [
            case(
                f"{name}: full weights / delta",
                [e.ratio for e in link_statistics],
                "x",
                least=RATES[rate],
            ),
            case(f"{name}: weights that change", density, "%"),
            case(f"{name}: overlap with the step before", overlap, ""),
        ]
    return cases


def fine_tuned(
    rate: float, shape: tuple[int, int], warm_up: int, steps: int, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """Yields copies of the bf16 weights before the first step of the fine-tuning and after each."""
    model = copy.deepcopy(pretrain_model(shape, warm_up)).to(dtype)
    batches = random_batches(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    for step in range(steps + 1):
        if step:
            train(model, optimizer, next(batches))
        yield {
            name: value.detach().to(torch.bfloat16, copy=True)
            for name, value in model.named_parameters()
        }


@cache
def pretrain_model(shape: tuple[int, int], steps: int) -> GPT:
    """Returns a model that has learned some of the text, in fp32."""
    layers, width = shape
    config = ModelConfig(n_layer=layers, n_head=layers, n_embd=width, context=CONTEXT)
    model = GPT(resolve_architecture(config, 256))
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _, batch in zip(range(steps), random_batches(seed=0), strict=False):
        train(model, optimizer, batch)
    return model


def random_batches(seed: int) -> Iterator[Tensor]:
    text = "".join(path.read_text("utf-8") for path in sorted(DOCS.glob("*.md"))).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    chance = torch.Generator().manual_seed(seed)
    while True:
        begins = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,), generator=chance)
        yield torch.stack([tokens[begin : begin + CONTEXT + 1] for begin in begins])


def train(model: GPT, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    low = next(model.parameters()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = model(batch[:, :-1], batch[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def speeds(size_mib: int, repeats: int) -> list[Case]:
    """Bytes of full weights per second of a core, of creating and applying a link."""
    from safetensors.torch import save_file

    chance = torch.Generator().manual_seed(0)
    old = {
        f"layers.{i}.weight": (0.02 * torch.randn(1 << 20, generator=chance)).bfloat16()
        for i in range(size_mib // 2)
    }
    new = {}
    for name, tensor in old.items():
        steps = torch.randint(0, 2, tensor.shape, generator=chance, dtype=torch.int16) * 2 - 1
        change_mask = torch.rand(tensor.shape, generator=chance) < DENSITY
        new[name] = (tensor.view(torch.int16) + steps * change_mask).view(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        base, target, link, out = (Path(folder) / name for name in ("base", "new", "link", "out"))
        save_file(old, base)
        save_file(new, target)
        create = [processor_s(lambda: create_file(base, target, link)) for _ in range(repeats)]
        apply = [processor_s(lambda: apply_file(base, link, out)) for _ in range(repeats)]
        ratio = base.stat().st_size / link.stat().st_size
    size_mb = size_mib * 2**20 / 1e6
    return [
        case(
            "creating a delta, 1 % changed",
            [size_mb / seconds for seconds in create],
            "MB/s",
            least=500,
        ),
        case(
            "applying a delta, 1 % changed",
            [size_mb / seconds for seconds in apply],
            "MB/s",
            least=500,
        ),
        case("full weights / delta, 1 % changed", [ratio], "x"),
    ]


def processor_s(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
