"""Candidates of a search, which of its trials are next and go on, and its file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from pilots import FINAL, SMALL, TOKENS, loss_after
from shapes import gpt2, llama

from instar.config.errors import ConfigError
from instar.config.sections import Operation
from instar.extensions.lab.pilot_file import write_json
from instar.extensions.lab.saving import PilotFindings, predict_saving, worth
from instar.extensions.lab.search_state import (
    SCRATCH,
    CandidateStage,
    GrowthCandidate,
    ScheduleSearch,
    SearchTrial,
    proposals,
    read_search,
)
from instar.growth.operators import plan
from instar.models.architecture import Architecture

THETA = 0.2


def copies(share: float) -> GrowthCandidate:
    grown = CandidateStage(share, FINAL, ({"name": "stack_layers", "value": 4},))
    name, begin = f"L2-8-at-{100 * share:.0f}", {"model.n_layer": 2}
    return GrowthCandidate(name, "L2", begin, 5000, (CandidateStage(0.0, SMALL), grown))


CANDIDATES = (
    GrowthCandidate(SCRATCH, "L8", {}, 20_000, (CandidateStage(0.0, FINAL),)),
    *(copies(share) for share in (0.3, 0.5, 0.6, 0.7, 0.8)),
)
SEARCH = ScheduleSearch(
    name="tiny",
    settings={"optimizer.lr": 0.1},
    candidates=CANDIDATES,
    seeds=(1, 2),
    rungs=(50, 100, 200),
    run_steps=2000,
    decay=0.15,
    tokens_per_step=TOKENS,
    evaluations=20,
    seconds=((SMALL, 0.25), (FINAL, 0.5)),
)


def known(candidate: GrowthCandidate, steps: int) -> float:
    """The loss if a token of the small model is worth c ** θ of the final size."""
    return loss_after(worth(candidate.costs(steps, TOKENS), THETA))


def run(
    search: ScheduleSearch,
    loss: Callable[[GrowthCandidate, int], float | None] = known,
    most: int = 99,
) -> ScheduleSearch:
    """The search after `most` more trials."""
    while most and (following := search.missing) is not None:
        candidate, rung, seed = following
        steps = candidate.steps(search.rungs[rung])
        done = SearchTrial(candidate.name, rung, seed, steps, loss(candidate, steps))
        search, most = structs.replace(search, trials=(*search.trials, done)), most - 1
    return search


def test_all_trials_of_a_rung_spend_the_same() -> None:
    for candidate in CANDIDATES:
        for rung in (50, 200, 5000):
            steps = candidate.steps(rung)
            apart = candidate.flops(steps) - FINAL * rung
            assert abs(apart) <= FINAL  # less than a step
            assert candidate.branches_at(steps, 0.15) <= steps - round(0.15 * steps)
            assert sum(each.tokens for each in candidate.costs(steps, TOKENS)) == steps * TOKENS


def test_the_better_half_goes_on_and_the_best_wins() -> None:
    found = run(SEARCH)
    by_rung = [[t.candidate for t in found.trials if t.rung == rung] for rung in range(3)]
    assert [len(set(each)) for each in by_rung] == [1 + 5, 1 + 3, 1 + 2]
    assert len(found.trials) == found.count == 2 * (6 + 4 + 3)
    # a token of the small model is worth more than it costs, so the latest growth is best
    assert set(by_rung[1]) == {SCRATCH, "L2-8-at-80", "L2-8-at-70", "L2-8-at-60"}
    assert found.winner == CANDIDATES[-1]
    assert run(structs.replace(SEARCH, seeds=(1,))).count == 13


def test_nothing_wins_where_growth_costs_more_than_it_saves() -> None:
    found = run(SEARCH, lambda candidate, _: 2.0 if candidate.name == SCRATCH else 2.1)
    assert found.winner is None
    assert found.missing is None
    # an end that is as low is no better
    assert run(SEARCH, lambda _candidate, _steps: 2.0).winner is None


def test_a_loss_that_is_not_finite_is_the_worst() -> None:
    found = run(SEARCH, lambda each, steps: None if "80" in each.name else known(each, steps))
    assert found.winner == CANDIDATES[-2]
    assert found.loss(CANDIDATES[-1], 0) == math.inf
    assert CANDIDATES[-1] not in (found.alive(1) or ())


def test_a_rung_begins_when_the_one_before_has_ended() -> None:
    found = run(SEARCH, most=11)
    assert found.missing == (CANDIDATES[-1], 0, 2)
    assert found.alive(1) is None
    assert run(found, most=1).missing == (CANDIDATES[0], 1, 1)


def test_its_cost_is_that_of_its_runs_with_each_trunk_once() -> None:
    found = run(SEARCH)
    spent, trunks = 0.0, dict[str, float]()
    for trial in found.trials:
        (candidate,) = (each for each in CANDIDATES if each.name == trial.candidate)
        first = candidate.stages[0].flops_per_token
        shared = first * candidate.branches_at(trial.steps, found.decay)
        trunks[candidate.trunk] = max(trunks.get(candidate.trunk, 0.0), shared)
        spent += candidate.flops(trial.steps) - shared
    flops, count = found.work(lambda per_token: per_token)
    assert count == found.count + 2 * len(trunks)
    # at most: it is not known which go on
    assert 0.8 < (spent + 2 * sum(trunks.values())) / flops <= 1
    assert flops < 0.85 * sum(FINAL * found.rungs[trial.rung] for trial in found.trials)


def test_its_trials_are_a_pilot() -> None:
    found = run(SEARCH)
    assert found.winner is not None
    trunks = dict.fromkeys(found.seeds, ((250, 250 * TOKENS, 2.0),))
    pilot = found.pilot(found.winner, found.settings, trunks)
    assert {case.arm for case in pilot.cases} == {"final", "grown", "small"}
    assert PilotFindings(pilot).grown_cases[0].exponent == pytest.approx(THETA, abs=0.02)
    spent = found.winner.costs(found.winner.steps(200), TOKENS)
    flops = sum(each.flops_per_token * each.tokens for each in spent)
    saving = predict_saving(pilot, spent)
    assert saving.share == pytest.approx(1 - flops / (FINAL * worth(spent, THETA)), abs=0.03)


@pytest.mark.parametrize(
    "final",
    [
        *(gpt2(n_layer=n) for n in (1, 2, 3, 4, 5, 6, 8, 12)),
        *(llama(n_layer=n, n_embd=48) for n in (4, 9)),
        gpt2(n_layer=0),
        gpt2(n_layer=1, n_head=1, n_embd=16),
    ],
    ids=lambda shape: f"{shape.n_layer}-{shape.norm}-{shape.n_head}",
)
def test_every_proposal_leads_to_the_final_shape(final: Architecture) -> None:
    found = list(proposals(final, 0.15))
    assert len({each.name for each in found}) == len(found)
    for each in found:
        shape: Any = each.shape
        shares = [share for share, _ in each.growth]
        assert shares == sorted(shares)
        assert shares[-1] <= 0.85
        for _, operations in each.growth:
            for one in operations:
                options = {k: v for k, v in one.items() if k not in ("name", "value")}
                shape, _ = plan(shape, Operation(one["name"], one["value"], options))
        changed = final.changed(norm_eps=shape.norm_eps, rope_base=shape.rope_base)
        assert shape == changed, each.name
        assert each.shape != final
    sizes = {each.shape.n_layer for each in found if each.shape.n_embd == final.n_embd}
    assert sizes <= {size for size in range(1, final.n_layer) if 4 * size >= final.n_layer}
    if final.n_layer > 1:
        assert sizes
    if final.n_layer % 4 == 0 and final.n_layer:
        assert any(len(each.growth) == 2 for each in found)
    assert bool(found) == (final.n_layer > 1 or final.n_head > 1)


def test_the_file_is_read_again_and_nothing_else_is_believed(tmp_path: Path) -> None:
    file = tmp_path / "run.search.json"
    write_json(file, run(SEARCH, most=7))
    assert read_search(file) == run(SEARCH, most=7)
    values = json.loads(file.read_text())
    for key, value, message in (
        ("version", 2, r"\$.version"),
        ("rungs", [1, 2], "length >= 3"),
        ("rungs", [0, 1, 2], ">= 1"),
        ("candidates", values["candidates"][:1], "length >= 2"),
        ("trials", [{"candidate": "../up", "rung": 0, "seed": 1, "steps": 1}], "regex"),
        ("trials", [{**values["trials"][0], "rung": 3}], "rung|< 3|<= 2"),
        ("run_dir", "/etc", "unknown field"),
    ):
        file.write_text(json.dumps(values | {key: value}))
        with pytest.raises(ConfigError, match=message) as raised:
            read_search(file)
        assert str(file) in str(raised.value)
    for text in (b"", b'{"name": "a"', b"[" * 100_000, b"\xff"):
        file.write_bytes(text)
        with pytest.raises(ConfigError, match="is not the file of a search"):
            read_search(file)
