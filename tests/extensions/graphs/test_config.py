from typing import Any

import pytest

from instar.config.checks import cross_checks
from instar.config.schema import RunConfig
from instar.extensions.graphs.config import GraphConfig, graph_checks

KIND = {"name": "kind", "kind": "classification", "classes": 2}
SIZE = {"name": "size", "kind": "regression"}


def config(**sections: Any) -> GraphConfig:
    return GraphConfig.model_validate(sections)


def test_the_defaults_fit_each_other() -> None:
    assert graph_checks(config()) == []


def test_a_section_with_one_key_keeps_the_defaults_of_this_kind_of_run() -> None:
    run_config = config(checkpoint={"keep_last": 1}, train={"clip": 2.0}, eval={"at_start": True})
    assert run_config.checkpoint.on_best
    assert run_config.test.at_end
    assert run_config.train.until[0].endswith("ep")
    assert run_config.eval.eval_epochs == 1
    assert RunConfig().eval.eval_epochs is None


@pytest.mark.parametrize(
    ("sections", "culprit", "message"),
    [
        ({"model": {"heads": []}}, "model.heads", "is empty: there is nothing to learn"),
        (
            {"model": {"heads": [KIND, {**SIZE, "name": "kind"}]}},
            "model.heads",
            "2 heads are called 'kind'",
        ),
        (
            {"model": {"heads": [SIZE, {**KIND, "classes": None}]}},
            "model.heads[1].classes",
            "the classification head 'kind' needs a number of classes",
        ),
        (
            {"model": {"heads": [{**SIZE, "classes": 3}]}},
            "model.heads[0].classes",
            "head 'size' is a regression, which has no classes",
        ),
        (
            {"model": {"heads": [KIND, {**SIZE, "level": "node"}]}},
            "model.heads",
            "kind of graphs and size of nodes cannot be trained together",
        ),
        ({"model": {"pooling": []}}, "model.pooling", "heads for graphs would have no input"),
        ({"model": {"pooling": ["sum", "max", "sum"]}}, "model.pooling", "has sum 2 times"),
        (
            {"model": {"layer": "gat", "width": 30, "n_head": 4}},
            "model.width",
            "width (30) must be divisible by model.n_head (4)",
        ),
        (
            {"early_stopping": {"rules": [{"metric": "loss"}, {"metric": "manifold/acuracy"}]}},
            "early_stopping.rules[1].metric",
            "no metric 'manifold/acuracy'",
        ),
        (
            {"learning_rate": {"plateau": {"metric": "f1"}}},
            "learning_rate.plateau.metric",
            "no metric 'f1'",
        ),
        (
            {"checkpoint": {"best_of": ["loss", "dimension/mae"]}},
            "checkpoint.best_of[1]",
            "no metric 'dimension/mae'",
        ),
    ],
)
def test_what_contradicts_itself_is_told(sections: Any, culprit: str, message: str) -> None:
    (clash,) = cross_checks(config(**sections))
    assert clash.keys[0] == culprit
    assert message in clash.message


def test_an_unknown_metric_says_which_there_are() -> None:
    (near, far) = cross_checks(
        config(model={"heads": [KIND]}, checkpoint={"best_of": ["kind/accuracies", "f1"]})
    )
    assert near.hint == "did you mean 'kind/accuracy'?"
    assert far.hint == "there are loss, kind/loss, kind/accuracy"


def test_what_needs_no_attention_needs_no_even_heads() -> None:
    assert graph_checks(config(model={"layer": "sage", "width": 30, "n_head": 4})) == []
    nodes = {**KIND, "level": "node"}
    assert graph_checks(config(model={"heads": [nodes], "pooling": []})) == []


def test_every_metric_has_a_direction() -> None:
    assert config(model={"heads": [KIND, SIZE]}).metrics == {
        "loss": "min",
        "kind/loss": "min",
        "kind/accuracy": "max",
        "size/mae": "min",
        "size/mse": "min",
    }


def test_samples_without_tokens_have_no_context() -> None:
    (clash,) = cross_checks(config(eval={"context": 64}))
    assert clash.keys[0] == "eval.context"
    assert "is for text" in clash.message
