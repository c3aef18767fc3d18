"""The loop of one run: plan, fetch, step, record, evaluate, change, decide."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from instar.config.budget import Budget, parse_budget
from instar.config.schema import RunConfig
from instar.data.feed import GaveUp
from instar.data.reader import StepBatch
from instar.distributed.agree import agree
from instar.distributed.ranklog import RankLog
from instar.distributed.world import RunFailed, World
from instar.run.ahead import Ahead, is_wanted
from instar.run.analyst import Analyst
from instar.run.changes import change_if_due, loss_of_now
from instar.run.course import Course, Supply
from instar.run.evaluate import Evaluation, evaluate
from instar.run.judge import Judge, Judgement
from instar.run.layers import LayerWatch
from instar.run.narrate import Narrator
from instar.run.progress import Progress
from instar.run.rig import freeze, rig
from instar.run.safepoint import GivenUp, SafePoint, Wish
from instar.run.saving import Saver, reasons
from instar.run.snapshot import snapshot
from instar.run.step import Stepper, StepResult, enter
from instar.run.stop import REACHED, Decision, budget_met
from instar.run.writer import Writer
from instar.schedule.entries import Entry
from instar.schedule.operations import History, State, carried_out
from instar.schedule.settings import Settings, initial_settings, learning_rate
from instar.schedule.triggers import losses_needed
from instar.tasks.task import Task


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    progress: Progress
    decision: Decision
    validation: Evaluation | None
    """the last one made"""


class Trainer:
    """Carries a run from its first step to its end. All ranks run the same lines."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        task: Task,
        stepper: Stepper,
        safe: SafePoint,
        saver: Saver,
        narrator: Narrator,
        log: RankLog,
        judge: Judge,
        writer: Writer,
        entries: Sequence[Entry] = (),
    ) -> None:
        """`entries`: the schedule, in its order."""
        self.config, self.world = config, world
        self.stepper, self.safe, self.saver = stepper, safe, saver
        self.narrator, self.log, self.judge, self.writer = narrator, log, judge, writer
        safe.save_is_due = saver.overdue
        self.budgets = [parse_budget(text) for text in config.train.until]
        self.entries = tuple(entries)
        self.history: History = ()
        self.progress = self.looked_at = Progress()
        self.judgement = Judgement()
        self.evaluated: Evaluation | None = None
        self.evaluated_at = self.judged_at = self.asked_at = self.grown_at = -1
        self.losses: tuple[tuple[int, float], ...] = ()
        """steps and validation losses since the last operation of the schedule, as far as it asks"""
        self.losses_kept = max((losses_needed(e.trigger) for e in self.entries), default=0) or 1
        self.skipped_in_a_row = 0
        self.analyst = Analyst(config.record.analyze_every if world.is_main else None)
        self.ahead = Ahead(on=is_wanted(config, world))
        self.in_force = self.initial = State(initial_settings(config), task.architecture)
        self.task = task
        self.supply = Supply(config, world)
        self.read(self.supply.first(task, self.settings.context))

    @property
    def settings(self) -> Settings:
        """The hyperparameters in force."""
        return self.in_force.settings

    def read(self, course: Course) -> None:
        """Take samples from a course on; the task has samples of that length already."""
        # what one feed sends is all received before the next one sends
        self.close(self.config.parallel.timeout_s)
        self.course = course
        self.feed = self.supply.open(self.task, course)
        self.validation = self.task.held_out("val")
        self.narrator.epochs = course.epochs

    def close(self, limit_s: float = 0.2) -> None:
        """Read no more; wait for a read under way for `limit_s` seconds at most."""
        if (feed := getattr(self, "feed", None)) is not None:
            feed.close(limit_s)

    def train(self) -> Outcome:
        """Run until a budget is met or somebody asks to stop.

        Raises:
            RunFailed: a rank failed, or too many steps in a row had a non-finite gradient.
        """
        if self.config.eval.at_start and self.progress.step == 0:
            self.evaluate()
        # a stop may have come between a step and its evaluation
        self.evaluate_if_due()
        while (decision := self.decide()) is None:
            if change_if_due(self):
                continue
            self.save_if_due()
            self.step()
            self.evaluate_if_due()
            self.writer.write_if_due(self)
            self.analyst.look_if_due(self)
        self.analyst.tell(self)
        if not decision.interrupted and self.evaluated_at != self.progress.step:
            self.evaluate()
        self.writer.write_if_due(self, last=not decision.interrupted)
        return Outcome(self.progress, decision, self.evaluated)

    def step(self) -> None:
        """Consume the next global batch; or nothing, if all are to stop while one waits for it."""
        begun = time.perf_counter()
        number = self.progress.step
        self.safe.enter(f"step {number + 1}", number + 1)
        self.log.step = number + 1
        lr = learning_rate(self.settings, number)
        every = self.config.record.layers_every
        if every is not None and (number + 1) % every == 0 and self.world.is_main:
            self.stepper.layers = LayerWatch()
        try:
            batch = self.next_batch()
            result = self.stepper.step(batch, number, lr, before_sync=self.heard)
        except GivenUp:
            return
        self.progress = self.progress.after_step(
            batch.plan.count,
            round(batch.weight),
            self.task.flops(batch.weight),
            time.perf_counter() - begun,
        )
        self.note(batch, result, lr)
        self.ahead.look_if_due(self, batch)

    def next_batch(self) -> StepBatch:
        """This rank's share of the next samples; a rank that cannot read ends all."""
        take = partial(
            self.feed.take,
            self.course.place(self.progress.samples),
            self.settings.global_batch,
            self.settings.batch_size,
            self.safe.wants_to_stop,
        )
        if not self.supply.reads:
            self.world.position.expect("the samples that rank 0 sends")
        begun = time.perf_counter()
        batch, failure = self.safe.attempt(take)
        self.narrator.waited(time.perf_counter() - begun)
        gave_up = isinstance(failure, GaveUp)
        failure = None if gave_up else failure
        self.beat = self.safe.post(failure, giving_up=gave_up)
        if batch is None:
            self.safe.settle(self.beat, failure)
            raise RunFailed(f"{self.safe.where}: no batch, and no rank said why")
        if batch.epoch_samples != self.course.samples_per_epoch:
            self.course = self.course.learnt(batch.epoch_samples)
            self.narrator.epochs = self.course.epochs
        return batch

    def heard(self) -> None:
        """Hear the other ranks, at the last moment where leaving hangs nobody."""
        self.safe.settle(self.beat)

    def note(self, batch: StepBatch, result: StepResult, lr: float) -> None:
        """Record the step; give up after too many skipped ones."""
        self.narrator.stepped(self.progress, batch, result, lr)
        if (layers := self.stepper.layers) is not None:
            self.narrator.layered(self.progress, layers)
            self.stepper.layers = None
        if (watch := self.stepper.watch) is not None:
            self.narrator.reached_new(self.progress, watch)
            if watch.over:
                self.stepper.watch = None
        if not result.skipped:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        self.narrator.skipped(self.progress, self.skipped_in_a_row)
        if self.skipped_in_a_row >= self.config.train.max_skipped_steps:
            raise RunFailed(
                f"step {self.progress.step}: the gradient was not finite for "
                f"{self.skipped_in_a_row} steps in a row; lower optimizer.lr or clip harder, or "
                "look for bad samples"
            )

    def evaluate_if_due(self) -> None:
        """Evaluate after every `eval_interval`-th step; a step is asked about once, also by a run
        that goes on from it."""
        step = self.progress.step
        if step in (0, self.asked_at):
            return
        due = self.evaluation_is_due()
        if due and self.evaluated_at != step:
            self.evaluate()
        if not due or self.evaluated_at == step:
            self.asked_at = step

    def evaluation_is_due(self) -> bool:
        """Whether an interval of steps ends here, or where the config says so, of epochs."""
        if (epochs := self.config.eval.eval_epochs) is None:
            return self.progress.step % self.settings.eval_interval == 0
        place = self.course.place(self.progress.samples)
        return place > 0 and place % (epochs * self.course.samples_per_epoch) == 0

    def evaluate(self, *, judged: bool = True) -> None:
        """Held-out metrics of the weights, or of their moving average where one is kept.

        Args:
            judged: it counts for the best, for early stopping and for the plateau.
        """
        self.safe.enter(f"evaluation at step {self.progress.step}", self.progress.step)
        enter(self.stepper.bare_model, self.progress.step)
        with self.stepper.averaged_weights():
            result = evaluate(
                self.task,
                self.stepper.bare_model,
                self.validation,
                self.world,
                batch_size=self.config.eval.batch_size or self.settings.batch_size,
                limit=self.settings.eval_iters
                and self.settings.eval_iters * self.settings.batch_size,
                seed=self.config.seed,
                autocast=self.stepper.autocast,
                safe=self.safe,
            )
        if result is not None:
            self.evaluated, self.evaluated_at = result, self.progress.step
            self.losses = (*self.losses, (self.progress.step, result.loss))[-self.losses_kept :]
            if judged:
                self.judgement = self.judge.see(self.judgement, result.values(), self.progress.step)
                self.judged_at = self.progress.step
            self.narrator.evaluated(self.progress, result, best=self.best_is_now if judged else ())

    @property
    def best_is_now(self) -> tuple[str, ...]:
        """The metrics of which the weights as they are gave the best so far."""
        step = self.progress.step
        return self.judge.best_at(self.judgement, step) if self.judged_at == step else ()

    def save_if_due(self) -> None:
        """Save between two steps, if a count, rank 0's clock, a new best or somebody says so."""
        self.saver.poll()
        if self.progress == self.looked_at:
            return
        why = reasons(self.config.checkpoint, self.looked_at, self.progress)
        self.looked_at = self.progress
        if self.config.checkpoint.on_growth and self.grown_at == self.progress.step:
            why.append("after growth")
        if self.config.checkpoint.on_best and self.best_is_now:
            why.append("best so far")
        wish = self.safe.save_requested
        if wish is Wish.PERSON:
            why.append("asked for")
        elif wish is Wish.CLOCK:
            why.append(f"every {self.config.checkpoint.every_minutes:g} min")
        if why:
            # a person waits for it
            self.save(", ".join(why), wait=wish is Wish.PERSON)

    def save(self, reason: str, *, wait: bool = False, must: bool = False) -> None:
        """Save what all ranks hold after this step.

        Args:
            wait: do not go on before it is on the disk.
            must: it is the last one; raise if it fails.

        Raises:
            RunFailed, CheckpointError: see `Saver.save`.
        """
        self.safe.enter(f"saving step {self.progress.step}", self.progress.step)
        self.saver.save(snapshot(self, reason), wait=wait, must=must)
        self.safe.save_requested = Wish.NONE
        self.safe.answer("save")

    def decide(self) -> Decision | None:
        """Why the run ends here, or None. Rank 0 decides, all obey.

        Asked only where there may be something to decide, which every rank knows alike: after a
        stop request, after an evaluation, or when a counted budget is used up.
        """
        if self.safe.stop_requested:
            return self.safe.decision()
        met = self.budget_met()
        just_evaluated = self.evaluated_at == self.progress.step
        if met is None and not just_evaluated:
            return None
        reason = self.judge.give_up(self.judgement) if just_evaluated else None
        if met is not None:
            reason = f"{REACHED}{met}"
        told = agree(self.world, reason)
        return None if told is None else Decision(str(told), interrupted=False)

    def budget_met(self) -> Budget | None:
        return budget_met(
            self.budgets,
            self.progress,
            epochs=self.course.epochs(self.progress.samples),
            validation_loss=loss_of_now(self),
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint remembers beside tensors and history, as JSON."""
        return {
            "progress": dataclasses.asdict(self.progress),
            "course": self.course.state(),
            "judgement": msgspec.to_builtins(self.judgement),
            "story": self.narrator.state(),
            "evaluated_at": self.evaluated_at,
            "judged_at": self.judged_at,
            "asked_at": self.asked_at,
            "losses": self.losses,
            "skipped_in_a_row": self.skipped_in_a_row,
            "scaler": self.stepper.scaler.state_dict(),
        }

    def restore(self, state: Mapping[str, Any], history: History) -> None:
        """Go on from what `state` gave, with the settings and the shape that the history leads to.

        The weights are left to be filled in. All ranks come here together.

        Raises:
            LookupError, TypeError, ValueError: `state` never gave that.
        """
        self.follow(history)
        if "course" in state:
            self.course = self.course.restored(state["course"])
            self.narrator.epochs = self.course.epochs
        self.progress = self.looked_at = msgspec.convert(state["progress"], Progress)
        self.judgement = msgspec.convert(state["judgement"], Judgement)
        self.evaluated_at = msgspec.convert(state["evaluated_at"], int)
        self.judged_at = msgspec.convert(state.get("judged_at", self.evaluated_at), int)
        self.asked_at = msgspec.convert(state.get("asked_at", self.evaluated_at), int)
        self.losses = msgspec.convert(state.get("losses", ()), tuple[tuple[int, float], ...])
        self.skipped_in_a_row = msgspec.convert(state["skipped_in_a_row"], int)
        self.writer.wrote_at = self.progress.step
        self.stepper.scaler.load_state_dict(state["scaler"])
        self.narrator.restore(state["story"], self.progress)

    def follow(self, history: History) -> None:
        """Fold the history anew, and build what it leads to (law 1)."""
        state, task, course = self.initial, self.task, self.course
        for change in history:
            if not change.skipped:
                state = carried_out(state, change.operation, change.step)
                task = task.at(state.architecture, state.settings.context)
                if state.settings.context != course.context:
                    course = self.supply.next(course, task, state.settings.context, change.cursor)
        before = self.in_force
        self.history, self.in_force, self.task = history, state, task
        if state.architecture != before.architecture:
            bare = task.shell().to(self.world.device)
            self.stepper = rig(self.config, self.world, task, bare, state.settings.frozen)
        elif state.settings.frozen != before.settings.frozen:
            freeze(self.stepper, self.config, state.settings.frozen)
        if course != self.course:
            self.read(course)
