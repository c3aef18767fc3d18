"""A tiny real data set and trainers on it, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from instar.config.load import Loaded, load_config
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal
from instar.distributed.world import World
from instar.record import device
from instar.record.console import silent_console
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir
from instar.run.start.build import RunOutputs, build_trainer
from instar.run.start.preflight import Prepared, preflight, prepare_run_data
from instar.run.trainer import Trainer

TEXT = "".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(300))

TINY = [
    "name=tiny",
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=32",
    "model.context=16",
    "data.tokenizer=char",
    "data.order=shuffled",
    "train.until=[8it]",
    "train.batch_size=4",
    "train.gradient_accumulation_steps=2",
    "learning_rate.warmup_iters=2",
    "record.log_interval=1",
    "record.sample_tokens=4",
    "record.report=false",
    "eval.eval_interval=1000",
]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of some 10 kB, prepared once as characters."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "squares.txt").write_text(TEXT, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def config_in(corpus: Path) -> Callable[..., Loaded]:
    """config_in(folder, *overrides): a tiny run's config under `key=value` texts, for runs in a folder;
    its data set is there."""

    def load(folder: Path, *overrides: str) -> Loaded:
        loaded_config = load_config(
            None,
            [
                *TINY,
                f"data.source={corpus / 'squares.txt'}",
                f"data.path={corpus / 'tokens'}",
                f"record.out_dir={folder / 'runs'}",
                *overrides,
            ],
        )
        prepare_run_data(loaded_config, 1, lambda _: None)
        return loaded_config

    return load


@pytest.fixture
def config(config_in: Callable[..., Loaded], tmp_path: Path) -> Callable[..., Loaded]:
    """A tiny run's config under `key=value` texts; its data set is there."""
    return partial(config_in, tmp_path)


@pytest.fixture
def prepare_run(config: Callable[..., Loaded]) -> Callable[..., Prepared]:
    return lambda *overrides: preflight(config(*overrides), world_size=1)


@pytest.fixture
def trainer(
    prepare_run: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Trainer]]:
    """Trainers on one thread, whose events go to `<tmp_path>/<name>.jsonl`. How fast the processor is,
    they measure by small products."""
    monkeypatch.setattr(device, "_CPU_SIDES", (64,))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ExitStack() as stack:

        def make(*overrides: str, name: str = "events", **options: Any) -> Trainer:
            world = World(0, 0, 1, torch.device("cpu"), "none")
            run_dir = RunDir(tmp_path / name)
            run_dir.path.mkdir()
            sink = Recorder(tmp_path / f"{name}.jsonl")
            stack.callback(sink.close)
            tiny_trainer = build_trainer(
                prepare_run(*overrides),
                world,
                RunOutputs(
                    options.get("signal", StopSignal()),
                    sink,
                    silent_console(),
                    RankLog(0),
                    run_dir,
                ),
            )
            stack.callback(tiny_trainer.close)
            return tiny_trainer

        yield make
    torch.set_num_threads(threads)


@pytest.fixture
def losses(tmp_path: Path) -> Callable[[str], list[float]]:
    """The recorded training losses of the run named."""
    from instar.record.events import Train, read_events

    return lambda name: [
        event.loss for event in read_events(tmp_path / f"{name}.jsonl") if isinstance(event, Train)
    ]
