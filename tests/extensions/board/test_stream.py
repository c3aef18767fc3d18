"""A stream's end: by a page that goes, a page that takes nothing, a server that ends."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from recorded import make_run, train
from starlette.datastructures import QueryParams
from starlette.types import Message

from instar.extensions.board import stream as live
from instar.extensions.board.app import catalog_row, unread_row
from instar.extensions.board.catalog import Catalog
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir

SCOPE = {"type": "http"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path, "one-aaaaa", steps=5)


def stream(run: RunDir, is_ending: bool = False) -> live.EventStream:
    params = QueryParams([("run", f"{run.path.name}:0"), ("metric", "loss")])
    return live.page_stream(
        Catalog(run.path.parent, catalog_row, unread_row), params, "", lambda: is_ending
    )


async def request_then_nothing(messages: list[Message]) -> Message:
    if messages:
        return messages.pop()
    await asyncio.Event().wait()
    raise AssertionError


def test_for_a_page_that_takes_nothing_nothing_is_gathered_until_its_connection_is_dropped(
    run: RunDir,
) -> None:
    sent_messages: list[Message] = []

    async def go() -> None:
        disconnect = asyncio.Event()

        async def stuck(message: Message) -> None:
            sent_messages.append(message)
            if len(sent_messages) > 1:
                asyncio.get_running_loop().call_later(0.05, disconnect.set)
                await disconnect.wait()

        async def receive() -> Message:
            await disconnect.wait()
            return {"type": "http.disconnect"}

        await asyncio.wait_for(stream(run)(SCOPE, receive, stuck), 5)

    asyncio.run(go())
    assert [message.get("more_body") for message in sent_messages] == [None, True, None]


@pytest.mark.parametrize("why", ["page", "server"])
def test_it_ends_with_its_page_and_with_its_server(run: RunDir, why: str) -> None:
    sent_messages: list[Message] = []

    async def send(message: Message) -> None:
        sent_messages.append(message)

    async def go() -> None:
        messages: list[Message] = [{"type": "http.disconnect"}] if why == "page" else []
        messages.append({"type": "http.request"})
        event_stream = stream(run, is_ending=why == "server")
        await asyncio.wait_for(event_stream(SCOPE, lambda: request_then_nothing(messages), send), 5)

    asyncio.run(go())
    assert sent_messages[0]["status"] == 200
    assert not sent_messages[-1].get("more_body", False)


def test_a_place_in_an_unknown_form_is_the_beginning(run: RunDir) -> None:
    catalog = Catalog(run.path.parent, catalog_row, unread_row)
    for text in ("one-aaaaa:-1", "one-aaaaa:x", f"one-aaaaa:{'9' * 99}", "one-aaaaa:²"):
        for last_id in ("", "nonsense", "a.1|", "a.1|x|y"):
            news = live.PageUpdates(catalog, QueryParams([("run", text), ("seen", "?")]), last_id)
            assert any(b'"names"' in part for part in news.poll())


def test_a_page_that_is_far_behind_misses_no_line_after_its_curves_are_read_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "BEHIND_BYTES", 10)
    catalog = Catalog(run.path.parent, catalog_row, unread_row)
    news = live.PageUpdates(catalog, QueryParams([("run", "one-aaaaa:0"), ("metric", "loss")]))
    line = msgspec.json.encode(train(6, 1.0)) + b"\n"
    with run.events.open("ab") as file:
        file.write(line[:20])
        file.flush()
        assert any(b"event: anew" in part for part in news.poll())
        file.write(line[20:])
    monkeypatch.undo()
    assert [part.count(b'"step":[6]') for part in news.poll()] == [1]


def test_what_was_told_is_not_told_again(run: RunDir) -> None:
    catalog = Catalog(run.path.parent, catalog_row, unread_row)
    params = QueryParams([("run", "one-aaaaa:0"), ("run", "gone:7"), ("metric", "loss")])
    news = live.PageUpdates(catalog, params)
    assert news.poll()
    assert news.poll() == []
    with Recorder(run.events) as record:
        record.write(train(6, 1.0))
    later_updates = live.PageUpdates(catalog, params, news.id)
    assert [part.count(b'"step":[6]') for part in later_updates.poll()] == [1]
    assert later_updates.poll() == []
