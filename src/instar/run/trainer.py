"""Training loop: decide, change, save, step, evaluate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from instar.config.budget import Counters, budget_met
from instar.data.loader import StepBatch, WaitCancelled
from instar.distributed.agree import agree
from instar.distributed.failure import RunFailed
from instar.run.changes.requests import end_waiting
from instar.run.changes.scheduled import change_if_due
from instar.run.checkpointing import save_checkpoint, save_checkpoint_if_due
from instar.run.components import Components
from instar.run.parallel.strategy import RoundEnd
from instar.run.state.gradient_stats import LayerStats, Skips, noise_interval
from instar.run.state.run_state import REACHED, Decision, Interval, RunState
from instar.run.state.sync_point import Stopped
from instar.run.step.stepper import StepResult, do_nothing
from instar.run.validation import evaluate_validation, evaluate_validation_if_due, is_comparable
from instar.schedule.settings import learning_rate
from instar.tasks.logged import recording


@dataclass(frozen=True)
class Outcome:
    """Counters and decision at the end of a run."""

    progress: Counters
    decision: Decision


@contextmanager
def _partial_explained(batch: StepBatch, global_batch: int) -> Iterator[None]:
    """Context manager that adds a note to errors of a step that has fewer samples than others."""
    try:
        yield
    except Exception as error:
        if batch.plan.count < global_batch:
            error.add_note(
                f"this step has an epoch's last {batch.plan.count} of {global_batch} samples, which data.drop_last: true "
                "leaves out, also at a resume (--set data.drop_last=true)"
            )
        raise


class Trainer:
    """Trains a run from its first step to its end. All ranks call the same methods."""

    def __init__(self, parts: Components, state: RunState) -> None:
        self.parts, self.state = parts, state
        self._step_begun: float | None = None
        self._round_begun: Counters | None = None
        """progress at the beginning of the round; None: all ranks are the same"""
        self._skipped = 0
        """steps of this round whose gradient was not finite, on this rank"""
        self._skips_before = 0
        """skipped in a row before this round, on all ranks"""
        self._unjudged: tuple[Counters, Skips, StepBatch] | None = None
        """the last step, if a GPU has not computed it yet; its samples, because the GPU copies them"""
        self._waited_s = 0.0
        """seconds that other work has waited for the last step, which belong to training"""
        self.around_step: Callable[[], AbstractContextManager[None]] = nullcontext
        """returns the context in which a step runs, e.g. a profiler's"""
        parts.sync.active_s = self.active_s
        parts.sync.before_other_work = self._wait_for_step
        parts.sync.save_is_due = parts.saver.overdue

    def train(self) -> Outcome:
        """Train until a budget is used up, early stopping, or a stop request. A collective.

        Raises:
            RunFailed: a rank failed, or too many consecutive steps had a non-finite gradient.
        """
        parts = self.parts
        parts.hooks.call("on_train_begin", self.state, parts.stepper)
        if parts.config.eval.at_start and self.state.step == 0:
            self.evaluate()
        # a resumed run may have stopped between a step and its evaluation
        self.state = evaluate_validation_if_due(self.state, parts)
        while (decision := self.decide()) is None:
            self.state, is_new_loss = change_if_due(self.state, parts)
            if is_new_loss:
                continue
            self.state = save_checkpoint_if_due(self.state, parts)
            self.round()
            self.state = evaluate_validation_if_due(self.state, parts)
            self.state = parts.text_sampler.sample_if_due(self.state, parts.stepper, parts.logger)
            parts.weight_analyzer.analyze_if_due(
                self.state, parts.stepper, parts.validation, parts.logger
            )
        self._wait_for_step()
        parts.sync.end_training()
        parts.weight_analyzer.finish(self.state, parts.logger)
        if not decision.is_interrupted and self.state.evaluated_at != self.state.step:
            self.state = evaluate_validation(self.state, parts, at_end=True)
        parts.logger.flush_interval(self.state.progress)
        if not decision.is_interrupted:
            self.state = end_waiting(self.state, parts)
        self.state = parts.text_sampler.sample_if_due(
            self.state, parts.stepper, parts.logger, last=not decision.is_interrupted
        )
        parts.hooks.call("on_train_end", self.state, parts.stepper)
        return Outcome(self.state.progress, decision)

    def round(self) -> None:
        """Train until all ranks are the same again: one step, or those of a round of the strategy.

        A collective.
        """
        over = False
        while not over:
            with self.around_step():
                self.step()
            over = self._round_begun is None

    def step(self) -> None:
        """Train on the next global batch. A collective, but for those steps of a round before its last.

        No effect if a stop is requested while a rank waits for its samples.
        """
        state, parts, number = self.state, self.parts, self.state.step
        parts.hooks.call("on_step_begin", state, parts.stepper)
        start = self._step_begun = time.perf_counter()
        parts.sync.set_place(f"step {number + 1}", number + 1)
        parts.rank_log.step = number + 1
        lr = self._learning_rate()
        self._observe_layers()
        try:
            batch, finish = self._next_batch()
            with (
                recording(parts.logger.logged_values),
                _partial_explained(batch, state.settings.global_batch),
            ):
                result = parts.stepper.step(
                    batch,
                    number,
                    lr,
                    before_sync=finish or do_nothing,
                    measures_part=self._measures_noise(),
                )
        except Stopped:
            self._step_begun = None
            return
        # by now a GPU has computed the step before
        self._judge()
        before = self._round_begun or state.progress
        skips, end = self._end_round(result, ends=finish is not None)
        reads = result.part is not None or parts.hooks.have("on_step_end")
        if reads or parts.logger.reads_step(before.step, number + 1):
            result.norm.item()  # whose wait belongs to the step
        seconds = time.perf_counter() - start + self._waited_s
        self._waited_s = 0.0
        self.state = self._after_step(before, batch, result, seconds, skips)
        self._step_begun = None
        # before the record, which has what a hook logs
        parts.hooks.call("on_step_end", self.state, parts.stepper, norm=result.norm)
        self._record(batch, result, lr, end)

    def _learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        settings, step = self.state.settings, self.state.step
        scheduled_step = settings.scheduled_step(step) - settings.lr_start
        share = self.parts.task.lr_share(scheduled_step, settings.lr_decay_iters)
        return learning_rate(settings, step, share)

    def _observe_layers(self) -> None:
        """Let the next step measure the norms of layers, where they are due."""
        parts, step = self.parts, self.state.step
        every, strategy = parts.config.record.layers_every, parts.stepper.strategy
        if every is None or not Interval(every).due(step, step + 1):
            return
        # whether a norm is a collective, which all ranks must enter
        if parts.world.is_main or strategy.forward_is_collective:
            parts.stepper.layers = LayerStats(strategy.norms)

    def _measures_noise(self) -> bool:
        """Return whether the next step measures a part of its batch for the gradient noise scale."""
        parts, step = self.parts, self.state.step
        batch = self.state.settings.global_batch
        every = noise_interval(parts.config, batch, parts.loaders.slices)
        return every is not None and Interval(every).due(step, step + 1)

    def _end_round(self, result: StepResult, *, ends: bool) -> tuple[Skips, RoundEnd | None]:
        """Count a step that was skipped, and end the round of the strategy with it. A collective if it `ends`."""
        state, stepper = self.state, self.parts.stepper
        skips = Skips(state.skipped_in_a_row, result.norm, result.scale)
        if stepper.strategy.rounds is not None:
            if self._round_begun is None:
                self._skips_before = state.skipped_in_a_row
            self._skipped += not result.norm.finite
        before = self._round_begun = self._round_begun or state.progress
        if not ends:
            return skips, None
        steps = state.step + 1 - before.step
        end = stepper.end_round(steps, self._skipped, skips)
        self._round_begun, self._skipped = None, 0
        if end is not None:
            # a round that is taken back is one update that all ranks skip; within it each counts its own
            skips = Skips(end.in_a_row if end.finite else self._skips_before + 1)
        return skips, end

    def _after_step(
        self, before: Counters, batch: StepBatch, result: StepResult, seconds: float, skips: Skips
    ) -> RunState:
        """Return the state after a step; `before`: at the beginning of its round."""
        samples = batch.plan.after - batch.plan.cursor
        flops = self.parts.task.flops(batch.weight)
        state = self.state.after_step(samples, round(batch.weight), flops, seconds)
        noise = state.noise
        if result.part is not None:
            noise = noise.with_measurement(result.part, batch.plan.count, result.norm.item())
        return replace(state, before=before, skips=skips, noise=noise)

    def _next_batch(self) -> tuple[StepBatch, Callable[[], None] | None]:
        """Return this rank's share of the next samples; a rank that cannot read ends all ranks.

        Where the ranks are the same after this step, they exchange flags; what receives them is returned,
        to be called at the latest point where leaving hangs no rank. A rank that cannot read earlier waits
        for the others where their round ends. Where only the samples tell what the step weighs, flags and
        weights are exchanged at every step, before it.
        """
        state, parts = self.state, self.parts
        assert parts.loader is not None
        rounds = parts.stepper.strategy.rounds
        take = partial(
            parts.loader.take,
            state.phase.place(state.progress.samples),
            state.settings.global_batch,
            state.settings.batch_size,
            # in a round, no rank can leave alone
            parts.sync.wants_to_stop if rounds is None else lambda: False,
        )
        if not parts.loaders.reads:
            parts.world.position.expect("the samples that rank 0 sends")
        start = time.perf_counter()
        batch, failure = parts.sync.attempt(take)
        parts.logger.add_wait(time.perf_counter() - start)
        gave_up = isinstance(failure, WaitCancelled)
        failure = None if gave_up else failure
        if batch is None:
            parts.sync.finish(parts.sync.report(failure, giving_up=gave_up), failure)
            raise RunFailed(f"{parts.sync.where}: no batch, and no rank said why")
        if batch.epoch_samples != state.phase.samples_per_epoch:
            phase = state.phase.learnt(batch.epoch_samples)
            self.state = replace(state, phase=phase)
            parts.logger.epochs = phase.epochs
        if batch.own_weight is None:
            over = rounds is None or self._ends_round(batch, rounds.sync_every)
            return batch, partial(parts.sync.finish, parts.sync.report()) if over else None
        flags = parts.sync.report(weight=batch.own_weight)
        parts.sync.finish(flags)
        batch = replace(batch, weight=flags.wait().sums[-1], own_weight=None)
        over = rounds is None or self._ends_round(batch, rounds.sync_every)
        return batch, do_nothing if over else None

    def _ends_round(self, batch: StepBatch, sync_every: int) -> bool:
        """Return whether a round ends with the step of a batch: after a multiple of `sync_every` steps, and at the
        end of the run, where it is known."""
        now = self.state.progress
        samples = batch.plan.after - batch.plan.cursor
        progress = now.after_step(samples, round(batch.weight), 0.0, 0.0)
        epochs = self.state.phase.epochs(progress.samples)
        met_budget = budget_met(self.parts.budgets, progress, epochs=epochs, validation_loss=None)
        return progress.step % sync_every == 0 or met_budget is not None

    def _record(
        self, batch: StepBatch, result: StepResult, lr: float, end: RoundEnd | None
    ) -> None:
        """Record the step, and judge it if its norm is known.

        Args:
            end: of the round of which the step is the last.
        """
        over = self._round_begun is None
        parts, progress = self.parts, self.state.progress
        parts.logger.log_step(self.state, batch, result, lr, on_all_ranks=over)
        if (layers := parts.stepper.layers) is not None:
            parts.logger.log_layers(progress, layers)
            parts.stepper.layers = None
        if (watch := parts.stepper.watch) is not None:
            parts.logger.log_new_gradients(progress, watch)
            if watch.is_over:
                parts.stepper.watch = None
        if not over:
            return
        if end is not None:
            parts.logger.log_round(progress, end, self.state.skipped_in_a_row)
        self._unjudged = progress, self.state.skips, batch
        if not result.norm.pending:
            self._judge()

    def _judge(self) -> None:
        """Record whether the last step was skipped, once: a GPU's when the next one is under way.

        Raises:
            RunFailed: too many consecutive steps were.
        """
        if self._unjudged is None:
            return
        (progress, skips, _), self._unjudged = self._unjudged, None
        parts, n_skipped = self.parts, skips.in_a_row
        if parts.stepper.strategy.rounds is None:
            if skips.lowers_scale:
                parts.logger.log_lowered_scale(progress, parts.stepper.scaler.get_scale())
            elif n_skipped:
                parts.logger.log_skip(progress, n_skipped)
        if not skips.lowers_scale and n_skipped >= parts.config.train.max_skipped_steps:
            advice = "lower optimizer.lr or clip harder, or look for bad samples"
            if parts.stepper.scaler.is_enabled():
                advice = (
                    "precision fp16 has no smaller loss scale than 1 to try: use precision: bf16 or fp32, or a smaller "
                    "loss, or look for bad samples"
                )
            raise RunFailed(
                f"step {progress.step}: the gradient was not finite for {n_skipped} steps in a row; {advice}"
            )

    def _wait_for_step(self) -> None:
        """Wait until the last step is computed, and judge it."""
        start = time.perf_counter()
        self._judge()
        self._waited_s += time.perf_counter() - start

    def evaluate(self) -> None:
        """Evaluate now. A collective."""
        self.state = evaluate_validation(self.state, self.parts)

    def save(self, reason: str, *, wait: bool = False, must: bool = False) -> None:
        """Save now, see `checkpointing.save_checkpoint`. A collective."""
        save_checkpoint(self.state, self.parts, reason, wait=wait, must=must)

    def decide(self) -> Decision | None:
        """Return why the run ends here, or None. Rank 0 decides for all ranks.

        A collective only after a stop request, after an evaluation, or when a counted budget is
        used up, which every rank knows; otherwise there is nothing to decide.
        """
        parts = self.parts
        if parts.sync.stop_requested:
            return parts.sync.decision()
        reason = self._end_reason()
        if reason is None and self.state.evaluated_at != self.state.step:
            return None
        agreed_reason = agree(parts.world, reason)
        return None if agreed_reason is None else Decision(str(agreed_reason), is_interrupted=False)

    def over(self) -> str | None:
        """Return why a run that was just resumed is complete; None: there is something left to do.

        The same on all ranks, which have restored the same state. A run whose last step is not
        evaluated is not complete.
        """
        return self._end_reason() if self.state.evaluated_at == self.state.step else None

    def _end_reason(self) -> str | None:
        """Return the budget that is used up, or, if just evaluated, early stopping's reason."""
        state, parts = self.state, self.parts
        met_budget = budget_met(
            parts.budgets,
            state.progress,
            epochs=state.epochs,
            validation_loss=state.loss,
            resumed_s=state.resumed_s,
        )
        if met_budget is not None:
            return f"{REACHED}{met_budget}"
        if state.evaluated_at != state.step:
            return None
        reason = parts.tracker.stop_reason(state.metrics)
        # a resume may have changed what is evaluated, and early stopping begins anew
        return reason if reason is not None and is_comparable(state, parts) else None

    def active_s(self) -> float:
        """Seconds of training over the whole run, including the current step."""
        start = self._step_begun
        now = 0.0 if start is None else time.perf_counter() - start
        return self.state.progress.active_s + now

    def close(self, limit_s: float = 0.2) -> None:
        """Stop reading samples, and end what extensions do; see `Components.close`."""
        self.parts.close(limit_s)
        for extension in self.parts.extensions:
            extension.close()
