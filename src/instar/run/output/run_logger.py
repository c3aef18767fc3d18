"""Writes a run's events to the record and the display."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from instar.config.budget import Budget, Counters, eta
from instar.config.origins import in_yaml, redacted_value
from instar.config.schema import RunConfig
from instar.data.loader import StepBatch
from instar.distributed.agree import gather, reduce_sums
from instar.distributed.world import World
from instar.growth.analysis import WeightAnalysis
from instar.record.console import Console
from instar.record.device import PeakFlops
from instar.record.events import (
    AnalysisEvent,
    Asked,
    BeginsAnew,
    Eval,
    ExtensionEvent,
    Layers,
    NewGradients,
    OperationEvent,
    Placed,
    RunFinished,
    RunStarted,
    SampleText,
    Saved,
    Skip,
    Stop,
    Train,
    Warn,
)
from instar.record.format import asked_text, begins_anew_line, confusion_lines
from instar.record.recorder import Silent, Sink
from instar.record.system import memory_bytes
from instar.run.output.operation_text import ChangeOutcome, log_block, operation_event
from instar.run.output.save import SaveResult
from instar.run.parallel.strategy import RoundEnd
from instar.run.state.early_stopping import RuleState
from instar.run.state.gradient_stats import GradientWatch, GradNorm, LayerStats
from instar.run.state.run_state import Decision, Interval, RunState
from instar.run.step.evaluate import Evaluation, TestResult
from instar.run.step.stepper import StepResult
from instar.tasks.images import Pixels
from instar.tasks.logged import Logged, TableData, media_events

logger = logging.getLogger(__name__)

LARGEST_TABLE = 12
"""maximum number of classes of a confusion matrix that is displayed"""

P = TypeVar("P", bound=Placed)


class RunLogger:
    """Accumulates step results and logs them every `log_interval` steps.

    A logged loss is the exact mean over all ranks and all steps of an interval, which starts after
    every `log_interval`-th step and after growth. In between, the terminal shows rank 0's own share
    of one step. An interval that the run's end cuts short is logged as far as it got. A checkpoint
    stores the interval, so that a resumed run logs the same as an uninterrupted one.
    """

    def __init__(
        self,
        world: World,
        sink: Sink,
        console: Console,
        *,
        config: RunConfig,
        budgets: Sequence[Budget],
        folder: Path,
    ) -> None:
        """
        Args:
            folder: the run's; images are saved there.
        """
        self.world, self.sink, self.console = world, sink, console
        self.interval = Interval(config.record.log_interval)
        self.epochs: Callable[[int], float] = lambda _: 0.0
        """passes over the data at a cursor; set by the trainer"""
        self.budgets = budgets
        self.best_metric = config.checkpoint.best_of[0]
        """metric of the pointer `checkpoints/best`"""
        self.folder = folder
        self.logged_values = Logged(world, of_training=True)
        """what the task's code has logged in this interval"""
        self.peak = (
            None
            if isinstance(sink, Silent)
            else PeakFlops(world.device, config.precision, world.size)
        )
        """peak FLOP/s of all ranks' devices together; None on ranks that do not log"""
        self.started = time.monotonic()
        self.paused_s = 0.0
        """total seconds between saves and the resumes from them"""
        self.foreign_progress = Counters()
        """what another tool trained before, of which no time is known"""
        self.last_loss: float | None = None
        self._warned_of_empty = False
        self.last_step = GradNorm(math.nan), 0.0
        """gradient norm and learning rate of the last step"""
        self.lr_new: dict[str, float] = {}
        """learning rate of the latest of new parameters in the last step, while it warms up"""
        self.noise: dict[str, float] = {}
        """gradient noise scale after the last step, if it is known"""
        self._start_interval(Counters())

    def _start_interval(self, progress: Counters) -> None:
        """Start a new interval."""
        self.since = self.flushed = progress
        self.logged_values.clear()
        self.loss_sum: torch.Tensor | None = None
        self.weight = 0.0
        self.waited_s = 0.0

    def log_start(self, event: RunStarted, where: Path, *, only_test: bool = False) -> None:
        """Log the start of the run.

        Args:
            only_test: write no event: a test alone does not supersede the record after its step.
        """
        if not only_test:
            self.sink.write(event)
        self.console.header(event, where)

    def add_wait(self, seconds: float) -> None:
        """Add time spent waiting for samples."""
        self.waited_s += seconds

    def reads_step(self, before: int, step: int) -> bool:
        """Return whether numbers of a step are read when it is added.

        Args:
            before: the step before it, or before its round.
        """
        return self.console.due or self._ends_interval(before, step)

    def _ends_interval(self, before: int, step: int) -> bool:
        return step == 1 or self.interval.due(before, step)

    def log_step(
        self,
        state: RunState,
        batch: StepBatch,
        result: StepResult,
        lr: float,
        *,
        on_all_ranks: bool = True,
    ) -> None:
        """Add a step; log the interval after the first step and after every `log_interval`-th, or after
        the round in which that is. A collective when an interval is logged.

        Args:
            on_all_ranks: whether all ranks call this at this step.
        """
        progress, total = state.progress, result.loss_sum
        before = self.loss_sum
        self.loss_sum = total if before is None else before.to(total.dtype) + total
        self.weight += batch.weight
        if not batch.weight and not self._warned_of_empty:
            self._warned_of_empty = True
            self.warn(
                "no sample of this step has a target, so that nothing is learnt from it (said once)",
                progress.step,
            )
        self.last_step = result.norm, lr
        warmups = state.settings.new_param_warmups
        rises = bool(warmups) and progress.step <= warmups[-1].end
        self.lr_new = {"lr_new": lr * warmups[-1].factor(progress.step - 1)} if rises else {}
        scale, context = state.noise.value, state.settings.context
        self.noise = {} if scale is None else {"noise_scale": scale}
        if scale is not None and context > 1:
            self.noise["noise_scale_tokens"] = scale * context
        if not on_all_ranks or not self._ends_interval(state.before.step, progress.step):
            if self.console.due:
                weight = sum(micro.weight for micro in batch.micro_batches)
                loss = total.item() / weight if weight else math.nan
                event = self._train_event(progress, loss, result.norm, lr)
                self.console.progress(event, self._eta(progress))
            return
        self.flush_interval(progress)
        self._start_interval(progress)
        if self.peak is not None:
            self.peak.measure_again()

    def flush_interval(self, progress: Counters, *, has_grown: bool = False) -> None:
        """Log the steps of the current interval that are not logged yet. A collective.

        Args:
            has_grown: start a new interval, because the next steps train another model.
        """
        if self.loss_sum is None:
            return
        if progress.step > self.flushed.step and self.weight:
            sums = reduce_sums(self.world, {"loss": self.loss_sum.item()})
            self.last_loss = sums["loss"] / self.weight
            norm, lr = self.last_step
            event = self._train_event(progress, self.last_loss, norm, lr)
            event = msgspec.structs.replace(
                event,
                steps=progress.step - self.since.step,
                extra=self.lr_new | self.noise | self.logged_values.numbers(),
            )
            self.console.train(self._write(progress, event), self._eta(progress))
            logger.info(
                "step %d: loss %.4f, gradient norm %.3f", progress.step, event.loss, event.grad_norm
            )
            self._media(progress, "train", self.logged_values.images, self.logged_values.tables)
            self.flushed = progress
        if has_grown:
            self._start_interval(progress)

    def _train_event(self, progress: Counters, loss: float, norm: GradNorm, lr: float) -> Train:
        seconds = progress.active_s - self.since.active_s
        return Train(
            step=progress.step,
            tokens=progress.tokens,
            loss=loss,
            grad_norm=norm.item(),
            lr=lr,
            tokens_per_s=(progress.tokens - self.since.tokens) / seconds,
            mfu=None
            if self.peak is None
            else self.peak.share((progress.flops - self.since.flops) / seconds),
            data_wait=self.waited_s / seconds,
            memory_bytes=memory_bytes(str(self.world.device)),
        )

    def log_layers(self, progress: Counters, layers: LayerStats) -> None:
        """Log a step's gradient norm and update ratio (0 if skipped) per layer."""
        self._write(
            progress,
            Layers(
                step=progress.step,
                grad_norm=dict(layers.grad_norm),
                update_ratio=dict(layers.update_ratio),
            ),
        )

    def log_sample_text(self, progress: Counters, prompt: str, text: str) -> None:
        """Log a sample text."""
        self._write(progress, SampleText(step=progress.step, prompt=prompt, text=text))
        logger.info("step %d: wrote %r", progress.step, text)

    def log_skip(self, progress: Counters, consecutive: int) -> None:
        self._write(progress, Skip(step=progress.step, consecutive=consecutive))
        self.console.warn(f"step {progress.step}: gradient not finite, update skipped on all ranks")

    def log_lowered_scale(self, progress: Counters, scale: float) -> None:
        """Log a step of fp16's search for a loss scale whose gradients do not overflow."""
        self._write(progress, Skip(step=progress.step, reason="loss scale lowered", consecutive=0))
        self.console.warn(
            f"step {progress.step}: the scaled gradient overflows in float16, update skipped; the loss scale is lowered to {scale:g}"
        )

    def log_round(self, progress: Counters, end: RoundEnd, n_skipped: int) -> None:
        """Log the steps of a round whose gradient was not finite.

        Args:
            n_skipped: updates skipped in a row, on all ranks.
        """
        for rank, count in enumerate(end.n_skipped):
            if count:
                self._write(progress, Skip(step=progress.step, consecutive=max(1, end.in_a_row)))
                self.console.warn(
                    f"step {progress.step}: in {count} steps of this round rank {rank}'s gradient was not "
                    "finite, updates skipped there"
                )
        if not end.finite:
            self._write(progress, Skip(step=progress.step, consecutive=n_skipped))
            self.console.warn(
                f"step {progress.step}: what the ranks moved by in this round is not finite: the round is taken back "
                "on all ranks, whose optimizers begin anew without moments"
            )

    def log_eval(
        self,
        progress: Counters,
        result: Evaluation,
        *,
        best: Sequence[str],
        split: str = "val",
        drawn: Mapping[str, int] | None = None,
    ) -> None:
        event = Eval(
            step=progress.step,
            split=split,
            loss=result.loss,
            eval_tokens=round(result.weight),
            seconds=result.seconds,
            standard_error=result.metrics["loss"].standard_error,
            best=self.best_metric in best,
            best_of=tuple(best),
            extra={
                **{name: m.value for name, m in result.metrics.items() if name != "loss"},
                **result.numbers,
            },
            errors={
                name: m.standard_error
                for name, m in result.metrics.items()
                if name != "loss" and m.standard_error is not None
            },
            drawn=dict(drawn or {}),
        )
        self.console.show_eval(self._write(progress, event))
        self._media(progress, split, result.images, result.tables)
        split_name = {"val": "validation"}.get(split, split)
        logger.info("step %d: %s loss %.4f", progress.step, split_name, result.loss)

    def log_new_basis(self, progress: Counters, reasons: Sequence[str]) -> None:
        """Log that evaluations that follow cannot be compared with earlier ones."""
        event = BeginsAnew(step=progress.step, reasons=tuple(reasons))
        self.console.say(begins_anew_line(self._write(progress, event)))

    def _media(
        self,
        progress: Counters,
        split: str,
        images: Mapping[str, Pixels],
        tables: Mapping[str, TableData],
    ) -> None:
        """Log images and tables of rank 0."""
        if not self.world.is_main:
            return
        for event in media_events(self.folder, split, progress.step, images, tables):
            if isinstance(event, Warn):
                self.warn(event.message, progress.step)
            elif isinstance(event, Placed):
                self._write(progress, event)

    def log_test(
        self,
        progress: Counters,
        test_result: TestResult,
        confusions: Mapping[str, list[list[int]]],
        where: Path,
    ) -> None:
        """Log the result of the final test."""
        self.log_eval(progress, test_result.evaluation, best=(), split="test")
        for target, matrix in confusions.items():
            if len(matrix) <= LARGEST_TABLE:
                for line in confusion_lines(target, matrix):
                    self.console.say(line)
        self.console.say(
            f"tested the weights of step {test_result.step:,} ({test_result.weights}) → {where}"
        )
        logger.info("tested the weights of step %d (%s)", test_result.step, test_result.weights)

    def log_save(self, save: SaveResult) -> None:
        """Log the result of a save, of this step or an earlier one."""
        step = save.snapshot.progress.step
        if save.path is None:
            self.warn(f"step {step:,} could not be saved, training continues: {save.error}", step)
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
        if save.error is not None:
            self.warn(f"step {step:,} is saved, but what follows a save failed: {save.error}", step)

    def log_event(self, progress: Counters, event: ExtensionEvent) -> None:
        """Log an event of an extension, of the step that has this progress."""
        self._write(progress, event)

    def log_operation(self, progress: Counters, outcome: ChangeOutcome, loss: float | None) -> None:
        """Log an operation between two steps, and the validation loss before it, if there is one."""
        self.console.show_operation(self._write(progress, operation_event(outcome)))
        self.sink.sync()
        logger.info("%s", log_block(outcome, loss, ddp=self.world.size > 1))

    def log_asked(self, progress: Counters, event: Asked) -> None:
        """Log what became of an operation that somebody asked for."""
        self._write(progress, event)
        self.sink.sync()
        self.console.say(asked_text(event))
        logger.info("%s", asked_text(event))

    def log_new_gradients(self, progress: Counters, watch: GradientWatch) -> None:
        """Log the gradients of an operation's new parameters; warn if they are dead."""
        kept_norm, new = watch.norms[-1]
        event = NewGradients(
            step=progress.step,
            operation=watch.operation,
            grad_norm_kept=kept_norm,
            grad_norm_new=new,
        )
        self._write(progress, event)
        if watch.dead:
            self.warn(
                f"the parameters that {watch.operation} added receive no gradient; they will never "
                "train",
                progress.step,
            )
        elif watch.is_over and (dead := watch.parameters_without_gradient):
            examples = ", ".join(f"{count} of {name}" for name, count in list(dead.items())[:3])
            self.warn(
                f"some rows or columns that {watch.operation} added receive no gradient; they will "
                f"never train: {examples}{', …' if len(dead) > 3 else ''}",
                progress.step,
            )

    def log_analysis(self, progress: Counters, analysis: WeightAnalysis, seconds: float) -> None:
        """Log the result of a weight analysis; `progress` is where it was started."""
        event = AnalysisEvent(
            step=progress.step,
            findings=analysis.to_dict(),
            suggestions=analysis.suggestions,
            seconds=seconds,
        )
        self._write(progress, event)
        for suggestion in analysis.suggestions:
            self.console.say(f"step {progress.step:,}: {suggestion}")

    def log_override(
        self, progress: Counters, changes: Mapping[str, tuple[object, object]]
    ) -> None:
        """Log the config keys that were changed at a resume, as (before, after)."""
        for key, values in changes.items():
            safe_values = [redacted_value(key, value) for value in values]
            before, after = map(in_yaml, safe_values)
            event = OperationEvent(
                step=progress.step,
                name="override",
                value={key: safe_values[1]},
                change=f"{key} {before} → {after}",
                reason="set at resume",
            )
            self._write(progress, event)
            self.console.say(f"{key}: {before} → {after}")

    def warn(self, message: str, step: int) -> None:
        """Log a warning."""
        self.sink.write(Warn(message=message, step=step))
        self.console.warn(message)
        logger.warning("%s", message)

    def log_end(
        self, progress: Counters, decision: Decision, best: Mapping[str, RuleState], where: Path
    ) -> None:
        """Log the regular end of the run: its reason and its totals."""
        self._write(
            progress,
            Stop(step=progress.step, reason=decision.reason, resumable=decision.is_interrupted),
        )
        lowest = best.get("loss", RuleState())
        best_state = best.get(self.best_metric, RuleState())
        event = RunFinished(
            step=progress.step,
            loss=self.last_loss,
            best_loss=lowest.best,
            best_step=lowest.best_step,
            best_metric=self.best_metric,
            best_value=best_state.best,
            best_value_step=best_state.best_step,
            tokens_per_s=(progress.tokens - self.foreign_progress.tokens) / progress.active_s
            if progress.active_s
            else None,
        )
        event = self._write(progress, event)
        stop_reason = "" if decision.is_budget else decision.reason
        self.console.show_end(event, where, stop_reason)

    def state(self) -> dict[str, Any]:
        """Return the logger's state as JSON. A collective."""
        interval: dict[str, Any] | None = None
        # as text: JSON has no NaN, which a step that was skipped leaves
        sums = gather(self.world, None if self.loss_sum is None else repr(self.loss_sum.item()))
        if self.loss_sum is not None:
            interval = {
                "loss_sums": [float(str(text)) for text in sums],
                "weight": self.weight,
                "waited_s": self.waited_s,
                "since": dataclasses.asdict(self.since),
                "logged": gather(self.world, self.logged_values.state()),
            }
        return {
            "interval": interval,
            "last_loss": self.last_loss,
            "wall_s": self.wall_s(),
            "paused_s": self.paused_s,
            "saved_at": time.time(),
            **(
                {"foreign_progress": dataclasses.asdict(self.foreign_progress)}
                if self.foreign_progress.step
                else {}
            ),
        }

    def restore(self, state: Mapping[str, Any], progress: Counters) -> None:
        """Restore what `state` returned; the pause since the save counts as wall-clock time."""
        saved_at, wall_s = (msgspec.convert(state[key], float) for key in ("saved_at", "wall_s"))
        pause = max(0.0, time.time() - saved_at)
        self.paused_s = msgspec.convert(state.get("paused_s", 0.0), float) + pause
        self.started = time.monotonic() - wall_s - pause
        self.foreign_progress = msgspec.convert(state.get("foreign_progress", {}), Counters)
        self.last_loss = msgspec.convert(state["last_loss"], float | None)
        self._start_interval(progress)
        if (interval := state.get("interval")) is not None:
            sums = msgspec.convert(interval["loss_sums"], list[float])
            rank = self.world.rank
            total = math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan
            total = total if rank == 0 else 0.0
            loss_sum = sums[rank] if len(sums) == self.world.size else total
            self.loss_sum = torch.tensor(loss_sum, dtype=torch.float64, device=self.world.device)
            self.weight = msgspec.convert(interval["weight"], float)
            self.waited_s = msgspec.convert(interval["waited_s"], float)
            self.since = msgspec.convert(interval["since"], Counters)
            self.logged_values.restore(interval.get("logged", []))

    def wall_s(self) -> float:
        """Wall-clock seconds since the run began, including pauses."""
        return time.monotonic() - self.started

    def _write(self, progress: Counters, event: P) -> P:
        """Write an event with the run's totals and return it as written."""
        placed_event = msgspec.structs.replace(
            event,
            samples=progress.samples,
            tokens=progress.tokens,
            epoch=self.epochs(progress.samples),
            flops=progress.flops,
            wall_s=self.wall_s(),
            active_s=progress.active_s,
        )
        self.sink.write(placed_event)
        return placed_event

    def _eta(self, progress: Counters) -> float | None:
        """Estimated seconds until the first budget is used up, at the pace so far (without pauses
        between resumes); None without a budget that allows an estimate."""
        running = self.wall_s() - self.paused_s
        foreign_amounts = self.foreign_progress.amounts(self.epochs(self.foreign_progress.samples))
        return eta(self.budgets, progress, self.epochs(progress.samples), running, foreign_amounts)
