"""A mixture whose weights change in mid-run: the samples are exact for any number of ranks, kills and resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import parametrize_first
from live import restore
from started import run_ranks

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.store import load_checkpoint
from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.data import mixture
from instar.record.events import Eval, OperationEvent, Train, read_events
from instar.run.start.preflight import Prepared
from instar.run.trainer import Trainer

SCHEDULE = [
    {"name": "set_mixture", "value": {"squares": 1, "code": 3, "words": 0}, "when": {"at_step": 3}},
    {"name": "set_batch_size", "value": 3, "when": {"at_step": 5}},
    {
        "name": "set_mixture",
        "value": {"squares": 5, "code": 0.5, "words": 1},
        "when": {"at_step": 6},
    },
    {"name": "set_context", "value": 8, "when": {"at_step": 9}},
    {
        "name": "set_mixture",
        "value": {"squares": 0, "code": 0, "words": 1},
        "when": {"at_step": 11},
    },
]
WEIGHTS = ((2, 1, 1), (1, 3, 0), (5, 0.5, 1), (5, 0.5, 1), (0, 0, 1))
ENDS = (3, 6, 9, 11, 14)
BATCHES = [8] * 5 + [6] * 9


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three texts, the last of which is so short that it is read many times."""
    folder = tmp_path_factory.mktemp("sources")
    for name, text in (
        ("squares", "".join(f"{n} times {n} is {n * n}\n" for n in range(200))),
        ("code", "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(120))),
        ("words", "once upon a time there was a mixture of few words\n" * 12),
    ):
        (folder / f"{name}.txt").write_text(text)
    return folder


def mixture_settings(folder: Path, *keys: str) -> list[str]:
    parts = [
        {"source": str(folder / f"{name}.txt"), "name": name, "weight": weight}
        for name, weight in zip(("squares", "code", "words"), WEIGHTS[0], strict=True)
    ]
    return [
        "data.source=stdlib",
        f"data.mixture={json.dumps(parts)}",
        "data.tokenizer=byte",
        f"data.path={folder / 'tokens'}",
        "train.until=[14it]",
        "learning_rate.lr_decay_iters=14",
        "checkpoint.every_steps=2",
        *keys,
    ]


def schedule_setting() -> str:
    return f"schedule={json.dumps(SCHEDULE)}"


def test_shares_are_exact_in_every_prefix_of_every_stage_and_parts_go_on_in_their_order(
    trainer: Callable[..., Trainer], sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    sizes: list[tuple[int, ...]] = []
    orders: list[Any] = []
    original, original_order = mixture.Concatenated.read, mixture.Mixed.at_stage

    def reading(self: mixture.Concatenated, indices: Any, epoch: int = 0) -> Any:
        if self.__dict__.get("offsets") is not None and len(self) > 150:  # the training split
            read.extend(indices.tolist())
            sizes.append(tuple(int(offset) for offset in self.offsets))
        return original(self, indices, epoch)

    def at_stage(self: mixture.Mixed, stage: Any) -> mixture.Mixed:
        orders.append(self)
        return original_order(self, stage)

    monkeypatch.setattr(mixture.Concatenated, "read", reading)
    monkeypatch.setattr(mixture.Mixed, "at_stage", at_stage)
    run = trainer(
        *mixture_settings(
            sources,
            schedule_setting(),
            "data.prefetch=false",
            "eval.eval_iters=1",
            "eval.at_start=false",
        )
    )
    run.train()
    begin, step = 0, 0
    counts = np.zeros(3, dtype=int)
    assert len(read) >= sum(BATCHES)
    for number, (weights, end) in enumerate(zip(WEIGHTS, ENDS, strict=True)):
        length = sum(BATCHES[step:end])
        stage = np.array(read[begin : begin + length])
        offsets = np.array(sizes[step])
        parts = np.searchsorted(offsets, stage, side="right") - 1
        prefix = np.arange(1, length + 1)
        for part, weight in enumerate(weights):
            count = np.cumsum(parts == part)
            assert np.abs(count - prefix * weight / sum(weights)).max() < 1, (number, part)
        if number == 3:
            counts[:] = 0  # samples of another length are in another order
        order = orders[-1] if number >= 3 else orders[0]
        for part in range(3):
            actual = (stage[parts == part] - offsets[part]).tolist()
            part_order = order.parts[part].order
            n = part_order.samples_per_epoch
            part_samples = [i for e in range(200) for i in part_order.indices(e, 0, n).tolist()]
            assert actual == part_samples[counts[part] : counts[part] + len(actual)], (number, part)
            counts[part] += len(actual)
        begin, step = begin + length, end
    assert run.state.progress.samples == sum(BATCHES)


@pytest.mark.torture
def test_a_killed_run_draws_the_same_samples(
    trainer: Callable[..., Trainer], sources: Path, tmp_path: Path
) -> None:
    full_run = trainer(*mixture_settings(sources, schedule_setting()), name="whole")
    full_run.train()
    losses = [e.loss for e in read_events(tmp_path / "whole.jsonl") if isinstance(e, Train)]
    assert len(losses) == 14
    for killed_at in (2, 4, 7, 10, 12):
        first = trainer(*mixture_settings(sources, schedule_setting()), name=f"first-{killed_at}")

        def kill(run: Trainer = first, at: int = killed_at) -> Any:
            if run.state.step == at:
                raise KeyboardInterrupt
            return nullcontext()

        first.around_step = kill
        with pytest.raises(KeyboardInterrupt):
            first.train()
        first.parts.saver.finish()
        second = trainer(*mixture_settings(sources, schedule_setting()), name=f"second-{killed_at}")
        restore(second, load_checkpoint(latest_checkpoint(first.parts.saver.root)))
        second.train()
        events = read_events(tmp_path / f"second-{killed_at}.jsonl")
        after = [event.loss for event in events if isinstance(event, Train)]
        assert after == losses[14 - len(after) :]
        assert len(after) >= 14 - killed_at


def test_a_checkpoint_from_before_turns_were_even_goes_on_in_its_order(
    trainer: Callable[..., Trainer], sources: Path
) -> None:
    run = trainer(*mixture_settings(sources), name="old")
    run.step()
    run.save("now")
    run.parts.saver.finish()
    checkpoint = load_checkpoint(latest_checkpoint(run.parts.saver.root))
    course = dict(checkpoint.state["course"])
    assert course.pop("mixture") == {"weights": [2.0, 1.0, 1.0], "drawn": [0, 0, 0]}
    checkpoint.state["course"] = course  # type: ignore[index]
    later = trainer(*mixture_settings(sources), name="later")
    restore(later, checkpoint)
    assert later.state.phase.mixture is None
    later.train()


@parametrize_first(
    ("ranks", "keys"),
    [
        (2, ("reproducible=elastic", "parallel.elastic.virtual_ranks=2")),
        (3, ()),
    ],
    first=1,
)
def test_any_number_of_ranks_draws_the_same_samples(
    config_in: Callable[..., Loaded],
    sources: Path,
    tmp_path: Path,
    ranks: int,
    keys: tuple[str, ...],
) -> None:
    """Bit for bit in an elastic run, also resumed, and where rank 0 reads for all."""
    curves = []
    for number, more in ((1, ()), (ranks, ("data.strategy=dispatched",))):
        folder = tmp_path / str(number)
        folder.mkdir()
        loaded_config = config_in(
            folder, *mixture_settings(sources, schedule_setting(), *keys, *more)
        )
        path = folder / "run.yaml"
        path.write_text(loaded_config.to_yaml(origin=False), encoding="utf-8")
        place = ("--set", f"record.run_dir={folder / 'run'}")
        run_ranks(number, folder, "train", path, *place, "--until", "7it")
        run_ranks(number, folder, "resume", folder / "run", "--until", "14it")
        events = read_events(folder / "run" / "events.jsonl")
        curves.append([event.loss for event in events if isinstance(event, Train)])
    assert len(curves[0]) == 14
    assert curves[0] == (curves[1] if keys else pytest.approx(curves[1], rel=1e-5))


def test_a_resume_with_other_weights_is_as_an_operation(
    config_in: Callable[..., Loaded], sources: Path, tmp_path: Path
) -> None:
    """And one with other parts is refused, as none of them goes on where it was."""
    change = {"name": "set_mixture", "value": {"squares": 1, "code": 3, "words": 2}}
    entry = f"schedule={json.dumps([{**change, 'when': {'at_step': 4}}])}"
    parts = json.loads(mixture_settings(sources)[1].partition("=")[2])
    other = [{**part, "weight": w} for part, w in zip(parts, (1, 3, 2), strict=True)]
    sets = ("--allow", "data", "--set", f"data.mixture={json.dumps(other)}", "--until", "8it")
    curves = []
    for name, keys, more in (("whole", (entry,), ()), ("resumed", (), sets)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(
            config_in(tmp_path, *mixture_settings(sources, *keys)).to_yaml(origin=False)
        )
        run = tmp_path / name
        until = "4it" if more else "8it"
        run_ranks(1, tmp_path, "train", path, "--until", until, "--set", f"record.run_dir={run}")
        if more:
            run_ranks(1, tmp_path, "resume", run, *more)
        curves.append([e.loss for e in read_events(run / "events.jsonl") if isinstance(e, Train)])
    assert curves[0] == curves[1]
    fewer = f"data.mixture={json.dumps(parts[:2])}"
    with pytest.raises(AssertionError, match=r"data\.mixture was .* and cannot become"):
        run_ranks(1, tmp_path, "resume", tmp_path / "resumed", "--allow", "data", "--set", fewer)


def test_the_forecast_knows_the_stages(
    trainer: Callable[..., Trainer],
    prepare_run: Callable[..., Prepared],
    sources: Path,
    tmp_path: Path,
) -> None:
    ready = prepare_run(*mixture_settings(sources, schedule_setting()))
    stages = [stage.settings.mixture for stage in ready.forecast.stages]
    assert stages[-1] == (0.0, 0.0, 1.0)
    run = trainer(*mixture_settings(sources, schedule_setting()), name="run")
    run.train()
    assert ready.forecast.early is not None
    assert run.state.progress.samples == ready.forecast.early.samples
    evaluation = [e for e in read_events(tmp_path / "run.jsonl") if isinstance(e, Eval)][-1]
    assert evaluation.drawn == {"squares": 9, "code": 1, "words": 20}
    assert run.state.epochs == pytest.approx(ready.forecast.early.epochs)
    events = [e for e in read_events(tmp_path / "run.jsonl") if isinstance(e, OperationEvent)]
    assert events[0].change == "mixture: squares 2→1, mixture: code 1→3, mixture: words 1→0"


@pytest.mark.parametrize(
    ("value", "keys", "message"),
    [
        ({"squares": 1, "code": 1, "poems": 1}, (), "no part is called 'poems'; .* squares, code"),
        ({"squares": 1, "code": 1}, (), "every part needs a weight, 0 to leave it out"),
        ({"squares": 0, "code": 0, "words": 0}, (), "leaves out every part"),
        ({"squares": -1, "code": 1, "words": 1}, (), "must be weights by the names of parts"),
        (2, (), "must be weights by the names of parts"),
        ({"squares": 1}, ("data.mixture=[]",), "data.mixture has no parts with weights"),
    ],
)
def test_other_mixtures_are_refused(
    prepare_run: Callable[..., Prepared],
    sources: Path,
    value: Any,
    keys: tuple[str, ...],
    message: str,
) -> None:
    entry = json.dumps([{"name": "set_mixture", "value": value, "when": {"at_step": 1}}])
    options = mixture_settings(sources, f"schedule={entry}", *keys)
    if keys:
        options = [f"schedule={entry}"]
    with pytest.raises((ConfigError, ValueError), match=message):
        prepare_run(*options)
