"""Means over seeds in a page: the same as on the command line, over any axis, with operations marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Watched, chromium, watch_page
from drawn import eval_event, falling, read_run, train
from opened import wait_for_frame
from playwright.sync_api import expect

from instar.extensions.board.curves import chart_data
from instar.extensions.board.report import report_html
from instar.logs.plot.transforms import Band, band, smooth
from instar.logs.read.record import RunRecord

MEAN = """([runs, metric, axis, weight]) => {
  const { count, band } = new Instar.Mean(runs, metric, axis, weight);
  return { count, ...band };
}"""


@pytest.fixture(scope="module")
def seen() -> Iterator[Watched]:
    with chromium() as browser, watch_page(browser) as found:
        yield found


def config(seed: int, lr: float = 0.1) -> str:
    return f"name: rates\nseed: {seed}  # --set\noptimizer:\n  lr: {lr}  # --set\n"


def opened(seen: Watched, path: Path, text: str) -> None:
    file = path / "page.html"
    file.write_text(text)
    seen.page.goto(file.as_uri())
    seen.page.wait_for_selector(".chart canvas")
    wait_for_frame(seen.page)


def on_page(seen: Watched, records: Sequence[RunRecord], points: int, *how: Any) -> Any:
    data = [chart_data(record, points, metrics=["loss", "val/loss"]) for record in records]
    return seen.page.evaluate(MEAN, [data, *how])


def on_command_line(records: Sequence[RunRecord], metric: str, axis: str, weight: float) -> Band:
    every = [record.series(metric) for record in records if metric in record]
    found = band([(each.axis(axis), smooth(each.value, weight)) for each in every])
    assert found is not None
    return found


def test_a_page_draws_the_mean_and_band_of_the_command_line(seen: Watched, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    records = [
        read_run(
            tmp_path / str(seed),
            [
                *(train(n, rng.normal(3, 0.2), wall_s=n * pace) for n in range(1, last, every)),
                *([eval_event(last, 2.5 + seed)] if seed else []),
            ],
            config(seed),
        )
        for seed, (last, every, pace) in enumerate([(60, 1, 0.5), (50, 2, 0.7), (70, 1, 0.6)])
    ]
    opened(seen, tmp_path, report_html(records))
    for metric, axis, weight in (
        ("loss", "step", 0.0),
        ("loss", "wall_s", 0.0),
        ("loss", "tokens", 0.6),
    ):
        found = on_page(seen, records, 2000, metric, axis, weight)
        wanted = on_command_line(records, metric, axis, weight)
        np.testing.assert_allclose(found["xs"], wanted.x, rtol=1e-4)
        np.testing.assert_allclose(found["mean"], wanted.mean, rtol=1e-4)
        np.testing.assert_allclose(found["deviation"], wanted.deviation, rtol=1e-3)
        np.testing.assert_allclose(found["low"], wanted.mean - wanted.deviation, rtol=1e-3)
    # one has no evaluation, the others have none at a place in common
    assert on_page(seen, records, 2000, "val/loss", "step", 0) == {
        "count": 2, "xs": [], "mean": [], "deviation": [], "low": [], "high": [],
    }  # fmt: skip


def test_extremes_of_thinned_curves_do_not_widen_the_band(seen: Watched, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    records = [
        read_run(
            tmp_path / str(seed),
            [train(n, value) for n, value in enumerate(rng.normal(3, 0.1, length), 1)],
            config(seed),
        )
        for seed, length in enumerate([4000, 4000, 3000])
    ]
    opened(seen, tmp_path, report_html(records))
    found = on_page(seen, records, 400, "loss", "step", 0)
    wanted = on_command_line(records, "loss", "step", 0.0)
    places = found["xs"][:-1]  # the end of the shortest lies between two places of the others
    assert np.diff(places).tolist() == [64] * 46
    at = np.searchsorted(wanted.x, places)
    np.testing.assert_allclose(found["mean"][:-1], wanted.mean[at], rtol=1e-5)
    np.testing.assert_allclose(found["deviation"][:-1], wanted.deviation[at], atol=1e-5)


def test_a_report_shows_runs_or_means_with_their_operations(seen: Watched, tmp_path: Path) -> None:
    """A matrix of seed and learning rate: a band for each learning rate."""
    records = [
        read_run(
            tmp_path / f"rates-{letter * 4}{'xyz'[seed]}",
            falling(40, 6 + seed + 10 * lr),
            config(seed, lr),
        )
        for letter, lr in (("a", 0.1), ("b", 0.2))
        for seed in range(3)
    ]
    lone = read_run(tmp_path / "alone-aaaaa", falling(30), config(1, 0.3))
    opened(seen, tmp_path, report_html([*records, lone]))
    page, panel = seen.page, seen.page.locator(".panel").first
    keys, switch = panel.locator(".ic-key"), page.get_by_label("Draw")
    expect(switch).to_have_value("")
    expect(keys).to_have_count(7 * 2)
    marked = panel.locator(".ic-mark.ic-operation").count()
    alone = page.evaluate("document.querySelector('canvas').toDataURL()")
    switch.select_option("mean and band")
    wait_for_frame(page)
    losses = [text for text in keys.all_inner_texts() if not text.endswith("val/loss")]
    assert losses == [
        "rates lr=0.1 (3 seeds) loss",
        "rates lr=0.2 (3 seeds) loss",
        "alone lr=0.3 loss",
    ]
    means = page.evaluate("document.querySelector('canvas').toDataURL()")
    assert means != alone
    assert panel.locator(".ic-mark.ic-operation").count() == marked > 0
    page.get_by_label("Over", exact=True).select_option("tokens")
    wait_for_frame(page)
    panel.locator(".u-over").hover()
    tip = panel.locator(".ic-tip")
    expect(tip).to_contain_text("tokens")
    assert sum(" ± " in text for text in tip.locator("b").all_inner_texts()) == 4
    keys.first.click()
    wait_for_frame(page)
    expect(keys.first).to_have_attribute("aria-pressed", "false")
    page.mouse.move(0, 0)
    switch.select_option("runs")
    page.get_by_label("Over", exact=True).select_option("step")
    wait_for_frame(page)
    assert page.evaluate("document.querySelector('canvas').toDataURL()") == alone
    assert seen.errors == []


def test_without_seeds_there_is_nothing_to_switch(seen: Watched, tmp_path: Path) -> None:
    records = [read_run(tmp_path / f"r{lr}", falling(10), config(1, lr)) for lr in (0.1, 0.2)]
    opened(seen, tmp_path, report_html(records))
    expect(seen.page.get_by_label("Draw")).to_be_hidden()
