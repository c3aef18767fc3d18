"""Validation of a run: evaluates the validation split and updates the run's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from instar.run.checkpointing import best_is_now
from instar.run.components import Components
from instar.run.state.run_state import Interval, RunState
from instar.run.step.evaluate import Evaluation, EvaluationOptions, evaluate_source
from instar.run.step.stepper import set_model_step
from instar.schedule.settings import mixture_names
from instar.schedule.triggers import losses_needed
from instar.tasks.basis import incomparable
from instar.tasks.basis_of import basis_of

VALIDATION = "val"


def evaluate_validation_if_due(state: RunState, parts: Components) -> RunState:
    """Evaluate if an interval has ended. Each step is checked once, also after a resume.

    A collective.
    """
    if state.step in (0, state.evaluation_checked_at):
        return state
    epochs = parts.config.eval.eval_epochs
    every = Interval(state.settings.eval_interval) if epochs is None else Interval(epochs, "epochs")
    due = state.due(every)
    if due and state.evaluated_at != state.step:
        state = evaluate_validation(state, parts)
    # an evaluation that a stop request cut short stays due
    if not due or state.evaluated_at == state.step:
        state = replace(state, evaluation_checked_at=state.step)
    return state


def samples_evaluated(state: RunState, parts: Components) -> int | None:
    """Return the number of held-out samples of an evaluation; None: all."""
    iters = state.settings.eval_iters
    # evaluations are compared with each other, so batch_size must not change the subset
    return None if iters is None else iters * parts.initial.settings.batch_size


def is_comparable(state: RunState, parts: Components) -> bool:
    """Return whether the last evaluation can be compared with one that would be made now."""
    limit = samples_evaluated(state, parts)
    return not incomparable(
        state.basis, basis_of(parts.config, parts.task, parts.validation, limit)
    )


def evaluate_validation(
    state: RunState, parts: Components, *, counts: bool = True, at_end: bool = False
) -> RunState:
    """Evaluate the weights, or their moving average if there is one. A collective.

    Args:
        counts: the result counts for the best value, for early stopping and for the plateau.
        at_end: the run ends between two evaluations. The result counts for the best value only: a run
            that is continued later stops and changes where an uninterrupted one does.

    Returns:
        the state with the result; unchanged if a stop was requested meanwhile.
    """
    parts.hooks.call("on_evaluate_begin", state, parts.stepper)
    parts.sync.begin(f"evaluation at step {state.step}", state.step)
    set_model_step(parts.stepper.unwrapped_model, state.step)
    parts.stepper.share_buffers()
    limit = samples_evaluated(state, parts)
    results = _evaluate(state, parts, limit, all_sets=at_end or not state.step)
    if results is None:
        return state
    result = results[VALIDATION]
    basis = basis_of(parts.config, parts.task, parts.validation, limit)
    state, reasons = state.on_basis(basis)
    if reasons:
        parts.logger.log_new_basis(state.progress, reasons)
    entries = (*parts.entries, *(post.entry for post in state.posted))
    n_losses = max((losses_needed(entry.trigger) for entry in entries), default=0) or 1
    losses = state.losses if at_end else (*state.losses, (state.step, result.loss))[-n_losses:]
    metrics = _metrics_of(results)
    state = replace(state, evaluated_metrics=metrics, evaluated_at=state.step, losses=losses)
    if counts:
        judged = parts.tracker.update(state.metrics, metrics, state.step, only_best=at_end)
        state = replace(state, metrics=judged, judged_at=state.step)
    best = best_is_now(state, parts) if counts else ()
    _log(state, parts, results, best)
    parts.hooks.call("on_evaluate_end", state, parts.stepper, metrics=metrics)
    return state


def _evaluate(
    state: RunState, parts: Components, limit: int | None, *, all_sets: bool
) -> dict[str, Evaluation] | None:
    """Evaluate the validation split and the further held-out splits that are due, by name; None: a stop was requested.

    A split is due at the first evaluation at or after a multiple of its interval.
    """
    config, stepper = parts.config, parts.stepper
    options = EvaluationOptions(
        config.eval.batch_size or state.settings.batch_size,
        config.data_seed,
        limit,
        stepper.autocast,
        stepper.strategy.forward_is_collective,
    )
    sources = {VALIDATION: parts.validation} | {
        name: parts.eval_sets[name]
        for name, every in parts.task.held_out_sets.items()
        if all_sets
        or every is None
        or Interval(every).due(max(0, state.step - state.settings.eval_interval), state.step)
    }
    results: dict[str, Evaluation] = {}
    with stepper.evaluating():
        for name, source in sources.items():
            of_parts = parts.task.held_out_parts() if name == VALIDATION else {}
            result = evaluate_source(
                parts.task,
                stepper.unwrapped_model,
                source,
                replace(options, parts=of_parts),
                parts.sync,
            )
            if result is None:
                return None
            results[name] = result
    return results


def _metrics_of(results: Mapping[str, Evaluation]) -> dict[str, float]:
    """Return all metrics, those of further splits as `<split>/<metric>`."""
    metrics: dict[str, float] = {}
    for split, result in results.items():
        prefix = "" if split == VALIDATION else f"{split}/"
        metrics |= {f"{prefix}{name}": value for name, value in result.values().items()}
    return metrics


def _log(
    state: RunState, parts: Components, results: Mapping[str, Evaluation], best: Sequence[str]
) -> None:
    """Log each split, with the metrics that are the best so far."""
    names = mixture_names(parts.config)
    drawn = dict(zip(names, state.phase.drawn(state.progress.samples), strict=False))
    for split, result in results.items():
        is_validation = split == VALIDATION
        own = [
            name
            for name in best
            if (name.startswith(f"{split}/") if not is_validation else name in result.metrics)
        ]
        parts.logger.log_eval(
            state.progress, result, best=own, split=split, drawn=drawn if is_validation else {}
        )
