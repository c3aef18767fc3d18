"""Ranks that train apart for some steps, to which something happens; `forks.Child` runs these."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import failures
import torch

from instar.cli.main import main
from instar.config.schema import ParallelConfig
from instar.distributed.world import join_group
from instar.run import validation
from instar.run.parallel import diloco
from instar.run.step.hooks import HookContext
from instar.run.trainer import Trainer
from instar.tasks.language import LanguageTask


def _main_with_signal(argv: Sequence[str], number: int, step: int, rank: int) -> int:
    if failures.is_rank(rank):
        failures.before_step(step, lambda: os.kill(os.getpid(), number))
    return main(argv)


def stopped_at_step_17(argv: Sequence[str]) -> int:
    """Rank 1 is asked to stop."""
    return _main_with_signal(argv, signal.SIGTERM, 17, 1)


def rank_1_dies_at_step_7(argv: Sequence[str]) -> int:
    return _main_with_signal(argv, signal.SIGKILL, 7, 1)


def rank_1_freezes_at_step_7(argv: Sequence[str]) -> int:
    return _main_with_signal(argv, signal.SIGSTOP, 7, 1)


def stopped_in_its_first_evaluation(argv: Sequence[str]) -> int:
    """Rank 1 is asked to stop; rank 0 hears of it where they synchronize."""
    evaluate = validation.evaluate_source

    def evaluate_and_stop(*arguments: object, **options: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments, **options)  # type: ignore[arg-type]

    if failures.is_rank(1):
        validation.evaluate_source = evaluate_and_stop  # type: ignore[assignment]
    return main(argv)


def rank_1_has_nan_in_step_1(argv: Sequence[str]) -> int:
    return failures._with_nan(argv, 1, lambda step: step == 1)


def rank_1_cannot_evaluate(argv: Sequence[str]) -> int:
    """On rank 1, the second micro-batch of an evaluation fails."""
    measure, calls = LanguageTask.measure, [0]

    def failing(self: LanguageTask, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError("the disk is gone")
        return measure(self, *arguments, **options)

    if failures.is_rank(1):
        LanguageTask.measure = failing  # type: ignore[method-assign]
    return main(argv)


class _Waiting:
    """Has something to do around every step."""

    def on_step_begin(self, run: HookContext) -> None:
        pass

    def on_step_end(self, run: HookContext) -> None:
        pass


def counts_messages(argv: Sequence[str]) -> int:
    """Say after every step how many exchanges with other ranks there were in it."""
    step = Trainer.step

    def count_step(self: Trainer) -> None:
        before = self.parts.world.position.n_arrived
        step(self)
        os.write(terminal, f"messages {self.parts.world.position.n_arrived - before}\n".encode())

    terminal = os.dup(1)
    Trainer.step = count_step  # type: ignore[method-assign]
    LanguageTask.hooks = lambda _: [_Waiting()]  # type: ignore[method-assign]
    torch.set_num_threads(1)
    return main(argv)


SHAPES = (3,), (2, 2), (), (7, 1), (5,)


def checks_means(bits: str) -> int:
    """The mean of normal numbers, in messages of about six elements; 0: it is right."""
    diloco.BUCKET = 6
    with join_group(ParallelConfig(), "cpu") as world:
        everyones = [_random_tensors(rank) for rank in range(world.size)]
        dtype = getattr(torch, bits)
        means = diloco.mean_over_ranks(world, everyones[world.rank], dtype)
    for mean, tensors in zip(means, zip(*everyones, strict=True), strict=True):
        expected = (
            torch.stack([tensor.to(dtype).float() for tensor in tensors]).mean(0).to(dtype).float()
        )
        torch.testing.assert_close(
            mean, expected, rtol=0.01 if bits == "bfloat16" else 1e-6, atol=1e-6
        )
    return 0


def _random_tensors(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]
