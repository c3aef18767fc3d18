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
    growth_stage = CandidateStage(share, FINAL, ({"name": "stack_layers", "value": 4},))
    name, begin = f"L2-8-at-{100 * share:.0f}", {"model.n_layer": 2}
    return GrowthCandidate(name, "L2", begin, 5000, (CandidateStage(0.0, SMALL), growth_stage))


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


def expected_loss(candidate: GrowthCandidate, steps: int) -> float:
    """The loss if a token of the small model is worth c ** θ of the final size."""
    return loss_after(worth(candidate.costs(steps, TOKENS), THETA))


def run(
    search: ScheduleSearch,
    loss: Callable[[GrowthCandidate, int], float | None] = expected_loss,
    max_trials: int = 99,
) -> ScheduleSearch:
    """The search after `most` more trials."""
    while max_trials and (following := search.missing) is not None:
        candidate, rung, seed = following
        steps = candidate.steps(search.rungs[rung])
        trial = SearchTrial(candidate.name, rung, seed, steps, loss(candidate, steps))
        search, max_trials = structs.replace(search, trials=(*search.trials, trial)), max_trials - 1
    return search


def test_all_trials_of_a_rung_spend_the_same() -> None:
    for candidate in CANDIDATES:
        for rung in (50, 200, 5000):
            steps = candidate.steps(rung)
            excess = candidate.flops(steps) - FINAL * rung
            assert abs(excess) <= FINAL  # less than a step
            assert candidate.branches_at(steps, 0.15) <= steps - round(0.15 * steps)
            assert sum(stage.tokens for stage in candidate.costs(steps, TOKENS)) == steps * TOKENS


def test_the_better_half_goes_on_and_the_best_wins() -> None:
    search = run(SEARCH)
    by_rung = [[t.candidate for t in search.trials if t.rung == rung] for rung in range(3)]
    assert [len(set(names)) for names in by_rung] == [1 + 5, 1 + 3, 1 + 2]
    assert len(search.trials) == search.count == 2 * (6 + 4 + 3)
    # a token of the small model is worth more than it costs, so the latest growth is best
    assert set(by_rung[1]) == {SCRATCH, "L2-8-at-80", "L2-8-at-70", "L2-8-at-60"}
    assert search.winner == CANDIDATES[-1]
    assert run(structs.replace(SEARCH, seeds=(1,))).count == 13


def test_nothing_wins_where_growth_costs_more_than_it_saves() -> None:
    search = run(SEARCH, lambda candidate, _: 2.0 if candidate.name == SCRATCH else 2.1)
    assert search.winner is None
    assert search.missing is None
    # an end that is as low is no better
    assert run(SEARCH, lambda _candidate, _steps: 2.0).winner is None


def test_a_loss_that_is_not_finite_is_the_worst() -> None:
    search = run(
        SEARCH,
        lambda candidate, steps: (
            None if "80" in candidate.name else expected_loss(candidate, steps)
        ),
    )
    assert search.winner == CANDIDATES[-2]
    assert search.loss(CANDIDATES[-1], 0) == math.inf
    assert CANDIDATES[-1] not in (search.alive(1) or ())


def test_a_rung_begins_when_the_one_before_has_ended() -> None:
    search = run(SEARCH, max_trials=11)
    assert search.missing == (CANDIDATES[-1], 0, 2)
    assert search.alive(1) is None
    assert run(search, max_trials=1).missing == (CANDIDATES[0], 1, 1)


def test_its_cost_is_that_of_its_runs_with_each_trunk_once() -> None:
    search = run(SEARCH)
    total, trunks = 0.0, dict[str, float]()
    for trial in search.trials:
        (candidate,) = (option for option in CANDIDATES if option.name == trial.candidate)
        first = candidate.stages[0].flops_per_token
        shared = first * candidate.branches_at(trial.steps, search.decay)
        trunks[candidate.trunk] = max(trunks.get(candidate.trunk, 0.0), shared)
        total += candidate.flops(trial.steps) - shared
    flops, count = search.work(lambda per_token: per_token)
    assert count == search.count + 2 * len(trunks)
    # at most: it is not known which go on
    assert 0.8 < (total + 2 * sum(trunks.values())) / flops <= 1
    assert flops < 0.85 * sum(FINAL * search.rungs[trial.rung] for trial in search.trials)


def test_its_trials_are_a_pilot() -> None:
    search = run(SEARCH)
    assert search.winner is not None
    trunks = dict.fromkeys(search.seeds, ((250, 250 * TOKENS, 2.0),))
    pilot = search.pilot(search.winner, search.settings, trunks)
    assert {case.arm for case in pilot.cases} == {"final", "grown", "small"}
    assert PilotFindings(pilot).grown_cases[0].exponent == pytest.approx(THETA, abs=0.02)
    costs = search.winner.costs(search.winner.steps(200), TOKENS)
    flops = sum(stage.flops_per_token * stage.tokens for stage in costs)
    saving = predict_saving(pilot, costs)
    assert saving.share == pytest.approx(1 - flops / (FINAL * worth(costs, THETA)), abs=0.03)


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
    candidates = list(proposals(final, 0.15))
    assert len({proposal.name for proposal in candidates}) == len(candidates)
    for proposal in candidates:
        shape: Any = proposal.shape
        shares = [share for share, _ in proposal.growth]
        assert shares == sorted(shares)
        assert shares[-1] <= 0.85
        for _, operations in proposal.growth:
            for operation in operations:
                options = {k: v for k, v in operation.items() if k not in ("name", "value")}
                shape, _ = plan(shape, Operation(operation["name"], operation["value"], options))
        expected = final.changed(norm_eps=shape.norm_eps, rope_base=shape.rope_base)
        assert shape == expected, proposal.name
        assert proposal.shape != final
    sizes = {
        proposal.shape.n_layer for proposal in candidates if proposal.shape.n_embd == final.n_embd
    }
    assert sizes <= {size for size in range(1, final.n_layer) if 4 * size >= final.n_layer}
    if final.n_layer > 1:
        assert sizes
    if final.n_layer % 4 == 0 and final.n_layer:
        assert any(len(proposal.growth) == 2 for proposal in candidates)
    assert bool(candidates) == (final.n_layer > 1 or final.n_head > 1)


def test_the_file_is_read_again_and_nothing_else_is_believed(tmp_path: Path) -> None:
    file = tmp_path / "run.search.json"
    write_json(file, run(SEARCH, max_trials=7))
    assert read_search(file) == run(SEARCH, max_trials=7)
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
        with pytest.raises(ConfigError, match=message) as error:
            read_search(file)
        assert str(file) in str(error.value)
    for text in (b"", b'{"name": "a"', b"[" * 100_000, b"\xff"):
        file.write_bytes(text)
        with pytest.raises(ConfigError, match="is not the file of a search"):
            read_search(file)
