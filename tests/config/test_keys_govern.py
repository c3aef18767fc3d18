"""What every key of the config governs changes with it: by a function here, or in a test that is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from governed import GOVERNED
from torch import nn

from instar.api import train
from instar.config.fields import known_tasks, root_of, schema_keys
from instar.config.language import LanguageConfig
from instar.config.load import load_config
from instar.data.order import order_of
from instar.distributed import parallel
from instar.distributed.world import World
from instar.extensions import BUILT_IN, built_in
from instar.models.architecture import resolve_architecture
from instar.models.gpt import GPT
from instar.run.optimizer import build_optimizers, set_learning_rate
from instar.schedule.settings import initial_settings, learning_rate

TESTS = Path(__file__).parents[1]
GRAPHS = "graphs" in built_in()
Change = tuple[str, tuple[str, ...]]
"""an override, and others on both sides under which it has an effect"""


def config_of(*overrides: str) -> Any:
    return load_config(None, overrides, checks=()).config


def gpt(config: Any) -> Any:
    """Sizes of all parameters, and logits of a model in training mode."""
    assert isinstance(config, LanguageConfig)
    model = GPT(resolve_architecture(config.model, 64))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            )
    model.set_step(3)
    tokens = torch.arange(16).reshape(2, 8) % 64
    sizes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    return sizes, round(float(model(tokens, tokens).detach()), 3)


def graph(config: Any) -> Any:
    from instar.extensions.graphs.shape import resolve_graph

    return resolve_graph(config.model, 3, 2, 2)


def updates(config: Any) -> Any:
    """Parameters after two updates with each optimizer that the config makes."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(8, 8)]), "head": nn.Linear(8, 8)})
    parameters = dict(model.named_parameters())
    optimizers = build_optimizers(parameters, config.optimizer)
    for step in range(2):
        set_learning_rate(optimizers, config.optimizer.lr, step)
        for number, parameter in enumerate(parameters.values()):
            generator = torch.Generator().manual_seed(10 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-3
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach().tolist() for name, parameter in parameters.items()}


def rates(config: Any) -> Any:
    return [learning_rate(initial_settings(config), step) for step in range(120)]


def order(config: Any) -> Any:
    return order_of(config.data, 512, config.seed).indices(0, 0, 512).tolist()


COURSE = ("learning_rate.lr_decay_iters=100", "learning_rate.warmup_iters=20")
MUON, SGD = ("optimizer.name=muon",), ("optimizer.name=sgd",)
EXPERTS = ("model.num_experts=4", "model.num_experts_per_tok=2")
FUNCTIONS: Mapping[str, tuple[Callable[[Any], Any], tuple[str, ...], list[Change]]] = {
    "model": (
        gpt,
        ("model.n_layer=2", "model.n_embd=32", "model.n_head=4", "model.context=8"),
        [
            ("model.n_layer=3", ()),
            ("model.n_head=2", ()),
            ("model.n_kv_head=2", ()),
            ("model.n_embd=64", ()),
            ("model.head_dim=16", ()),
            ("model.n_mlp=48", ()),
            ("model.context=16", ()),
            ("model.vocab_size=80", ()),
            ("model.norm=rmsnorm", ()),
            ("model.activation=relu2", ()),
            ("model.positions=rope", ()),
            ("model.bias=false", ()),
            ("model.tied=false", ()),
            ("model.qk_norm=true", ()),
            ("model.qk_norm_eps=0.5", ("model.qk_norm=true",)),
            ("model.conv_size=3", ()),
            ("model.embedding_multiplier=2.0", ()),
            ("model.rope_base=100.0", ("model.positions=rope",)),
            ("model.norm_eps=0.5", ()),
            ("model.dropout=0.5", ()),
            ("model.num_experts=8", EXPERTS),
            ("model.num_experts_per_tok=1", EXPERTS),
        ],
    ),
    "graph": (
        graph,
        ("task=graph",),
        [
            ("model.layer=gat", ()),
            ("model.width=64", ()),
            ("model.n_layer=7", ()),
            ("model.n_mlp=48", ()),
            ("model.n_readout=24", ()),
            ("model.flow=forward", ()),
            ("model.pooling=[sum]", ()),
            ("model.graph_features=true", ()),
            ("model.edge_features=true", ()),
            ("model.heads=[{name: y, kind: regression}]", ()),
        ],
    ),
    "optimizer": (
        updates,
        (),
        [
            ("optimizer.name=sgd", ()),
            ("optimizer.lr=0.01", ()),
            ("optimizer.muon_lr=0.1", MUON),
            ("optimizer.beta1=0.1", ()),
            ("optimizer.beta2=0.1", ()),
            ("optimizer.eps=0.1", ()),
            ("optimizer.weight_decay=0.7", ()),
            ("optimizer.no_decay=['*.weight']", ()),
            ("optimizer.momentum=0.1", SGD),
            ("optimizer.nesterov=true", SGD),
            ("optimizer.ns_steps=2", MUON),
            ("optimizer.ns_iteration=polar_express", MUON),
            ("optimizer.options={alpha: 0.5}", ("optimizer.name=rmsprop",)),
        ],
    ),
    "learning_rate": (
        rates,
        COURSE,
        [
            ("learning_rate.shape=linear", ()),
            ("learning_rate.warmup_iters=10", ()),
            ("learning_rate.lr_decay_iters=50", ()),
            ("learning_rate.decay_fraction=0.5", ("learning_rate.shape=wsd",)),
            (
                "learning_rate.decay_every=7",
                ("learning_rate.shape=step", "learning_rate.warmup_iters=3"),
            ),
            (
                "learning_rate.gamma=0.9",
                (
                    "learning_rate.shape=step",
                    "learning_rate.decay_every=5",
                    "learning_rate.warmup_iters=3",
                ),
            ),
            ("learning_rate.min_lr_ratio=0.5", ()),
            (
                "learning_rate.options={step_size: 7}",
                (
                    "learning_rate.shape=StepLR",
                    "learning_rate.options={step_size: 5}",
                    "learning_rate.lr_decay_iters=null",
                ),
            ),
        ],
    ),
    "data": (
        order,
        (),
        [
            ("data.order=sequential", ()),
            ("seed=3", ()),
            ("data.block_samples=4", ("data.order=blocks",)),
            ("data.shuffle_window=64", ("data.order=blocks", "data.block_samples=8")),
        ],
    ),
}


BASE = {
    "name": "short",
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 32, "context": 16},
    "data": {"source": "text.txt", "path": "tokens", "tokenizer": "char"},
    "train": {"until": "5it", "batch_size": 4},
    "eval": {"eval_interval": 2, "eval_iters": 2},
    "record": {"report": False, "sample_tokens": 0, "log_interval": 2},
    "checkpoint": {"every_steps": 1, "keep_last": 1, "keep_best": 0, "on_best": False},
}
RUN: list[Change] = [
    ("model.router_aux_loss_coef=9.0", EXPERTS),
    ("train.until=6it", ()),
    ("train.batch_size=8", ()),
    ("train.gradient_accumulation_steps=2", ()),
    ("train.clip=1e-3", ()),
    ("train.ema=0.5", ()),
    ("eval.eval_interval=3", ()),
    ("eval.eval_iters=1", ()),
    ("eval.at_start=true", ()),
    ("checkpoint.every_steps=2", ("checkpoint.keep_last=3",)),
    ("checkpoint.every_tokens=128", ("checkpoint.every_steps=null", "checkpoint.keep_last=9")),
    ("checkpoint.keep_last=2", ()),
    ("checkpoint.keep_every=2", ()),
    ("checkpoint.keep_best=2", ("checkpoint.on_best=true",)),
    ("checkpoint.on_best=true", ("checkpoint.every_steps=null", "checkpoint.keep_last=9")),
    ("checkpoint.save_optimizer_state=false", ()),
    ("checkpoint.save_rng_state=false", ()),
    ("checkpoint.delta.every=2", ()),
    ("checkpoint.delta.anchor_every=1", ("checkpoint.delta.every=1",)),
    ("checkpoint.delta.dtype=bf16", ("checkpoint.delta.every=1",)),
    ("record.log_interval=5", ()),
    ("record.layers_every=2", ()),
    ("record.analyze_every=2", ()),
    ("record.sample_tokens=4", ()),
    ("record.sample_every=2", ("record.sample_tokens=4",)),
    ("record.sample_prompt=is", ("record.sample_tokens=4",)),
    ("record.report=true", ()),
    ("test.at_end=true", ("test.weights=last",)),
    ("record.trackers.tensorboard={}", ()),
]


def run_files(folder: Path, *overrides: str) -> Any:
    """What a short run leaves: its files but the record's, and its events without times."""
    run = Path(train(BASE, [*overrides, f"record.run_dir={folder}"]))
    sizes = {
        path.relative_to(run).as_posix(): path.stat().st_size
        for path in run.rglob("*")
        if path.is_file() and path.suffix == ".safetensors"
    }
    names = {path.name for path in run.iterdir()} - {"lock"}
    events = [
        (event["kind"], event.get("step"), event.get("loss"), event.get("text"))
        for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())
    ]
    return sizes, sorted(names), events


def test_each_key_changes_what_a_short_run_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(300)))
    runs: dict[tuple[str, ...], Any] = {}

    def files_after(*overrides: str) -> Any:
        if overrides not in runs:
            runs[overrides] = run_files(tmp_path / f"run-{len(runs)}", *overrides)
        return runs[overrides]

    same = run_files(tmp_path / "same")
    assert files_after() == same
    keys = {*every_key()} - (set() if "board" in built_in() else {"record.report"})
    rows = [(o, more) for o, more in RUN if o.partition("=")[0] in keys]
    assert [o for o, more in rows if files_after(*more, o) == files_after(*more)] == []


@pytest.mark.parametrize(
    "override",
    [
        "bucket_cap_mb=5",
        "find_unused_parameters=true",
        "static_graph=true",
        "gradient_as_bucket_view=false",
        "broadcast_buffers=true",
    ],
)
def test_each_option_reaches_ddp(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        parallel, "DistributedDataParallel", lambda _model, **options: calls.append(options)
    )
    world = World(0, 0, 2, torch.device("cpu"), "gloo")
    for overrides in ((), (f"parallel.ddp.{override}",)):
        parallel.wrap(nn.Linear(2, 2), world, config_of(*overrides).parallel.ddp)
    before, after = calls
    assert before != after


@pytest.mark.parametrize("part", [part for part in FUNCTIONS if part != "graph" or GRAPHS])
def test_each_key_changes_what_a_function_makes_of_the_config(part: str) -> None:
    function, base, changes = FUNCTIONS[part]
    for override, more in changes:
        key = override.partition("=")[0]
        decay_options = (
            ("learning_rate.decay_every=40",) if key == "learning_rate.decay_every" else ()
        )
        before = function(config_of(*base, *more, *decay_options))
        assert before == function(config_of(*base, *more, *decay_options)), override
        assert function(config_of(*base, *more, override)) != before, override


def by_function() -> set[str]:
    """The keys whose effect a test here looks at."""
    of_functions = [change for _, _, changes in FUNCTIONS.values() for change in changes]
    return {override.partition("=")[0] for override, _ in [*of_functions, *RUN]}


def every_key() -> list[str]:
    return list(dict.fromkeys(key for task in known_tasks() for key in schema_keys(root_of(task))))


def test_what_each_key_governs_is_seen_to_change() -> None:
    covered_keys = by_function()
    missing = [
        key
        for key in every_key()
        if key not in covered_keys and not any(fnmatch(key, pattern) for pattern in GOVERNED)
    ]
    assert missing == []


def test_every_row_is_of_a_key_and_its_tests_name_it() -> None:
    for pattern, tests in GOVERNED.items():
        keys = [key for key in every_key() if fnmatch(key, pattern)]
        assert keys or len(built_in()) < len(BUILT_IN), pattern
        for test in tests:
            file, _, function = test.partition("::")
            text = (TESTS / file).read_text(encoding="utf-8")
            assert f"def {function}(" in text, test
            word = re.escape(pattern.rpartition(".")[2]).replace(r"\*", ".*")
            inside = {key.rpartition(".")[2] for key in keys}
            assert any(re.search(rf"\b{name}\b", text) for name in {word, *inside}), test
