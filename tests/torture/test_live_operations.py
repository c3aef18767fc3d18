"""People ask running ranks for operations at random moments, and ranks are killed: what was asked for is carried out
once by all ranks, or refused by name, or waits; and the run is one whose schedule said the same."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import figures
import pytest
from forks import Child
from tiny_run import Place, acknowledged_step, codes, course, events, fingerprint, output_of

from instar.checkpoint.store import Checkpoint, load_checkpoint
from instar.record.control import Post, send_post

ASKED = figures.times(6, 200)
STEPS = 32
LAST = STEPS - 6
"""after it nobody asks any more"""
IN_TIME = STEPS - 4
"""what is there after this step is taken in before the end"""
WITHIN = 2
"""steps, in which what has no trigger is carried out"""
WAIT_S = 10.0
ALONE_S = WAIT_S + 5.0
"""until a rank whose peer is gone must have ended"""
SCHEDULE = [
    {"name": "change_lr", "value": 0.9, "when": {"at_step": 17}},
    {"name": "insert_layers", "value": 1, "when": {"at_step": 25}},
]
SETTINGS = (
    "reproducible=elastic",
    "train.batch_size=9",
    f"train.until=[{STEPS}it]",
    f"learning_rate.lr_decay_iters={STEPS}",
    "checkpoint.every_steps=3",
    "checkpoint.keep_last=2",
    f"parallel.timeout_s={WAIT_S}",
)
WAYS = ((1, ()), (2, ()), (2, ("parallel.strategy=fsdp",)))
LAUNCHED = 5
"""every so many runs has a launcher, which is killed, unless it has one rank"""

Content = Mapping[str, Any]
GROWTH: list[Content] = [
    {"name": "insert_layers", "value": 1},
    {"name": "widen_mlp", "value": "x1.5"},
    {"name": "widen_hidden", "value": 48},
    {"name": "add_heads", "value": 1},
    {"name": "untie_embeddings", "value": True},
    {"name": "set_window", "value": 5},
    {"name": "set_dropout", "value": 0.2},
]
DIALS: list[Content] = [
    {"name": "change_lr", "value": 0.8},
    {"name": "set_lr", "value": 0.004},
    {"name": "set_context", "value": 8},
    {"name": "freeze", "value": "blocks.0.*"},
    {"name": "unfreeze", "value": "blocks.0.*"},
    {"name": "set_eval_interval", "value": 5},
    {"name": "set_batch_size", "value": 8},
    {"name": "change_batch_size", "value": 1.25},
    {"name": "set_grad_accum", "value": 2},
    {"name": "set_weight_decay", "value": 0.2},
    {"name": "change_clip", "value": 0.5},
    {"name": "set_betas", "value": [0.8, 0.9]},
    {"name": "set_momentum", "value": 0.9},
    {"name": "set_ema_decay", "value": 0.8},
]
WRONG: list[Content] = [
    {"name": "widen_mpl", "value": 2},
    {"name": "change_lr", "value": "fast"},
    {"name": "widen_hidden", "value": 47},
    {"name": "insert_layers", "value": 10**9},
    {"name": "set_context", "value": 4096},
    {"name": "change_lr", "value": 0.5, "on_failure": "stop"},
    {"value": 2},
]


@dataclass(frozen=True)
class Sent:
    """What somebody asked for."""

    post: Post
    content: Content
    step: int
    """the last that was said when it was there"""
    is_disturbed: bool = False
    """whether ranks were killed after it"""

    @property
    def waits(self) -> bool:
        return self.post.command == "apply" and "when" in self.content


@pytest.mark.timeout(7200)
def test_what_is_asked_for_is_carried_out_once_as_if_the_schedule_had_said_it(place: Place) -> None:
    chance = random.Random(0)
    n_requests, runs, kills = 0, 0, 0
    outcomes, wrong, different = Counter[str](), list[str](), list[str]()
    while n_requests < ASKED or runs < len(WAYS):
        run_dir, schedule_run = place.path / f"live-{runs}", place.path / f"scheduled-{runs}"
        requests, run_kills, ranks = live_run(place, run_dir, runs, chance)
        if set(exit_codes := codes(ranks)) != {0}:
            wrong.append(f"{run_dir.name}: {exit_codes}\n{output_of(ranks)}")
        else:
            checkpoint = load_checkpoint(run_dir / "checkpoints" / f"step-{STEPS}")
            wrong += [f"{run_dir.name}: {what}" for what in not_once(run_dir, checkpoint, requests)]
            outcomes += outcomes_of(checkpoint, requests)
            entries = f"schedule={json.dumps(schedule_of(checkpoint))}"
            (rank,) = place.train(schedule_run, *SETTINGS, entries)
            assert rank.finish() == 0, rank.output()
            if fingerprint(run_dir, STEPS) != fingerprint(schedule_run, STEPS):
                different.append(f"{run_dir.name}, {WAYS[runs % len(WAYS)]}: {entries}")
            shutil.rmtree(schedule_run)
        n_requests, runs, kills = n_requests + len(requests), runs + 1, kills + run_kills
        shutil.rmtree(run_dir)
    assert outcomes["carried out"] >= n_requests // 3
    figures.write(
        "live-operations",
        [
            figures.none_of(
                n_requests, "asked for: not once, nor refused by name, nor waiting", wrong
            ),
            figures.none_of(runs, "runs that were asked: another than the scheduled", different),
            figures.count("SIGKILL of a rank, all or the launcher in them", kills),
            *(figures.count(f"of them {name}", outcomes[name]) for name in sorted(outcomes)),
        ],
    )


def live_run(
    place: Place, run_dir: Path, number: int, chance: random.Random
) -> tuple[list[Sent], int, list[Child]]:
    """What was asked for of a run, how often it was killed, and the ranks that bring it to its end."""
    size, strategy = WAYS[number % len(WAYS)]
    is_launched = number % LAUNCHED == LAUNCHED - 1 and size > 1
    launcher = ("--nproc", size) if is_launched else ()
    sets = (word for text in (*SETTINGS, *strategy) for word in ("--set", text))
    where = ("--set", f"record.run_dir={run_dir}", "--set", f"schedule={json.dumps(SCHEDULE)}")
    words = ("train", "run.yaml", *where, *sets, *launcher)
    ranks = place.instar(*words, ranks=1 if is_launched else size)
    ranks[0].wait_until(lambda: acknowledged_step(run_dir))
    requests, kills = list[Sent](), 0
    for deaths_left in range(chance.choice((1, 1, 2)), -1, -1):
        for _ in range(chance.randint(2, 3)):
            requests += ask(ranks[0], run_dir, requests, chance)
        if deaths_left:
            kills += kill(ranks, chance, limit_s=ALONE_S)
            requests = [replace(request, is_disturbed=True) for request in requests]
            ranks = resume(place, run_dir, size)
    return requests, kills, ranks


def ask(rank: Child, run_dir: Path, earlier: Sequence[Sent], chance: random.Random) -> list[Sent]:
    """Ask for one thing, or two people at once for one each, at a moment of one of the next steps."""
    now = step_of(rank)
    if now >= LAST or not rank.wait_for(rf"^ *{min(LAST, now + chance.randint(1, 3))} .*loss"):
        return []
    contents = [content_of(step_of(rank), earlier, chance) for _ in range(chance.choice((1, 1, 2)))]
    rank.ended_within(chance.uniform(0.0, 0.03))
    with ThreadPoolExecutor(len(contents)) as people:
        posts = list(people.map(lambda content: post(run_dir, content), contents))
    step = step_of(rank)
    return [Sent(*pair, step) for pair in zip(posts, contents, strict=True)]


def content_of(step: int, earlier: Sequence[Sent], chance: random.Random) -> Content:
    kind = chance.random()
    if kind < 0.12:
        return chance.choice(WRONG)
    if kind < 0.25:
        waiting = [request.post.id for request in earlier if request.waits]
        return {"id": chance.choice(waiting)} if waiting else {"entry": chance.randint(0, 1)}
    content = chance.choice(GROWTH if kind < 0.55 else DIALS)
    if chance.random() < 0.3:
        when = {"at_step": step + chance.randint(1, 8)} if chance.random() < 0.7 else {"waited": 3}
        return {**content, "when": when}
    return content


def post(run_dir: Path, content: Content) -> Post:
    command: Any = "cancel" if content.keys() <= {"id", "entry"} else "apply"
    return send_post(run_dir / "control", command, content)


def step_of(rank: Child) -> int:
    """The last step that a rank, or the ranks of a launcher, said."""
    return max(map(int, re.findall(r"^ *(\d+) .*loss", rank.output(), re.MULTILINE)), default=0)


def kill(ranks: Sequence[Child], chance: random.Random, limit_s: float) -> int:
    """Soon after something was asked for, before, while or after it is carried out or saved; how many kills."""
    ranks[0].ended_within(chance.uniform(0.0, 0.12))
    for victim in ranks if chance.random() < 0.5 else [chance.choice(ranks)]:
        victim.signal(signal.SIGKILL)
    return int(-signal.SIGKILL in [rank.finish(limit_s) for rank in ranks])


def resume(place: Place, run_dir: Path, size: int) -> list[Child]:
    """Resume, once the ranks of a launcher that is gone have ended."""
    while True:
        ranks = place.resume(run_dir, ranks=size)
        n_starts = len(events(run_dir, "run_started"))
        if ranks[0].wait_until(
            lambda before=n_starts: len(events(run_dir, "run_started")) > before
        ):
            return ranks
        output = "".join(rank.output() for rank in ranks if rank.finish(ALONE_S))
        if "is training there" not in output:  # it was complete
            return ranks


def schedule_of(checkpoint: Checkpoint) -> list[Content]:
    """What a schedule would have said, for the same run."""
    return [
        {**change["operation"]["options"], "name": change["operation"]["name"]}
        | {"value": change["operation"]["value"], "when": {"at_step": change["step"]}}
        for change in checkpoint.manifest.history
        if not change["skipped"]
    ]


def outcomes_of(checkpoint: Checkpoint, requests: Sequence[Sent]) -> Counter[str]:
    change_ids = {
        change.get("id") for change in checkpoint.manifest.history if not change["skipped"]
    }
    return Counter(
        "cancels"
        if request.post.command == "cancel"
        else "carried out"
        if request.post.id in change_ids
        else "refused, cancelled or waiting"
        for request in requests
    )


def not_once(run_dir: Path, checkpoint: Checkpoint, requests: Sequence[Sent]) -> list[str]:
    """What is wrong with what became of all that was asked for."""
    history = checkpoint.manifest.history
    changes = Counter(change["id"] for change in history if "id" in change)
    wrong = [f"{number} is there {times} times" for number, times in changes.items() if times > 1]
    starts = Counter(event["id"] for event in course(run_dir, "operation") if event.get("id"))
    answers = events(run_dir, "asked")
    wrong += [f"without a reason: {event}" for event in answers if not event.get("reason")]
    for request in requests:
        number = request.post.id
        change = next((change for change in history if change.get("id") == number), None)
        cancels = {other.post.id for other in requests if other.content == {"id": number}}
        outcomes = {event["outcome"] for event in answers if event["id"] == number}
        if number in checkpoint.state.get("closed", ()):
            outcomes |= {event["outcome"] for event in answers if event["id"] in cancels} & {
                "cancelled"
            }
        waiting = {post["id"] for post in checkpoint.state.get("posted", ())}
        what = f"{request}: {outcomes}, {change}, begun {starts[number]} times"
        if request.post.path.exists():
            if request.step < IN_TIME:
                wrong.append(f"not taken in: {what}")
        elif request.post.command == "cancel" or change is None:
            if number in waiting:
                outcomes -= {"waits"}
                ends = 1
            else:
                ends = len(outcomes & {"refused", "cancelled"})
            if ends != 1 or starts[number]:
                wrong.append(f"no end, or several: {what}")
        elif change["skipped"]:
            if "refused" not in outcomes or starts[number]:
                wrong.append(f"skipped, but not refused: {what}")
        elif starts[number] != 1 or "cancelled" in outcomes:
            wrong.append(f"not begun once: {what}")
        elif not (request.waits or request.is_disturbed) and change["step"] > request.step + WITHIN:
            wrong.append(f"late: {what}")
    return wrong
