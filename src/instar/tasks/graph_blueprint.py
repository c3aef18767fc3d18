"""What is known of a run of a graph network before torch is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from instar.config.errors import ConfigError
from instar.config.graph import GraphConfig
from instar.config.load import Loaded
from instar.config.named import load_named
from instar.config.schema import RunConfig
from instar.data.arrays import Arrays, holds_arrays, open_arrays
from instar.data.causal_sets import prepare_causal_sets
from instar.data.division import SampleSet, divide_samples
from instar.data.order import Int64Array
from instar.data.samples import Samples, Weighed
from instar.data.source import Source
from instar.models.graph_shape import GraphShape, flops_per_graph, resolve_graph
from instar.models.memory import ALL_TRAIN, Still, state_bytes
from instar.models.shape import ArchitectureError
from instar.tasks.blueprint import Say
from instar.tasks.graph_survey import GraphSurvey, ragged, survey_graphs
from instar.tasks.samples_blueprint import SamplesBlueprint

if TYPE_CHECKING:
    from instar.tasks.graph import GraphTask

CAUSAL_SETS = "causal_sets"


@dataclass(frozen=True, eq=False)
class GraphBlueprint(SamplesBlueprint):
    """A graph network on graphs that have been looked at."""

    config: GraphConfig
    architecture: GraphShape
    survey: GraphSurvey

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

    def units(self, context: int) -> int:
        return self.samples(context) * self.weight(context)

    def weight(self, context: int) -> int:  # noqa: ARG002
        return round(self.survey.mean_nodes) if self.unit == "node" else 1

    def flops(self, architecture: GraphShape, context: int) -> int:
        of_graph = flops_per_graph(architecture, self.survey.mean_nodes, self.survey.mean_edges)
        return round(of_graph / self.weight(context))

    def memory(
        self,
        architecture: GraphShape,
        context: int,
        batch_size: int,
        device: str,
        still: Still = ALL_TRAIN,
    ) -> dict[str, int]:
        """Without what a step keeps for its backward pass, which hangs on the graphs."""
        del context, batch_size, device
        return state_bytes(
            architecture.parameters(),
            still,
            optimizer=self.config.optimizer.name,
            ema=self.config.train.ema is not None,
        )

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

    def task(self, config: RunConfig) -> GraphTask:
        from instar.tasks.graph import GraphTask

        return GraphTask(_graph(config), self.architecture, self.data, self.survey)


def prepare(loaded: Loaded, world_size: int, say: Say) -> None:  # noqa: ARG001
    """See `Kind`: causal sets are generated; everything else is the user's to make."""
    config = _graph(loaded.config)
    if config.data.source == CAUSAL_SETS:
        prepare_causal_sets(config.data.causal_sets, _folder(config), config.seed, say)


def blueprint(loaded: Loaded, world_size: int) -> GraphBlueprint:  # noqa: ARG001
    """See `Kind`: every graph is looked at once."""
    config = _graph(loaded.config)
    source = _opened(config)
    classes = _classes(source, config.data.stratify)
    splits = divide_samples(
        len(source),
        val=config.data.val,
        test=config.data.test,
        seed=config.seed,
        classes=classes,
    )
    survey = survey_graphs(source, splits, config.model)
    try:
        shape = resolve_graph(config.model, survey.features, survey.graph_features)
    except ArchitectureError as error:
        raise ConfigError(
            *(loaded.problem(m.key, m.message, m.hint) for m in error.mistakes)
        ) from None
    nodes = _nodes(source)
    if config.model.level == "node":
        source = Weighed(source, nodes)
    # nearly all of the work is done for each node
    samples = SampleSet(source, splits, config.data, costs=nodes)
    samples.held_out("val")
    return GraphBlueprint(samples, config, shape, survey)


def assumed(loaded: Loaded, say: Say) -> GraphBlueprint:
    """See `Kind`: a hundred causal sets stand for those that are not there yet."""
    config = _graph(loaded.config)
    if config.data.source != CAUSAL_SETS or holds_arrays(_folder(config)):
        return blueprint(loaded, 1)
    from instar.data.causal_sets import causal_sets

    say(f"no data in {_folder(config)} yet: 100 causal sets stand for them")
    options = config.data.causal_sets
    source = Samples(causal_sets(options, config.seed, 0, min(100, options.sets)))
    everything = {"train": np.arange(len(source))}
    survey = survey_graphs(source, {"val": everything["train"]}, config.model)
    shape = resolve_graph(config.model, survey.features, survey.graph_features)
    return GraphBlueprint(SampleSet(source, everything, config.data), config, shape, survey)


def _opened(config: GraphConfig) -> Source:
    if _is_stored(config):
        return open_arrays(_folder(config))
    given = load_named(config.data.source, key="data.source")()
    try:
        source: Source = Samples(given) if isinstance(given, Mapping) else given
    except ValueError as error:
        raise ConfigError.one(
            f"{config.data.source}: {error}", where="data.source", key="data.source"
        ) from None
    return source


def _is_stored(config: GraphConfig) -> bool:
    return ":" not in config.data.source


def _folder(config: GraphConfig) -> Path:
    """Where the graphs lie, or are to lie."""
    if config.data.source != CAUSAL_SETS:
        return Path(config.data.source)
    if config.data.path is not None:
        return Path(config.data.path)
    told = f"{config.seed} {config.data.causal_sets.model_dump_json()}"
    return Path("data", f"causal-sets-{xxhash.xxh3_64_hexdigest(told.encode())[:8]}")


def _nodes(source: Source) -> Int64Array:
    """Of every graph."""
    if isinstance(source, Arrays):
        return source.sizes("x")
    return ragged(source.read(np.arange(len(source)))["x"]).sizes


def _classes(source: Source, column: str | None) -> Int64Array | None:
    """The classes that every split gets the same shares of."""
    if column is None:
        return None
    there: Any = source.column if isinstance(source, Arrays) else None
    if there is not None:
        return np.asarray(there(column)).astype(np.int64)
    found = source.columns.get(column) if isinstance(source, Samples) else None
    if not isinstance(found, np.ndarray):
        raise ConfigError.one(
            f"there is no column {column!r} of classes", where="data.stratify", key="data.stratify"
        )
    return found.astype(np.int64)


def _graph(config: RunConfig) -> GraphConfig:
    assert isinstance(config, GraphConfig)
    return config
