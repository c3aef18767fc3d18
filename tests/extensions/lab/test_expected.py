"""What a forecast says of a saving: without a pilot, and of a family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sized import spec_for_tokens

from instar.config.language import LanguageConfig
from instar.config.load import load_config
from instar.extensions.lab.expected import (
    EXPONENTS,
    TypicalSaving,
    expected_saving,
    family_saving,
    render_saving,
    saved_share,
    saving_values,
    typical,
)
from instar.extensions.lab.pilot_file import Spent
from instar.extensions.lab.saving import spending
from instar.schedule.forecast import Forecast, forecast
from instar.schedule.render import render


def foretold(preset: str, *settings: str) -> Forecast:
    """The forecast of 8 layers, at 7 tokens per parameter unless settings say otherwise."""
    base = ["model.n_layer=8", "model.n_embd=32", "model.context=32", "model.vocab_size=256"]
    base += ["train.batch_size=4", "train.until=6000it", f"preset={preset}"]
    config = load_config(None, [*base, *settings]).config
    assert isinstance(config, LanguageConfig)
    return forecast(config, spec_for_tokens(config, 10**7, 256), 1)


def test_without_a_pilot_it_is_the_range_of_other_runs_at_the_costs_of_this() -> None:
    told = foretold("moult")
    found = typical(told)
    assert found is not None
    assert found.shares is not None
    assert found.family is None
    low, middle, high = found.shares
    assert 0 < low < middle < high < 0.75
    *small, final = (stage.flops_per_token for stage in told.stages)
    costs = [flops / final for flops in small]
    worth = 0.3 + sum(0.35 * cost ** EXPONENTS[1] for cost in costs)
    assert middle == pytest.approx(1 - (0.3 + 0.35 * sum(costs)) / worth)
    text = " ".join(render(told, [render_saving(found)]).split())
    assert "may save" in text
    assert "not measured for this config" in text
    assert "`instar schedule pilot` measures it" in text
    assert max(map(len, render(told, [render_saving(found)]).splitlines())) <= 80


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.until=100it"], "tokens per parameter, and those that were measured 5 to 20"),
        (["train.until=60000it"], "tokens per parameter, and those that were measured 5 to 20"),
        (["sizes=[1, 8]"], "the layers become 8 times as many, in what was measured at most 4"),
        (["train.until=[6000it, loss<2]"], ""),
    ],
)
def test_beyond_what_was_measured_there_is_no_number(settings: list[str], said: str) -> None:
    found = typical(foretold("moult", *settings))
    assert found is not None
    assert said in found.unknown
    assert (found.shares is None) == bool(said)
    if said:
        assert "nobody can say what it saves" in render_saving(found).replace("\n", " ")


def test_of_late_and_of_uncertain_growth_there_is_no_number() -> None:
    def of(when: dict[str, object]) -> TypicalSaving | None:
        entry = {"name": "stack_layers", "value": 4, "when": when}
        return typical(foretold("[]", "model.n_layer=2", f"schedule={json.dumps([entry])}"))

    late, open_ = of({"at_fraction": 0.9}), of({"any": [{"loss_below": 3}, {"at_fraction": 0.7}]})
    assert late is not None
    assert "it grows after 90 % of its tokens" in late.unknown
    assert open_ is not None
    assert "when it grows or ends is not known" in open_.unknown


def test_nothing_is_said_of_other_growth_or_of_none() -> None:
    assert typical(foretold("[]")) is None
    wider = '[{"name": "widen_mlp", "value": "x2", "when": {"at_step": 9}}]'
    assert typical(foretold("[]", f"schedule={wider}")) is None


def test_a_family_saves_the_steps_that_its_members_share() -> None:
    told = foretold("family")
    trunk = spending(told)
    # at θ = 0 a token is worth a token, so each size from scratch takes the tokens of its own
    found = family_saving(told, [0.0])
    assert found is not None
    flops, scratch = 0.0, 0.0
    per_token = [each.flops_per_token for each in trunk]
    tokens_per_step = 4 * 32
    for (begun, own), cost in zip(((2100, 900), (4200, 1800)), (min(per_token), None), strict=True):
        size = cost or sorted(set(per_token))[1]
        scratch += (begun + own) * tokens_per_step * size
        flops += own * tokens_per_step * size
    scratch += 6000 * tokens_per_step * max(per_token)
    flops += sum(each.flops_per_token * each.tokens for each in trunk)
    assert found[1] == pytest.approx(1 - flops / scratch)
    both = typical(told)
    assert both is not None
    assert both.family is not None
    assert both.shares is not None
    # its members share more than the largest alone saves
    assert all(family > alone for family, alone in zip(both.family, both.shares, strict=True))
    assert "of all sizes from scratch" in " ".join(render_saving(both).split())


def test_one_model_saves_what_its_stages_are_worth() -> None:
    stages = (Spent(10.0, 60.0), Spent(40.0, 40.0))
    assert saved_share([stages], 2200.0, 0.0) == pytest.approx(1 - 2200 / 4000)
    assert saved_share([stages], 2200.0, 1.0) == pytest.approx(0.0)


def test_in_json_what_was_not_measured_has_another_name(tmp_path: Path) -> None:
    told = foretold("family")
    found = expected_saving(told, load_config(None), str(tmp_path / "run.yaml"))
    given = json.loads(json.dumps(saving_values(found)))
    assert given["saving"] is None
    assert len(given["typical_saving"]["family"]) == 3
    assert saving_values(None) == {"saving": None, "typical_saving": None}
