from typing import Any

import pytest

from instar.config.checks import cross_checks, rank_checks
from instar.config.errors import ConfigProblem
from instar.config.language import LanguageConfig


def clashes(**sections: Any) -> list[ConfigProblem]:
    return cross_checks(LanguageConfig.model_validate(sections))


def test_the_defaults_fit_each_other() -> None:
    assert clashes() == []


@pytest.mark.parametrize(
    ("sections", "culprit", "message"),
    [
        ({"model": {"n_embd": 100, "n_head": 3}}, "model.n_embd", "n_embd (100) must be divisible"),
        ({"model": {"n_head": 4, "n_kv_head": 3}}, "model.n_kv_head", "divisible by model.n_kv_head (3)"),
        ({"model": {"n_head": 4, "n_kv_head": 8}}, "model.n_kv_head", "divisible by model.n_kv_head (8)"),
        ({"model": {"n_embd": 12, "positions": "rope"}}, "model.n_embd", "must be even, got 12 / 4 = 3"),
        ({"data": {"val_fraction": 0.6, "test_fraction": 0.4}}, "data.val_fraction", "less than 1"),
        ({"optimizer": {"nesterov": True}}, "optimizer.nesterov", "is for SGD with momentum above 0"),
        ({"train": {"until": ["ten"]}}, "train.until[0]", "not a budget: 'ten'"),
        ({"train": {"until": ["1it", "0it"]}}, "train.until[1]", "not a budget: '0it'"),
        ({"train": {"until": []}}, "train.until", "would never end"),
        (
            {"learning_rate": {"warmup_iters": 50, "lr_decay_iters": 50}},
            "learning_rate.warmup_iters",
            "warmup_iters (50) must be less than learning_rate.lr_decay_iters (50)",
        ),
        (
            {"learning_rate": {"shape": "step", "lr_decay_iters": 50}},
            "learning_rate.decay_every",
            "decay_every is needed: with shape step, the rate is multiplied by gamma (0.5)",
        ),
        (
            {"learning_rate": {"shape": "exponential", "gamma": 0.95}},
            "learning_rate.decay_every",
            "with shape exponential, the rate is multiplied by gamma (0.95)",
        ),
        (
            {"learning_rate": {"shape": "linear", "warmup_iters": 60, "lr_decay_iters": 50}},
            "learning_rate.warmup_iters",
            "warmup_iters (60) must be less than learning_rate.lr_decay_iters (50)",
        ),
        (
            {"reproducible": "elastic", "parallel": {"elastic": {"virtual_ranks": 6}}},
            "parallel.elastic.virtual_ranks",
            "must be a power of two, got 6",
        ),
        (
            {"reproducible": "elastic", "parallel": {"ddp": {"exchange": "bfloat16"}}},
            "parallel.ddp.exchange",
            "cannot be combined with reproducible: elastic",
        ),
        ({"reproducible": "elastic", "compile": True}, "compile", "cannot be combined with reproducible"),
        (
            {"parallel": {"fsdp": {"gather": "bfloat16"}}, "precision": "fp16"},
            "parallel.fsdp.gather",
            "weights that are computed with in fp16",
        ),
        (
            {"parallel": {"fsdp": {"offload": True}}},
            "parallel.fsdp.offload",
            "needs strategy fsdp or hsdp",
        ),
        (
            {"parallel": {"strategy": "fsdp", "fsdp": {"offload": True}}, "device": "cpu"},
            "parallel.fsdp.offload",
            "on a CPU, everything is in host memory already",
        ),
        ({"parallel": {"strategy": "hsdp"}}, "parallel.strategy", "needs parallel.fsdp.shards"),
        ({"parallel": {"fsdp": {"shards": 2}}}, "parallel.fsdp.shards", "parallel.strategy is ddp"),
        (
            {"reproducible": "elastic", "parallel": {"fsdp": {"reduce_each_micro_batch": True}}},
            "parallel.fsdp.reduce_each_micro_batch",
            "cannot be combined with reproducible: elastic",
        ),
    ],
)  # fmt: skip
def test_a_clash_names_its_likeliest_culprit(
    sections: dict[str, Any], culprit: str, message: str
) -> None:
    (clash,) = clashes(**sections)
    assert clash.keys[0] == culprit
    assert message in clash.message


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"n_head": 4, "n_kv_head": 2}},
        {"model": {"n_embd": 12}},
        {"train": {"until": ["10min", "loss<3"]}},
        {"train": {"until": ["10min"]}, "learning_rate": {"lr_decay_iters": 5000}},
        {"train": {"until": ["10min", "3ep"]}},
        {"train": {"until": ["50it"]}},
        {"learning_rate": {"shape": "constant", "lr_decay_iters": 10}},
        {"learning_rate": {"shape": "wsd", "lr_decay_iters": 1000}},
        {"learning_rate": {"shape": "linear", "lr_decay_iters": 101}},
        {"train": {"until": ["10min"]}, "learning_rate": {"shape": "step", "decay_every": 500}},
        {"learning_rate": {"shape": "exponential", "decay_every": 1, "lr_decay_iters": 10}},
        {"learning_rate": {"shape": "wsd", "lr_decay_iters": 110, "decay_fraction": 1.0}},
        {"parallel": {"elastic": {"virtual_ranks": 6}}, "compile": True},
        {"reproducible": "elastic", "parallel": {"elastic": {"virtual_ranks": 16}}},
    ],
)
def test_what_fits_raises_no_alarm(sections: dict[str, Any]) -> None:
    assert clashes(**sections) == []


def test_all_clashes_are_found_at_once() -> None:
    problems = clashes(
        model={"n_embd": 100, "n_head": 3},
        data={"val_fraction": 0.9, "test_fraction": 0.9},
        train={"until": ["x", "y"]},
    )
    assert [clash.keys[0] for clash in problems] == [
        "model.n_embd",
        "data.val_fraction",
        "train.until[0]",
        "train.until[1]",
    ]


@pytest.mark.parametrize(
    ("slices", "bad_counts", "hint"),
    [(4, [3, 5, 8], "use 1, 2 or 4 ranks"), (1, [2], "use 1 rank, or more virtual ranks in a new run")],
)  # fmt: skip
def test_elastic_ranks_share_the_slices_evenly(
    slices: int, bad_counts: list[int], hint: str
) -> None:
    elastic = {"elastic": {"virtual_ranks": slices}}
    config = LanguageConfig.model_validate({"reproducible": "elastic", "parallel": elastic})
    clashes_of = {ranks: rank_checks(config, ranks) for ranks in range(1, 9)}
    for ranks in bad_counts:
        (clash,) = clashes_of[ranks]
        assert clash.message == f"{ranks} ranks cannot share {slices} virtual ranks evenly"
        assert clash.hint == hint
    for ranks in (ranks for ranks in (1, 2, 4) if ranks <= slices):
        assert clashes_of[ranks] == []


def test_any_number_of_ranks_will_do_otherwise() -> None:
    assert all(rank_checks(LanguageConfig(), ranks) == [] for ranks in range(1, 9))
