"""The report: all that a record says, in a page that asks nobody for anything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browser import Watched, chromium, watch_page
from figures import times
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opened import tab_through, wait_for_frame
from playwright.sync_api import Browser, Page
from records import make_run
from shown_runs import place, start_event, steps, told_run, write

import instar
from instar.extensions.board import ending
from instar.extensions.board.report import inline_json, panels, report_html, write_report
from instar.extensions.board.sections import key_figures
from instar.extensions.delta.events import Delta
from instar.logs.query.config import config_lines, config_values, derived_keys
from instar.logs.query.stages import stages
from instar.logs.query.summary import summarize
from instar.logs.read.record import read_record
from instar.record.events import Eval, Event, Layers, OperationEvent, RecordError, SampleText, Warn
from instar.record.rundir import RunDir

HOSTILE = (
    "</script><script>window.owned = 1</script><!-- <img src=x onerror='owned=1'> \"&amp; {{ 7 }}"
)


Render = Callable[[str], Page]


class Tags(HTMLParser):
    """The elements that are in a page, with their attributes, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.tags = "", list[tuple[str, dict[str, str | None]]]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += f" {data}"


def data_of(text: str) -> Any:
    """The data in a page."""
    (json_text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    return json.loads(json_text)


def runs_of(text: str) -> Any:
    return data_of(text)["answers"]["/api/curves"]["runs"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as chromium_browser:
        yield chromium_browser


@pytest.fixture(scope="module")
def render(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Render]:
    """Opens a page's text, with all that is folded in it, and no error."""
    file = tmp_path_factory.mktemp("shown") / "page.html"
    with watch_page(browser) as session:

        def show(text: str) -> Page:
            file.write_text(text, "utf-8", "backslashreplace")
            session.page.goto(file.as_uri())
            session.page.evaluate(
                "document.querySelectorAll('details').forEach((d) => (d.open = true))"
            )
            assert session.errors == []
            return session.page

        yield show


def words(page: Page) -> str:
    return " ".join(page.inner_text("main").split())


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return told_run(tmp_path / "told-r7f3a")


def test_the_page_says_all_that_the_record_does(run_dir: RunDir, render: Render) -> None:
    page_words = words(render(report_html([read_record(run_dir)])))
    for text in (
        "told-r7f3a finished",
        "2L/32d, 24.1k parameters on cpu",
        "best val/loss 2.9250 ± 0.01 at step 40",
        "20.0k→24.1k 2L/32d",
        "tokens 5.12k 320 samples",
        "20 widen_mlp 64→96 20.0k→24.1k, optimizer mapped val 3.12 < 3.50 20.0k → 24.1k exact 2.5e-07 0 0.12s",
        "20 – 40 widen_mlp 64→96",
        "alert step 35 divergence: loss 3.9 is far above 2.8",
        "skipped step 31 update skipped: non-finite gradient, 2 in a row",
        "failed step 35 rank 0: CUDA out of memory",
        "warning step 40 the disk is nearly full",
        'step 40, prompt "def " def square(n): return n * n',
        "0 – 35 superseded after 30",
        "rank 0 failed: CUDA out of memory",
        "step-20 after growth 4.00 KiB 0.50s 2ms removed",
        "torch 2.13.0",
        "memory 16.0 GiB",
    ):
        assert text in page_words, text


def test_only_what_is_not_at_its_default_is_marked(run_dir: RunDir, render: Render) -> None:
    marks = render(report_html([read_record(run_dir)])).locator("mark").all()
    assert [
        (mark.get_attribute("title"), " ".join(mark.inner_text().split())) for mark in marks
    ] == [
        ("--set", "name: told"),
        ("told.yaml:3:3", "n_layer: 2"),
        ("told.yaml:5:1", "schedule:"),
        ("told.yaml:6:5", "- {name: widen_mlp, value: 96}"),
    ]


def told_apart(page: Page) -> dict[str, list[str]]:
    """The keys in which configs differ, and their values."""
    rows = page.get_by_role("table", name="Differences between the configs").locator("tbody tr")
    value = "(cell) => (cell.querySelector('details') ?? cell).lastChild?.textContent ?? ''"
    return {
        row.locator("th").inner_text(): [cell.evaluate(value) for cell in row.locator("td").all()]
        for row in rows.all()
    }


def test_a_long_value_is_folded_in_the_table_of_differences(tmp_path: Path, render: Render) -> None:
    operation = "{name: change_lr, value: 0.5, max_wait_iters: 4}"
    other = operation.replace("0.5", "0.25")
    texts = [f"schedule: [{first}, {operation}]\n" for first in (operation, other)]
    runs = [
        read_record(write(tmp_path / f"run{n}", [(start_event(), 1), *steps(1, 2)], text))
        for n, text in enumerate(texts)
    ]
    page = render(report_html(runs))
    cells = page.locator("tr", has_text="schedule").locator("td")
    assert [summary.inner_text() for summary in cells.locator("summary").all()] == [
        "2 operations",
        "2 operations, differs",
    ]
    title = cells.locator("details").last.get_attribute("title")
    assert title is not None
    assert "value: 0.5" in title
    assert "value: 0.25" in title
    assert "value: 0.25" in told_apart(page)["schedule"][1]


def test_configs_differ_in_the_keys_whose_values_differ(tmp_path: Path, render: Render) -> None:
    lines = [(start_event(), 1), *steps(1, 2)]
    texts = {
        "one": "seed: 1  # --set\noptimizer:\n  lr: 1e-3\nmodel:\n  n_layer: 2\n",
        "two": "seed: 2  # --set\noptimizer:\n  lr: 0.001\ntrain:\n  until: [9it]\n",
        "graph": "task: graph\nmodel:\n  heads:\n    - {name: h, kind: regression}\n",
    }
    first_record, second_record, graph = (
        read_record(write(tmp_path / name, lines, text)) for name, text in texts.items()
    )
    assert told_apart(render(report_html([first_record, second_record]))) == {
        "seed": ["1", "2"],
        "model.n_layer": ["2", "4"],
        "train.until": ["[2000it]", "[9it]"],
    }
    differences = told_apart(render(report_html([first_record, graph])))
    assert differences["task"] == ["language", "graph"]
    assert differences["data.tokenizer"] == ["byte", ""]
    assert differences["eval.eval_epochs"] == ["null", "1"]
    assert "name: h, target: null, kind: regression" in differences["model.heads"][1]


def test_a_config_that_cannot_be_read_is_told_apart_from_nothing(
    tmp_path: Path, render: Render
) -> None:
    lines = [(start_event(), 1), *steps(1, 2)]
    texts = ("seed: 1\n", "seed: 2\n", "mdoel: {}\n")
    runs = [write(tmp_path / f"run{n}", lines, text) for n, text in enumerate(texts)]
    page = render(report_html([read_record(run) for run in runs]))
    assert told_apart(page) == {"seed": ["1", "2", ""]}
    assert f"Not compared: {runs[2].config}: unknown key" in words(page)
    assert config_lines(RunDir(tmp_path / "none")) == []


def test_what_is_derived_and_nowhere_given_is_no_difference(tmp_path: Path) -> None:
    def run(n_mlp: int, origin: str) -> RunDir:
        model = f"model:\n  n_mlp: {n_mlp}  # {origin}\n"
        return write(tmp_path / str(len(list(tmp_path.iterdir()))), [], model)

    derived_run, wider, explicit_run = run(64, "derived"), run(96, "derived"), run(96, "--set")
    assert derived_keys([config_lines(run) for run in (derived_run, wider)]) == {"model.n_mlp"}
    assert "model.n_mlp" not in config_values([derived_run, wider])[0][1]
    assert [c["model.n_mlp"] for c in config_values([derived_run, explicit_run])[0]] == [64, 96]
    assert derived_keys([config_lines(explicit_run)]) == set()


def test_nothing_in_a_run_breaks_out_of_the_page(tmp_path: Path, render: Render) -> None:
    lines = [
        (start_event(), 1),
        *steps(1, 20),
        (
            OperationEvent(
                name=HOSTILE,
                change=HOSTILE,
                reason=HOSTILE,
                notes=(HOSTILE,),
                preserves=HOSTILE,
                **place(20),
            ),
            1,
        ),
        (Warn(message=HOSTILE), 1),
    ]
    folder = tmp_path / HOSTILE.replace("/", "-")
    text = report_html([read_record(write(folder, lines, f"name: {HOSTILE}  # {HOSTILE}\n"))])
    page = Tags(text)
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [
        {"type": "application/json", "id": "data"},
        {},
    ]
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert HOSTILE in page.words
    assert HOSTILE in runs_of(text)[0]["marks"][0]["title"]
    browser_page = render(text)
    assert " ".join(HOSTILE.split()) in words(browser_page)
    assert browser_page.locator("img, main script").count() == 0
    assert browser_page.evaluate("window.owned") is None


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.text() | st.floats() | st.none(), st.lists))
def test_inlined_data_is_json_and_ends_nothing(data: Any) -> None:
    text = inline_json(data)
    assert not set(text) & set("<>&\u2028\u2029")
    finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
    assert json.loads(text) == finite


def test_several_runs_have_a_row_each(tmp_path: Path, render: Render) -> None:
    first = told_run(tmp_path / "told-aaaaa")
    second = write(
        tmp_path / "told-bbbbb", [(start_event(), 1), *steps(1, 30)], "name: told\nseed: 2\n"
    )
    text = report_html([read_record(first), read_record(second)])
    page = render(text)
    page_words = words(page)
    assert "2 runs" in page_words
    first_row, second_row = (
        row.split() for row in page.locator("table.runs tbody tr").all_inner_texts()
    )
    assert (first_row[:3], second_row[:3]) == (
        ["aaaaa", "finished", "1"],
        ["bbbbb", "crashed", "2"],
    )
    assert ("40" in first_row, "30" in second_row) == (True, True)
    assert "Differences between the configs aaaaa bbbbb seed 1 2" in page_words
    assert [run["id"] for run in runs_of(text)] == ["aaaaa", "bbbbb"]


def test_every_metric_is_in_one_panel(run_dir: RunDir) -> None:
    record = read_record(run_dir)
    metrics = [metric for panel in panels([record]) for metric in panel.metrics]
    assert len(metrics) == len(set(metrics))
    assert set(metrics) == {name for name in record.metrics if not name.endswith(":error")}
    assert panels([record])[0].metrics == ("loss", "val/loss")


def test_layers_are_one_panel_in_their_order(tmp_path: Path) -> None:
    names = ("embedding", "blocks.0", "blocks.1", "head")
    lines: list[tuple[Event, int]] = [(start_event(), 1), *steps(1, 2)]
    lines.append((Layers(grad_norm=dict.fromkeys(names, 1.0), update_ratio={}, **place(1)), 1))
    names_after_growth = (*names, "blocks.10", "blocks.2")
    lines.append(
        (Layers(grad_norm=dict.fromkeys(names_after_growth, 1.0), update_ratio={}, **place(2)), 1)
    )
    (panel,) = [p for p in panels([read_record(write(tmp_path / "run", lines))]) if p.log]
    assert [name.removeprefix("grad_norm/") for name in panel.metrics] == [
        "embedding",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "blocks.10",
        "head",
    ]


def test_deltas_are_panels_and_their_layers_one(tmp_path: Path) -> None:
    lines: list[tuple[Event, int]] = [(start_event(), 1), *steps(1, 3)]
    size = {"size_bytes": 9, "seconds": 0.1, "stall_s": 0.0}
    lines.append((Delta(number=0, anchor=True, **size, **place(1)), 1))
    shares = {"density": 0.5, "overlap": 0.25, "layers": {"blocks.0": 1.0, "blocks.1": 0.0}}
    lines.append((Delta(number=1, anchor=False, **size, **shares, **place(2)), 1))
    panel_metrics = {
        panel.metrics for panel in panels([read_record(write(tmp_path / "run", lines))])
    }
    by_layer = ("delta_density/blocks.0", "delta_density/blocks.1")
    assert {("delta_density",), ("delta_overlap",), ("delta_bytes",), by_layer} < panel_metrics


def test_the_latest_sample_is_open_and_its_blanks_are_kept(
    tmp_path: Path, browser: Browser
) -> None:
    lines: list[tuple[Event, int]] = [(start_event(), 1), *steps(1, 2)]
    lines += [(SampleText(prompt="\n", text=f"  {n}:\tdone\n\n", **place(n)), 1) for n in (1, 2)]
    run = write(tmp_path / "run", lines)
    with watch_page(browser) as session:
        session.page.goto(write_report(run).as_uri())
        latest, previous = session.page.locator(".written pre").all()
        assert latest.is_visible()
        assert latest.text_content() == "\n  2:\tdone\n\n"
        assert not previous.is_visible()
        assert previous.text_content() == "\n  1:\tdone\n\n"
        assert session.page.locator(".written code").first.text_content() == '"\\n"'
        assert [prompt.text_content() for prompt in session.page.locator(".prompt").all()] == [
            "\n",
            "\n",
        ]


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\xff\x00\n", b'{"v":1,"kind":"train","st'])
def test_a_record_without_a_run_in_it_is_refused_or_told_of(
    tmp_path: Path, content: bytes, render: Render
) -> None:
    run = write(tmp_path / "odd", [])
    run.events.write_bytes(content)
    try:
        record = read_record(run)
    except RecordError:
        return
    assert "odd" in words(render(report_html([record])))


ODD = st.sampled_from(["NaN", "Infinity", "-Infinity", -1, 0, 1e308, "", "x", {}, None])


@settings(
    max_examples=times(10, 60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.integers(0, 79), st.integers(0, 30), ODD), min_size=1, max_size=4))
def test_odd_values_are_shown_or_refused(
    run_dir: RunDir, render: Render, changes: list[Any]
) -> None:
    lines = [json.loads(line) for line in run_dir.events.read_bytes().splitlines()]
    for number, field, value in changes:
        line = lines[number % len(lines)]
        inside = line["proof"] if line.get("proof") and field % 2 else line
        name = [name for name in inside if name not in ("v", "kind")][field % (len(inside) - 2)]
        inside[name] = value
    odd = RunDir(run_dir.path.parent / "odd")
    odd.path.mkdir(exist_ok=True)
    odd.events.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    try:
        record = read_record(odd)
    except RecordError:
        return
    assert "odd" in words(render(report_html([record])))


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path, render: Render) -> None:
    run = write(tmp_path / "new", [(start_event(), 1)])
    assert "new crashed" in words(render(report_html([read_record(run)])))


def test_the_page_of_a_large_run_stays_small(tmp_path: Path) -> None:
    text = report_html([read_record(make_run(tmp_path / "made", 20_000, evals=400, rewinds=3))])
    assert len(text.encode()) < 5_000_000
    assert sum(value > 40 for value in runs_of(text)[0]["series"]["loss"]["value"] if value) == 3


def test_the_page_of_a_run_that_had_much_to_say_stays_small(tmp_path: Path, render: Render) -> None:
    lines: list[tuple[Event, int]] = [(start_event(), 1), *steps(1, 20)]
    for step in range(1, 1001):
        layers = {f"blocks.{number}": 1.0 for number in range(60)}
        lines.append((Layers(grad_norm=layers, update_ratio=layers, **place(step)), 1))
        lines.append((Warn(message="x" * 10_000, step=step), 1))
        lines.append((OperationEvent(name="override", change="y" * 10_000, **place(step)), 1))
    text = report_html([read_record(write(tmp_path / "loud", lines))])
    assert len(text.encode()) < 5_000_000
    assert "Operations 600 earlier ones are left out" in words(render(text))


def test_it_is_written_whole_beside_the_record(run_dir: RunDir) -> None:
    run_dir.report.write_text("old")
    assert write_report(run_dir) == run_dir.path / "report.html"
    assert run_dir.report.read_text().rstrip().endswith("</html>")
    assert {path.name for path in run_dir.path.iterdir()} == {
        "checkpoints",
        "events.jsonl",
        "report.html",
        "run.yaml",
    } | ({"events.idx"} if (run_dir.path / "events.idx").exists() else set())


def write_final_test(run: RunDir) -> None:
    """A test with a class, a number of each sample, and a number of each node."""
    folder = run.path / "test"
    folder.mkdir()
    result = {
        "step": 40,
        "weights": "best",
        "samples": 5000,
        "metrics": {"kind/accuracy": {"value": 0.975, "standard_error": 0.0025, "weight": 5000.0}},
        "confusion": {"kind": [[90, 10], [0, 100]]},
    }
    (folder / "result.json").write_text(json.dumps(result))
    true = np.linspace(-1, 1, 5000, dtype=np.float32)
    lists = pa.ListArray.from_arrays(np.arange(0, 10001, 2, dtype=np.int32), np.repeat(true, 2))
    columns = {
        "sample": np.arange(5000),
        "kind": np.zeros(5000, int),
        "kind.predicted": np.zeros(5000, int),
    }
    columns |= {
        "charge": true,
        "charge.predicted": true / 2,
        "force": lists,
        "force.predicted": lists,
    }
    pq.write_table(pa.table(columns), folder / "predictions.parquet")


def test_the_final_test_is_drawn(run_dir: RunDir, render: Render) -> None:
    write_final_test(run_dir)
    page = render(report_html([read_record(run_dir)]))
    page_words = words(page)
    assert "5,000 samples, weights of step 40 (best)" in page_words
    assert "kind/accuracy 0.9750 0.0025" in page_words
    assert "true ↓ predicted → 0 1 0 90 10 1 0 100" in page_words, (
        "which axis of the matrix is which"
    )
    share = "(cell) => [cell.textContent, cell.style.getPropertyValue('--share')]"
    cells = page.locator(".tested td").all()
    assert [cell.evaluate(share) for cell in cells[:2]] == [["90", "90%"], ["10", "10%"]]
    assert "charge: predicted over true, 2,500 of 5,000" in page_words
    assert "force: predicted over true, 2,500 of 10,000" in page_words
    dots = page.locator("svg .dots").first.get_attribute("d")
    assert dots is not None
    pairs = np.array(re.findall(r"M([\d.]+) ([\d.]+)h0", dots), float)
    assert np.abs(pairs[:, 1] - (320 - (pairs[:, 0] - 160) / 2 - 160)).max() < 0.2


def test_without_pyarrow_it_says_what_is_missing(
    run_dir: RunDir, render: Render, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_final_test(run_dir)
    monkeypatch.setattr(ending, "find_spec", lambda _: None)
    page = render(report_html([read_record(run_dir)]))
    assert ending.NO_PYARROW in words(page).replace("’", "'")
    assert "kind/accuracy 0.9750" in words(page)
    assert page.locator("svg.scatter").count() == 0


@pytest.mark.parametrize("file", ["result.json", "predictions.parquet"])
def test_a_broken_test_is_said_to_be_broken(run_dir: RunDir, file: str, render: Render) -> None:
    write_final_test(run_dir)
    (run_dir.path / "test" / file).write_bytes(b"PAR1 {")
    assert f"test/{file} cannot be read" in words(render(report_html([read_record(run_dir)])))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = told_run(tmp_path_factory.mktemp("shown") / "told-r7f3a")
    write_final_test(run)
    return write_report(run)


def open_report(session: Watched, page: Path) -> None:
    session.page.goto(page.as_uri())
    wait_for_frame(session.page)


def colour_count(session: Watched, panel: int = 0) -> int:
    """How many colours there are in a chart's middle half."""
    return int(
        session.page.evaluate(
            """panel => {
              const canvas = document.querySelectorAll('.chart canvas')[panel];
              const { width, height } = canvas;
              const ctx = canvas.getContext('2d');
              const pixels = new Uint32Array(
                ctx.getImageData(width / 4, 0, width / 2, height).data.buffer);
              return new Set(pixels).size;
            }""",
            panel,
        )
    )


def test_it_opens_and_paints_without_asking_for_anything(browser: Browser, page: Path) -> None:
    with watch_page(browser) as session:
        open_report(session, page)
        assert all(colour_count(session, number) > 3 for number in range(5))
        assert session.errors == []
        assert session.urls() == [page.as_uri()]
        load_ms = session.page.evaluate(
            "performance.timing.loadEventEnd - performance.timing.navigationStart"
        )
        assert load_ms < 2000


def test_a_script_that_is_not_the_pages_own_does_not_run(browser: Browser, page: Path) -> None:
    page_copy = page.with_name("changed.html")
    script = "<script>window.owned = 1</script></main>"
    page_copy.write_text(page.read_text().replace("</main>", script))
    with watch_page(browser) as session:
        open_report(session, page_copy)
        assert session.page.evaluate("window.owned") is None
        assert any("Content Security Policy" in error for error in session.errors)


@pytest.mark.parametrize("how", ["hover", "focus"])
def test_an_operation_explains_itself(browser: Browser, page: Path, how: str) -> None:
    with watch_page(browser) as session:
        open_report(session, page)
        mark = session.page.locator(".panel").first.locator(".ic-mark.ic-operation")
        getattr(mark, how)()
        tip_text = session.page.locator(".panel").first.locator(".ic-tip").inner_text()
        assert "widen_mlp 64→96" in tip_text
        assert "because val 3.12 < 3.50" in tip_text
        assert "exact, max |Δlogit| 2.5e-07" in tip_text


def test_the_cursor_reads_values_on_the_axis_of_choice(browser: Browser, page: Path) -> None:
    with watch_page(browser) as session:
        open_report(session, page)
        session.page.select_option("select[name=x]", "tokens")
        over = session.page.locator(".panel").first.locator(".u-over")
        box = over.bounding_box()
        assert box is not None
        session.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
        tip_text = session.page.locator(".panel").first.locator(".ic-tip").inner_text()
        match = re.match(
            r"tokens ([\d,]+)\s+(?:val/loss|loss)\s+[\d.]+\s+(?:val/loss|loss)\s+[\d.]+", tip_text
        )
        assert match, tip_text
        assert abs(int(match[1].replace(",", "")) - 128 * 20) <= 2 * 128


def test_dragging_zooms_and_a_double_click_goes_back(browser: Browser, page: Path) -> None:
    with watch_page(browser) as session:
        open_report(session, page)
        over = session.page.locator(".panel").first.locator(".u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        assert box is not None
        marks = session.page.locator(".panel").first.locator(".ic-mark")
        before = marks.count()
        session.page.mouse.move(box["x"] + 10, box["y"] + 90)
        session.page.mouse.down()
        session.page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 90, steps=4)
        session.page.mouse.up()
        wait_for_frame(session.page)
        assert marks.count() < before
        session.page.mouse.dblclick(box["x"] + 0.7 * box["width"], box["y"] + 90)
        wait_for_frame(session.page)
        assert marks.count() == before
        assert session.errors == []


def test_smoothing_logarithm_and_marks_redraw(browser: Browser, page: Path) -> None:
    with watch_page(browser) as session:
        open_report(session, page)
        canvas = "document.querySelector('.chart canvas').toDataURL()"
        pictures = [session.page.evaluate(canvas)]
        session.page.locator("input[name=smooth]").fill("0.9")
        wait_for_frame(session.page)
        pictures.append(session.page.evaluate(canvas))
        session.page.locator("input[name=log]").check()
        wait_for_frame(session.page)
        pictures.append(session.page.evaluate(canvas))
        assert len(set(pictures)) == 3
        session.page.locator("input[name=marks]").uncheck()
        wait_for_frame(session.page)
        assert session.page.locator(".ic-mark").count() == 0
        assert session.errors == []


def test_dark_and_light_follow_the_system_and_the_button(browser: Browser, page: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    with watch_page(browser, scheme="dark") as session:
        open_report(session, page)
        dark = session.page.evaluate(paper)
        session.page.click("#theme")
        light = session.page.evaluate(paper)
        assert (dark, light) == ("rgb(18, 22, 27)", "rgb(246, 247, 249)")
        assert colour_count(session) > 3
    with watch_page(browser, scheme="light") as session:
        open_report(session, page)
        assert session.page.evaluate(paper) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_against_what_is_behind_it(
    browser: Browser, page: Path, scheme: Any
) -> None:
    contrast = """() => {
      const luminance = (text) => {
        const parts = text.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
          .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
      };
      const probe = document.body.appendChild(document.createElement("i"));
      const colour = (name) => {
        probe.style.color = `var(--${name})`;
        return luminance(getComputedStyle(probe).color);
      };
      const pairs = [["ic-ink", 7], ["ic-text", 4.5], ["good", 4.5], ["bad", 4.5], ["warn", 4.5],
        ["live", 4.5], ...[0, 1, 2, 3, 4, 5, 6, 7].map((n) => [`ic-${n}`, 2.9])];
      return pairs.filter(([name, least]) => {
        const [a, b] = [colour(name), colour("ic-paper")].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05) < least;
      });
    }"""
    with watch_page(browser, scheme=scheme) as session:
        open_report(session, page)
        assert session.page.evaluate(contrast) == []


def test_a_phone_needs_no_scrolling_sideways(browser: Browser, page: Path) -> None:
    with watch_page(browser, width=375, height=700) as session:
        open_report(session, page)
        assert session.page.evaluate("document.documentElement.scrollWidth") == 375
        widths = session.page.evaluate(
            "[...document.querySelectorAll('.uplot')].map((u) => u.offsetWidth)"
        )
        assert max(widths) <= 375
        session.page.set_viewport_size({"width": 900, "height": 700})
        wait_for_frame(session.page)
        assert session.page.evaluate("document.querySelector('.uplot').offsetWidth") > 700


def test_without_javascript_the_summary_is_there(browser: Browser, page: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    try:
        without = context.new_page()
        without.goto(page.as_uri())
        assert without.locator("text=Curves need JavaScript").is_visible()
        assert without.locator("pre >> text=widen_mlp 64→96").is_visible()
        assert "2.9250" in without.locator("pre").inner_text()
    finally:
        context.close()


def test_everything_is_reached_by_tab_and_seen_where_it_is(browser: Browser, page: Path) -> None:
    with watch_page(browser) as session:
        open_report(session, page)
        assert tab_through(session.page) == []


def test_of_a_chart_s_marks_one_is_reached_by_tab_and_the_others_by_arrows(
    browser: Browser, page: Path
) -> None:
    with watch_page(browser) as session:
        open_report(session, page)
        marks = session.page.locator(".panel").first.locator(".ic-mark")
        stops = [mark for mark in marks.all() if mark.get_attribute("tabindex") == "0"]
        assert len(stops) == 1
        stops[0].focus()
        labels = []
        for _ in range(marks.count()):
            labels.append(
                session.page.evaluate("document.activeElement.getAttribute('aria-label')")
            )
            session.page.keyboard.press("ArrowRight")
        assert len(set(labels)) == marks.count()
        assert labels[0].startswith(("widen_mlp", "checkpoint at step 20"))
        assert labels[-1].startswith("ended at step 40")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_paper_it_is_light_and_every_chart_whole(
    browser: Browser, page: Path, scheme: Any
) -> None:
    width = """() => [...document.querySelectorAll(".chart")].map((place) =>
      place.clientWidth - place.querySelector(".uplot").offsetWidth)"""
    with watch_page(browser, scheme=scheme) as session:
        open_report(session, page)
        before = session.page.evaluate("document.querySelector('canvas').toDataURL()")
        session.page.evaluate(
            """() => addEventListener("beforeprint", () => (window.open_ =
              document.querySelectorAll("details.printed:not([open])").length), { once: true })"""
        )
        assert session.page.pdf().startswith(b"%PDF")
        assert session.page.evaluate("window.open_") == 0
        session.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        session.page.emulate_media(media="print")
        assert set(session.page.evaluate(width)) == {0}
        assert session.page.evaluate("document.body.offsetWidth") == 690
        ink = session.page.evaluate("getComputedStyle(document.body).color")
        assert ink == "rgb(27, 31, 36)"
        session.page.emulate_media(media="screen")
        session.page.evaluate("dispatchEvent(new Event('afterprint'))")
        wait_for_frame(session.page)
        assert session.page.evaluate("document.querySelector('canvas').toDataURL()") == before
        assert session.page.evaluate("document.documentElement.dataset.theme") is None


def test_tables_of_eight_runs_stay_on_the_paper(browser: Browser, tmp_path: Path) -> None:
    records = [
        read_record(told_run(tmp_path / f"a-run-with-a-long-name-{number}")) for number in range(8)
    ]
    path = tmp_path / "eight.html"
    path.write_text(report_html(records), encoding="utf-8")
    rights = (
        "() => [...document.querySelectorAll('table')].map((t) => t.getBoundingClientRect().right)"
    )
    with watch_page(browser, width=690) as session:
        open_report(session, path)
        session.page.emulate_media(media="print")
        right_edges = session.page.evaluate(rights)
        assert len(right_edges) > 2
        assert max(right_edges) <= 691
        session.page.emulate_media(media="screen")


def test_points_and_marks_can_be_appended(browser: Browser, page: Path) -> None:
    with watch_page(browser) as session:
        open_report(session, page)
        result = session.page.evaluate(
            """() => {
              const data = JSON.parse(document.getElementById("data").textContent);
              const { runs } = data.answers["/api/curves"];
              const place = document.querySelector("main").appendChild(document.createElement("div"));
              const chart = new InstarChart(place, { metric: "loss", x: "step" });
              chart.setRuns(runs);
              const loss = runs[0].series.loss;
              const before = loss.value.length;
              const point = { x: { step: 50, tokens: 6400 }, value: 9.5 };
              chart.append(runs[0].id, "loss", point);
              chart.append(runs[0].id, "loss", point);
              chart.append("nobody", "loss", point);
              chart.append(runs[0].id, "loss", { x: { step: [51, 52] }, value: [NaN, 2] });
              chart.append(runs[0].id, "fresh", { x: { step: [1, 2] }, value: [1, 2] });
              chart.appendMark(runs[0].id, {
                kind: "alert", x: { step: 51 }, title: "late", text: "", superseded: false,
              });
              return new Promise((resolve) =>
                requestAnimationFrame(() => requestAnimationFrame(() => {
                  const found = [loss.value.slice(before), loss.x.step.slice(before),
                    place.querySelectorAll("[aria-label*=late]").length];
                  chart.destroy();
                  resolve([...found, place.children.length]);
                })));
            }"""
        )
        assert result == [[9.5, None, 2], [50, 51, 52], 1, 0]
        assert session.errors == []


def test_the_metric_that_is_followed_is_named_first_and_small_values_are_shown(
    tmp_path: Path,
) -> None:
    start = msgspec.structs.replace(start_event(), best_metric="german/loss")
    evaluations = [
        (Eval(split="val", loss=3.0, **place(10)), 1),
        (Eval(split="german", loss=2.5e-6, **place(10)), 1),
    ]
    record = read_record(write(tmp_path / "run", [(start, 1), *steps(1, 9), *evaluations]))
    figures = [figure[:2] for figure in key_figures(summarize(record), stages(record))]
    assert figures[:2] == [("best german/loss", "2.500e-06"), ("best val/loss", "3.0000")]


def test_a_plot_over_time_has_dates(run_dir: RunDir) -> None:
    assert instar.plot([run_dir.path], axis="time").chart.axis == "time"
    assert instar.plot([run_dir.path], axis="wall").chart.axis == "wall_s"
