from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from feeds import Numbers
from figures import times
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import same

from instar.config.errors import ConfigError
from instar.config.schema import SamplesConfig, Size
from instar.data.order import Int64Array, divide_step, plan_step, samples_at
from instar.data.sample_set import SampleSet, Subset
from instar.data.source import WorkerSource, close
from instar.data.split import HELD_OUT, check_division, divide_samples

MakeFile = Callable[..., str]
CONFIGURATIONS = times(250, 1000)


@pytest.fixture
def make_file(tmp_path: Path) -> MakeFile:
    def make(content: str | bytes, name: str = "numbers.txt") -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return make


def size_of_any_kind(
    rng: np.random.Generator, pool: Int64Array, total: int, file: Callable[[str], str]
) -> tuple[Size, Int64Array]:
    """A split's size as a config may say it, and what is left of the pool for another file."""
    kind = rng.integers(4)
    if kind == 0:
        return 0, pool
    if kind == 1:
        return int(rng.integers(0, total // 2 + 1)), pool
    if kind == 2:
        return float(rng.uniform(0.5 / total, 0.6)), pool
    count = int(rng.integers(1, max(2, total // 2)))
    return file("".join(f"{number}\n" for number in pool[:count])), pool[count:]


@pytest.mark.repeated
def test_no_sample_that_is_held_out_is_ever_trained_on(tmp_path: Path) -> None:
    """In random configurations, whatever the number of ranks and the size of batches."""
    rng = np.random.default_rng(20250115)
    num_accepted = num_refused = 0
    kinds = set()
    while num_accepted < CONFIGURATIONS:
        total, seed = int(rng.integers(2, 300)), int(rng.integers(2**62))
        pool, sizes = rng.permutation(total), {}
        for name in HELD_OUT:
            path = tmp_path / name
            sizes[name], pool = size_of_any_kind(
                rng, pool, total, lambda text, path=path: str(path.write_text(text) and path)
            )
        classes = rng.integers(-1, rng.integers(0, 5), total) if rng.integers(2) else None
        try:
            splits = divide_samples(total, **sizes, seed=seed, classes=classes)
        except ConfigError:
            num_refused += 1
            continue
        num_accepted += 1
        kinds.add((*map(type, sizes.values()), classes is not None))
        train, val, test = (set(splits[name].tolist()) for name in ("train", *HELD_OUT))
        assert len(train) + len(val) + len(test) == total
        assert train | val | test == set(range(total))
        assert train
        for name, size in sizes.items():
            assert np.all(np.diff(splits[name]) > 0)
            check_size(splits[name], size, total)

        config = SamplesConfig(
            **sizes,
            order=str(rng.choice(["shuffled", "sequential", "blocks"])),
            block_samples=int(rng.integers(1, 20)),
            shuffle_window=int(rng.integers(1, 50)),
        )
        samples = SampleSet(Numbers(total), splits, config)
        world, batch = int(rng.integers(1, 9)), int(rng.integers(1, 40))
        numbers = trained_on(samples, world, batch, seed)
        assert len(numbers) == len(train)
        assert set(numbers) == train
        held_out = (set(), val, test)
        for name, members in zip(("", *HELD_OUT), held_out, strict=True):
            if members:
                source = samples.held_out(name)
                assert set(source.read(np.arange(len(source)))["number"].tolist()) == members
    assert len(kinds) == 3 * 3 * 2
    assert num_refused < num_accepted


def check_size(numbers: Int64Array, size: Size, total: int) -> None:
    match size:
        case str():
            assert numbers.tolist() == sorted(map(int, Path(size).read_text().split()))
        case int():
            assert numbers.size == size
        case float():
            assert abs(numbers.size - size * total) <= 0.5 + 1e-9
            assert numbers.size > 0


def trained_on(samples: SampleSet, world: int, batch: int, seed: int) -> list[int]:
    """The numbers of all samples that all ranks read in one epoch."""
    source, order = samples.train(seed)
    size = order.samples_per_epoch
    assert size == len(source)
    of_epoch = order.indices(0, 0, size)
    cursor, numbers = 0, []
    while cursor < size:
        plan = plan_step(cursor, size, batch)
        ids = of_epoch[plan.start : plan.start + plan.count]
        for places in divide_step(plan, world):
            numbers += source.read(samples_at(ids, places), plan.epoch)["number"].tolist()
        cursor += plan.count
    assert cursor == size
    return numbers


@settings(deadline=None)
@given(
    classes=st.lists(st.sampled_from([-1, -1, -1, 0, 0, 7, 1000]), min_size=1, max_size=120),
    shares_of=st.tuples(st.floats(0.01, 0.6), st.floats(0.01, 0.6)),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_class_gets_its_share_of_each_split(
    classes: list[int], shares_of: tuple[float, float], seed: int
) -> None:
    of, (val, test) = np.array(classes), shares_of
    try:
        splits = divide_samples(of.size, val=val, test=test, seed=seed, classes=of)
    except ConfigError:
        return
    plain = divide_samples(of.size, val=val, test=test, seed=seed)
    assert {name: len(numbers) for name, numbers in splits.items()} == {
        name: len(numbers) for name, numbers in plain.items()
    }
    counts_left = {label: classes.count(label) for label in set(classes)}
    for name in HELD_OUT:
        members, total = of[splits[name]].tolist(), sum(counts_left.values())
        for label, count in counts_left.items():
            assert abs(members.count(label) - Fraction(len(members) * count, total)) < 1
            counts_left[label] -= members.count(label)
    assert set(of[splits["train"]].tolist()) == set(classes)


def test_equal_classes_get_equal_shares() -> None:
    classes = np.arange(1200) % 4
    splits = divide_samples(1200, val=0.1, test=0.25, seed=3, classes=classes)
    counts = {name: np.bincount(classes[numbers]).tolist() for name, numbers in splits.items()}
    assert counts == {"train": [195] * 4, "val": [30] * 4, "test": [75] * 4}


def test_of_classes_alike_no_one_is_preferred() -> None:
    """Twenty classes of two samples, of which ten samples are held out: each seed takes others."""
    classes = np.repeat(np.arange(20), 2)
    counts = np.zeros(20, dtype=np.int64)
    for seed in range(200):
        val = divide_samples(40, val=10, test=0, seed=seed, classes=classes)["val"]
        counts += np.bincount(classes[val], minlength=20)
    assert counts.min() > 60
    assert counts.max() < 140


def test_a_split_is_drawn_from_the_seed_and_looks_it() -> None:
    splits = [divide_samples(1000, val=0.1, test=0.1, seed=seed) for seed in (1, 1, 2)]
    for name in ("train", *HELD_OUT):
        assert np.array_equal(splits[0][name], splits[1][name])
        assert not np.array_equal(splits[0][name], splits[2][name])
    overlap = np.intersect1d(splits[0]["val"], splits[2]["val"])
    assert 0 < overlap.size < 30
    assert 350 < splits[0]["val"].mean() < 650


def test_val_stays_what_it_is_while_test_changes() -> None:
    vals = [divide_samples(500, val=50, test=size, seed=9)["val"] for size in (0, 0.3, 200)]
    assert all(np.array_equal(val, vals[0]) for val in vals)


def test_splits_never_change_between_versions() -> None:
    """Runs are resumed by what these numbers are: they are part of the format."""
    splits = divide_samples(20, val=0.2, test=0.15, seed=1337)
    assert {name: numbers.tolist() for name, numbers in splits.items()} == PLAIN
    splits = divide_samples(20, val=0.2, test=0.15, seed=1337, classes=np.arange(20) // 7)
    assert {name: numbers.tolist() for name, numbers in splits.items()} == STRATIFIED


PLAIN = {
    "train": [0, 1, 2, 3, 4, 5, 6, 8, 12, 13, 15, 18, 19],
    "val": [7, 14, 16, 17],
    "test": [9, 10, 11],
}
STRATIFIED = {
    "train": [0, 1, 3, 4, 6, 8, 10, 12, 13, 15, 16, 18, 19],
    "val": [2, 7, 11, 17],
    "test": [5, 9, 14],
}


def test_a_file_names_samples_one_a_line(make_file: MakeFile) -> None:
    val = make_file("# chosen by hand\n7\n  2 # the odd one\n\n0\n")
    splits = divide_samples(10, val=val, test=0.3, seed=1)
    assert splits["val"].tolist() == [0, 2, 7]
    assert splits["test"].size == 3
    test = make_file("9\n8", "test.txt")
    splits = divide_samples(10, val=val, test=test, seed=1)
    assert splits["train"].tolist() == [1, 3, 4, 5, 6]


def test_what_a_file_leaves_is_drawn_from_by_class(make_file: MakeFile) -> None:
    classes = np.array([0] * 40 + [1] * 40)
    val = make_file("\n".join(map(str, range(20))))
    splits = divide_samples(80, val=val, test=30, seed=1, classes=classes)
    assert np.bincount(classes[splits["test"]]).tolist() == [10, 20]


@pytest.mark.parametrize(
    ("sizes", "key", "message"),
    [
        ({"val": 0.7, "test": 0.6}, "data.val", "the shares of val and test sum to 1.3"),
        ({"val": 0.6, "test": 0.4}, "data.val", "val (6) and test (4) take all of the 10 samples"),
        ({"val": 5, "test": 5}, "data.val", "nothing is left to train on"),
        ({"val": 0.5, "test": 40}, "data.val", "val (5) and test (40)"),
        ({"val": 0.05, "test": 0.02}, "data.test", "a share of 0.02 of 10 samples is none"),
        ({"val": 1.0, "test": 0}, "data.val", "1 is no share of the samples"),
        ({"val": 0, "test": -0.1}, "data.test", "-0.1 is no share of the samples"),
        ({"val": float("nan"), "test": 0}, "data.val", "nan is no share of the samples"),
        ({"val": -3, "test": 0}, "data.val", "a split cannot have -3 samples"),
        ({"val": "nowhere.txt", "test": 0}, "data.val", "'nowhere.txt' cannot be read: No such file"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be(sizes: dict[str, Size], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        divide_samples(10, **sizes, seed=1)
    (problem,) = error.value.problems
    assert problem.key == key
    assert message in problem.message


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("1\n2\n10\n", 3, "there is no sample 10; they are 0 to 9"),
        ("1\n-2\n", 2, "'-2' is no sample number"),
        ("1\ntwo # 2\n", 2, "'two' is no sample number; one number a line"),
        ("1 2\n", 1, "'1 2' is no sample number"),
        ("1.0\n", 1, "'1.0' is no sample number"),
        ("٣\n", 1, "is no sample number"),
        ("4\n#\n5\n4\n", 4, "sample 4 is already in line 1"),
        ("# none\n\n", None, "has no sample numbers; or set data.test to 0"),
        (b"1\n\xff\n", None, "cannot be read: it is no text in UTF-8"),
    ],
)
def test_a_file_that_is_wrong_says_in_which_line(
    content: str | bytes, line: int | None, message: str, make_file: MakeFile
) -> None:
    path = make_file(content)
    with pytest.raises(ConfigError) as error:
        divide_samples(10, val=0.2, test=path, seed=1)
    (problem,) = error.value.problems
    assert problem.key == "data.test"
    assert problem.where == (f"{path}:{line}" if line else "data.test")
    assert message in str(problem)


def test_files_that_share_a_sample(make_file: MakeFile) -> None:
    val, test = make_file("1\n5\n", "val.txt"), make_file("7\n5\n", "test.txt")
    with pytest.raises(ConfigError, match=r"sample 5 is in the val split \(.*val.txt\)"):
        divide_samples(10, val=val, test=test, seed=1)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        divide_samples(10, val=1.5, test="nowhere.txt", seed=1)
    assert [problem.key for problem in error.value.problems] == ["data.val", "data.test"]


def test_nothing_to_divide() -> None:
    with pytest.raises(ConfigError, match="there are no samples"):
        divide_samples(0, val=0, test=0, seed=1)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([0] * 9 + [5], "class 5 has 1 sample, and all would be held out"),
        ([0] * 7 + [3, 4, 4], "class 3 has 1 sample, and all would be held out, and so would 1 "),
    ],
)
def test_a_class_of_which_none_is_left_to_train_on(
    classes: list[int], message: str, make_file: MakeFile
) -> None:
    val = make_file("7\n8\n9\n")
    with pytest.raises(ConfigError) as error:
        divide_samples(10, val=val, test=0, seed=1, classes=np.array(classes))
    (problem,) = error.value.problems
    assert problem.key == "data.stratify"
    assert problem.message.startswith(message)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [0, 1, 2], "val": [2]}, "sample 2 is in train and val"),
        ({"train": [0, 2, 2], "val": [1]}, "sample 2 is in train and train"),
        ({"train": [0], "val": [2]}, "sample 1 is in no split"),
        ({"train": [0, 1], "val": [2, 3]}, "samples 0..3 of 3"),
        ({"train": [0, 1, 2], "val": [-1]}, "samples -1..2 of 3"),
        ({}, "sample 0 is in no split"),
    ],
)
def test_splits_that_are_none_are_noticed(splits: dict[str, list[int]], message: str) -> None:
    arrays = {name: np.array(numbers) for name, numbers in splits.items()}
    with pytest.raises(ValueError, match=message):
        check_division(arrays, 3)
    with pytest.raises(ValueError, match=message):
        SampleSet(Numbers(3), arrays, SamplesConfig())


def test_a_subset_is_chosen_samples_of_its_source() -> None:
    source, numbers = Numbers(50), np.array([3, 4, 10, 44])
    subset = Subset(source, numbers)
    assert len(subset) == 4
    assert same(subset.read(np.array([2, 0])), source.read(np.array([10, 3])))
    assert subset.weights(np.array([1, 3])) == source.weights(np.array([4, 44]))
    for wrong in ([4], [0, -1]):
        with pytest.raises(IndexError, match="of 4"):
            subset.read(np.array(wrong))


def sample_set(**fields: object) -> SampleSet:
    splits = divide_samples(40, val=0.2, test=5, seed=1)
    return SampleSet(Numbers(40), splits, SamplesConfig(**fields))  # type: ignore[arg-type]


def test_fingerprints_are_of_samples_and_splits() -> None:
    samples, splits = sample_set(), sample_set().splits
    assert samples.fingerprint == sample_set().fingerprint
    swapped_splits = {"train": splits["train"], "val": splits["test"], "test": splits["val"]}
    assert (
        SampleSet(Numbers(40), swapped_splits, SamplesConfig()).fingerprint != samples.fingerprint
    )
    other = Numbers(40)
    other.fingerprint = "others"
    assert SampleSet(other, splits, SamplesConfig()).fingerprint != samples.fingerprint
    parts = [
        samples.held_out("val"),
        samples.held_out("test"),
        samples.train(1)[0],
        Subset(other, splits["val"]),
    ]
    assert len({part.fingerprint for part in parts}) == 4


def test_what_is_held_out_is_asked_for_by_name() -> None:
    none = divide_samples(40, val=0.1, test=0, seed=1)
    samples = SampleSet(Numbers(40), none, SamplesConfig(test=0))
    with pytest.raises(ConfigError, match=r"the test split is empty; set data\.test to a share"):
        samples.held_out("test")
    for unknown in ("train", "tset"):
        with pytest.raises(ConfigError, match=f"no split '{unknown}' that is held out; use val or"):
            samples.held_out(unknown)


def test_the_order_is_the_configs_and_the_seeds() -> None:
    sequential = trained_on(sample_set(order="sequential"), 2, 7, seed=5)
    assert sequential == sample_set().splits["train"].tolist()
    orders = [trained_on(sample_set(), 2, 7, seed=seed) for seed in (5, 5, 6)]
    assert orders[0] == orders[1] != orders[2]


@pytest.fixture
def drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A transform that draws, in a module of the user's."""
    (tmp_path / "drawing.py").write_text(
        "def draw(sample, generator):\n"
        "    return {'number': sample['number'], 'drawn': generator.random()}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "drawing:draw"


def test_only_training_samples_are_transformed_each_by_its_own_number(drawing: str) -> None:
    samples = sample_set(transform=drawing)
    assert set(samples.held_out("val").read(np.array([0]))) == {"number", "twice"}
    values = {}
    fewer = divide_samples(40, val=0.4, test=5, seed=1)
    for dataset in (samples, SampleSet(Numbers(40), fewer, samples.data)):
        source, _ = dataset.train(3)
        columns = source.read(np.arange(len(source)), epoch=2)
        for number, value in zip(columns["number"], columns["drawn"], strict=True):
            assert values.setdefault(int(number), value) == value
    assert len(set(values.values())) == len(values) == samples.splits["train"].size


def test_workers_read_the_same(drawing: str) -> None:
    source, _ = sample_set(transform=drawing).train(3)
    worker_source, _ = sample_set(transform=drawing, workers=2).train(3)
    try:
        assert isinstance(worker_source, WorkerSource)
        ids = np.arange(len(source))
        assert same(worker_source.read(ids, 1), source.read(ids, 1))
        assert worker_source.fingerprint == source.fingerprint
        assert worker_source.weights(ids) == source.weights(ids)
    finally:
        close(worker_source)


def test_the_source_is_closed_with_the_set_alone() -> None:
    class Closing(Numbers):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    source = Closing(40)
    samples = SampleSet(source, sample_set().splits, SamplesConfig())
    close(samples.train(1)[0])
    close(samples.held_out("val"))
    assert not source.closed
    samples.close()
    assert source.closed == 1
