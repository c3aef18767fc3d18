"""Operations that people ask a running run for: checked, taken in between two steps, kept, carried out once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from live import restore

from instar.api import control
from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.store import load_checkpoint
from instar.record.control import MOST_BYTES, WAITING, Post, send_post
from instar.record.events import Asked, OperationEvent, Train, Warn, read_events
from instar.record.rundir import RunDir
from instar.run.changes.requests import take_in, warn_of_unsaved
from instar.run.start import restore as restoring
from instar.run.trainer import Trainer
from instar.schedule.operations import override

Make = Callable[..., Trainer]
Content = Mapping[str, Any]


def events(run: Trainer, kind: type[Any]) -> list[Any]:
    path = run.parts.saver.root
    all_events = read_events(path.with_name(f"{path.name}.jsonl"))
    return [event for event in all_events if isinstance(event, kind)]


def post(run: Trainer, content: Content, command: Any = "apply") -> Post:
    return send_post(run.parts.saver.root / "control", command, content)


def train(run: Trainer, posts: Mapping[int, Content]) -> list[Post]:
    """Train to the end, and post after these steps, while the next begins."""
    sent_posts: list[Post] = []

    @contextmanager
    def posting() -> Any:
        if run.state.step in posts:
            content = posts[run.state.step]
            sent_posts.append(
                post(run, content, "cancel" if content.keys() <= {"id", "entry"} else "apply")
            )
        yield

    run.around_step = posting
    run.train()
    run.parts.saver.finish()
    return sent_posts


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.parts.stepper.parameters.items()}


def entries(*rows: Content) -> str:
    return f"schedule={json.dumps(rows)}"


@pytest.mark.parametrize(
    "content",
    [
        {"name": "change_lr", "value": 0.5},
        {"name": "widen_mlp", "value": "x2"},
        {"name": "insert_layers", "value": 1},
        {"name": "set_context", "value": 8},
        {"name": "freeze", "value": "blocks.0.*"},
    ],
    ids=lambda content: content["name"],
)
def test_what_is_asked_for_is_as_if_the_schedule_had_said_it(
    trainer: Make, content: Content
) -> None:
    by_request = trainer(name="asked")
    (request,) = train(by_request, {3: content})
    by_schedule = trainer(entries({**content, "when": {"at_step": 4}}), name="scheduled")
    train(by_schedule, {})
    losses = [[event.loss for event in events(run, Train)] for run in (by_request, by_schedule)]
    assert len(losses[0]) == 8
    assert losses[0] == losses[1]
    actual, expected = weights(by_request), weights(by_schedule)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    (change,) = by_request.state.history
    assert (change.id, change.entry, change.step) == (request.id, None, 4)
    (event,) = events(by_request, OperationEvent)
    assert event.id == request.id
    assert event.by == change.by != ""
    assert event.reason == f"asked for by {change.by}"


def test_one_with_a_trigger_waits_for_it_and_is_listed(trainer: Make) -> None:
    run = trainer(entries({"name": "change_lr", "value": 0.5, "when": {"at_step": 7}}))
    run.step()
    request = post(run, {"name": "set_clip", "value": 1.0, "when": {"at_step": 6}})
    request.path.unlink()
    request = post(run, {"name": "change_lr", "value": 0.1, "when": {"at_step": 6}})
    train(run, {})
    waits, *_ = events(run, Asked)
    assert (waits.outcome, waits.reason, waits.id) == ("waits", "at step 6", request.id)
    assert [(c.step, c.operation.value, c.id) for c in run.state.history] == [
        (6, 0.1, request.id),
        (7, 0.5, ""),
    ]
    assert run.state.posted == ()


def test_waiting_is_written_for_whoever_lists_it(trainer: Make) -> None:
    run = trainer(entries({"name": "change_lr", "value": 0.5, "when": {"at_step": 100}}))
    (request,) = train(run, {2: {"name": "widen_mlp", "value": "x2", "when": {"at_step": 200}}})
    waiting = json.loads((run.parts.saver.root / "control" / "waiting.json").read_text())
    assert waiting == {
        "schedule": [
            {"name": "change_lr", "value": 0.5, "options": {}, "when": "at step 100", "entry": 0}
        ],
        "asked": [
            {
                "name": "widen_mlp",
                "value": "x2",
                "options": {},
                "when": "at step 200",
                "id": request.id,
                "by": run.state.posted[0].by,
                "since_step": 3,
            }
        ],
    }


REFUSED = [
    ({"name": "widen_mpl", "value": 2}, "did you mean 'widen_mlp'"),
    ({"name": "change_lr", "value": "fast"}, "change_lr.value"),
    ({"name": "widen_mlp", "value": 3}, "widen_mlp.value is not possible here"),
    ({"name": "widen_mlp", "value": "x2", "momments": "reset"}, "momments"),
    ({"name": "change_lr", "value": 0.5, "when": {}}, "when is empty"),
    ({"name": "change_lr", "value": 0.5, "repeat": 3}, "repeat is of no use"),
    ({"name": "change_lr", "value": 0.5, "on_failure": "explode"}, "on_failure"),
    ({"name": "change_lr", "value": 0.5, "on_failure": "stop"}, "on_failure is skip"),
    ({"value": 2}, "name is missing"),
    ({"name": "set_context", "value": 4096}, "set_context"),
    ({"name": "insert_layers", "value": 10**9}, "insert_layers"),
    ({"name": "fold_masks"}, "a run folds its masks by itself"),
    ({"name": "branch", "value": "../out", "iters": 3}, "branch.value"),
    ({"entry": 7}, "no entry 7 of the schedule waits"),
    ({"id": "0123456789ab"}, "no operation with the id '0123456789ab' waits"),
    ({"id": []}, "no operation with the id [] waits"),
    ({"entry": {}}, "no entry {} of the schedule waits"),
]


def test_what_the_run_cannot_do_is_refused_by_name_and_changes_nothing(trainer: Make) -> None:
    plain = trainer(name="plain")
    train(plain, {})
    run = trainer()
    for content, _ in REFUSED:
        post(run, content, "cancel" if content.keys() <= {"id", "entry"} else "apply")
    requests = train(run, {})
    assert requests == []
    refusals = events(run, Asked)
    reasons = sorted(event.reason for event in refusals)
    assert {event.outcome for event in refusals} == {"refused"}
    assert len(reasons) == len(REFUSED)
    for _, words in REFUSED:
        assert any(words in reason for reason in reasons), (words, reasons)
    assert run.state.history == ()
    assert list((run.parts.saver.root / "control").iterdir()) == []
    actual, expected = weights(run), weights(plain)
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


def test_what_would_break_the_rest_of_the_schedule_is_refused(trainer: Make) -> None:
    run = trainer(entries({"name": "widen_mlp", "value": 192, "when": {"at_step": 6}}))
    train(run, {1: {"name": "widen_mlp", "value": 256}})
    (refusal,) = events(run, Asked)
    assert "the rest of the schedule would not be possible: schedule[0].value" in refusal.reason
    assert [change.step for change in run.state.history] == [6]


def test_of_two_that_together_would_break_the_rest_only_the_first_is_carried_out(
    trainer: Make,
) -> None:
    """Both are checked before either is carried out."""
    run = trainer(entries({"name": "widen_mlp", "value": 192, "when": {"at_step": 7}}))
    run.step()
    posts = {post(run, {"name": "widen_mlp", "value": "x1.25"}).id for _ in range(2)}
    train(run, {})
    history = run.state.history
    assert [(c.step, c.operation.value) for c in history if not c.skipped] == [
        (2, "x1.25"),
        (7, 192),
    ]
    (skip,) = (change for change in history if change.skipped)
    assert "the rest of the schedule would not be possible: schedule[0]" in skip.skipped
    assert {change.id for change in history if change.id} == posts
    (refusal,) = events(run, Asked)
    assert (refusal.id, refusal.outcome) == (skip.id, "refused")


def test_files_that_are_no_posts_are_refused_or_left_alone(trainer: Make, tmp_path: Path) -> None:
    run = trainer()
    control = run.parts.saver.root / "control"
    control.mkdir()
    good = json.dumps({"name": "change_lr", "value": 0.5}).encode()
    names = iter(f"{number:012x}.apply" for number in range(100))

    def put(content: bytes) -> Path:
        path = control / next(names)
        path.write_bytes(content)
        path.chmod(0o644)
        return path

    put(b"{" * 20_000)
    put(b'{"name": "change_lr", "value": ' + b"[" * 5_000 + b"]" * 5_000 + b"}")
    put(good + b" " * MOST_BYTES)
    put(b"\xff\xfe")
    put(b'{"name": "change_lr", "value": NaN}')
    put(b'{"name": "change_lr", "value": 1e999}')
    put(b'{"name": "change_lr", "value": "\\ud800"}')
    put(b'{"name": "insert_layers", "value": 1' + b"0" * 9_000 + b"}")
    put(b'["change_lr"]')
    put(good).chmod(0o666)
    os.link(put(good), tmp_path / "second name")
    (control / next(names)).symlink_to(put(good).rename(tmp_path / "elsewhere"))
    os.mkfifo(control / next(names))
    (control / "readme.txt").write_text("not a post")
    (control / "zz.apply").write_bytes(good)
    if os.getuid() == 0:
        os.chown(put(good), 12345, -1)
    train(run, {})
    assert run.state.history == ()
    reasons = [event.reason for event in events(run, Asked)]
    assert len(reasons) == 13 + (os.getuid() == 0)
    assert all(reasons)
    assert {path.name for path in control.iterdir()} == {"readme.txt", "zz.apply"}
    assert (tmp_path / "elsewhere").read_bytes() == good


def test_an_entry_of_the_schedule_is_cancelled_and_the_others_go_on(trainer: Make) -> None:
    run = trainer(
        entries(
            {"name": "change_lr", "value": 0.5, "when": {"at_step": 4}},
            {"name": "change_lr", "value": 0.1, "when": {"at_step": 5}, "repeat": 1},
            {"name": "change_lr", "value": 0.25, "when": {"at_step": 6}},
        )
    )
    train(run, {1: {"entry": 1}})
    changes = [change for change in run.state.history if not change.skipped]
    assert [(change.step, change.operation.value) for change in changes] == [(4, 0.5), (6, 0.25)]
    (skip,) = (change for change in run.state.history if change.skipped)
    assert skip.skipped == f"cancelled by {skip.by}"
    assert not [e for e in events(run, Warn) if "cancelled" in e.message]


def test_one_that_waits_is_cancelled_and_its_file_goes_with_the_next_checkpoint(
    trainer: Make,
) -> None:
    run = trainer("checkpoint.every_steps=2", "checkpoint.asynchronous=false")
    run.step()
    request = post(run, {"name": "change_lr", "value": 0.5, "when": {"at_step": 6}})
    train(run, {3: {"id": request.id}})
    assert run.state.history == ()
    assert run.state.posted == ()
    assert not request.path.exists()
    assert [event.outcome for event in events(run, Asked)] == ["waits", "cancelled"]


def test_what_is_cancelled_at_once_is_cancelled_once(trainer: Make) -> None:
    """As after a kill, when the files of both are there again; and two people cancel the same."""
    run = trainer(entries({"name": "change_lr", "value": 0.5, "when": {"at_step": 4}}))
    run.step()
    request = post(run, {"name": "change_lr", "value": 0.1, "when": {"at_step": 6}})
    time.sleep(0.02)  # they are taken in as they came, by a clock that ticks so often
    for content in ({"id": request.id}, {"id": request.id}, {"entry": 0}, {"entry": 0}):
        post(run, content, "cancel")
    train(run, {})
    assert [change for change in run.state.history if not change.skipped] == []
    outcomes = [event.outcome for event in events(run, Asked)]
    assert sorted(outcomes) == ["cancelled", "cancelled", "refused", "refused"]


def test_a_failure_announces_what_a_resume_does_again_and_not_what_was_given_up(
    trainer: Make,
) -> None:
    run = trainer("train.until=[4it]")
    run.step()
    later = {"name": "change_lr", "value": 0.5, "when": {"at_step": 6}}
    given_up, kept = post(run, later), post(run, later)
    time.sleep(0.02)  # they are taken in as they came, by a clock that ticks so often
    post(run, {"id": given_up.id}, "cancel")
    run.train()  # without a checkpoint
    earlier = len(events(run, Warn))
    warn_of_unsaved(run.state, run.parts, RunDir(run.parts.saver.root))
    (warning,) = events(run, Warn)[earlier:]
    assert warning.message.startswith("change_lr was asked for after the last checkpoint")
    assert warning.message.endswith(f"cancel id={kept.id}")


def test_a_post_stays_until_a_checkpoint_has_it_and_is_carried_out_once(trainer: Make) -> None:
    first_run = trainer("train.until=[4it]", "checkpoint.every_steps=2", name="killed")
    first_run.step()
    first_run.save("early")
    first_run.parts.saver.finish()
    request = post(first_run, {"name": "change_lr", "value": 0.5})
    first_run.step()
    first_run.train()  # without a last checkpoint of step 4: as if it were killed there
    first_run.parts.saver.finish()
    assert [change.id for change in first_run.state.history] == [request.id]
    root = first_run.parts.saver.root
    early = load_checkpoint(root / "checkpoints" / "step-1")
    late = load_checkpoint(latest_checkpoint(root))
    assert not request.path.exists()  # step 2 has it

    request.path.write_text(
        json.dumps({"name": "change_lr", "value": 0.5})
    )  # as before step 2 was saved
    request.path.chmod(0o644)
    for checkpoint, times in ((early, 1), (late, 1)):
        run = trainer(name=f"from {checkpoint.path.name}")
        target = run.parts.saver.root / "control"
        target.mkdir()
        (target / request.path.name).write_bytes(request.path.read_bytes())
        (target / request.path.name).chmod(0o644)
        restore(run, checkpoint)
        run.train()
        run.save("end")
        run.parts.saver.finish()
        assert [change.id for change in run.state.history] == [request.id] * times
        assert [path.name for path in target.iterdir() if path.name != WAITING] == []


@pytest.mark.parametrize("takes_in", [True, False])
def test_who_asked_is_told_whether_a_late_request_was_taken_in(
    trainer: Make, monkeypatch: pytest.MonkeyPatch, takes_in: bool
) -> None:
    run = trainer()
    run.step()
    folder = RunDir(run.parts.saver.root)
    monkeypatch.setattr(control, "lock_owner", lambda _: os.getpid())  # it trains in this process
    monkeypatch.setattr(control, "check_operation_for", lambda *_: None)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(
            control.change_run, folder, {"name": "change_lr", "value": 0.5}, timeout_s=0.5
        )
        while not (requests := list(folder.control.glob("[!.]*.apply"))):
            assert not answer.done(), answer.result()
            time.sleep(0.01)
        if takes_in:  # and then changes the model for minutes
            run.step()
            run.state = take_in(run.state, run.parts)
        error = answer.exception()
    assert isinstance(error, control.NotRunning)
    assert requests[0].exists() == takes_in
    assert ("has taken" in str(error), "is withdrawn" in str(error)) == (takes_in, not takes_in)
    run.train()
    run.parts.saver.finish()
    assert len(run.state.history) == takes_in


def test_what_waits_is_part_of_a_checkpoint(trainer: Make) -> None:
    first = trainer(
        entries({"name": "change_lr", "value": 0.5, "when": {"at_step": 5}}), name="first"
    )
    first.step()
    request = post(first, {"name": "widen_mlp", "value": "x2", "when": {"at_step": 6}})
    cancellation = post(first, {"entry": 0}, "cancel")
    first.step()
    first.around_step = lambda: pytest.fail("the run goes on")  # type: ignore[assignment]
    with pytest.raises(pytest.fail.Exception):
        first.train()
    first.around_step = lambda: __import__("contextlib").nullcontext()
    first.save("now")
    first.parts.saver.finish()
    assert not request.path.exists()
    assert not cancellation.path.exists()
    second = trainer(
        entries({"name": "change_lr", "value": 0.5, "when": {"at_step": 5}}), name="second"
    )
    restore(second, load_checkpoint(latest_checkpoint(first.parts.saver.root)))
    assert [waiting.id for waiting in second.state.posted] == [request.id]
    train(second, {})
    assert [(c.operation.name, c.step, bool(c.skipped)) for c in second.state.history] == [
        ("change_lr", second.state.history[0].step, True),
        ("widen_mlp", 6, False),
    ]


def test_what_was_given_up_or_refused_changes_no_weights_of_a_later_growth(trainer: Make) -> None:
    """New weights are drawn by the number of operations before."""
    grow = {"name": "insert_layers", "value": 1, "when": {"at_step": 5}}
    run = trainer(entries({"name": "change_lr", "value": 0.5, "when": {"at_step": 4}}, grow))
    run.step()
    post(run, {"entry": 0}, "cancel")
    for _ in range(2):  # of which the second finds the first there
        post(run, {"name": "widen_mlp", "value": 192})
    train(run, {})
    assert sum(bool(change.skipped) for change in run.state.history) == 2
    plain = trainer(
        entries({"name": "widen_mlp", "value": 192, "when": {"at_step": 2}}, grow), name="plain"
    )
    train(plain, {})
    actual, expected = weights(run), weights(plain)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_what_is_refused_restarts_no_wait(trainer: Make) -> None:
    run = trainer(entries({"name": "change_lr", "value": 0.5, "when": {"waited": 4}}))
    run.step()
    for when in ({"at_step": 2}, {"at_step": 4}):
        post(run, {"name": "widen_mlp", "value": 192, "when": when})
    train(run, {})
    assert [change.step for change in run.state.history] == [2, 4, 6]
    assert [bool(change.skipped) for change in run.state.history] == [False, True, False]


def test_what_never_fired_is_said_once_at_the_end(trainer: Make) -> None:
    run = trainer()
    waits = {"name": "change_lr", "value": 0.5, "when": {"at_step": 100}}
    late = {"name": "change_lr", "value": 0.1}
    first, last = train(run, {2: waits, 7: late})
    texts = [event.message for event in events(run, Warn) if "never fired" in event.message]
    by, later = run.state.posted[0].by, "a resume with a later end goes on with it"
    assert texts == [
        f"change_lr ({first.id}) asked for by {by} never fired, at step 100; {later}",
        f"change_lr ({last.id}) asked for by {by} never fired; {later}",
    ]


def test_another_schedule_at_a_resume_has_none_of_its_entries_cancelled(trainer: Make) -> None:
    old = entries({"name": "change_lr", "value": 0.5, "when": {"at_step": 7}})
    new = {"name": "change_lr", "value": 0.25, "when": {"at_step": 6}}
    first = trainer(old, name="first")
    first.step()
    cancellation = post(first, {"entry": 0}, "cancel")
    first.step()
    first.state = take_in(first.state, first.parts)
    first.save("now")
    first.parts.saver.finish()
    assert not cancellation.path.exists()
    checkpoint = load_checkpoint(latest_checkpoint(first.parts.saver.root))
    second = trainer(entries(new), name="second")
    send = second.parts.saver.root / "control"
    send.mkdir()
    (send / cancellation.path.name).write_text(
        json.dumps({"entry": 0})
    )  # as if killed before it was removed
    (send / cancellation.path.name).chmod(0o644)
    change = override({"schedule": [new]}, {"schedule": "set"})
    second.state, warnings = restoring.restore(
        second.state, second.parts, checkpoint, override=change
    )
    assert [text for text in warnings if "cancelled entry 0" in text]
    train(second, {})
    changes = [(c.operation.value, c.step) for c in second.state.history if c.entry is not None]
    assert changes == [(0.25, 6)]
    assert list(send.glob("*.cancel")) == []


def test_a_branch_begins_with_nothing_that_waits_in_its_trunk(trainer: Make) -> None:
    branch = {"name": "branch", "value": "small", "when": {"at_step": 6}, "iters": 3}
    later = {"name": "change_lr", "value": 0.5, "when": {"at_step": 100}}
    run = trainer(entries(branch, later), "learning_rate.shape=constant")
    run.step()
    prompt_request = post(run, {"name": "change_lr", "value": 0.5})
    waits, late_request = post(run, later), post(run, {**later, "when": {"at_step": 200}})
    post(run, {"entry": 1}, "cancel")
    run.step()
    train(run, {3: {"id": late_request.id}})
    assert [post.id for post in run.state.posted] == [waits.id]
    assert run.state.cancelled
    assert run.state.closed
    root = run.parts.saver.root
    first = load_checkpoint(latest_checkpoint(root.with_name(f"{root.name}.small")))
    assert not first.state.keys() & {"posted", "cancelled", "closed"}
    assert [change["id"] for change in first.manifest.history if "id" in change] == [
        prompt_request.id
    ]


def test_a_branch_is_asked_for_and_takes_along_what_was_carried_out(trainer: Make) -> None:
    run = trainer()
    train(
        run,
        {
            1: {"name": "change_lr", "value": 0.5},
            2: {"name": "widen_mlp", "value": "x2", "when": {"at_step": 100}},
            3: {"name": "branch", "value": "side", "iters": 2},
        },
    )
    trunk = run.parts.saver.root
    first = load_checkpoint(latest_checkpoint(trunk.with_name(f"{trunk.name}.side")))
    names = [
        (change["operation"]["name"], bool(change.get("id"))) for change in first.manifest.history
    ]
    assert names == [("change_lr", True), ("override", False), ("branched", False)]
    assert "posted" not in first.state
    refusals = [e for e in events(run, Asked) if e.outcome == "refused"]
    assert refusals == []
    second = trainer(name="second")
    train(second, {2: {"name": "branch", "value": "a b", "iters": 2}})
    (refusal,) = events(second, Asked)
    assert "must be the branch's name" in refusal.reason


def test_a_branch_whose_name_is_in_use_is_refused(trainer: Make) -> None:
    branch = {"name": "branch", "value": "small", "iters": 2}
    waits = {**branch, "value": "late", "when": {"at_step": 100}}
    run = trainer()
    train(run, {1: branch, 2: waits, 3: branch, 4: waits})
    refusals = [event for event in events(run, Asked) if event.outcome == "refused"]
    assert [event.step for event in refusals] == [4, 5]
    assert all("choose another name" in event.reason for event in refusals)
    assert [change.operation.value for change in run.state.history if not change.skipped] == [
        "small"
    ]
