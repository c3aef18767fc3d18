"""Sources made of a user function's return value, and `data.transform`, applied to each sample."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.schema import FeedConfig
from instar.config.user_code.named import load_named
from instar.data.columns import (
    NUMBERS,
    Column,
    Columns,
    Ragged,
    as_ragged,
    dtype_of,
    leaves,
    native_array,
    ragged_names,
    stack,
)
from instar.data.order import Int64Array, key_bytes
from instar.data.source import InMemorySource, Measure, Source, WrappedSource
from instar.data.torch_loader import check_loader, is_loader

Sample: TypeAlias = "Mapping[str, Any]"
"""One sample: arrays by name, nested as the columns are."""

SampleFunction: TypeAlias = "Callable[[dict[str, Any], np.random.Generator], Sample]"

Examples: TypeAlias = "Callable[[], Iterable[tuple[int, Columns]]]"
"""Reads some samples one by one, the same in every process: the number of each, and its columns."""


def sample_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random generator of a sample in an epoch, independent of where it is read."""
    words: Any = _Words(np.frombuffer(key_bytes(f"sample/{index}", seed, epoch, 32), dtype="<u8"))
    return np.random.Generator(np.random.PCG64(words))


class Transformed(WrappedSource):
    """Applies a function to the samples of a source.

    The weights are the source's where there is no `measure` of what the function returns. With `draws_of` samples,
    indices count draws, see `instar.data.sampling.Draws`: each draw of a sample has random numbers of its own.

    The function must be deterministic in the sample and the generator, so that a sample can be read
    again. It gets its own copies of the arrays and may modify them.

    Columns are ragged as in the source, and where the function's results for `examples`, which the first read
    tries, differ in size.
    """

    def __init__(
        self,
        source: Source,
        function: SampleFunction,
        seed: int,
        measure: Measure | None = None,
        draws_of: int | None = None,
        examples: Examples | None = None,
    ) -> None:
        """
        Args:
            examples: default: evenly spaced samples.
        """
        self.source, self._draws_of = source, draws_of
        self._examples = examples or partial(examples_of, source, np.arange(len(source)))
        self._ragged: frozenset[str] | None = None
        self._measure, self._function, self._seed = measure, function, seed
        self._name = getattr(function, "__qualname__", type(function).__qualname__)

    @property
    def fingerprint(self) -> str:
        function = f"{self._function.__module__}:{self._name}"
        return f"{self.source.fingerprint}/{function}/{self._seed}"

    @property
    def measure(self) -> Measure | None:
        return self._measure

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """Return the transformed samples.

        Exceptions of the function are raised with a note that names the sample.

        Raises:
            ValueError: the function's result for a sample, given by its index, is not a mapping of
                numeric arrays, or has other columns than that for the first sample.
        """
        numbers = self._samples(indices)
        columns = self.source.read(numbers, epoch)
        rows = enumerate(zip(numbers.tolist(), indices.tolist(), strict=True))
        samples = [
            self._apply(_sample(columns, row), number, draw, epoch) for row, (number, draw) in rows
        ]
        try:
            if self._ragged is None:  # by the same samples on every rank and in every worker
                self._ragged = self._varying()
            return stack(samples, numbers.tolist(), self._ragged | ragged_names(columns))
        except ValueError as error:
            raise ValueError(f"{self._name} made samples that do not fit: {error}") from None

    def _varying(self) -> frozenset[str]:
        """Return the columns in which the examples' results differ in size."""
        sizes: dict[str, set[int]] = {}
        for number, example in self._examples():
            result = self._apply(_sample(example, 0), number, number, 0)
            for name, column in leaves(stack([result], [number])):
                assert not isinstance(column, Ragged)  # of one sample
                sizes.setdefault(name, set()).add(column.shape[1] if column.ndim > 1 else 0)
        return frozenset(name for name in sizes if len(sizes[name]) > 1)

    def _apply(self, sample: dict[str, Any], number: int, draw: int, epoch: int) -> Sample:
        try:
            result = self._function(sample, sample_generator(self._seed, epoch, draw))
            if self._measure is not None:
                result = self._measure.check(result)
        except Exception as error:
            error.add_note(f"in {self._name}, of sample {number} in epoch {epoch}")
            raise
        return result

    def weights(self, indices: Int64Array) -> float:
        return self.source.weights(self._samples(indices))

    def _samples(self, indices: Int64Array) -> Int64Array:
        return indices if self._draws_of is None else indices % self._draws_of


def transform_source(
    source: Source,
    data: FeedConfig,
    seed: int,
    measure: Measure | None = None,
    draws_of: int | None = None,
    examples: Examples | None = None,
) -> Source:
    """Return the source with the user's transform, if there is one, applied to its samples.

    Args:
        measure: the weights of what the transform returns; None: they are the source's.
        draws_of, examples: see `Transformed`.
    """
    if data.transform is None:
        return source
    function = load_named(data.transform, key="data.transform")
    return Transformed(source, function, seed, measure, draws_of, examples)


def examples_of(source: Source, numbers: Int64Array) -> Iterator[tuple[int, Columns]]:
    """Read evenly spaced ones of some samples; see `Examples`."""
    for number in numbers[_spread(numbers.size)].tolist():
        yield number, source.read(np.array([number]))


def _spread(total: int) -> Int64Array:
    """Return evenly spaced numbers of so many items, the first and the last among them."""
    return np.unique(np.linspace(0, total - 1, min(total, _LOOKED_AT)).astype(np.int64))


class _Words(np.random.bit_generator.ISeedSequence):
    """Seeds a generator with words that are random already; much cheaper than mixing a seed."""

    def __init__(self, words: np.ndarray[Any, Any]) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return self._words[:n_words].astype(dtype)


def _sample(columns: Columns, row: int) -> dict[str, Any]:
    return {name: _value(column, row) for name, column in columns.items()}


def _value(column: Column, row: int) -> Any:
    if isinstance(column, Mapping):
        return _sample(column, row)
    if isinstance(column, Ragged):
        return column.values[column.offsets[row] : column.offsets[row + 1]]
    return column[row]


FORMS = (
    "return arrays by name, each [samples, …]; a list of samples, each with arrays by name; "
    "a data set with __len__ and __getitem__; or an iterable of samples"
)
MOST_ITEMS = 1 << 20
"""The number of items that an iterable of unknown length may have to be read into memory."""
_SOURCE = ("read", "weights", "fingerprint", "__len__")
_LOOKED_AT = 64
"""The number of evenly spaced items of a data set by which its fingerprint and its ragged columns are determined."""


def as_source(value: object, fields: Sequence[str] = ()) -> Source:
    """Convert the return value of a user's function to a `Source`.

    An iterable that is not indexed is read to its end, into memory.

    Args:
        fields: names for the elements of samples that are tuples; those of pairs default to x, y.

    Raises:
        ValueError: the value cannot be used; says why, and what to return instead.
    """
    value = data_set(value)
    if isinstance(value, Mapping):
        return _in_memory({str(name): _column(str(name), column) for name, column in value.items()})
    if all(hasattr(value, name) for name in _SOURCE):
        return cast(Source, value)
    if isinstance(tensors := getattr(value, "tensors", None), tuple):  # a TensorDataset
        return as_source(dict(zip(_names(fields, tensors), tensors, strict=True)))
    if hasattr(value, "columns") and hasattr(value, "to_numpy"):  # a DataFrame
        table: Any = value
        return as_source({str(name): table[name].to_numpy() for name in table.columns})
    if isinstance(value, tuple) and value and all(map(_is_array, value)):
        return as_source(dict(zip(_names(fields, value), value, strict=True)))
    if _is_array(value) or isinstance(value, str | bytes):
        raise ValueError(f"a single {type(value).__name__} without a name; {FORMS}")
    if is_iterable(value):
        value = _read(cast(Iterable[Any], value))
    if is_graph(value) and not hasattr(value, "to_data_list"):  # which a batch of graphs has
        raise ValueError("a single graph, where a sample is a graph: return [graph]")
    if isinstance(value, type) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        raise ValueError(f"{_unusable(value)}; {FORMS}")
    samples = cast(Sequence[Any], value)
    if not len(samples):
        raise ValueError("there are no samples")
    if is_graph(samples[0]):
        graphs = [graph_sample(samples[number]) for number in range(len(samples))]
        return _in_memory(graph_columns(graphs, of_whole_graph(graphs)))
    if isinstance(value, list | tuple):
        return _in_memory(
            stack([sample_of(*numbered_sample, fields) for numbered_sample in enumerate(value)])
        )
    return IndexedSource(samples, fields)


def is_iterable(value: object) -> bool:
    """Return whether samples can only be read one after the other."""
    torch = sys.modules.get("torch.utils.data")
    if torch is not None and isinstance(value, torch.IterableDataset):
        return True  # which has a __getitem__ that raises
    return hasattr(value, "__iter__") and not hasattr(value, "__getitem__")


def data_set(value: object) -> object:
    """Return the data set of a torch `DataLoader`; one of `datasets` with its columns as arrays;
    anything else unchanged.

    Raises:
        ValueError: the loader collates or orders samples in a way of its own.
    """
    if is_loader(value):
        check_loader(value)
        return data_set(value.dataset)
    if isinstance(form := getattr(value, "format", None), dict) and form.get("type", "") is None:
        table: Any = value  # of `datasets`, whose items would be lists
        return cast(object, table.with_format("numpy"))
    return value


def _read(items: Iterable[Any]) -> list[Any]:
    """Return all items. Raises ValueError if they are more than `MOST_ITEMS`."""
    read = list(islice(items, MOST_ITEMS + 1))
    if len(read) > MOST_ITEMS:
        raise ValueError(
            f"an iterable of more than {MOST_ITEMS:,} samples is not read into memory; to read it "
            'as a stream, return {"train": iterable, "val": …} with held-out samples of their own'
        )
    return read


class IndexedSource:
    """A `Source` of the items of a map-style data set, read one by one on demand.

    One thread reads at a time. The fingerprint covers only a few items; columns are ragged whose sizes differ
    among these.
    """

    def __init__(self, items: Sequence[Any], fields: Sequence[str] = ()) -> None:
        self._items, self._fields = items, tuple(fields)
        self._lock = threading.Lock()
        self._ragged: frozenset[str] | None = None
        columns = self.read(_spread(len(items)))
        self._ragged = ragged_names(columns)
        identity = f"{type(items).__module__}.{type(items).__qualname__} {len(items)}"
        self.fingerprint = xxhash.xxh3_128_hexdigest(
            f"{identity} {InMemorySource(columns).fingerprint}".encode()
        )

    def __len__(self) -> int:
        return len(self._items)

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:  # noqa: ARG002
        """Read items. Raises ValueError if an item is not numeric or does not fit the others."""
        numbers = indices.tolist()
        with self._lock:
            items = zip(numbers, self._read(numbers), strict=True)
            samples = [sample_of(*item, self._fields) for item in items]
            return stack(samples, numbers, self._ragged)

    def _read(self, numbers: list[int]) -> Iterator[Any]:
        items: Any = self._items
        if hasattr(items, "__getitems__"):  # torch's name for reading several at once
            yield from items.__getitems__(numbers)
            return
        for number in numbers:
            try:
                yield items[number]
            except Exception as error:
                error.add_note(f"when item {number} of {len(items)} was read")
                raise

    def weights(self, indices: Int64Array) -> float:
        return float(indices.size)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()


def sample_of(number: int, item: object, fields: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return an item as arrays by name. Raises ValueError if its parts have no names."""
    if dataclasses.is_dataclass(item):
        item = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    if isinstance(item, Mapping):
        return {str(name): _to_numpy(str(name), value) for name, value in item.items()}
    if isinstance(item, tuple | list):
        fields = fields or getattr(item, "_fields", ())  # of a named tuple
        parts = dict(zip(_names(fields, item), item, strict=True))
        return {name: _to_numpy(name, value) for name, value in parts.items()}
    if _is_array(item):
        return sample_of(number, (item,), fields)
    kind = "None" if item is None else f"a {type(item).__name__}"
    hint = _NAMED_SPLITS if _is_set(item) else "; return mappings, tuples or dataclasses of arrays"
    if hasattr(item, "node_types"):  # of a heterogeneous graph
        hint = "; return the arrays of each type by name"
    raise ValueError(f"sample {number} is {kind}{hint}")


def numeric(columns: Columns) -> None:
    """Raise ValueError naming a column that is not an array of numbers."""
    for name, column in leaves(columns):
        if (dtype := dtype_of(column)).kind not in NUMBERS:
            raise ValueError(
                f"{name} has values of type {dtype}, not numbers; encode text as numbers first, "
                "e.g. by np.unique(…, return_inverse=True)"
            )


def _in_memory(columns: Columns) -> InMemorySource:
    numeric(columns)
    source = InMemorySource(columns)
    if not len(source):
        raise ValueError("there are no samples")
    return source


def _column(name: str, value: object) -> Column:
    if isinstance(value, Ragged):
        return value
    if isinstance(value, Mapping):
        return {str(part): _column(f"{name}.{part}", inner) for part, inner in value.items()}
    value = _to_numpy(name, value)
    if hasattr(value, "to_numpy"):  # a column of a DataFrame
        value = value.to_numpy()
        value = _to_numpy(name, value)
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        value = _of_samples(name, value)
    if isinstance(value, Ragged):
        return value
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        hint = _NAMED_SPLITS if _is_set(value) else ""
        if hasattr(value, "toarray"):  # a sparse matrix of SciPy
            hint = f"; give {name}.toarray()"
        raise ValueError(
            f"{name} is a {type(value).__name__}, where an array [samples, …] is expected{hint}"
        )
    return value


def _of_samples(name: str, values: Iterable[Any]) -> NDArray[Any] | Ragged:
    """Stack values given per sample into one array; ragged if their lengths differ."""
    arrays = [_to_numpy(name, value) for value in values]
    if not arrays or isinstance(arrays[0], str | bytes):
        return np.asarray(arrays)
    if all(isinstance(array, list | tuple | int | float) for array in arrays):
        arrays = _of_one_type(arrays)
    column = stack([{name: value} for value in arrays])[name]
    assert not isinstance(column, Mapping)
    return column


def _of_one_type(values: list[Any]) -> list[Any]:
    """Return Python's numbers, and lists of them, as arrays of the type that they have in one array of NumPy."""
    try:
        arrays = [np.asarray(value) for value in values]
    except ValueError:  # lists of different lengths, which are refused with their sample
        return values
    dtypes = {array.dtype for array in arrays if array.size}
    if not dtypes <= _OF_PYTHON:
        return values
    dtype = np.result_type(*(dtypes or _OF_PYTHON))
    return [array.astype(dtype, copy=False) for array in arrays]


def _to_numpy(name: str, value: Any) -> Any:
    """Convert tensors, also in nested samples, to arrays; leave other values unchanged."""
    if isinstance(value, Mapping):
        return {str(part): _to_numpy(f"{name}.{part}", inner) for part, inner in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMBERS:
        return native_array(name, value)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided or value.is_quantized:
        raise ValueError(f"{name} is a sparse or quantized tensor; give {name}.to_dense()")
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


_OF_PYTHON = frozenset(map(np.dtype, ("bool", "int64", "float64")))
_NAMED_SPLITS = "; data sets of splits are named: {'train': …, 'val': …, 'test': …}"


def _is_set(value: object) -> bool:
    """Return whether a value in the place of samples is a data set itself."""
    has_items = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return (has_items or is_iterable(value)) and not isinstance(value, str | bytes)


def _unusable(value: object) -> str:
    """Describe what is no set of samples."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it"
    kind = f"a {type(value).__name__}"
    if hasattr(value, "__getitem__"):
        return f"{kind}, without __len__"
    return f"{kind}, not what it returns" if callable(value) else kind


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) or (
        (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor)
    )


_PAIR = ("x", "y")


def _names(fields: Sequence[str], parts: Sequence[Any]) -> Sequence[str]:
    if not fields and len(parts) <= len(_PAIR):
        return _PAIR[: len(parts)]
    if len(fields) == len(parts):
        return fields
    example = ("x", "label", *(f"field{number}" for number in range(2, len(parts))))[: len(parts)]
    raise ValueError(
        f"tuples of {len(parts)} parts"
        + (f", of which fields names {len(fields)}" if fields else " without names")
        + f"; name them in the task's class, e.g. fields = {example}"
    )


def is_graph(item: object) -> bool:
    """Return whether a sample is a PyTorch Geometric graph."""
    # in this order: a data set in memory, which has no `to_dict`, makes a batch of all its graphs for `edge_index`
    return callable(getattr(item, "to_dict", None)) and hasattr(item, "edge_index")


def graph_sample(graph: Any) -> dict[str, NDArray[Any]]:
    """Convert a PyTorch Geometric graph to arrays of at least one axis; edge_index [2, edges] is
    `edges` [edges, 2]. Text, such as the name of a molecule, is left out, and `num_nodes` where `x` or
    `pos` has a row for each node.

    A graph without edge_index, such as a cloud of points, has no `edges`.

    Raises:
        ValueError: `num_nodes` is not the number of these rows.
    """
    sample = {name: _to_numpy(name, value) for name, value in graph.to_dict().items()}
    if (edge_index := sample.pop("edge_index", None)) is not None:
        sample["edges"] = np.ascontiguousarray(edge_index.T)
    rows = next((len(sample[name]) for name in ("x", "pos") if sample.get(name) is not None), None)
    nodes = sample.get("num_nodes")
    if rows is not None and nodes is not None:
        if rows != nodes:
            raise ValueError(f"num_nodes is {nodes}, but there are {rows} rows of features")
        del sample["num_nodes"]
    arrays = {name: value for name, value in sample.items() if not _is_text(value)}
    return {name: np.atleast_1d(value) for name, value in arrays.items() if value is not None}


def of_whole_graph(samples: Sequence[Mapping[str, NDArray[Any]]]) -> frozenset[str]:
    """Return the names of attributes of whole graphs: tensors with one row in each of them, the
    convention of PyTorch Geometric."""
    names = set(samples[0]) - {"x", "pos", "edges", "edge_attr"}
    return frozenset(name for name in names if all(len(s.get(name, ())) == 1 for s in samples))


def graph_columns(
    samples: Sequence[Mapping[str, NDArray[Any]]],
    of_graph: frozenset[str],
    numbers: Sequence[int] | None = None,
) -> dict[str, Column]:
    """Stack graphs into columns: those of whole graphs dense, all else ragged.

    Raises:
        ValueError: as `stack`; or an attribute of whole graphs has several rows in one.
    """
    numbers = range(len(samples)) if numbers is None else numbers
    for number, sample in zip(numbers, samples, strict=True):
        for name in of_graph & sample.keys():
            if len(sample[name]) != 1:
                raise ValueError(
                    f"graph {number}: {name} has {len(sample[name])} rows, in the first graphs one"
                )
    rows = [{n: v[0] if n in of_graph else v for n, v in s.items()} for s in samples]
    columns = stack(rows, numbers).items()
    return {name: column if name in of_graph else as_ragged(column) for name, column in columns}


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and any(isinstance(element, str) for element in value)
    )
