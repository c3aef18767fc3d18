"""`instar schedule pilot` and `instar schedule search`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from instar.cli.options import (
    StrictCommand,
    json_option,
    rank_options,
    schedule_option,
    set_option,
    trust_option,
)
from instar.cli.output import print_json, print_table
from instar.config.budget import parse_budget
from instar.extensions.lab.expected import render_saving
from instar.extensions.lab.pilot import run_pilot
from instar.extensions.lab.pilot_file import Pilot
from instar.extensions.lab.search import SearchResult, run_search
from instar.extensions.lab.search_state import ScheduleSearch
from instar.extensions.lab.short_runs import ShortRunRequest
from instar.record.format import scientific, si

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


def takes_request(
    *, fewest: int, counted: str, output: str, more: Decorator = lambda command: command
) -> Decorator:
    """Return a decorator that adds the options of a command that trains short runs, among them `more`, and passes
    what they say as a `ShortRunRequest`."""
    seed_help = (
        "Seed of the runs; several, for better intervals, share the budget. Default: CONFIG's."
    )
    steps_help = f"Steps {counted}; default: as many as --budget allows."
    budget_help = "How long it may take, e.g. 30min or 2h."
    seed_type = click.IntRange(0, 2**63 - 1)
    options: list[Decorator] = [
        trust_option,
        set_option,
        rank_options,
        more,
        click.option(
            "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help=output
        ),
        click.option("--seed", "seeds", type=seed_type, multiple=True, help=seed_help),
        click.option("--steps", type=click.IntRange(min=fewest), help=steps_help),
        click.option("--budget", metavar="TIME", help=budget_help),
    ]

    def add_options(command: Command) -> Command:
        @wraps(command)
        def run(
            cfg: str,
            overrides: tuple[str, ...],
            budget: str | None,
            steps: int | None,
            seeds: tuple[int, ...],
            output: Path | None,
            nproc: int | None,
            devices: list[int] | None,
            **others: Any,
        ) -> None:
            budget_s, say = _seconds(budget, steps), partial(click.echo, err=True)
            request = ShortRunRequest(
                cfg, overrides, budget_s, steps, seeds, output, nproc, devices, say
            )
            command(request, **others)

        wrapped: Command = run
        for option in options:
            wrapped = option(wrapped)
        return wrapped

    return add_options


@click.command(cls=StrictCommand)
@click.argument("cfg", metavar="CONFIG")
@click.option("--schedule", "file", metavar="FILE", help="Schedule of operations, if not CONFIG's.")
@takes_request(
    fewest=40,
    counted="of the longest runs",
    output="The pilot's file; default: CONFIG's name, ending in .pilot.json, beside it.",
)
@json_option
def pilot(request: ShortRunRequest, file: str | None, as_json: bool) -> None:
    """Measure by short runs how much compute the schedule of growth saves.

    Trains CONFIG's final model from scratch, and the run that grows into it, each shortened to what the
    budget allows, as ordinary runs in the folder of runs. From then on `instar schedule check` and
    `instar train --dry-run` print the saving to expect. The same command goes on after an interruption.
    """
    if file:
        request = replace(request, overrides=(*request.overrides, schedule_option(file)))
    result = run_pilot(request)
    if as_json:
        findings = result.pilot.found
        print_json({"file": str(result.file), "saving": result.saving.to_dict(), **findings})
        return
    _print_pilot(result.pilot)
    click.echo(render_saving(result.saving))


@click.command(cls=StrictCommand)
@click.argument("cfg", metavar="CONFIG")
@takes_request(
    fewest=80,
    counted="of the final size, with whose FLOPs candidates are compared",
    output="The schedule's file; default: CONFIG's name, ending in .schedule.yaml, beside it.",
    more=click.option(
        "--dry-run", is_flag=True, help="Print the candidates and what they cost; train none."
    ),
)
@json_option
def search(request: ShortRunRequest, dry_run: bool, as_json: bool) -> None:
    """Find the schedule of growth that leads to CONFIG's final shape with the least compute.

    Trains candidates from shared trunks as ordinary runs in the folder of runs, and compares them with the final
    shape from scratch at equal FLOPs. The better half of them goes on with twice as many, twice. The winner is
    written as a schedule's file, for `instar train CONFIG --schedule FILE`, and as a config that has it. The same
    command goes on after an interruption.
    """
    result = run_search(request, dry_run=dry_run)
    schedule_search, saving = result.search, result.saving
    if as_json:
        print_json(_search_values(result))
        return
    _print_search(schedule_search)
    if saving is not None:
        click.echo(render_saving(saving))
    if result.file is not None:
        words = shlex.join(["instar", "train", str(result.config)])
        click.echo(f"{result.file}\n{result.config}\nnext: {words}")
    elif not dry_run and schedule_search.missing is None:
        click.echo(
            "no schedule is better than the final size from scratch with the same FLOPs: none is written"
        )


def _search_values(result: SearchResult) -> dict[str, Any]:
    """Return what a search has found as JSON-ready data."""
    search = result.search
    flops, runs = search.work(lambda per_token: per_token * search.tokens_per_step)
    return {
        "file": None if result.file is None else str(result.file),
        "config": None if result.config is None else str(result.config),
        "saving": None if result.saving is None else result.saving.to_dict(),
        "complete": search.missing is None,
        "losses": {candidate.name: search.losses(candidate) for candidate in search.candidates},
        "rungs": search.rungs,
        "runs": runs,
        "flops": flops,
    }


def _print_search(schedule_search: ScheduleSearch) -> None:
    """Print the candidates of a search with their losses, and what it costs in all."""
    headers = [
        "schedule",
        "begins with",
        "grows at",
        "steps",
        *(f"{n:,}" for n in schedule_search.rungs),
    ]
    rows = []
    for candidate in schedule_search.candidates:
        steps = candidate.steps(schedule_search.rungs[-1])
        moments = ", ".join(f"{step:,}" for step in candidate.moments(steps))
        losses = [
            "" if loss is None else f"{loss:.4f}" for loss in schedule_search.losses(candidate)
        ]
        rows.append([candidate.name, si(candidate.parameters), moments, f"{steps:,}", *losses])
    print_table(headers, rows, right=headers[1:])
    flops, count = schedule_search.work(
        lambda per_token: per_token * schedule_search.tokens_per_step
    )
    seconds, _ = schedule_search.work(schedule_search.step_seconds)
    scratch_flops = (
        schedule_search.scratch.flops(schedule_search.run_steps) * schedule_search.tokens_per_step
    )
    click.echo(
        f"losses at the FLOPs of so many steps of the final size; steps, moments: at {schedule_search.rungs[-1]:,}\n"
        f"{count} runs, at most {scientific(round(flops))} FLOPs, {flops / scratch_flops:.2f} times those of the "
        f"final size in {schedule_search.run_steps:,} steps; steps take about {seconds / 60:,.1f} min"
    )


def _seconds(text: str | None, steps: int | None) -> float:
    """Parse a time such as 30min, which may be left out where the steps are given."""
    if text is None:
        if steps is None:
            raise click.UsageError("How long may it take? Write e.g. --budget 30min.")
        return math.inf
    try:
        budget = parse_budget(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--budget") from None
    if budget.kind != "seconds":
        raise click.BadParameter(f"{text!r} is no time; write e.g. 30min", param_hint="--budget")
    return budget.amount


def _print_pilot(pilot: Pilot) -> None:
    """Print the runs of a pilot, what they say, and the trigger that follows from them."""
    summary = pilot.found
    worths = {entry["run"]: entry for entry in summary["grown"]}
    rows = []
    for run in pilot.runs:
        growth = worths.get(run.case.name)
        worth = (
            ["", ""]
            if growth is None
            else [f"{growth['token_worth']:.3f}", f"{growth['missing_loss']:+.4f}"]
        )
        grown_at = f"{run.case.grown_at[-1]:,}" if run.case.grown_at else ""
        steps, tokens = f"{run.case.steps:,}", si(round(run.tokens))
        rows.append([run.case.name, steps, grown_at, tokens, f"{run.loss:.4f}", *worth])
    headers = ["run", "steps", "grown at", "tokens", "loss", "γ", "δ"]
    print_table(headers, rows, right=headers[1:])
    click.echo(
        f"c {summary['cost']:.3f} of the FLOPs, {summary['cost_in_seconds']:.3f} of the time; "
        f"θ {summary['exponent']:.2f} ({summary['exponent_low']:.2f} to {summary['exponent_high']:.2f})"
    )
    if (law := summary["final_curve"]) is not None:
        curve = ", ".join(f"{key}: {value:.6g}" for key, value in law.items())
        click.echo(f"trigger     when: {{slope_below: {{window: 5, curve: {{{curve}}}}}}}")
