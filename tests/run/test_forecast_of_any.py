"""Random schedules of all operations: run and forecast agree on every step, setting, shape, sample, token and FLOP.

`INSTAR_TORTURE=full` tries 500.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import figures
import pytest
from live import restore

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import load_checkpoint
from instar.config.errors import ConfigError
from instar.record.events import Train, read_events
from instar.run.start.preflight import Prepared
from instar.run.trainer import Trainer
from instar.schedule.forecast import Stage
from instar.schedule.operations import FOLD, State, operation_names, states
from instar.schedule.settings import learning_rate

Entry = dict[str, Any]
FACTORS = [0.5, 1.5, 2, "x2", 3]
SIZES = ["x2", "x1.5", 40, 48, 64, 96]
TARGETS = ["attn", "mlp", "embedding", "all", "blocks.0.*"]
OF_BATCH = [{}, {"lr": "sqrt"}, {"lr": {"exponent": 0.6}}]
CHOICES: Mapping[str, list[tuple[Any, list[Entry]]]] = {
    "set_lr": [(value, [{}]) for value in (1e-4, 3e-3)],
    "set_batch_size": [(value, OF_BATCH) for value in (1, 2, 3, 6)],
    "change_batch_size": [(value, OF_BATCH) for value in FACTORS],
    "adjust_batch_size": [(0.9, [{"max": 3, "batch_size": 3}, {"max": 2, "batch_size": 2}])],
    "set_grad_accum": [(value, OF_BATCH) for value in (1, 3)],
    "set_warmup_iters": [(value, [{}]) for value in (1, 3, 5)],
    "set_eval_iters": [(value, [{}]) for value in (1, 2)],
    "set_eval_interval": [(value, [{}]) for value in (1, 2, 4)],
    "set_context": [(value, [{}, {"tokens": "keep"}]) for value in (4, 8, 16, 32)],
    "change_context": [(value, [{}, {"tokens": "keep"}]) for value in (0.5, 2)],
    "reset_lr_schedule": [(None, [{}])],
    "freeze": [(value, [{}]) for value in ("blocks.0.*", "token*", ["*norm*", "blocks.*.mlp.*"])],
    "unfreeze": [(value, [{}]) for value in ("blocks.0.*", "*")],
    "average_checkpoints": [(1, [{}])],
    "branch": [("side", [{"iters": 2}])],
    "set_weight_decay": [(value, [{}]) for value in (0, 0.3)],
    "set_clip": [(value, [{}]) for value in (0.5, None)],
    "set_betas": [([0.8, 0.9], [{}])],
    "set_momentum": [(0.5, [{}])],
    "change_momentum": [(0.5, [{}])],
    "set_ema_decay": [(0.5, [{}])],
    "change_ema_decay": [(0.5, [{}])],
    "set_dropout": [(0.1, [{}])],
    "change_dropout": [(value, [{}]) for value in (0.5, "x2")],
    "untie_embeddings": [(True, [{}])],
    "loop_layers": [({"from": first, "to": 1, "times": 2}, [{}]) for first in (0, 1)],
    "unloop": [(True, [{}])],
    "set_window": [(value, [{}]) for value in (5, {"layers": [0], "size": 3}, None)],
    "change_window": [(value, [{}]) for value in (0.5, "x2")],
    "stack_layers": [(2, [{}, {"how": "interleave"}]), ([0, 0, 1], [{}]), ("x2", [{}])],
    "insert_layers": [(1, [{}, {"where": "even"}, {"mask": 2}, {"from": "copy"}])],
    "split_kv_heads": [(2, [{}])],
    "add_heads": [(value, [{}, {"mask": 3}]) for value in (1, 2)],
    "grow_head_dim": [(value, [{}]) for value in ("x2", 24)],
    "upcycle": [(2, [{"num_experts_per_tok": 1}])],
    "extend_context": [(value, [{}]) for value in (32, "x2")],
    "set_lora_rank": [
        ({"target": target, "rank": rank}, [{}, {"merge": True}])
        for target in TARGETS
        for rank in (0, 2, 3)
    ],
    "change_lora_rank": [
        ({"target": target, "factor": factor}, [{}, {"merge": True}])
        for target in TARGETS
        for factor in FACTORS
    ],
    "set_lora_alpha": [({"target": target, "alpha": 3}, [{}]) for target in TARGETS],
    "change_lora_alpha": [({"target": "all", "factor": 0.5}, [{}]), ("x2", [{}])],
    "merge_lora": [(target, [{}]) for target in (None, "attn")],
    "widen": [({"axis": axis, "size": "x1.5"}, [{}]) for axis in ("mlp", "embed", "vocab")],
}
"""Values and options of operations; of others factors or sizes."""
GROWTH_OPTIONS = [{}, {}, {"lr": "reset"}, {"lr": {"rewarm": 3}}, {"lr": {"rewarm_new": 2}}]


NEEDS = {
    **{
        name: {"name": "set_lora_rank", "value": {"target": "all", "rank": 2}}
        for name in ("change_lora_rank", "set_lora_alpha", "change_lora_alpha", "merge_lora")
    },
    "change_dropout": {"name": "set_dropout", "value": 0.2},
    "unloop": {"name": "loop_layers", "value": {"from": 0, "to": 0, "times": 3}},
    "change_window": {"name": "set_window", "value": 7},
}
"""What comes first, or an operation would never be possible."""


ELSEWHERE = ("fold_masks", "set_mixture")
"""A run's own, and one that needs several sources (test_mixture_stages.py)."""


def operation(draw: random.Random) -> Entry:
    name = draw.choice([name for name in operation_names() if name not in ELSEWHERE])
    choices = [(value, [{}]) for value in (FACTORS if name.startswith("change_") else SIZES)]
    value, options = draw.choice(CHOICES.get(name, choices))
    more = draw.choice(GROWTH_OPTIONS) if name in GROWN else {}
    return {"name": name, "value": value, **draw.choice(options), **more}


GROWN = (
    *("stack_layers", "insert_layers", "widen_mlp", "widen_hidden", "add_heads", "split_kv_heads"),
    *("grow_head_dim", "upcycle", "resize_vocab", "extend_context", "widen"),
)


OTHER_TRIGGERS = ("trigger_loss", "max_wait_iters", "reevaluate")


def trigger(draw: random.Random) -> Entry:
    """Bounds of losses that all evaluations are below: then a forecast's earliest steps are those of the run."""
    return draw.choice(
        [
            {"when": {"at_step": draw.randint(0, 11)}},
            {"when": {"waited": draw.randint(1, 4)}},
            {"when": {"at_tokens": draw.randint(1, 1200)}},
            {"when": {"at_fraction": round(draw.random(), 2)}},
            {"when": {"all": [{"waited": 1}, {"at_step": draw.randint(0, 9)}]}},
            {"when": {"any": [{"loss_below": 99.0}, {"waited": 5}]}},
            {"trigger_loss": 99.0, "max_wait_iters": draw.randint(0, 6)},
            {"trigger_loss": 99.0, "max_wait_iters": 3, "reevaluate": True},
            {"max_wait_iters": draw.randint(0, 3)},
        ]
    )


def keys(draw: random.Random) -> list[str]:
    schedule = []
    for _ in range(draw.randint(1, 5)):
        entry = operation(draw) | trigger(draw)
        if entry["name"] == "average_checkpoints":  # not before the first is saved
            entry |= {"when": {"at_step": draw.randint(3, 11)}}
            entry = {key: part for key, part in entry.items() if key not in OTHER_TRIGGERS}
        if entry["name"] in NEEDS:
            schedule.append(NEEDS[entry["name"]] | {"when": {"at_step": 0}, "on_failure": "skip"})
        entry |= {"on_failure": "skip"} if draw.random() < 0.25 else {}
        entry |= {"min_steps": draw.randint(1, 3)} if draw.random() < 0.2 else {}
        schedule.append(entry)
    options = [
        f"schedule={json.dumps(schedule)}",
        f"train.until=[{draw.choice(['12it', '1300tok', '90samples', '9it'])}]",
        f"eval.eval_interval={draw.choice([2, 3, 5])}",
        "eval.eval_iters=2",
        f"learning_rate.shape={draw.choice(['cosine', 'linear', 'wsd', 'constant'])}",
        f"train.batch_size={draw.choice([2, 4])}",
        f"train.ema={draw.choice(['null', '0.9'])}",
        f"optimizer.name={draw.choice(['adamw', 'muon'])}",
        "checkpoint.every_minutes=null",
        "checkpoint.every_steps=3",
        "record.sample_tokens=0",
        "model.n_head=4",
    ]
    shapes = (["preset=gpt2"], ["preset=llama", "model.n_kv_head=2"])
    return [*options, *draw.choice(shapes)]


@pytest.mark.repeated
@pytest.mark.timeout(7200)
def test_a_run_is_what_its_forecast_says(
    trainer: Callable[..., Trainer], prepare_run: Callable[..., Prepared], tmp_path: Path
) -> None:
    """Every third is killed after a random step, and goes on from its last checkpoint."""
    trials, wrong, seed = 0, list[str](), 0
    # a text of whole windows at every length: how long the last one is, a forecast does not know
    data = ("data.max_bytes=13903", f"data.path={tmp_path / 'whole'}")
    counts: Counter[str] = Counter()
    while trials < figures.times(6, 500):
        seed += 1
        options = [*keys(random.Random(seed)), *data]
        try:
            ready = prepare_run(*options)
        except ConfigError:
            continue  # not possible, which the check says; others are
        trials += 1
        run = trainer(*options, name=f"run-{seed}")
        if seed % 3 == 0:
            run = resume_killed(run, trainer, options, seed)
        run.train()
        run.parts.saver.finish()
        counts.update(c.operation.name for c in run.state.history if not c.skipped)
        events = tmp_path / f"{run.parts.saver.root.name}.jsonl"
        wrong += [f"seed {seed}: {text}" for text in differences(ready, run, events)]
        run.close()
        shutil.rmtree(run.parts.saver.root, ignore_errors=True)
    missing = {*operation_names()} - {*ELSEWHERE} - counts.keys() if figures.FULL else set[str]()
    figures.write(
        "forecast",
        [
            figures.none_of(trials, "random schedules, runs other than their forecasts", wrong),
            figures.none_of(len(counts), "operations, never carried out", sorted(missing)),
        ],
    )


def resume_killed(
    run: Trainer, trainer: Callable[..., Trainer], options: Sequence[str], seed: int
) -> Trainer:
    """A run that goes on from the last checkpoint of one that was killed."""
    killed_at = random.Random(-seed).randint(1, 9)

    @contextmanager
    def killing() -> Iterator[None]:
        if run.state.step == killed_at:
            raise KeyboardInterrupt
        yield

    run.around_step = killing
    with suppress(KeyboardInterrupt):
        run.train()
    run.parts.saver.finish()
    after = trainer(*options, name=f"run-{seed}-resumed")
    checkpoints = run.parts.saver.root / "checkpoints"
    if checkpoints.exists():
        shutil.copytree(checkpoints, after.parts.saver.root / "checkpoints")
    with suppress(CheckpointError):  # it was killed before the first
        restore(after, load_checkpoint(latest_checkpoint(run.parts.saver.root)))
    return after


def differences(ready: Prepared, run: Trainer, events: Path) -> list[str]:
    """In what a run that has ended is other than its forecast."""
    problems: list[str] = []
    history = [c for c in run.state.history if c.operation != FOLD]
    stages = [stage for stage in ready.forecast.stages[1:] if stage.first_step is not None]
    expected = [(s.operation.split(" ")[0].rstrip(","), s.first_step, s.skipped) for s in stages]
    actual = [(c.operation.name, c.step, c.skipped) for c in history]
    if expected != actual:
        return [f"operations: forecast {expected}, run {actual}"]
    after = {id(change): state for change, state in states(run.parts.initial, run.state.history)}
    for stage, change in zip(stages, history, strict=True):
        if not change.skipped:
            problems += of_stage(stage, after[id(change)])
    progress, totals = run.state.progress, ready.forecast.early
    assert totals is not None
    for name in ("step", "samples", "tokens", "flops"):
        total = getattr(totals, "steps" if name == "step" else name)
        if getattr(progress, name) != total:
            problems.append(f"{name}: forecast {total}, run {getattr(progress, name)}")
    rates = {e.step: e.lr for e in read_events(events) if isinstance(e, Train)}
    state, later_states = (
        run.parts.initial,
        [(c.step, after[id(c)]) for c in run.state.history if not c.skipped],
    )
    for step, rate in rates.items():
        while later_states and later_states[0][0] < step:
            state = later_states.pop(0)[1]
        if rate != pytest.approx(learning_rate(state.settings, step - 1), rel=1e-9):
            problems.append(f"rate of step {step}: {rate}")
    return problems


def of_stage(stage: Stage, state: State) -> list[str]:
    """Settings, but for when a rate schedule or a warm-up began, which a forecast does not know; and the shape."""
    began = {"lr_start": 0, "rewarm_start": 0, "new_param_warmups": ()}
    pairs = (replace(stage.settings, **began), replace(state.settings, **began))
    problems = (
        [f"{stage.operation}: forecast {pairs[0]}, run {pairs[1]}"] if pairs[0] != pairs[1] else []
    )
    if stage.architecture.parameters() != state.architecture.parameters():
        problems.append(f"{stage.operation}: another shape")
    return problems
