"""Every operation that a record holder's script does by hand, on 1, 2 and 4 ranks, with and without shards, killed at random
moments around them: an elastic run ends in the same bits as one on one rank that nothing happened to, a fixed one in the same
losses."""

from __future__ import annotations

import json
import random
import shutil
import signal

import figures
import pytest
from tiny_run import Place, codes, course, fingerprint, go_on, output_of, start

from instar.checkpoint.store import load_checkpoint

STEPS = 44
KILLS = figures.times(1, 3)
ENTRIES = [
    ("set_weight_decay", 0.3),
    ("set_clip", 0.5),
    ("set_betas", [0.8, 0.9]),
    ("set_momentum", 0.9),
    ("set_ema_decay", 0.5),
    ("set_window", {"layers": [0], "size": 5}),
    ("set_mixture", {"many": 1, "few": 3}),
    ("untie_embeddings", True),
    ("loop_layers", {"from": 0, "to": 1, "times": 2}),
    ("change_weight_decay", 0.5),
    ("change_window", 2),
    ("set_lora_rank", {"target": "attn", "rank": 2}),
    ("unloop", True),
    ("change_lora_rank", {"target": "attn", "factor": 2}, {"merge": True}),
    ("set_mixture", {"many": 0, "few": 1}),
    ("change_lora_alpha", "x2"),
    ("change_batch_size", "x1.5", {"lr": {"exponent": 0.6}}),
    ("set_window", None),
    ("merge_lora", None),
]
SCHEDULE = [
    {"name": name, "value": value, "when": {"at_step": 4 + 2 * number}, **dict(*options)}
    for number, (name, value, *options) in enumerate(ENTRIES)
]
SIZES = [1, 2, 4]
WAYS = [
    (size, strategy, reproducible)
    for reproducible in ("fixed", "elastic")
    for size in SIZES
    for strategy in ("ddp", "fsdp")
    if size > 1 or strategy == "ddp"
]


def settings(place: Place, strategy: str, reproducible: str) -> tuple[str, ...]:
    parts = []
    for name, text in (
        ("many", "all sorts of words are here\n" * 400),
        ("few", "few words\n" * 60),
    ):
        path = place.path / f"{name}.txt"
        path.write_text(text)
        parts.append({"source": str(path), "name": name, "weight": 1})
    return (
        f"schedule={json.dumps(SCHEDULE)}",
        f"train.until=[{STEPS}it]",
        f"learning_rate.lr_decay_iters={STEPS}",
        "train.batch_size=8",
        "train.gradient_accumulation_steps=1",
        "model.dropout=0",
        "data.source=stdlib",
        f"data.mixture={json.dumps(parts)}",
        "data.tokenizer=byte",
        f"data.path={place.path / 'mixed'}",
        "checkpoint.every_steps=3",
        f"parallel.strategy={strategy}",
        f"reproducible={reproducible}",
    )


@pytest.mark.timeout(7200)
def test_operations_are_carried_out_alike_by_any_ranks_and_through_kills(place: Place) -> None:
    chance, kills = random.Random(0), 0
    other_bits, other_losses, other_history = list[str](), list[str](), list[str]()
    ways = WAYS if figures.FULL else [(2, "fsdp", "elastic")]
    for reproducible in dict.fromkeys(way[2] for way in ways):
        full_run = place.path / f"whole-{reproducible}"
        ranks = start(place, full_run, (1, settings(place, "ddp", reproducible)))
        assert codes(ranks) == [0], output_of(ranks)
        expected_losses = [event["loss"] for event in course(full_run, "train")]
        for size, strategy, _ in (way for way in ways if way[2] == reproducible):
            name = f"{size} × {strategy} {reproducible}"
            run_dir = place.path / f"{size}-{strategy}-{reproducible}"
            way = (size, settings(place, strategy, reproducible))
            ranks = start(place, run_dir, way)
            for _ in range(KILLS):
                ranks[0].wait_for(rf"^\s*{chance.randint(3, STEPS - 2)}\b  ")
                for rank in ranks:
                    rank.signal(signal.SIGKILL)
                codes(ranks)
                kills += 1
                ranks = go_on(place, run_dir, way)
            if set(exit_codes := codes(ranks)) != {0}:
                other_history.append(f"{name}: ended {exit_codes}\n{output_of(ranks)[-2000:]}")
                continue
            history = load_checkpoint(run_dir / "checkpoints" / f"step-{STEPS}").manifest.history
            operations = [(c["operation"]["name"], c["step"], c["skipped"]) for c in history]
            if operations != [(e["name"], 4 + 2 * n, "") for n, e in enumerate(SCHEDULE)]:
                other_history.append(f"{name}: {operations}")
            if reproducible == "elastic" and fingerprint(run_dir, STEPS) != fingerprint(
                full_run, STEPS
            ):
                other_bits.append(name)
            actual_losses = [event["loss"] for event in course(run_dir, "train")]
            if actual_losses != pytest.approx(expected_losses, rel=1e-5):
                other_losses.append(f"{name}: {actual_losses} instead of {expected_losses}")
            shutil.rmtree(run_dir)
    figures.write(
        "operations",
        [
            figures.none_of(len(ways), "ways: operations not once, in order", other_history),
            figures.none_of(len(ways), "ways: losses other than on one rank", other_losses),
            figures.none_of(len(ways), "ways: elastic bits other than on one rank", other_bits),
            figures.count("kills of all ranks in them", kills),
        ],
    )
