"""Training samples that are drawn by weights, or classes equally often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import parametrize_first
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2_contingency, chisquare
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from instar.config.errors import ConfigError
from instar.config.schema import SamplesConfig
from instar.data.loader import LocalReader, ReadRequest, StepKey
from instar.data.order import Int64Array, Order
from instar.data.sample_set import SampleSet
from instar.data.sampling import BalancedSampling, WeightedSampling
from instar.data.source import CostedSource, InMemorySource, Source
from instar.data.user_sets import sample_set

WEIGHTS = np.array([0.0, 1.0, 2.5, 0.5, 7.0, 0.0, 3.0, 0.0])
ALL = np.arange(WEIGHTS.size)
DRAWS = 100_000
CLASSES = np.array([5, -1, 5, 5, 2, -1, 5, 5, 5])


def whole_epoch(order: Order, epoch: int = 0) -> Int64Array:
    return order.indices(epoch, 0, order.samples_per_epoch)


def weighted_order(weights: NDArray[np.float64], seed: int = 3) -> Order:
    return WeightedSampling(weights, "w").order(np.arange(weights.size), seed)


def balanced_order(classes: Int64Array, seed: int = 3) -> Order:
    return BalancedSampling(classes, "y").order(np.arange(classes.size), seed)


def counts_of_many_epochs(order: Order) -> Int64Array:
    epochs = range(DRAWS // order.samples_per_epoch)
    indices = np.concatenate([whole_epoch(order, epoch) for epoch in epochs])
    return np.bincount(indices, minlength=order.samples_per_epoch)


def test_draws_have_the_distribution_of_torchs_sampler() -> None:
    counts = counts_of_many_epochs(weighted_order(WEIGHTS))
    sampler = WeightedRandomSampler(WEIGHTS, DRAWS, generator=torch.Generator().manual_seed(1))
    of_torch = np.bincount([*sampler], minlength=WEIGHTS.size)
    used = WEIGHTS > 0
    assert counts[~used].sum() == of_torch[~used].sum() == 0
    assert chi2_contingency([counts[used], of_torch[used]]).pvalue > 0.01
    expected = WEIGHTS[used] / WEIGHTS.sum() * DRAWS
    assert chisquare(counts[used], expected).pvalue > 0.01
    # a test that would not see a wrong distribution shows nothing
    assert chisquare(counts[used], np.full(used.sum(), DRAWS / used.sum())).pvalue < 1e-9
    assert chisquare(counts[used], np.roll(expected, 1)).pvalue < 1e-9


def test_draws_are_independent_of_each_other_and_of_epochs() -> None:
    order = weighted_order(np.ones(64))
    epochs = np.stack([whole_epoch(order, epoch) for epoch in range(2000)])
    for before, after in (
        (epochs[:, :-1], epochs[:, 1:]),  # neighbours
        (epochs[:-1], epochs[1:]),  # one place in two epochs
    ):
        table = np.zeros((8, 8))
        np.add.at(table, (before.ravel() % 8, after.ravel() % 8), 1)
        assert chi2_contingency(table).pvalue > 0.01
    assert not np.array_equal(epochs[0], whole_epoch(weighted_order(np.ones(64), seed=4)))


@pytest.mark.parametrize(
    "weights",
    [np.array([1e300, 3e300, 0.0]), np.array([5e-324, 0.0, 5e-324]), np.array([0.0, 2.0])],
)
def test_weights_of_any_size_are_relative(weights: NDArray[np.float64]) -> None:
    counts = counts_of_many_epochs(weighted_order(weights))
    used = weights > 0
    assert counts[~used].sum() == 0
    assert counts[used] / counts.sum() == pytest.approx(
        weights[used] / weights.max() / (weights / weights.max()).sum(), abs=0.01
    )


@settings(deadline=None)
@given(
    classes=st.lists(st.integers(-2, 6), min_size=1, max_size=60).map(np.array),
    seed=st.integers(0, 2**63),
    epochs=st.integers(1, 4),
)
def test_each_period_has_every_class_and_no_sample_comes_before_its_class_is_through(
    classes: Int64Array, seed: int, epochs: int
) -> None:
    order = balanced_order(classes, seed)
    labels = np.unique(classes)
    indices = np.concatenate([whole_epoch(order, epoch) for epoch in range(epochs)])
    whole_periods = indices[: indices.size // labels.size * labels.size].reshape(-1, labels.size)
    assert np.all(np.sort(classes[whole_periods], axis=1) == labels)
    for label in labels:
        members = np.flatnonzero(classes == label)
        of_class = indices[classes[indices] == label]
        passes = of_class[: of_class.size // members.size * members.size]
        assert np.all(np.sort(passes.reshape(-1, members.size), axis=1) == members)
        last_pass = of_class[passes.size :]
        assert np.unique(last_pass).size == last_pass.size


def test_turns_and_passes_are_shuffled_anew() -> None:
    classes = np.repeat([0, 1, 2], [40, 80, 300])
    order = balanced_order(classes)
    indices = np.concatenate([whole_epoch(order, epoch) for epoch in range(30)])
    turns = classes[indices].reshape(-1, 3)
    assert chisquare(np.unique(turns @ [9, 3, 1], return_counts=True)[1]).pvalue > 0.01
    passes = indices[classes[indices] == 0].reshape(-1, 40)
    assert np.unique(passes, axis=0).shape == passes.shape
    firsts = np.bincount(passes[:, 0], minlength=40)
    assert chisquare(firsts).pvalue > 0.01
    assert not np.array_equal(
        indices, np.concatenate([whole_epoch(balanced_order(classes, 4), 0)] * 30)
    )


@pytest.mark.parametrize("order", [weighted_order(WEIGHTS), balanced_order(CLASSES)])
def test_an_order_is_a_function_of_its_place(order: Order) -> None:
    n = order.samples_per_epoch
    for epoch in (0, 7):
        indices = whole_epoch(order, epoch)
        parts = [order.indices(epoch, place, min(place + 2, n)) for place in range(0, n, 2)]
        np.testing.assert_array_equal(np.concatenate(parts), indices)
        assert indices.dtype == np.int64
    assert not np.array_equal(whole_epoch(order, 0), whole_epoch(order, 7))
    with pytest.raises(IndexError):
        order.indices(0, 0, n + 1)


# ---- sets of samples ----

N = 400
NUMBER = np.arange(N)
SIDE = (NUMBER % 10 == 3).astype(np.int64)
COLUMNS = {"number": NUMBER, "side": SIDE, "weight": 1.0 + 8 * SIDE, "pair": np.ones((N, 2))}


def open_samples(samples: Any = COLUMNS, seed: int = 5, **data: Any) -> SampleSet:
    opened_set = sample_set(lambda: samples, samples, (), SamplesConfig(**data), seed=seed)
    assert isinstance(opened_set, SampleSet)
    return opened_set


def steps(
    train: tuple[Source, Order], ranks: int, batch: int, count: int = 20, cursor: int = 0
) -> list[list[int]]:
    """The numbers of the samples of each step, over all ranks; a new reader for every other step."""
    numbers_of_steps: list[list[int]] = []
    for step in range(count):
        key = StepKey(cursor, batch, 3)
        of_ranks = []
        for rank in range(ranks):
            reader = LocalReader(*train, ranks, range(rank, rank + 1), "a reader")
            block = reader.read(ReadRequest(0, key, read_ahead=step % 2 == 0))
            batch_of_rank = block[key]
            assert not isinstance(batch_of_rank, Exception)
            parts = [m for m in batch_of_rank.micro_batches if m.samples]
            of_ranks += [number for m in parts for number in m.arrays["number"].tolist()]  # type: ignore[union-attr]
        numbers_of_steps.append(of_ranks)
        cursor = batch_of_rank.plan.after
    return numbers_of_steps


@pytest.mark.parametrize("key", ["balance", "sample_weights"])
def test_ranks_batches_and_workers_do_not_disturb_the_order(key: str) -> None:
    data = {key: {"balance": "side", "sample_weights": "weight"}[key]}
    expected = steps(open_samples(**data).train(1), 1, 12)
    assert sorted(map(len, expected))[-1] == 12
    for ranks in (2, 3, 4):
        assert steps(open_samples(**data).train(1), ranks, 12) == expected
    flat = [number for step in expected for number in step]
    smaller = [n for step in steps(open_samples(**data).train(1), 2, 5, 40) for n in step]
    assert smaller[:150] == flat[:150]
    in_workers = open_samples(**data, workers=2).train(1)
    try:
        assert steps(in_workers, 2, 12) == expected
    finally:
        in_workers[0].close()  # type: ignore[attr-defined]
    assert steps(open_samples(**data).train(1), 1, 12, 8, cursor=144) == expected[12:]


def test_only_training_samples_are_drawn_and_held_out_ones_are_not() -> None:
    for data in ({"balance": "side"}, {"sample_weights": "weight"}):
        plain, dataset = open_samples(), open_samples(**data)
        for split in ("val", "test"):
            held_out = dataset.held_out(split)
            assert held_out.fingerprint == plain.held_out(split).fingerprint
            assert len(held_out) == plain.size(split) == 40
        source, order = dataset.train(1)
        assert order.samples_per_epoch == len(source) == 320
        numbers = source.read(whole_epoch(order))["number"]
        assert set(numbers.tolist()) <= set(plain.splits["train"].tolist())  # type: ignore[union-attr]


def test_classes_come_equally_often() -> None:
    source, order = open_samples(balance="side").train(1)
    sides = source.read(whole_epoch(order))["side"]
    assert np.bincount(sides).tolist() == [160, 160]  # type: ignore[arg-type]
    assert np.all(sides.reshape(-1, 2).sum(1) == 1)  # type: ignore[union-attr]


def test_weights_count_of_training_samples_only() -> None:
    """The heaviest is held out."""
    splits = open_samples(val=0.5).splits
    weights = np.ones(N)
    weights[splits["val"]] = 1e9
    source, order = open_samples(
        {**COLUMNS, "weight": weights}, val=0.5, sample_weights="weight"
    ).train(1)
    counts = np.bincount(source.read(whole_epoch(order))["number"], minlength=N)  # type: ignore[arg-type]
    assert counts.max() < 10


def test_the_weights_of_a_loader_are_those_of_a_column() -> None:
    data = TensorDataset(*(torch.from_numpy(COLUMNS[name]) for name in ("number", "side")))
    loader = DataLoader(data, sampler=WeightedRandomSampler(COLUMNS["weight"], N), batch_size=9)
    fields = ("number", "side")
    of_loader = sample_set(lambda: loader, loader, fields, SamplesConfig(), seed=5)
    column = open_samples(sample_weights="weight")
    assert isinstance(of_loader, SampleSet)
    for epoch in range(3):
        numbers = [
            source.read(whole_epoch(order, epoch))["number"]
            for source, order in (of_loader.train(1), column.train(1))
        ]
        np.testing.assert_array_equal(*numbers)
    assert "by the DataLoader's weights" in of_loader.drawing
    # of one split, given beside others
    loader = DataLoader(data, sampler=WeightedRandomSampler(SIDE.astype(float), N))
    parts = {"train": loader, "val": TensorDataset(*(t[:7] for t in data.tensors))}
    of_part = sample_set(lambda: parts, parts, fields, SamplesConfig(test=0), seed=5)
    source, order = of_part.train(1)
    assert set(source.read(whole_epoch(order))["side"].tolist()) == {1}  # type: ignore[union-attr]


def test_what_is_drawn_is_said() -> None:
    assert open_samples().drawing == ""
    drawing = open_samples(balance="side", stratify="side").drawing
    assert drawing == (
        "balanced by side, samples → draws of an epoch: class 0 288 → 160, class 1 32 → 160"
    )
    odd = open_samples({**COLUMNS, "kind": NUMBER % 11}, balance="kind").drawing
    assert " → about 29, " in odd
    assert odd.endswith("and 3 more classes")
    samples = open_samples(sample_weights="weight")
    source, order = samples.train(1)
    distinct = [np.unique(whole_epoch(order, epoch)).size for epoch in range(50)]
    expected_count = float(samples.drawing.split(" of 320")[0].rpartition(" ")[2])
    assert expected_count == pytest.approx(np.mean(distinct), abs=3)
    assert "never" not in samples.drawing
    never = open_samples({**COLUMNS, "weight": 1 - SIDE}, sample_weights="weight", stratify="side")
    assert never.drawing.endswith("32 never do, whose weight is 0")
    assert len(source) == 320


def test_the_fingerprint_is_of_what_is_drawn_too() -> None:
    loaders = [
        DataLoader(
            TensorDataset(torch.from_numpy(NUMBER)), sampler=WeightedRandomSampler(weights, N)
        )
        for weights in (np.ones(N), np.ones(N), COLUMNS["weight"])
    ]
    sets = [open_samples(loader) for loader in loaders]
    assert sets[0].fingerprint == sets[1].fingerprint != sets[2].fingerprint
    prints = {open_samples(**data).fingerprint for data in ({}, {"balance": "side"})}
    assert len(prints) == 2


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(1.0, 2)] * 9)


def loader_with(sampler: Any) -> Callable[[], Any]:
    return lambda: DataLoader(TensorDataset(torch.from_numpy(NUMBER)), sampler=sampler)


REFUSALS: list[tuple[Any, dict[str, Any], str]] = [
    (COLUMNS, {"balance": "colour"}, "there is no column 'colour' of classes; there are number"),
    (COLUMNS, {"sample_weights": "colour"}, "there is no column 'colour' of weights; there are"),
    (COLUMNS, {"balance": "pair"}, "column 'pair' does not have one number for each sample"),
    (COLUMNS, {"sample_weights": "pair"}, "column 'pair' does not have one number for each"),
    (COLUMNS, {"balance": "number"}, "each of 320 training samples has a class of its"),
    ({**COLUMNS, "side": SIDE + 0.25}, {"balance": "side"}, "column 'side' is 0.25 in sample 0"),
    (
        {**COLUMNS, "side": np.where(SIDE, np.nan, 1)},
        {"balance": "side"},
        "column 'side' is nan in sample 3",
    ),
    ({**COLUMNS, "side": SIDE * 0}, {"balance": "side"}, "all training samples have the class 0"),
    (
        {"train": {"y": SIDE}, "val": {"y": SIDE[:4] + 2}},
        {"balance": "y"},
        "class 2 of column 'y' has no training sample, nor has class 3: all are held out or unused",
    ),
    ({"x": SIDE, "w": -SIDE}, {"sample_weights": "w"}, r"w: the weight of sample \d+ is -1, and"),
    (
        {"x": SIDE, "w": np.where(SIDE, np.nan, 1)},
        {"sample_weights": "w"},
        "the weight of sample .* is nan, and",
    ),
    (
        {"x": SIDE, "w": np.where(SIDE, np.inf, 1)},
        {"sample_weights": "w"},
        "the weight of sample .* is inf",
    ),
    ({"x": SIDE, "w": SIDE * 0}, {"sample_weights": "w"}, "all 320 training samples have the wei"),
    ({"x": SIDE, "w": SIDE * 1j}, {"sample_weights": "w"}, "complex128 is no type of weights"),
    (
        loader_with(WeightedRandomSampler(np.ones(N), 10)),
        {},
        "with num_samples=10, but an epoch has as many draws as there are samples, 400",
    ),
    (
        loader_with(WeightedRandomSampler(np.ones(N), N, replacement=False)),
        {},
        "with replacement=False, whose later draws depend on all earlier ones",
    ),
    (loader_with(WeightedRandomSampler(np.ones(7), N)), {}, "with 7 weights, and 400 samples"),
    (loader_with(WeightedRandomSampler(np.zeros(N), N)), {}, "all 320 training samples have the"),
    (
        loader_with(RandomSampler(range(N), replacement=True)),
        {},
        "a DataLoader that draws with replacement; .* data.order: random",
    ),
    (
        loader_with(WeightedRandomSampler(np.ones(N), N)),
        {"balance": "x"},
        "data.balance says how samples are drawn, and so does the DataLoader's",
    ),
    (
        loader_with(WeightedRandomSampler(np.ones(N), N)),
        {"order": "sequential"},
        "data.order sequential, and a DataLoader with a WeightedRandomSampler",
    ),
    (
        lambda: {
            "train": TensorDataset(torch.from_numpy(NUMBER)),
            "val": loader_with(WeightedRandomSampler(np.ones(N), N))(),
        },
        {},
        "the val split's DataLoader draws by weights",
    ),
    (
        {"train": Endless(), "val": [(1.0, 2)]},
        {"balance": "y", "workers": 0},
        "data.balance needs random access, and an iterable is read from its beginning",
    ),
    (
        {"train": Endless(), "val": [(1.0, 2)]},
        {"sample_weights": "y"},
        "data.sample_weights needs random access, and an iterable is read from",
    ),
]


@pytest.mark.parametrize(("samples", "data", "message"), REFUSALS)
def test_what_cannot_be_drawn_is_refused_by_name(
    samples: Any, data: dict[str, Any], message: str
) -> None:
    value = samples() if callable(samples) else samples
    with pytest.raises((ConfigError, ValueError), match=message):
        open_samples(value, **data)


def test_other_samplers_are_replaced_as_before() -> None:
    data = TensorDataset(torch.from_numpy(NUMBER))
    for loader in (DataLoader(data), DataLoader(data, shuffle=True)):
        assert open_samples(loader).sampling is None


def test_columns_are_read_of_any_source() -> None:
    """Also of one that only reads samples, of which all are read, some at a time."""
    read_sizes: list[int] = []

    class Lazy:
        def __len__(self) -> int:
            return 3000

        def __getitem__(self, number: int) -> Any:
            return self.__getitems__([number])[0]

        def __getitems__(self, numbers: list[int]) -> list[Any]:
            read_sizes.append(len(numbers))
            return [{"x": np.zeros(5), "y": np.float32(number % 3)} for number in numbers]

    lazy = open_samples(Lazy(), balance="y")
    source, order = lazy.train(1)
    labels = source.read(whole_epoch(order)[:300])["y"]
    assert np.bincount(labels.astype(int)).tolist() == [100] * 3  # type: ignore[union-attr]
    assert max(read_sizes[:-1]) <= 1024


def noise(sample: Any, generator: Any) -> Any:
    return {"number": sample["number"], "noise": generator.random()}


@parametrize_first(
    "data", [{"balance": "side"}, {"sample_weights": "weight"}, {"order": "random"}], first=1
)
@pytest.mark.parametrize("workers", [0, 2])
def test_each_draw_of_a_sample_is_transformed_anew(data: dict[str, Any], workers: int) -> None:
    transform = f"{__name__}:noise" if workers == 0 else "sampled:noise"
    dataset = open_samples(**data, transform=transform, workers=workers)
    train = source, order = dataset.train(1)
    try:
        draws = whole_epoch(order)
        columns = source.read(draws)
        reverse_columns = source.read(draws[::-1])
        other_epoch = source.read(draws, 1)
        cost_weight = source.weights(draws)
    finally:
        if workers:
            source.close()  # type: ignore[attr-defined]
    numbers, noises = (np.asarray(columns[name]) for name in ("number", "noise"))
    assert np.unique(numbers).size < numbers.size == np.unique(noises).size
    np.testing.assert_array_equal(reverse_columns["noise"][::-1], noises)  # type: ignore[index]
    assert not np.isin(other_epoch["noise"], noises).any()
    assert cost_weight == 320
    plain_source, plain_order = open_samples(**data).train(1)
    plain = plain_source.read(whole_epoch(plain_order))["number"]
    np.testing.assert_array_equal(numbers, plain)
    if not workers:
        assert steps(train, 2, 12, 5) == steps(open_samples(**data).train(1), 1, 12, 5)


def test_draws_have_the_costs_of_their_samples() -> None:
    costs = CostedSource(InMemorySource({"x": NUMBER}), NUMBER**2)
    assert costs.costs(np.array([3, 3 + N, 7 + 5 * N])).tolist() == [9, 9, 49]


def wrong(sample: Any, generator: Any) -> Any:  # noqa: ARG001
    raise ValueError("no")


def test_an_error_of_a_transform_names_the_sample_not_the_draw() -> None:
    source, order = open_samples(balance="side", transform=f"{__name__}:wrong").train(1)
    with pytest.raises(ValueError, match="no") as error:
        source.read(order.indices(0, 300, 301))
    (note,) = error.value.__notes__
    plain_source, plain_order = open_samples(balance="side").train(1)
    number = int(plain_source.read(plain_order.indices(0, 300, 301))["number"][0])  # type: ignore[index]
    assert note == f"in wrong, of sample {number} in epoch 0"
