"""A stream's end: by a page that goes, a page that takes nothing, a server that ends."""

import asyncio
from pathlib import Path

import pytest
from dashboards import make_run, train
from starlette.datastructures import QueryParams
from starlette.types import Message

from instar.logs.dashboard import live
from instar.logs.dashboard.answers import row, unseen
from instar.logs.dashboard.catalog import Catalog
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir

SCOPE = {"type": "http"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path, "one-aaaaa", steps=5)


def stream(run: RunDir, is_ending: bool = False) -> live.Stream:
    asked = QueryParams([("run", f"{run.path.name}:0"), ("metric", "loss")])
    return live.stream(Catalog(run.path.parent, row, unseen), asked, "", lambda: is_ending)


async def request_then_nothing(told: list[Message]) -> Message:
    if told:
        return told.pop()
    await asyncio.Event().wait()
    raise AssertionError


def test_a_page_that_takes_nothing_is_dropped(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STUCK_S", 0.05)
    sent: list[Message] = []

    async def stuck(message: Message) -> None:
        sent.append(message)
        if len(sent) > 1:
            await asyncio.Event().wait()

    async def go() -> None:
        told: list[Message] = [{"type": "http.request"}]
        await asyncio.wait_for(stream(run)(SCOPE, lambda: request_then_nothing(told), stuck), 5)

    asyncio.run(go())
    assert len(sent) == 2  # nothing was gathered behind the message that was not taken


@pytest.mark.parametrize("why", ["page", "server"])
def test_it_ends_with_its_page_and_with_its_server(run: RunDir, why: str) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def go() -> None:
        told: list[Message] = [{"type": "http.disconnect"}] if why == "page" else []
        told.append({"type": "http.request"})
        made = stream(run, is_ending=why == "server")
        await asyncio.wait_for(made(SCOPE, lambda: request_then_nothing(told), send), 5)

    asyncio.run(go())
    assert sent[0]["status"] == 200
    assert not sent[-1].get("more_body", False)


def test_a_place_in_an_unknown_form_is_the_beginning(run: RunDir) -> None:
    catalog = Catalog(run.path.parent, row, unseen)
    for text in ("one-aaaaa:-1", "one-aaaaa:x", f"one-aaaaa:{'9' * 99}", "one-aaaaa:²"):
        for last_id in ("", "nonsense", "a.1|", "a.1|x|y"):
            news = live.News(catalog, QueryParams([("run", text), ("seen", "?")]), last_id)
            assert any(b'"names"' in part for part in news.look())


def test_what_was_told_is_not_told_again(run: RunDir) -> None:
    catalog = Catalog(run.path.parent, row, unseen)
    asked = QueryParams([("run", "one-aaaaa:0"), ("run", "gone:7"), ("metric", "loss")])
    news = live.News(catalog, asked)
    assert news.look()
    assert news.look() == []
    with Recorder(run.events) as record:
        record.write(train(6, 1.0))
    again = live.News(catalog, asked, news.id)
    assert [part.count(b'"step":[6]') for part in again.look()] == [1]
    assert again.look() == []
