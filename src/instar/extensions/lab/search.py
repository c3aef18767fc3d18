"""Searches for a schedule of growth: candidates are trained from shared trunks and compared at equal FLOPs.

A trunk is a run at a stable rate. Where a schedule grows, and where the final size from scratch begins to decay,
a branch leaves it, so that what trials have in common is trained once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from msgspec import structs

from instar.config.errors import ConfigError
from instar.config.files import read_regular
from instar.config.origins import in_yaml
from instar.config.schema import RunConfig
from instar.config.writers.edit import check_replaceable, edited_config
from instar.distributed.failure import RunFailed
from instar.extensions.lab import short_runs
from instar.extensions.lab.halving import RUNGS, rung_steps
from instar.extensions.lab.pilot_file import pilot_path, settings_of, write_json
from instar.extensions.lab.saving import ExpectedSaving, pilot_summary, predict_saving, spending
from instar.extensions.lab.search_state import (
    SCRATCH,
    SUFFIX,
    CandidateStage,
    GrowthCandidate,
    GrowthProposal,
    ScheduleSearch,
    SearchTrial,
    proposals,
    read_search,
)
from instar.extensions.lab.short_runs import MeasuredConfig, ShortRunRequest
from instar.growth.operators import is_growth
from instar.models.architecture import Architecture
from instar.record.atomic import discard, replace_file
from instar.schedule.branches import branch_folder

_RUN = "search"
_SUFFIX = ".schedule.yaml"
_BEST = ".best.yaml"
AUTHOR = "instar schedule search"


@dataclass(frozen=True)
class SearchResult:
    """A search, and the schedule that it found."""

    search: ScheduleSearch
    file: Path | None = None
    """The winner's schedule; None: the search is not complete, or no schedule is better than the final size
    from scratch."""
    config: Path | None = None
    """The config with it, for `instar train`."""
    saving: ExpectedSaving | None = None
    """Of the config's run with it; None also if nothing can be predicted."""


@dataclass(frozen=True)
class _Final:
    """The final shape of a config."""

    measurement: MeasuredConfig
    shape: Architecture
    begin: dict[str, Any]
    """Keys of the config that give it in place of the first one."""

    @property
    def settings(self) -> list[str]:
        """With which the config has it, and no schedule."""
        return short_runs.options({**self.begin, "schedule": []})

    @property
    def config(self) -> RunConfig:
        return self.measurement.config


def run_search(request: ShortRunRequest, *, dry_run: bool = False) -> SearchResult:
    """Run what is missing of a search for a schedule that leads to a config's final shape.

    Trials are ordinary runs, `<name>-search-…` in the config's folder of runs. They are compared at the FLOPs of
    a quarter, half and all of the horizon's steps of the final size, all with their rate decayed; the better
    half goes on. A search that was interrupted goes on.

    The request's `out` is the schedule's file, by default the config's name with `.schedule.yaml`, beside it. Beside
    it in turn are the config with it, `.best.yaml`, the search's file, `.search.json`, and a pilot's, from which forecasts predict the saving.

    Args:
        dry_run: only plan.

    Raises:
        ConfigError: the config's shape cannot be grown into, or it is of a kind that searches do not know; the
            budget is too small; a file is another search's.
        RunFailed, Interrupted: see `launch`; the same call goes on.
    """
    start = time.monotonic()
    final = _final(short_runs.prepare_measurement(request))
    file = request.out or _file(request.config, final.config)
    state = file.with_suffix(SUFFIX)
    check_replaceable(_best_path(file), AUTHOR, "-o", has_folder=False)
    plan = _read_or_plan(file, state, final, request)
    if dry_run:
        return SearchResult(plan)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(state, plan)
    slowest = 0.0
    while (trial := plan.missing) is not None:
        elapsed_s = time.monotonic() - start
        if slowest and elapsed_s + slowest > request.budget_s:
            remaining = plan.count - len(plan.trials)
            request.say(f"the budget is used up: {remaining} trials are left for the next call")
            return SearchResult(plan)
        candidate, rung, seed = trial
        request.say(
            f"search: {candidate.name} at {plan.rungs[rung]:,} steps of the final size, seed {seed}: "
            f"trial {len(plan.trials) + 1} of {plan.count}"
        )
        finished_trial = _Runs(final, plan).run(*trial)
        plan = structs.replace(plan, trials=(*plan.trials, finished_trial))
        write_json(state, plan)
        _Runs(final, plan).delete_given_up()
        slowest = max(slowest, time.monotonic() - start - elapsed_s)
    return _result(final, plan, file)


def _read_or_plan(
    file: Path, state: Path, final: _Final, request: ShortRunRequest
) -> ScheduleSearch:
    """Return the search that was begun, or begin one.

    Raises:
        ConfigError: another search has the files, or one of other steps or seeds; or the budget is too small.
    """
    candidates = tuple(_candidates(final))
    if state.exists():
        plan = read_search(state)
        short_runs.check_begun(state, request, plan.rungs[-1], plan.seeds)
        _check_same(state, plan, candidates, final)
        return plan
    if file.exists():
        hint = "choose another file with -o"
        raise ConfigError.of("exists, and is not the file of a search", str(file), hint)
    return _plan(final, candidates, request)


def _file(path: str | None, config: RunConfig) -> Path:
    config_path = Path(path or Path(config.record.out_dir) / config.name)
    return config_path.with_suffix(_SUFFIX)


def _final(measurement: MeasuredConfig) -> _Final:
    """Find the final shape.

    Raises:
        ConfigError: the config's schedule or its rate is not one that trials can share.
    """
    rate = measurement.config.learning_rate
    problems = []
    if rate.shape != "wsd":
        text = f"is {rate.shape}, which has no stable part that trials could share"
        problems.append(("learning_rate.shape", text, "write shape: wsd"))
    elif rate.decay_fraction == 1:
        text = "is 1, which leaves no stable part that trials could share"
        problems.append(("learning_rate.decay_fraction", text, "write less, e.g. 0.3"))
    if rate.lr_decay_iters is not None:
        hint = "leave it out: the rate falls at the end of each trial"
        problems.append(("learning_rate.lr_decay_iters", "is given", hint))
    if rate.plateau.factor is not None:
        text = "is given: a rate that follows the losses of a run cannot be shared by trials"
        problems.append(("learning_rate.plateau.factor", text, "leave it out"))
    for number, entry in enumerate(measurement.config.schedule):
        if not is_growth(entry.name) or "lora" in entry.name:
            hint = "leave it out: a search replaces the schedule, and proposes growth only"
            problems.append((f"schedule[{number}]", f"is {entry.name}", hint))
    if problems:
        loaded_config = measurement.loaded_config
        raise ConfigError(
            *(loaded_config.problem(k, f"{k} {text}", hint) for k, text, hint in problems)
        )
    first, last = (
        short_runs.shape_of_stage(measurement, stage)
        for stage in (0, len(measurement.forecast.stages) - 1)
    )
    return _Final(measurement, last, short_runs.shape_settings(first, last))


def _candidates(final: _Final) -> Iterator[GrowthCandidate]:
    """Yield the final size from scratch, and all schedules that a run could carry out.

    Raises:
        ConfigError: there is none.
    """
    measurement = final.measurement
    (stage,) = measurement.forecast_of(final.settings).stages
    scratch_stage = CandidateStage(0.0, stage.flops_per_token)
    yield GrowthCandidate(
        SCRATCH, f"L{final.shape.n_layer}", {}, stage.parameters.total, (scratch_stage,)
    )
    candidates = [
        candidate
        for proposal in proposals(final.shape, final.config.learning_rate.decay_fraction)
        if (candidate := _checked(final, proposal)) is not None
    ]
    if not candidates:
        text = f"n_layer {final.shape.n_layer} leaves nothing to grow, and the width has no half"
        raise short_runs.refusal(
            measurement.loaded_config, "model", text, "give the final shape more layers"
        )
    yield from candidates


def _checked(final: _Final, proposal: GrowthProposal) -> GrowthCandidate | None:
    """Return the candidate of a proposal with its costs; None if no run could carry it out, if it ends with
    another shape, or if it costs no less."""
    begin = short_runs.shape_settings(final.shape, proposal.shape)
    stages = [
        CandidateStage(0.0, 1.0),
        *(CandidateStage(share, 1.0, operations) for share, operations in proposal.growth),
    ]
    draft = GrowthCandidate(proposal.name, proposal.trunk, begin, 1, tuple(stages), proposal.rewarm)
    try:
        forecast = final.measurement.forecast_of(_settings(final, draft))
    except ConfigError:
        return None
    last = forecast.stages[-1].architecture
    assert isinstance(last, Architecture)
    shape = final.shape.changed(norm_eps=last.norm_eps, rope_base=last.rope_base)
    if last != shape or any(stage.skipped for stage in forecast.stages):
        return None
    ends = [0]
    for stage in stages[1:]:
        ends.append(ends[-1] + len(stage.operations))
    costs = [forecast.stages[end].flops_per_token for end in ends]
    if costs != sorted(set(costs)):
        return None
    return structs.replace(
        draft,
        parameters=forecast.stages[0].parameters.total,
        stages=tuple(
            structs.replace(stage, flops_per_token=cost)
            for stage, cost in zip(stages, costs, strict=True)
        ),
    )


def _settings(final: _Final, candidate: GrowthCandidate) -> list[str]:
    """Return the settings of the config's run with a candidate's schedule."""
    entries = candidate.entries(final.measurement.run_steps, shares=True)
    return [*final.settings, *short_runs.options({**candidate.begin, "schedule": entries})]


def _plan(
    final: _Final, candidates: tuple[GrowthCandidate, ...], request: ShortRunRequest
) -> ScheduleSearch:
    """Choose the horizon that the budget allows, by the time of a few steps."""
    measurement, fewest = final.measurement, short_runs.FEWEST_STEPS * RUNGS[0]
    if request.steps is None:
        short_runs.check_run_steps(measurement, fewest, "search")
    (stage,) = measurement.forecast_of(final.settings).stages
    smallest = min(candidates, key=lambda candidate: candidate.stages[0].flops_per_token)
    times = [
        measurement.seconds([*final.settings, *short_runs.options(candidate.begin)], request.say)
        for candidate in (smallest, candidates[0])
    ]
    costs = [candidate.stages[0].flops_per_token for candidate in (smallest, candidates[0])]
    plan = ScheduleSearch(
        name=final.config.name,
        settings=_compared(final.config),
        candidates=candidates,
        seeds=tuple(request.seeds or (final.config.seed,)),
        rungs=rung_steps(measurement.run_steps),
        run_steps=measurement.run_steps,
        decay=final.config.learning_rate.decay_fraction,
        tokens_per_step=float(stage.settings.global_batch * stage.weight),
        evaluations=1,
        seconds=((costs[0], times[0][0]), (costs[1], times[1][0])),
    )
    seconds, count = plan.work(plan.step_seconds)
    seconds_each = seconds * (1 + short_runs.EVALUATED)
    fixed = count * short_runs.START_S
    steps = request.steps
    if steps is None:
        share = (short_runs.BUDGET_USED * request.budget_s - fixed) / seconds_each
        steps = int(measurement.run_steps * min(1.0, share))
    if steps < fewest:
        needed_s = (seconds_each * fewest / measurement.run_steps + fixed) / short_runs.BUDGET_USED
        raise short_runs.too_short(
            f"{count} runs of {short_runs.FEWEST_STEPS} steps and more", request.budget_s, needed_s
        )
    return structs.replace(
        plan, rungs=rung_steps(steps), evaluations=short_runs.evaluations(steps, *times[1])
    )


def _compared(config: RunConfig) -> dict[str, Any]:
    """Return the values of a config on which losses depend, by dotted key."""
    eval_settings = {"eval.eval_iters": config.eval.eval_iters, "eval.context": config.eval.context}
    return {**settings_of(config), **eval_settings}


def _check_same(
    file: Path, plan: ScheduleSearch, candidates: tuple[GrowthCandidate, ...], final: _Final
) -> None:
    """Raise ConfigError if a search is about another config."""
    settings = _compared(final.config)
    keys = sorted(k for k in {*settings, *plan.settings} if settings.get(k) != plan.settings.get(k))
    if plan.run_steps != final.measurement.run_steps:
        keys.append("train.until")
    if keys or plan.candidates != candidates:
        difference = f"settings of {', '.join(keys)}" if keys else "candidates"
        message = f"was begun with other {difference}"
        raise ConfigError.of(message, str(file), short_runs.ANOTHER_FILE)


@dataclass(frozen=True)
class _Runs:
    """The runs of a search."""

    final: _Final
    plan: ScheduleSearch

    def trunk(self, candidate: GrowthCandidate, seed: int) -> Path:
        """Return the folder of a trunk, whose name no search with other settings gives to one."""
        plan = self.plan
        parts = [plan.settings, [candidate.name for candidate in plan.candidates], plan.rungs]
        key = xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True).encode())[:6]
        run = f"{self.final.config.name}-{_RUN}-{key}-{candidate.trunk}-s{seed}"
        return Path(self.final.config.record.out_dir) / run

    def folder(self, candidate: GrowthCandidate, rung: int, seed: int) -> Path:
        """Return the folder of a trial, which is a branch of its trunk."""
        trunk, name = self.trunk(candidate, seed), self.plan.branch(candidate, rung)["value"]
        return trunk.with_name(branch_folder(trunk, name).name)

    def run(self, candidate: GrowthCandidate, rung: int, seed: int) -> SearchTrial:
        """Train a trial, or go on with it, and its trunk as far as its rung needs it; read how it ended."""
        plan, folder = self.plan, self.folder(candidate, rung, seed)
        steps = candidate.steps(plan.rungs[rung])
        if not folder.exists():
            self._train_trunk(candidate, rung, seed)
        if not folder.exists():
            raise RunFailed(f"{folder} is gone; delete the folder of its trunk to train both again")
        settings = ["resume=auto", *short_runs.options({"record.run_dir": os.fspath(folder)})]
        short_runs.train_or_resume(
            self.final.measurement, os.fspath(folder / "run.yaml"), settings, _RUN
        )
        at = candidate.branches_at(steps, plan.decay)
        before = (
            point for point in short_runs.losses_of(self.trunk(candidate, seed)) if point[0] <= at
        )
        after = (point for point in short_runs.losses_of(folder) if point[0] > at)
        loss = short_runs.loss_at_end(folder, steps)
        return SearchTrial(candidate.name, rung, seed, steps, loss, (*before, *after))

    def _train_trunk(self, candidate: GrowthCandidate, rung: int, seed: int) -> None:
        """Train a trunk to the last branch that it has in a rung.

        Its schedule is always the beginning of one list, that of the branches of all rungs, also of candidates
        that have been given up: what has fired never changes.
        """
        plan, config = self.plan, self.final.config
        rungs = range(len(plan.rungs))
        members = [other for other in plan.candidates if other.trunk == candidate.trunk]
        branches = [
            plan.branch(candidate, rung)
            for candidate, _ in plan.planned_trials(rung)
            if candidate in members
        ]
        last = max(entry["when"]["at_step"] for entry in branches)
        entries = (plan.branch(candidate, number) for number in rungs for candidate in members)
        schedule = sorted(
            (entry for entry in entries if entry["when"]["at_step"] <= last),
            key=lambda entry: (entry["when"]["at_step"], entry["value"]),
        )
        values = {
            **candidate.begin,
            **short_runs.run_values(config, _RUN, self.trunk(candidate, seed), last + 1, seed),
            "learning_rate.shape": "constant",
            "learning_rate.warmup_iters": min(
                config.learning_rate.warmup_iters, plan.rungs[0] // short_runs.WARMUP
            ),
            "eval.eval_interval": max(1, plan.rungs[-1] // plan.evaluations),
            "schedule": schedule,
        }
        measurement = self.final.measurement
        short_runs.train_or_resume(
            measurement,
            measurement.path,
            [*measurement.overrides, *self.final.settings, *short_runs.options(values)],
            _RUN,
        )

    def delete_given_up(self) -> None:
        """Delete branches that were made for trials which will not be run."""
        for rung in range(1, len(self.plan.rungs)):
            if (alive := self.plan.alive(rung)) is None:
                return
            for candidate in self.plan.candidates[1:]:
                for seed in self.plan.seeds if candidate not in alive else ():
                    if (folder := self.folder(candidate, rung, seed)).exists():
                        discard(folder)


def _result(final: _Final, plan: ScheduleSearch, file: Path) -> SearchResult:
    """Write the schedule of the winner, and its trials as a pilot."""
    winner, measurement = plan.winner, final.measurement
    if winner is None:
        return SearchResult(plan)
    folders = {seed: _Runs(final, plan).trunk(winner, seed) for seed in plan.seeds}
    trunks = {
        seed: short_runs.losses_of(folder) for seed, folder in folders.items() if folder.exists()
    }
    settings = _settings(final, winner)
    pilot = plan.pilot(winner, settings_of(measurement.load(settings).config), trunks)
    try:
        costs = spending(measurement.forecast_of(settings))
        saving = predict_saving(pilot, costs, source=os.fspath(pilot_path(file)))
    except ValueError:  # the final size from scratch diverged
        saving = None
    # each `--dry-run` looks beside the file that it reads
    for config_file in (file, _best_path(file)):
        write_json(pilot_path(config_file), structs.replace(pilot, found=pilot_summary(pilot)))
    if not file.exists():  # what was added to it stays
        replace_file(file, _text(final, plan, winner, saving).encode())
    text = _config_text(measurement.path)
    remarks = [f"{winner.name}: the winner of {file.with_suffix(SUFFIX).name}"]
    best = edited_config(text, [*measurement.overrides, *settings], AUTHOR, remarks)
    replace_file(_best_path(file), best.encode())
    return SearchResult(plan, file, _best_path(file), saving)


def _best_path(file: Path) -> Path:
    """Return where the config with the schedule of a file is written."""
    return file.with_name(f"{file.name.removesuffix('.yaml').removesuffix('.schedule')}{_BEST}")


def _config_text(path: str | None) -> str:
    return "" if path is None else read_regular(path, follow=True).decode("utf-8-sig")


def _text(
    final: _Final, plan: ScheduleSearch, winner: GrowthCandidate, saving: ExpectedSaving | None
) -> str:
    """Return the schedule's file."""
    horizon, last = plan.rungs[-1], len(plan.rungs) - 1
    losses = [plan.loss(candidate, last) or 0.0 for candidate in (winner, plan.scratch)]
    seeds = f"seed{'s' * (len(plan.seeds) > 1)} {', '.join(map(str, plan.seeds))}"
    comments = [
        f"{winner.name}: the best of {len(plan.candidates) - 1} schedules that lead to the final shape of "
        f"{in_yaml(plan.name)},",
        f"by `instar schedule search`, {len(plan.trials)} trials, {seeds}.",
        f"Held-out loss with the FLOPs of {horizon:,} steps of the final size: {losses[0]:.4f}; from "
        f"scratch: {losses[1]:.4f}.",
    ]
    if saving is not None:
        share, low, high = (
            f"{100 * percent:.0f}" for percent in (saving.share, saving.low, saving.high)
        )
        steps = f"{plan.run_steps:,} steps"
        comments.append(
            f"In a run of {steps} it is expected to save {share} % of the FLOPs ({low} to {high} %)."
        )
    begin = {key.removeprefix("model."): v for key, v in {**final.begin, **winner.begin}.items()}
    entries = winner.entries(final.measurement.run_steps, shares=True)
    lines = [f"# {line}" for line in comments]
    lines += [
        f"model: {in_yaml(begin)}",
        "schedule:",
        *(f"- {in_yaml(entry)}" for entry in entries),
    ]
    return "\n".join(lines) + "\n"
