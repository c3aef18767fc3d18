"""Ranks to which something happens; `forks.Child` runs these instead of the bare command line."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import functools
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import savers
import torch

from instar.cli.main import main
from instar.data.columns import Columns
from instar.data.loader import Prefetcher, StepBatch
from instar.data.order import Int64Array, Order
from instar.data.source import Source
from instar.growth import proof
from instar.record import atomic, recorder, system
from instar.record.control import send_request
from instar.run.start import opening, plan, rank_consistency
from instar.run.state import sync_point
from instar.run.trainer import Trainer
from instar.tasks.language import LanguageTask
from instar.tasks.task import Batch

FAILING_STEP = 8
GLOBAL_BATCH = 39
"""of tiny_run's config"""
ROOM_BYTES = 30_000
"""enough for a log, not for the weights"""


def is_rank(rank: int) -> bool:
    """Whether this process is that rank; -1 is the last."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return int(os.environ.get("RANK", "0")) == rank % size


def before_step(number: int, act: Callable[[], None]) -> None:
    """Do something once this rank comes to a step, with no save of an earlier one under way."""
    step = Trainer.step

    def act_and_step(self: Trainer) -> None:
        if self.state.progress.step + 1 == number:
            if self.parts.saver.pending is not None:
                futures.wait([self.parts.saver.pending])
            act()
        step(self)

    Trainer.step = act_and_step  # type: ignore[method-assign]


def full_from_step_8(argv: Sequence[str]) -> int:
    """On rank 0, no file can be larger than a log from step 8 on."""
    if is_rank(0):
        before_step(FAILING_STEP, lambda: _limit_files(ROOM_BYTES))
    return main(argv)


def full_at_step_10(argv: Sequence[str]) -> int:
    """On rank 0, no file can be larger than a log from step 8 to 11."""
    if is_rank(0):
        before_step(FAILING_STEP, lambda: _limit_files(ROOM_BYTES))
        before_step(12, lambda: _limit_files(resource.RLIM_INFINITY))
    return main(argv)


def rank_1_full_at_step_10(argv: Sequence[str]) -> int:
    """On rank 1, no file can be larger than a log from step 8 to 11."""
    if is_rank(1):
        before_step(FAILING_STEP, lambda: _limit_files(ROOM_BYTES))
        before_step(12, lambda: _limit_files(resource.RLIM_INFINITY))
    return main(argv)


def saves_what_it_loaded(argv: Sequence[str]) -> int:
    """A resumed run saves before its first step, too."""
    restore = opening.resume_from

    def resume_from(trainer: Trainer, *arguments: Any, **options: Any) -> None:
        restore(trainer, *arguments, **options)
        trainer.save("what was loaded", must=True)

    opening.resume_from = resume_from
    return main(argv)


def no_deltas_from_step_8(argv: Sequence[str]) -> int:
    """On rank 0, a file is where the folder of the deltas would be from step 8 on."""

    def block() -> None:
        (folder,) = Path.cwd().glob("*/deltas")
        folder.rename(folder.with_name("deltas.aside"))
        folder.touch()

    if is_rank(0):
        before_step(FAILING_STEP, block)
    return main(argv)


def full_from_step_8_to_20(argv: Sequence[str], place: str, copy: str) -> int:
    """With the run on a small disk of its own under `place`, which nothing fits on from step 8 on,
    until three seconds have passed at step 20; the disk is copied to `copy` in the end. The last
    page of the record has room for some of these steps' lines, not for all.

    Where no disk can be mounted, files cannot grow meanwhile.
    """
    folder = Path(place)
    free: list[Callable[[], None]] = []
    try:
        savers.mount_small_disk(folder, 8 << 20)
        filler = folder / "filler"

        def fill() -> None:
            with filler.open("wb", buffering=0) as file:
                for size in (1 << 16, 1):
                    while True:
                        try:
                            file.write(bytes(size))
                        except OSError:
                            break

        free.append(filler.unlink)
    except OSError:

        def fill() -> None:
            _limit_files(1)

        free.append(lambda: _limit_files(resource.RLIM_INFINITY))
    filled_at = [0.0]

    def begin() -> None:
        filled_at[0] = time.monotonic()
        fill()

    def end() -> None:
        threading.Event().wait(filled_at[0] + 3.0 - time.monotonic())
        free[0]()

    before_step(FAILING_STEP, begin)
    before_step(20, end)
    code = main(argv)
    shutil.copytree(folder, copy)
    return code


def full_until_given_up(argv: Sequence[str]) -> int:
    """On rank 0, the record cannot be written from step 8 on, and nobody waits for that to change."""
    recorder.MAX_REFUSED_S, recorder.CLOSE_WAIT_S = 0.0, 0.0

    def fill() -> None:
        for descriptor in Path("/proc/self/fd").iterdir():
            if descriptor.exists() and descriptor.resolve().name == "events.jsonl":
                os.dup2(os.open("/dev/full", os.O_WRONLY), int(descriptor.name))

    if is_rank(0):
        before_step(FAILING_STEP, fill)
    return main(argv)


def without_flock(argv: Sequence[str]) -> int:
    """On a file system that has no locks."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = refuse  # type: ignore[assignment]
    return main(argv)


def deletes_slowly(argv: Sequence[str]) -> int:
    """Deleting takes three seconds."""
    remove = atomic.remove_tree

    def slowly(path: Path) -> None:
        if path.name.startswith(atomic.TRASH):
            threading.Event().wait(3.0)
        remove(path)

    atomic.remove_tree = slowly  # type: ignore[assignment]
    return main(argv)


def rank_1_on_another_host(argv: Sequence[str]) -> int:
    """What is relative to the working directory is on another disk on rank 1."""
    if is_rank(1):
        other = Path.cwd().with_name("other-host")
        shutil.copytree(Path.cwd(), other)
        os.chdir(other)
    return main(argv)


def trains_again_and_again(times: int, overrides: Sequence[str]) -> int:
    """Train as a rank so often, from one script; what is left of each time is said as JSON."""
    import gc
    import json

    import psutil

    from instar import api

    me = psutil.Process()
    # more threads than cores would wait for one another, spinning
    torch.set_num_threads(2 // int(os.environ.get("WORLD_SIZE", "1")))
    flags = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    for number in range(times):
        api.train("run.yaml", [*overrides, f"record.run_dir=run-{number}"])
        gc.collect()
        time.sleep(0.1)  # the system may count a thread a moment longer than it lives
        trainers = sum(type(thing) is Trainer for thing in gc.get_objects())
        usage = {"trainers": trainers, "threads": me.num_threads(), "rss": me.memory_info().rss}
        same = flags == (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
        # one write, which the other rank's cannot divide: torchrun starts ranks unbuffered
        print(f"left {json.dumps(usage | {'flags': same})}\n", end="", flush=True)
    return 0


def counts_workers(argv: Sequence[str]) -> int:
    """Say, in the first step, how many worker processes were started and how many are there."""
    import psutil

    from instar.processes.pool import Workers

    starts = [0]
    start, step = Workers.__init__, Trainer.step

    def count_start(self: Workers, *arguments: Any) -> None:
        starts[0] += 1
        start(self, *arguments)

    def telling(self: Trainer) -> None:
        step(self)
        print("workers", starts[0], len(psutil.Process().children()), flush=True)

    Workers.__init__ = count_start  # type: ignore[method-assign]
    Trainer.step = telling  # type: ignore[method-assign]
    return main(argv)


def saves_once_told_twice(argv: Sequence[str]) -> int:
    """While the save of a stop is written, and while the process leaves, SIGTERM comes again."""
    from instar.cli import training
    from instar.run.output.save import Saver

    save, one_rank = Saver.save, training._one_rank

    def signal_and_save(self: Saver, *arguments: Any, **options: Any) -> None:
        threading.Event().wait(0.5)  # longer than what counts as the same signal
        os.kill(os.getpid(), signal.SIGTERM)
        save(self, *arguments, **options)

    def run_and_signal(*arguments: Any) -> int:
        code = one_rank(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return code

    Saver.save = signal_and_save  # type: ignore[method-assign]
    training._one_rank = run_and_signal  # type: ignore[assignment]
    return main(argv)


def told_to_stop_before_it_starts(argv: Sequence[str]) -> int:
    """SIGTERM comes while the config is checked."""
    preflight = plan.preflight

    def stop_and_preflight(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return preflight(*arguments, **options)

    plan.preflight = stop_and_preflight  # type: ignore[assignment]
    return main(argv)


def rank_1_cannot_write(argv: Sequence[str]) -> int:
    """On rank 1, a checkpoint's files cannot be written from step 8 on."""

    def refuse(path: Path, *_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    if is_rank(1):
        before_step(FAILING_STEP, lambda: setattr(atomic, "write_synced", refuse))
        before_step(FAILING_STEP, lambda: setattr(atomic, "sync_file", refuse))
    return main(argv)


def rank_1_cannot_read(argv: Sequence[str]) -> int:
    """On rank 1, the samples of step 8 cannot be read."""
    take = Prefetcher.take

    def failing(self: Prefetcher, cursor: int, *arguments: Any, **options: Any) -> StepBatch:
        if cursor == (FAILING_STEP - 1) * GLOBAL_BATCH:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return take(self, cursor, *arguments, **options)

    if is_rank(1):
        Prefetcher.take = failing  # type: ignore[method-assign]
    return main(argv)


def rank_1_cannot_read_step(argv: Sequence[str], step: int) -> int:
    """On rank 1, the samples of a step cannot be read."""
    take, calls = Prefetcher.take, [0]

    def failing(self: Prefetcher, cursor: int, *arguments: Any, **options: Any) -> StepBatch:
        calls[0] += 1
        if calls[0] == step:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return take(self, cursor, *arguments, **options)

    if is_rank(1):
        Prefetcher.take = failing  # type: ignore[method-assign]
    return main(argv)


def rank_1_grows_otherwise(argv: Sequence[str]) -> int:
    """On rank 1, what an operation makes new has other values."""
    from instar.growth import engine

    def apply_with_other_key(plan: Any, tensors: Any, role: Any, key: tuple[int, ...]) -> Any:
        return apply_each(plan, tensors, role, (*key, 1))

    apply_each = engine.apply_each
    if is_rank(1):
        engine.apply_each = apply_with_other_key  # type: ignore[assignment]
    return main(argv)


def rank_1_has_no_memory_to_grow(argv: Sequence[str]) -> int:
    """On rank 1, there is no room for a second model."""
    from instar.growth import engine

    def refuse(*_: Any) -> Iterator[None]:
        raise MemoryError("no room for another model")
        yield

    if is_rank(1):
        engine.apply_each = refuse  # type: ignore[assignment]
    return main(argv)


def seeds_by_rank(argv: Sequence[str]) -> int:
    """Each rank was given another seed."""
    return main([*argv, "--set", f"seed={os.environ['RANK']}"])


def rank_1_rounds_more(argv: Sequence[str]) -> int:
    """Of its comparisons before and after growth the first misses the tolerance, as on another GPU."""
    compare = proof.compare_outputs

    def misses_first(*arguments: Any) -> proof.Proof:
        proof.compare_outputs = compare
        return dataclasses.replace(compare(*arguments), holds=False)

    if is_rank(1):
        proof.compare_outputs = misses_first
    return main(argv)


def rank_1_was_given(argv: Sequence[str], text: str) -> int:
    return main([*argv, "--set", text] if is_rank(1) else list(argv))


def stop_is_withdrawn(argv: Sequence[str]) -> int:
    """Rank 0 is asked to stop at step 8, through the run's folder; as soon as all ranks agree, the
    request is withdrawn."""
    finish = sync_point.SyncPoint.finish

    def finish_and_withdraw(self: sync_point.SyncPoint, *arguments: Any) -> None:
        finish(self, *arguments)
        if self.stop_requested and self.inbox is not None:
            for request in self.inbox.requests():
                request.withdraw()

    def request_stop() -> None:
        (folder,) = Path().glob("*/checkpoints")
        send_request(folder.with_name("control"), "stop")

    if is_rank(0):
        before_step(FAILING_STEP, request_stop)
        sync_point.SyncPoint.finish = finish_and_withdraw  # type: ignore[method-assign]
    return main(argv)


def rank_1_cannot_wrap_again(argv: Sequence[str]) -> int:
    """On rank 1, there is no room for DDP's buckets around a second model."""
    from torch.nn.parallel import DistributedDataParallel

    make, calls = DistributedDataParallel.__init__, [0]

    def refuse(self: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        calls[0] += 1
        if calls[0] > 1:
            raise torch.OutOfMemoryError("no room for buckets")
        make(self, *arguments, **options)

    # what calls it looks at its arguments, to know the version of torch
    functools.update_wrapper(refuse, make)
    if is_rank(1):
        DistributedDataParallel.__init__ = refuse  # type: ignore[method-assign]
    return main(argv)


def rank_1_has_no_compiler(argv: Sequence[str]) -> int:
    """Compiled graphs run as they are, which takes no time; on rank 1, none can be compiled."""

    def backend(graph: Any, _: Any) -> Any:
        if is_rank(1):
            raise RuntimeError("no compiler here")
        return graph

    torch.compile = functools.partial(torch.compile, backend=backend)
    return main(argv)


def graphs_run_as_they_are(argv: Sequence[str]) -> int:
    """Compiled graphs run as they are, which takes no time; a line of the file `graphs` is about each."""

    def backend(graph: Any, _: Any) -> Any:
        with Path("graphs").open("a", encoding="utf-8") as file:
            file.write(f"{sum(1 for _ in graph.graph.nodes)} nodes\n")
        return graph

    torch.compile = functools.partial(torch.compile, backend=backend)
    return main(argv)


def bf16_units_except_on_rank(argv: Sequence[str], rank: int) -> int:
    """All processors have fast bf16 units but one."""
    if not is_rank(rank) or rank > 1:
        del os.environ["ONEDNN_MAX_CPU_ISA"]
        system.CPUINFO = Path("cpuinfo")
        rank_consistency.measure_bf16_gain = lambda: 4.0
        system.CPUINFO.write_text("flags\t: avx512_bf16\n", encoding="utf-8")
    return main(argv)


def last_rank_has_nan_once(argv: Sequence[str]) -> int:
    """On the last rank, the loss of step 8 is not a number."""
    return _with_nan(argv, -1, lambda step: step == FAILING_STEP)


def last_rank_has_nan_for_good(argv: Sequence[str]) -> int:
    """On the last rank, no loss is a number from step 8 on."""
    return _with_nan(argv, -1, lambda step: step >= FAILING_STEP)


def rank_1_has_nan_for_good(argv: Sequence[str]) -> int:
    """On rank 1, no loss is a number from step 8 on."""
    return _with_nan(argv, 1, lambda step: step >= FAILING_STEP)


def keeps_little(argv: Sequence[str]) -> int:
    """Of a stream, only the newest samples stay in memory: each pass reads it again."""
    from instar.data import loader
    from instar.data.text.streams import index as stream_index

    stream_index._KEPT_BYTES = 300 * 34  # samples of 17 tokens
    loader.BLOCK_STEPS = 2
    return main(argv)


def data_block_in_epoch_2(argv: Sequence[str]) -> int:
    """On the last rank, reading the second epoch never ends, as from a file server gone away.

    It says so on the terminal that it was started on, once it waits.
    """
    train_samples, take = LanguageTask.train_samples, Prefetcher.take
    terminal, epoch_samples = os.dup(1), 0

    def blocking(self: LanguageTask, course: int = 0) -> tuple[Source, Order]:
        nonlocal epoch_samples
        source, order = train_samples(self, course)
        epoch_samples = order.samples_per_epoch
        return _NeverTwice(source), order

    def telling(self: Prefetcher, cursor: int, *arguments: Any, **options: Any) -> StepBatch:
        if cursor == epoch_samples:
            os.write(terminal, b"waiting for data\n")
        return take(self, cursor, *arguments, **options)

    if is_rank(-1):
        LanguageTask.train_samples = blocking  # type: ignore[method-assign]
        Prefetcher.take = telling  # type: ignore[method-assign]
    return main(argv)


class _NeverTwice:
    """A source that never comes back with a sample which was read before."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._read: set[int] = set()
        self.fingerprint = source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def weights(self, indices: Int64Array) -> float:
        return self._source.weights(indices)

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        numbers = set(indices.tolist())
        if numbers & self._read:
            threading.Event().wait()
        self._read |= numbers
        return self._source.read(indices, epoch)


def notes_what_is_asked_of_ddp(argv: Sequence[str], file: str) -> int:
    """Write down the attributes of DistributedDataParallel that Instar's own code reads."""
    from torch.nn.parallel import DistributedDataParallel

    source_dir, attributes = str(Path(sync_point.__file__).parents[2]), set[str]()
    get = DistributedDataParallel.__getattribute__

    def note_attribute(self: DistributedDataParallel, name: str) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(source_dir):
            attributes.add(name)
        return get(self, name)

    DistributedDataParallel.__getattribute__ = note_attribute  # type: ignore[method-assign]
    code = main(argv)
    if is_rank(0):
        Path(file).write_text(" ".join(sorted(attributes)), encoding="utf-8")
    return code


def _limit_files(room_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))


def _with_nan(argv: Sequence[str], rank: int, at: Callable[[int], bool]) -> int:
    steps = [0]
    step, loss_sum = Trainer.step, LanguageTask.loss_sum

    def count_step(self: Trainer) -> None:
        steps[0] = self.state.progress.step + 1
        step(self)

    def nan_loss(self: LanguageTask, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        loss = loss_sum(self, model, batch)
        return loss * float("nan") if model.training and at(steps[0]) else loss

    if is_rank(rank):
        Trainer.step = count_step  # type: ignore[method-assign]
        LanguageTask.loss_sum = nan_loss  # type: ignore[method-assign]
    return main(argv)


def an_hour_later(argv: Sequence[str]) -> int:
    """The command line, with the clock of the wall an hour ahead."""
    now = time.time
    time.time = lambda: now() + 3600.0
    return main(argv)


def killed_at_step_18(argv: Sequence[str]) -> int:
    """SIGKILL comes before step 18."""
    before_step(18, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return main([*argv])
