"""Tells the record and the display what a run does."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from instar.config.budget import Budget
from instar.config.dump import in_yaml
from instar.data.reader import StepBatch
from instar.distributed.agree import reduce_sums
from instar.distributed.world import World
from instar.growth.moments import moments_mode
from instar.growth.proof import Proof
from instar.models.shape import count_parameters
from instar.record.console import Console
from instar.record.events import (
    Analysis,
    Eval,
    Layers,
    NewGradients,
    Operation,
    Placed,
    RunFinished,
    RunStarted,
    Saved,
    Skip,
    Stop,
    Train,
    Warn,
    Wrote,
)
from instar.record.lines import confusion_lines, si
from instar.record.recorder import Sink
from instar.record.system import memory_bytes
from instar.run.alarm import GradientWatch
from instar.run.analyst import Finding
from instar.run.evaluate import Evaluation
from instar.run.layers import LayerWatch
from instar.run.progress import Progress
from instar.run.standstill import Standing
from instar.run.step import StepResult
from instar.run.stop import Decision
from instar.run.tell import changed_text, differences, log_block
from instar.schedule.operations import Change, State

if TYPE_CHECKING:
    from instar.run.final import Tested
    from instar.run.saving import Save

logger = logging.getLogger(__name__)

LARGEST_TABLE = 12
"""classes whose confusions are shown"""

P = TypeVar("P", bound=Placed)

_MEMORY = {
    "asymmetric": "optimizer mapped",
    "mapped": "optimizer mapped, copies alike",
    "reset": "optimizer reset",
}
"""What an operation made of the optimizer's memory."""


class Narrator:
    """Gathers what steps did and speaks of it every `log_interval` steps.

    Recorded losses are exact means over all ranks and all steps since the last time it spoke;
    what a terminal shows in between is rank 0's own share of one step.
    """

    def __init__(
        self,
        world: World,
        sink: Sink,
        console: Console,
        *,
        log_interval: int,
        budgets: Sequence[Budget],
        peak_flops: float,
    ) -> None:
        """`peak_flops`: FLOPs per second that all ranks' devices reach together, measured."""
        self.world, self.sink, self.console = world, sink, console
        self.log_interval = log_interval
        self.epochs: Callable[[int], float] = lambda _: 0.0
        """passes through the data at a cursor; the trainer knows"""
        self.budgets = budgets
        self.peak_flops = peak_flops
        self.started = time.monotonic()
        self.last_loss: float | None = None
        self.since = Progress()
        self._forget(Progress())

    def _forget(self, progress: Progress) -> None:
        self.since = progress
        self.loss_sum: torch.Tensor | None = None
        self.weight = 0.0
        self.waited_s = 0.0

    def opened(self, event: RunStarted, where: Path, *, only_test: bool = False) -> None:
        """The run begins; its clock too. A test alone does not supersede what came after its step."""
        if not only_test:
            self.sink.write(event)
        self.console.header(event, where)

    def waited(self, seconds: float) -> None:
        """Samples were so long in coming."""
        self.waited_s += seconds

    def stepped(self, progress: Progress, batch: StepBatch, result: StepResult, lr: float) -> None:
        """Take in one step; speak at the first step and at every `log_interval`-th."""
        total = result.loss_sum
        self.loss_sum = total if self.loss_sum is None else self.loss_sum + total
        self.weight += batch.weight
        if progress.step > 1 and progress.step % self.log_interval:
            if self.console.due:
                weight = sum(micro.weight for micro in batch.micro_batches)
                loss = total.item() / weight if weight else math.nan
                event = self._train_event(progress, loss, result.grad_norm, lr)
                self.console.progress(event, self._eta(progress))
            return
        sums = reduce_sums(self.world, {"loss": self.loss_sum.item()})
        self.last_loss = sums["loss"] / self.weight
        event = self._train_event(progress, self.last_loss, result.grad_norm, lr)
        self.console.train(self._write(progress, event), self._eta(progress))
        logger.info(
            "step %d: loss %.4f, gradient norm %.3f", progress.step, event.loss, result.grad_norm
        )
        self._forget(progress)

    def _train_event(self, progress: Progress, loss: float, grad_norm: float, lr: float) -> Train:
        seconds = progress.active_s - self.since.active_s
        return Train(
            step=progress.step,
            tokens=progress.tokens,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens_per_s=(progress.tokens - self.since.tokens) / seconds,
            mfu=(progress.flops - self.since.flops) / seconds / self.peak_flops,
            data_wait=self.waited_s / seconds,
            memory_bytes=memory_bytes(str(self.world.device)),
        )

    def layered(self, progress: Progress, layers: LayerWatch) -> None:
        """What the step did to each layer; gradients that are not finite moved nothing."""
        self._write(
            progress,
            Layers(
                step=progress.step,
                grad_norm=dict(layers.grad_norm),
                update_ratio=dict(layers.update_ratio),
            ),
        )

    def wrote(self, progress: Progress, prompt: str, text: str) -> None:
        """The model has written something."""
        self._write(progress, Wrote(step=progress.step, prompt=prompt, text=text))
        logger.info("step %d: wrote %r", progress.step, text)

    def skipped(self, progress: Progress, consecutive: int) -> None:
        self._write(progress, Skip(step=progress.step, consecutive=consecutive))
        self.console.warn(f"step {progress.step}: gradient not finite, update skipped on all ranks")

    def evaluated(
        self, progress: Progress, result: Evaluation, *, best: Sequence[str], split: str = "val"
    ) -> None:
        event = Eval(
            step=progress.step,
            split=split,
            loss=result.loss,
            eval_tokens=round(result.weight),
            seconds=result.seconds,
            standard_error=result.metrics["loss"].standard_error,
            best=bool(best),
            extra={name: m.value for name, m in result.metrics.items() if name != "loss"},
            errors={
                name: m.standard_error
                for name, m in result.metrics.items()
                if name != "loss" and m.standard_error is not None
            },
        )
        self.console.evaluated(self._write(progress, event))
        told = {"val": "validation"}.get(split, split)
        logger.info("step %d: %s loss %.4f", progress.step, told, result.loss)

    def tested(
        self,
        progress: Progress,
        tested: Tested,
        confusions: Mapping[str, list[list[int]]],
        where: Path,
    ) -> None:
        """The final test is over."""
        self.evaluated(progress, tested.evaluation, best=(), split="test")
        for target, matrix in confusions.items():
            if len(matrix) <= LARGEST_TABLE:
                for line in confusion_lines(target, matrix):
                    self.console.say(line)
        self.console.say(f"tested the weights of step {tested.step:,} ({tested.weights}) → {where}")
        logger.info("tested the weights of step %d (%s)", tested.step, tested.weights)

    def saved(self, save: Save) -> None:
        """A save is over, of now or of some steps ago."""
        step = save.snapshot.progress.step
        if save.path is None:
            self.warn(f"step {step:,} could not be saved, training goes on: {save.error}", step)
            return
        event = Saved(
            step=step,
            path=str(save.path),
            reason=save.snapshot.facts.reason,
            seconds=save.seconds,
            stall_s=save.stall_s,
            size_bytes=save.size_bytes(),
        )
        self._write(save.snapshot.progress, event)
        self.sink.sync()
        logger.info("saved %s in %.2f s: %s", save.path.name, save.seconds, event.reason)

    def operated(
        self,
        progress: Progress,
        change: Change,
        before: State,
        after: State,
        *,
        proof: Proof | None,
        seconds: float,
        loss: float | None,
    ) -> None:
        """An operation was carried out between two steps; with a proof, one on the model."""
        operation, differ = change.operation, differences(before, after)
        notes, measured = list[str](), dict[str, float]()
        if proof is not None:
            sizes = [count_parameters(state.architecture).total for state in (before, after)]
            notes = ["→".join(map(si, sizes)), _MEMORY[moments_mode(operation)]]
            measured = {
                "max_logit_diff": proof.max_logit_diff,
                "max_logit_diff_relative": proof.max_logit_diff_relative,
                "delta_loss": proof.delta_loss,
                "parameters_before": sizes[0],
                "parameters_after": sizes[1],
            }
        event = Operation(
            step=progress.step,
            name=operation.name,
            value=operation.value,
            verb="SET" if proof is None else "GROW",
            change=changed_text(differ),
            reason=change.reason,
            notes=tuple(notes),
            preserves=proof.label if proof else "",
            proof=measured,
            seconds=seconds,
            architecture=dict(after.architecture.to_dict()) if proof else {},
        )
        self.console.operated(self._write(progress, event))
        self.sink.sync()
        logger.info("%s", log_block(change, differ, loss, proof, ddp=self.world.size > 1))

    def reached_new(self, progress: Progress, watch: GradientWatch) -> None:
        """Gradients have arrived, or not, where an operation made new parameters."""
        kept, new = watch.norms[-1]
        event = NewGradients(
            step=progress.step, operation=watch.operation, grad_norm_kept=kept, grad_norm_new=new
        )
        self._write(progress, event)
        if watch.dead:
            self.warn(
                f"no gradient has reached what {watch.operation} made new: it stands at a saddle "
                "that it will not leave",
                progress.step,
            )

    def analyzed(self, found: Finding) -> None:
        """An analysis that ran beside training is over."""
        event = Analysis(
            step=found.progress.step,
            findings=found.analysis.to_dict(),
            suggestions=found.analysis.suggestions,
            seconds=found.seconds,
        )
        self._write(found.progress, event)
        for suggestion in found.analysis.suggestions:
            self.console.say(f"step {found.progress.step:,}: {suggestion}")

    def overridden(self, progress: Progress, changed: Mapping[str, tuple[object, object]]) -> None:
        """The config was changed while the run stood still."""
        for key, values in changed.items():
            before, after = map(in_yaml, values)
            event = Operation(
                step=progress.step,
                name="override",
                value={key: values[1]},
                change=f"{key} {before} → {after}",
                reason="set at resume",
            )
            self._write(progress, event)
            self.console.say(f"{key}: {before} → {after}")

    def warn(self, message: str, step: int) -> None:
        """Something the person should know."""
        self.sink.write(Warn(message=message, step=step))
        self.console.warn(message)
        logger.warning("%s", message)

    def closed(
        self, progress: Progress, decision: Decision, best: Standing | None, where: Path
    ) -> None:
        """The run ends in order: the reason, then the totals."""
        self._write(
            progress,
            Stop(step=progress.step, reason=decision.reason, resumable=decision.interrupted),
        )
        event = RunFinished(
            step=progress.step,
            loss=self.last_loss,
            best_loss=best.best if best else None,
            best_step=best.best_step if best else None,
            tokens_per_s=progress.tokens / progress.active_s if progress.active_s else None,
        )
        event = self._write(progress, event)
        stopped = "" if decision.is_budget else decision.reason
        self.console.finished(event, where, stopped=stopped)

    def state(self) -> dict[str, Any]:
        """What the story so far comes to, as JSON."""
        return {
            "last_loss": self.last_loss,
            "wall_s": self.wall_s(),
            "saved_at": time.time(),
        }

    def restore(self, state: Mapping[str, Any], progress: Progress) -> None:
        """Take the story up where `state` left it; the pause counts as wall-clock time."""
        saved_at, wall_s = (msgspec.convert(state[key], float) for key in ("saved_at", "wall_s"))
        self.started = time.monotonic() - wall_s - max(0.0, time.time() - saved_at)
        self.last_loss = msgspec.convert(state["last_loss"], float | None)
        self._forget(progress)

    def wall_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.started

    def _write(self, progress: Progress, event: P) -> P:
        """Record an event of this moment, with the run's totals; returns it as recorded."""
        placed = msgspec.structs.replace(
            event,
            samples=progress.samples,
            tokens=progress.tokens,
            epoch=self.epochs(progress.samples),
            flops=progress.flops,
            wall_s=self.wall_s(),
            active_s=progress.active_s,
        )
        self.sink.write(placed)
        return placed

    def _eta(self, progress: Progress) -> float | None:
        """Seconds until the first counted or timed budget is used up, at the pace so far."""
        wall = self.wall_s()
        used = {
            "steps": float(progress.step),
            "tokens": float(progress.tokens),
            "samples": float(progress.samples),
            "epochs": self.epochs(progress.samples),
            "seconds": wall,
        }
        left = [
            wall * (budget.amount / used[budget.kind] - 1.0)
            for budget in self.budgets
            if budget.kind != "loss" and used[budget.kind] > 0
        ]
        return max(0.0, min(left)) if left else None
