"""Tells the record and the display what a run does."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from instar.config.budget import Budget
from instar.data.feed import StepBatch
from instar.distributed.agree import reduce_sums
from instar.distributed.world import World
from instar.record.console import Console
from instar.record.events import Eval, RunFinished, RunStarted, Saved, Skip, Stop, Train
from instar.record.recorder import Sink
from instar.record.system import memory_bytes
from instar.run.evaluate import Evaluation
from instar.run.progress import Progress
from instar.run.step import StepResult
from instar.run.stop import Decision

logger = logging.getLogger(__name__)


class Narrator:
    """Gathers what steps did and speaks of it every `log_interval` steps.

    Losses are exact means over all ranks and over all steps since the last time it spoke.
    """

    def __init__(
        self,
        world: World,
        sink: Sink,
        console: Console,
        *,
        log_interval: int,
        samples_per_epoch: int,
        budgets: Sequence[Budget],
        peak_flops: float,
    ) -> None:
        """`peak_flops`: FLOPs per second that all ranks' devices reach together, measured."""
        self.world, self.sink, self.console = world, sink, console
        self.log_interval = log_interval
        self.samples_per_epoch = samples_per_epoch
        self.budgets = budgets
        self.peak_flops = peak_flops
        self.started = time.monotonic()
        self.best: tuple[float, int] | None = None
        self.last_loss: float | None = None
        self.since = Progress()
        self._forget(Progress())

    def _forget(self, progress: Progress) -> None:
        self.since = progress
        self.loss_sum: torch.Tensor | None = None
        self.weight = 0.0

    def opened(self, event: RunStarted, where: Path) -> None:
        """The run begins; its clock too."""
        self.sink.write(event)
        self.console.header(event, where)

    def stepped(self, progress: Progress, batch: StepBatch, result: StepResult, lr: float) -> None:
        """Take in one step; speak at the first step and at every `log_interval`-th."""
        total = result.loss_sum
        self.loss_sum = total if self.loss_sum is None else self.loss_sum + total
        self.weight += batch.weight
        if progress.step > 1 and progress.step % self.log_interval:
            return
        sums = reduce_sums(self.world, {"loss": self.loss_sum.item()})
        self.last_loss = sums["loss"] / self.weight
        seconds = progress.active_s - self.since.active_s
        event = Train(
            **self._place(progress),
            loss=self.last_loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens_per_s=(progress.tokens - self.since.tokens) / seconds,
            mfu=(progress.flops - self.since.flops) / seconds / self.peak_flops,
            memory_bytes=memory_bytes(str(self.world.device)),
        )
        self.sink.write(event)
        self.console.train(event, self._eta(progress))
        logger.info("step %d: loss %.4f, gradient norm %.3f", progress.step, event.loss, result.grad_norm)
        self._forget(progress)

    def skipped(self, progress: Progress, consecutive: int) -> None:
        self.sink.write(Skip(**self._place(progress), consecutive=consecutive))
        self.console.warn(f"step {progress.step}: gradient not finite, update skipped on all ranks")

    def evaluated(self, progress: Progress, result: Evaluation) -> None:
        best = self.best is None or result.loss < self.best[0]
        if best:
            self.best = (result.loss, progress.step)
        event = Eval(
            **self._place(progress),
            split="val",
            loss=result.loss,
            eval_tokens=round(result.weight),
            seconds=result.seconds,
            best=best,
        )
        self.sink.write(event)
        self.console.evaluated(event)
        logger.info("step %d: validation loss %.4f", progress.step, result.loss)

    def saved(self, progress: Progress, path: Path, seconds: float, size_bytes: int) -> None:
        event = Saved(
            **self._place(progress), path=str(path), seconds=seconds, size_bytes=size_bytes
        )
        self.sink.write(event)
        self.sink.sync()

    def closed(self, progress: Progress, decision: Decision, where: Path) -> None:
        """The run ends in order: the reason, then the totals."""
        place = self._place(progress)
        self.sink.write(Stop(**place, reason=decision.reason, resumable=decision.interrupted))
        event = RunFinished(
            **place,
            loss=self.last_loss,
            best_loss=self.best[0] if self.best else None,
            best_step=self.best[1] if self.best else None,
            tokens_per_s=progress.tokens / progress.active_s if progress.active_s else None,
        )
        self.sink.write(event)
        stopped = decision.reason if decision.interrupted else ""
        self.console.finished(event, where, stopped=stopped)

    def wall_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.started

    def _place(self, progress: Progress) -> dict[str, float]:
        return {
            "step": progress.step,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "epoch": progress.samples / self.samples_per_epoch,
            "flops": progress.flops,
            "wall_s": self.wall_s(),
            "active_s": progress.active_s,
        }

    def _eta(self, progress: Progress) -> float | None:
        """Seconds until the first counted or timed budget is used up, at the pace so far."""
        wall = self.wall_s()
        used = {
            "steps": float(progress.step),
            "tokens": float(progress.tokens),
            "samples": float(progress.samples),
            "epochs": progress.samples / self.samples_per_epoch,
            "seconds": wall,
        }
        left = [
            wall * (budget.amount / used[budget.kind] - 1.0)
            for budget in self.budgets
            if budget.kind != "loss" and used[budget.kind] > 0
        ]
        return max(0.0, min(left)) if left else None
