"""How much memory the tensors of a real rank take, moment by moment."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from instar.config.load import load_config
from instar.distributed.agree import raise_on_all_ranks
from instar.distributed.rank_log import RankLog
from instar.distributed.shards import to_local
from instar.distributed.signals import StopSignal
from instar.distributed.world import join_group
from instar.growth import engine
from instar.growth.proof import Proof
from instar.record.console import silent_console
from instar.record.recorder import Silent
from instar.record.rundir import RunDir
from instar.run.changes.scheduled import carry_out
from instar.run.start.build import RunOutputs, build_trainer
from instar.run.start.preflight import preflight, prepare_run_data
from instar.run.step.stepper import Stepper
from instar.run.trainer import Trainer


class LiveBytes(TorchDispatchMode):
    """Adds up, after every operation on this thread, what the tensors take that it has seen. `fully_shard`
    frees parameters by making their memory smaller: `resizing` tells of it."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self._total = 0
        self._open: list[int] = []
        self.highest: dict[str, int] = {}
        """within each moment, apart from moments inside it"""
        self.at_end: dict[str, int] = {}
        """at the end of each moment"""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, output)):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._see(to_local(tensor).untyped_storage())
        if self._open:
            self._open[-1] = max(self._open[-1], self._total)
        return output

    def _see(self, storage: UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        ref, before = self._storages.get(key, (None, 0))
        if ref is None or ref() is None:
            ref = weakref.ref(storage, partial(self._forget, key))
        self._total += size - before
        self._storages[key] = ref, size

    def _forget(self, key: int, ref: weakref.ref[UntypedStorage]) -> None:
        if key in self._storages and self._storages[key][0] is ref:
            self._total -= self._storages.pop(key)[1]

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """While storages are made smaller or larger beside tensors' operations."""
        resize = UntypedStorage.resize_

        def resize_and_see(storage: UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._storages:
                self._see(storage)
            return result

        UntypedStorage.resize_ = resize_and_see  # type: ignore[method-assign]
        try:
            yield
        finally:
            UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def now(self) -> int:
        alive = [(ref(), size) for ref, size in list(self._storages.values())]
        sizes = [storage.nbytes() for storage, _ in alive if storage is not None]
        assert sum(sizes) == self._total, "a size has changed unseen"
        return self._total

    @contextmanager
    def moment(self, name: str) -> Iterator[None]:
        self._open.append(self.now())
        try:
            yield
        finally:
            self.highest[name], self.at_end[name] = self._open.pop(), self.now()


def run(folder: str, name: str, keys: Sequence[str]) -> int:
    """The body of a rank: builds a run, takes two steps, grows the model as its schedule says, and
    writes its bytes."""
    loaded_config = load_config(
        str(Path(folder, "run.yaml")), [*keys, f"record.run_dir={folder}/{name}"]
    )
    torch.set_num_threads(1)
    with join_group(loaded_config.config.parallel, "cpu") as world:
        with raise_on_all_ranks(world, "preparing data"):
            if world.is_main:
                prepare_run_data(loaded_config, world.size, lambda _: None)
        preparation = preflight(loaded_config, world.size)
        Path(folder, name).mkdir(exist_ok=True)
        outputs = silent_console(), RankLog(world.rank), RunDir(Path(folder, name))
        with LiveBytes() as live, live.resizing():
            with live.moment("start"):
                trainer = build_trainer(
                    preparation, world, RunOutputs(StopSignal(), Silent(), *outputs)
                )
            with closing(trainer):
                _steps(trainer, live)
        peaks = {"highest": live.highest, "at_end": live.at_end}
        Path(folder, f"{name}-{world.rank}.json").write_text(json.dumps(peaks))
    return 0


def _steps(trainer: Trainer, live: LiveBytes) -> None:
    parts, update, prove = trainer.parts, Stepper._update, engine.prove

    def updating(stepper: Stepper) -> float:
        with live.moment("gradients"):
            pass
        return update(stepper)

    def proving(*arguments: Any, **options: Any) -> Proof:
        with live.moment("proof"):
            return prove(*arguments, **options)

    trainer.step()
    Stepper._update = updating  # type: ignore[method-assign]
    engine.prove = proving
    with live.moment("step"):
        trainer.step()
    with live.moment("growth"):
        trainer.state = carry_out(trainer.state, parts, parts.entries[0].operation)
    Stepper._update = update  # type: ignore[method-assign]
    with live.moment("grown"):
        trainer.step()
