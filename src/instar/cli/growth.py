"""`instar grow`: grow a checkpoint or a folder of transformers offline; `instar schedule`: growth in a run."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from instar.cli.completion import candidates
from instar.cli.options import (
    MOST_RANKS,
    CommandGroup,
    NewFolder,
    byte_size,
    json_option,
    rank_options,
    schedule_option,
    set_option,
    trust_option,
)
from instar.cli.output import print_json

if TYPE_CHECKING:
    from instar.config.sections import Operation
    from instar.growth.offline import OfflineGrowth
    from instar.schedule.pilot import Pilot
    from instar.schedule.search.state import ScheduleSearch


Command = Callable[..., Any]
_OPTION = re.compile(r"\s+(?=[a-z_]+=)")


@click.command(
    epilog="Operations and their options: docs/growth.md, e.g. --op widen_mlp=1024 "
    "--op 'insert_layers=2 where=even' --op 'set_lora_rank={target: attn, rank: 8}'"
)
@click.argument("where", metavar="CHECKPOINT|RUN|FOLDER", shell_complete=candidates.checkpoints)
@click.argument("out", type=NewFolder())
@click.option(
    "--op",
    "texts",
    multiple=True,
    required=True,
    metavar="'NAME=VALUE [OPTION=VALUE …]'",
    help="Operation; may be given several times, carried out in this order.",
)
@click.option(
    "--check/--no-proof",
    default=None,
    help="Compare outputs, and write nothing if a label fails. Default: for small models of transformers.",
)
@click.option(
    "--max-shard-size",
    callback=byte_size,
    metavar="SIZE",
    default="5GB",
    show_default=True,
    help="Largest file of weights of a FOLDER.",
)
@trust_option
@json_option
def grow(
    where: str,
    out: Path,
    texts: tuple[str, ...],
    check: bool | None,
    max_shard_size: int,
    as_json: bool,
) -> None:
    """Create the run OUT by growing a checkpoint (of a RUN, the latest), or the folder OUT by growing FOLDER.

    The run's one checkpoint has the same weights, optimizer state and history as if the operations had been
    carried out during training: `instar resume OUT` continues from there. FOLDER is one that transformers'
    save_pretrained wrote, and OUT another. Memory holds one tensor of the model at a time (with --check, both
    models).
    """
    operations = [operation_of(text) for text in texts]

    from instar.models.hf import is_pretrained
    from instar.processes.memory import keep_freed_memory

    keep_freed_memory(all_of_it=True)
    if is_pretrained(Path(where)):
        from instar.growth.folders import grow_folder
        from instar.models.hf.pretrained_folder import open_folder

        result = grow_folder(
            open_folder(Path(where)), out, operations, check=check, max_shard_bytes=max_shard_size
        )
        advice = f"AutoModelForCausalLM.from_pretrained({str(out)!r})"
    else:
        from instar.checkpoint.store import load_checkpoint
        from instar.cli.checkpoints.checkpoint import checkpoint_at

        path = checkpoint_at(where)

        from instar.run.offline import grow as grow_checkpoint

        result = grow_checkpoint(load_checkpoint(path), out, operations, check=bool(check))
        advice = f"instar resume {shlex.quote(str(out))}"
    if as_json:
        print_json(result.to_dict())
        return
    _print_stages(result)
    click.echo(str(out))
    click.echo(f"next: {advice}", err=True)


def operation_of(text: str) -> Operation:
    """Parse an operation such as `insert_layers=2 where=even`; values are YAML.

    Raises:
        ConfigError: the form is wrong, or the operation is unknown.
    """
    from instar.config.document import parse
    from instar.config.errors import ConfigError
    from instar.config.sections import Operation
    from instar.schedule.operations import check_operation

    place = f"--op {text}"
    values: dict[str, Any] = {}
    for part in _OPTION.split(text.strip()):
        name, equals, value_text = part.partition("=")
        value, problems = parse(value_text, place, ())
        if problems:
            raise ConfigError(*problems)
        if not re.fullmatch("[a-z_]+", name) or (values and not equals) or name in values:
            raise ConfigError.one(
                f"{part!r} is not name=value", place, "write e.g. 'insert_layers=2 where=even'"
            )
        values[name] = None if value is None else value.data
    (name, value), *options = values.items()
    operation = Operation(name, value, dict(options))
    try:
        check_operation(operation)
    except ValueError as error:
        raise ConfigError.one(str(error), place) from None
    return operation


def _print_stages(result: OfflineGrowth) -> None:
    """Print one line per operation on stderr: its effect, and the model's new size."""
    from instar.record.format import si

    before = result.parameters_before
    for stage in result.stages:
        value = "" if stage.operation.value is None else f" {json.dumps(stage.operation.value)}"
        size = f"{si(before)} → {si(stage.parameters)}" if stage.label else ""
        words = [f"{stage.operation.name}{value}", size, stage.label or "", *stage.notes]
        click.echo("  ".join(filter(None, words)), err=True)
        before = stage.parameters
    if result.proof is not None:
        what = "logit" if result.checked_on == "random tokens" else "output"
        change = (
            f"max |Δ{what}| {result.proof.max_logit_diff:.2g}, Δloss {result.proof.delta_loss:+.2g}"
        )
        click.echo(f"checked on {result.checked_on}: {change}: {result.proof.label}", err=True)
    if result.warning:
        click.echo(f"warning: {result.warning}", err=True)
    click.echo(f"{result.path}, in {result.seconds:.1f} s", err=True)


def budget_options(*, fewest: int, steps: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of commands that train short runs."""

    def added(command: Command) -> Command:
        for option in (
            click.option(
                "--seed",
                "seeds",
                type=click.IntRange(0, 2**63 - 1),
                multiple=True,
                help="Seed of the runs; several, for better intervals, share the budget. Default: CONFIG's.",
            ),
            click.option(
                "--steps",
                type=click.IntRange(min=fewest),
                help=f"Steps {steps}; default: as many as --budget allows.",
            ),
            click.option(
                "--budget", metavar="TIME", help="How long it may take, e.g. 30min or 2h."
            ),
        ):
            command = option(command)
        return command

    return added


@click.group(cls=CommandGroup)
def schedule() -> None:
    """Check schedules of operations, predict what growth saves, and search for a schedule that does."""


@schedule.command()
@click.argument("file")
@click.option("--config", "cfg", metavar="CFG", help="The run's config; default: the defaults.")
@click.option("--nproc", type=click.IntRange(1, MOST_RANKS), default=1, help="Ranks of the run.")
@click.option(
    "--pilot",
    "pilot_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Predict the saving from this pilot; default: CFG's, if there is one.",
)
@set_option
@trust_option
@json_option
def check(
    file: str,
    cfg: str | None,
    nproc: int,
    pilot_file: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print a forecast of the run, stage by stage, with the schedule in FILE.

    Every mistake is listed with its line, exit code 2. No data are prepared: until they are,
    epochs are unknown.
    """
    from instar.run.origin.load import load_config
    from instar.schedule.checks import without_effect
    from instar.schedule.expected import expected_saving, saving_values
    from instar.schedule.forecast import checked_forecast
    from instar.schedule.render import render
    from instar.tasks.task import spec_class

    loaded = load_config(cfg, (*overrides, schedule_option(file)))
    spec = spec_class(loaded.config.task).assume(loaded, lambda text: click.echo(text, err=True))
    forecast = checked_forecast(loaded, spec, nproc)
    saving = expected_saving(forecast, loaded, cfg, pilot_file)
    for text in without_effect(loaded.config):
        click.echo(f"warning: {text}", err=True)
    if as_json:
        print_json({**forecast.to_dict(), **saving_values(saving)})
        return
    click.echo(render(forecast, saving))


@schedule.command()
@click.argument("cfg", metavar="CONFIG")
@click.option("--schedule", "file", metavar="FILE", help="Schedule of operations, if not CONFIG's.")
@budget_options(fewest=40, steps="of the longest runs")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The pilot's file; default: CONFIG's name, ending in .pilot.json, beside it.",
)
@rank_options
@set_option
@trust_option
@json_option
def pilot(
    cfg: str,
    file: str | None,
    budget: str | None,
    steps: int | None,
    seeds: tuple[int, ...],
    output: Path | None,
    nproc: int | None,
    devices: list[int] | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure by short runs how much compute the schedule of growth saves.

    Trains CONFIG's final model from scratch, and the run that grows into it, each shortened to what the
    budget allows, as ordinary runs in the folder of runs. From then on `instar schedule check` and
    `instar train --dry-run` print the saving to expect. The same command goes on after an interruption.
    """
    from instar.api.pilot import pilot as run_pilot
    from instar.schedule.render import render_saving

    budget_s = _seconds(budget, steps)
    settings = (*overrides, *([schedule_option(file)] if file else ()))
    result = run_pilot(
        cfg,
        settings,
        budget_s=budget_s,
        steps=steps,
        seeds=seeds,
        out=output,
        world_size=nproc,
        devices=devices,
        say=lambda text: click.echo(text, err=True),
    )
    if as_json:
        findings = result.pilot.found
        print_json({"file": str(result.file), "saving": result.saving.to_dict(), **findings})
        return
    _print_pilot(result.pilot)
    click.echo(render_saving(result.saving))


@schedule.command()
@click.argument("cfg", metavar="CONFIG")
@budget_options(fewest=80, steps="of the final size, with whose FLOPs candidates are compared")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The schedule's file; default: CONFIG's name, ending in .schedule.yaml, beside it.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the candidates and what they cost; train none."
)
@rank_options
@set_option
@trust_option
@json_option
def search(
    cfg: str,
    budget: str | None,
    steps: int | None,
    seeds: tuple[int, ...],
    output: Path | None,
    dry_run: bool,
    nproc: int | None,
    devices: list[int] | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Find the schedule of growth that leads to CONFIG's final shape with the least compute.

    Trains candidates from shared trunks as ordinary runs in the folder of runs, and compares them with the final
    shape from scratch at equal FLOPs. The better half of them goes on with twice as many, twice. The winner is
    written as a schedule's file, for `instar train CONFIG --schedule FILE`. The same command goes on after
    an interruption.
    """
    from instar.api.search import search as run_search
    from instar.schedule.render import render_saving

    result = run_search(
        cfg,
        overrides,
        budget_s=_seconds(budget, steps),
        steps=steps,
        seeds=seeds,
        out=output,
        world_size=nproc,
        devices=devices,
        dry_run=dry_run,
        say=lambda text: click.echo(text, err=True),
    )
    schedule_search, saving = result.search, result.saving
    if as_json:
        flops, runs = schedule_search.work(
            lambda per_token: per_token * schedule_search.tokens_per_step
        )
        values = {
            "file": None if result.file is None else str(result.file),
            "saving": None if saving is None else saving.to_dict(),
            "complete": schedule_search.missing is None,
            "losses": {
                candidate.name: schedule_search.losses(candidate)
                for candidate in schedule_search.candidates
            },
            "rungs": schedule_search.rungs,
            "runs": runs,
            "flops": flops,
        }
        print_json(values)
        return
    _print_search(schedule_search)
    if saving is not None:
        click.echo(render_saving(saving))
    if result.file is not None:
        words = shlex.join(["instar", "train", str(cfg), "--schedule", str(result.file)])
        click.echo(f"{result.file}\nnext: {words}")
    elif not dry_run and schedule_search.missing is None:
        click.echo(
            "no schedule is better than the final size from scratch with the same FLOPs: none is written"
        )


def _print_search(schedule_search: ScheduleSearch) -> None:
    """Print the candidates of a search with their losses, and what it costs in all."""
    from instar.cli.output import print_table
    from instar.record.format import scientific, si

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
    from instar.config.budget import parse_budget

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
    from instar.cli.output import print_table
    from instar.record.format import si

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
        grown = f"{run.case.grown_at[-1]:,}" if run.case.grown_at else ""
        steps, tokens = f"{run.case.steps:,}", si(round(run.tokens))
        rows.append([run.case.name, steps, grown, tokens, f"{run.loss:.4f}", *worth])
    headers = ["run", "steps", "grown at", "tokens", "loss", "γ", "δ"]
    print_table(headers, rows, right=headers[1:])
    click.echo(
        f"c {summary['cost']:.3f} of the FLOPs, {summary['cost_in_seconds']:.3f} of the time; "
        f"θ {summary['exponent']:.2f} ({summary['exponent_low']:.2f} to {summary['exponent_high']:.2f})"
    )
    if (law := summary["final_curve"]) is not None:
        curve = ", ".join(f"{key}: {value:.6g}" for key, value in law.items())
        click.echo(f"trigger     when: {{slope_below: {{window: 5, curve: {{{curve}}}}}}}")
