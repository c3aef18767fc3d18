"""Graph task without torch: opens, surveys and splits the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.config.user_code.failures import what_happened
from instar.config.user_code.named import load_named
from instar.data.columns import Columns, as_ragged
from instar.data.order import Int64Array
from instar.data.sample_set import SampleSet
from instar.data.sampling import DrawRule, sampling_of
from instar.data.source import InMemorySource, Source, WeightedSource, WrappedSource
from instar.data.split import UNUSED
from instar.data.user_sets import sample_set, split_samples
from instar.extensions.graphs.arrays import Arrays, holds_arrays, open_arrays
from instar.extensions.graphs.causal_sets import prepare_causal_sets, preview_causal_sets
from instar.extensions.graphs.config import GraphConfig
from instar.extensions.graphs.shape import GraphShape, flops_per_graph, resolve_graph, sizes_of
from instar.extensions.graphs.survey import GraphSurvey, survey_graphs, true_counts
from instar.models.shape import ArchitectureError
from instar.tasks.task import SampleSetSpec, SavedModel, Say


@dataclass(frozen=True)
class NodeCounts:
    """`Measure` of graphs at level "node": their weight is the number of nodes, or of those in a mask."""

    mask: str | None

    def check(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the sample. Raises ValueError unless it has what is counted."""
        if (name := self.mask or "x") not in sample:
            raise ValueError(f"there is no {name}")
        return sample

    def weights(self, columns: Columns) -> NDArray[np.float64]:
        """Return the nodes of each graph that count in the loss, [samples]."""
        column = as_ragged(columns[self.mask or "x"])
        return (column.sizes if self.mask is None else true_counts(column)).astype(np.float64)


@dataclass(frozen=True, eq=False)
class _Repeated(WrappedSource):
    """A few samples over and over, in place of `count` samples of their kind."""

    source: InMemorySource
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """See `Source`."""
        return self.source.read(indices % len(self.source), epoch)


@dataclass(frozen=True, eq=False)
class GraphSpec(SampleSetSpec):
    """`TaskSpec` of a graph network on surveyed graphs."""

    loss_keys = ("model.heads",)
    task_class = "instar.extensions.graphs.task:GraphTask"

    config: GraphConfig
    architecture: GraphShape
    survey: GraphSurvey

    @classmethod
    def prepare(cls, loaded_config: Loaded, world_size: int, say: Say) -> None:  # noqa: ARG003
        """See `TaskSpec`: generates and stores graphs; the user prepares all other data."""
        config = _graph(loaded_config.config)
        if config.data.is_generated:
            sets = config.data.causal_sets
            prepare_causal_sets(sets, _folder(config), config.data_seed, say)

    @classmethod
    def open(cls, loaded_config: Loaded, world_size: int) -> Self:  # noqa: ARG003
        """See `TaskSpec`: reads every graph once."""
        config = _graph(loaded_config.config)
        source, splits, sampling = _open_source(config)
        used = {name: numbers for name, numbers in splits.items() if name != UNUSED}
        survey = survey_graphs(source, used, config.model)
        try:
            shape = _shape(config, survey)
        except ArchitectureError as error:
            raise ConfigError(
                *(loaded_config.problem(m.keys[0], m.message, m.hint) for m in error.problems)
            ) from None
        nodes = _nodes(source)
        if config.model.level == "node":
            source = WeightedSource(source, _count_in_loss(source, config, nodes))
        # nearly all of a step's work is per node
        measure = NodeCounts(config.model.mask) if config.model.level == "node" else None
        samples = SampleSet(source, splits, config.data, nodes, measure, sampling)
        samples.held_out("val")
        return cls(config, shape, samples, survey)

    @classmethod
    def assume(cls, loaded_config: Loaded, say: Say, world_size: int = 1) -> Self:
        """See `TaskSpec`: a few generated graphs replace those that are not stored yet."""
        config = _graph(loaded_config.config)
        if not config.data.is_generated or holds_arrays(_folder(config)):
            return cls.open(loaded_config, world_size)
        data, seed = config.data, config.data_seed
        preview = InMemorySource(preview_causal_sets(data.causal_sets, seed))
        say(
            f"no data in {_folder(config)} yet; a run would generate them: {len(preview)} "
            f"{data.source} stand in for them"
        )
        survey = survey_graphs(preview, {"val": np.arange(len(preview))}, config.model)
        source = _Repeated(preview, data.causal_sets.sets)
        splits = split_samples(source, data, seed)
        sampling = sampling_of(source, splits["train"], data)
        samples = SampleSet(source, splits, data, sampling=sampling)
        return cls(config, _shape(config, survey), samples, survey)

    @classmethod
    def section(cls, config: Mapping[str, Any], architecture: Mapping[str, Any]) -> dict[str, Any]:
        return super().section(config, architecture) | sizes_of(GraphShape.from_dict(architecture))

    @classmethod
    def saved(cls, config: RunConfig, architecture: Mapping[str, Any]) -> SavedModel:
        from instar.extensions.graphs.network import GraphNetwork  # brings torch

        shape = GraphShape.from_dict(architecture)
        model = _graph(config).model
        initial = resolve_graph(model, shape.features, shape.graph_features, shape.edge_features)
        return SavedModel(initial, shape.to_dict(), GraphNetwork)

    @property
    def unit(self) -> str:
        return self.config.model.level

    @property
    def derived(self) -> dict[str, object]:
        return {
            "data.path": str(_folder(self.config)) if _is_stored(self.config) else None,
            "model.n_mlp": self.architecture.mlp,
            "model.n_readout": self.architecture.readout,
        }

    def weight(self, context: int) -> float:  # noqa: ARG002
        return self.survey.mean_counted if self.unit == "node" else 1

    def weight_remark(self, context: int) -> str:  # noqa: ARG002
        if self.unit != "node" or self.config.data.transform is None:
            return ""
        return "nodes of the graphs before data.transform, which may leave more or fewer"

    def flops(self, architecture: GraphShape, context: int) -> int:
        return round(self.flops_per_graph(architecture) / self.weight(context))

    def flops_per_graph(self, architecture: GraphShape) -> float:
        """Forward and backward FLOPs for the mean graph."""
        return flops_per_graph(architecture, self.survey.mean_nodes, self.survey.mean_edges)

    def style(self, architecture: GraphShape) -> Sequence[tuple[str, Sequence[str]]]:
        arch, survey = architecture, self.survey
        shape = f"{arch.layers} layers × {arch.width} wide, MLP {arch.mlp}, readout {arch.readout}"
        pooling = f"pooling {', '.join(arch.pooling)}" if arch.level == "graph" else "no pooling"
        style = [arch.layer, f"flow {arch.flow}", arch.norm, arch.activation, pooling]
        style += [f"dropout {arch.dropout:g}"] * (arch.dropout > 0)
        heads = [f"{head.name} ({head.kind})" for head in self.config.model.heads]
        graphs = f"{survey.mean_nodes:.1f} nodes and {survey.mean_edges:.1f} edges in the mean"
        return [
            ("shape", [shape]),
            ("style", [", ".join(style)]),
            ("heads", [", ".join(heads)]),
            ("graphs", [graphs]),
        ]


def _shape(config: GraphConfig, survey: GraphSurvey) -> GraphShape:
    return resolve_graph(config.model, survey.features, survey.graph_features, survey.edge_features)


def _open_source(
    config: GraphConfig,
) -> tuple[Source, Mapping[str, Int64Array], DrawRule | None]:
    """Return all graphs, those of each split, and how those to train on are drawn."""
    data, seed = config.data, config.data_seed
    if _is_stored(config):
        arrays = open_arrays(
            _folder(config), key="data.path" if data.is_generated else "data.source"
        )
        splits = split_samples(arrays, data, seed)
        return arrays, splits, sampling_of(arrays, splits["train"], data)
    make = load_named(data.source, key="data.source")
    try:
        dataset = sample_set(make, make(), (), data, seed)
        if not isinstance(dataset, SampleSet):
            raise ValueError("an iterable is no source of graphs: return a list of them")
        return dataset.source, dataset.splits, dataset.sampling
    except ConfigError:
        raise
    except ValueError as error:
        raise _wrong(f"{config.data.source}: {error}") from error
    except (Exception, SystemExit) as error:
        raise _wrong(f"{config.data.source} failed: {what_happened(error)}") from error


def _wrong(message: str) -> ConfigError:
    return ConfigError.at("data.source", message)


def _is_stored(config: GraphConfig) -> bool:
    return ":" not in config.data.source


def _folder(config: GraphConfig) -> Path:
    """Folder of the stored graphs, which may not exist yet."""
    if not config.data.is_generated:
        return Path(config.data.source)
    if config.data.path is not None:
        return Path(config.data.path)
    key = f"{config.data_seed} {config.data.causal_sets.model_dump_json()}"
    return Path("data", f"causal-sets-{xxhash.xxh3_64_hexdigest(key.encode())[:8]}")


def _nodes(source: Source) -> Int64Array:
    """Return the number of nodes of every graph."""
    if isinstance(source, Arrays):
        if "x" in source.offsets:
            return source.sizes("x")
        return np.full(len(source), source.values["x"].shape[1])
    return as_ragged(source.read(np.arange(len(source)))["x"]).sizes


def _count_in_loss(source: Source, config: GraphConfig, nodes: Int64Array) -> Int64Array:
    """Return the number of nodes of every graph that count in the loss."""
    if (mask := config.model.mask) is None:
        return nodes
    return true_counts(as_ragged(source.read(np.arange(len(source)))[mask]))


def _graph(config: RunConfig) -> GraphConfig:
    assert isinstance(config, GraphConfig)
    return config
