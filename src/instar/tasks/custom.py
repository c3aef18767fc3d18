"""Custom tasks: train a user's PyTorch model.

The config names a subclass of `CustomTask`, `task: module:class`. Everything else works as for the built-in tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic

from torch import Tensor, nn
from typing_extensions import TypeVar

from instar.config.schema import Direction, OptimizerConfig, SamplesConfig
from instar.config.sections import Section
from instar.models.shape import Growable, count_parameters
from instar.models.table import Shape
from instar.tasks import logged
from instar.tasks.task import Batch

M = TypeVar("M", bound=Section, default=Any)
D = TypeVar("D", bound=SamplesConfig, default=Any)


class CustomTask(Generic[M, D]):
    """Base class of a user's task. Subclasses must define `samples`, `module` and `loss`."""

    Model: ClassVar[type[Section]] = Section
    """class of the config's section `model`"""
    Data: ClassVar[type[SamplesConfig]] = SamplesConfig
    """class of the config's section `data`"""
    better: ClassVar[Mapping[str, Direction]] = {}
    """metrics in addition to the loss, and whether higher (max) or lower (min) is better"""
    unit: ClassVar[str] = "sample"
    """name of a sample, for the display"""
    refuses_shards: ClassVar[str] = ""
    """why every rank must hold the whole model, e.g. "compares all rows of a weight"; empty: it need
    not, and `parallel.strategy: fsdp` is possible"""
    fields: ClassVar[Sequence[str]] = ()
    """names of the parts of a sample that is a tuple, as torch data sets return"""

    def __init__(self, model: M, data: D, seed: int) -> None:
        """
        Args:
            seed: seed of the data: `data.seed`, or the run's seed if that is not set.
        """
        self.model, self.data, self.seed = model, data, seed

    def samples(self) -> Any:
        """Return all samples, the same in every process; the config says how to split them.

        Returns:
            arrays or tensors by name, each [samples, …] or `Ragged`; a list of samples, each a mapping of arrays by
            name or a tuple; a data set of torch, `datasets` or PyTorch Geometric; an iterable; a `Source`; or one
            of these for each split, by the names train, val and test.
        """
        raise NotImplementedError

    def collate(self, samples: Sequence[Batch]) -> Any:
        """Return the batch that the other methods get, e.g. padded, or a graph batch.

        Args:
            samples: the tensors of each sample, by name.

        Default: the columns of all samples; see `Batch`.
        """
        raise NotImplementedError

    def shape(self) -> Growable | None:
        """Return the shape of the model at step 0, whose named axes can grow; None: no growth."""
        return None

    def module(self, shape: Any) -> nn.Module:
        """Build a model of this shape. torch's generator is seeded for its initial values."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, Any]:
        """Return the loss of each sample of a batch, [samples], or a pair of it and of any outputs.

        With outputs, `measure` and `predict` receive them in place of the model, so that an
        evaluation runs the model once.
        """
        raise NotImplementedError

    def metrics(self) -> Mapping[str, Any]:
        """Return new metrics of a whole evaluation set by name, each a `torchmetrics.Metric` or a
        function that takes NumPy arrays of all samples and returns a number."""
        return {}

    def measure(self, model: Any, batch: Batch) -> Mapping[str, Any]:  # noqa: ARG002
        """Return what each metric that `better` names is computed from.

        Returns:
            values per sample, [samples], whose mean is the metric; for one of `metrics`, a tuple of
            the tensors that it takes, such as predictions and targets.
        """
        return {}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the model's outputs, which the proof of growth compares.

        Default: the model applied to the batch's first column.
        """
        outputs: Tensor = model(next(iter(batch.values())))
        return outputs

    def predict(self, model: Any, batch: Batch) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Return the columns that the final test saves, per sample: [samples] or [samples, n]."""
        return {}

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> Any:  # noqa: ARG002
        """Return an optimizer for the model, several, or parameter groups for the config's optimizer;
        None: as the config says. Called again for the grown model.

        Learning rates are peak rates, which the schedule multiplies; `config.lr` is the config's.
        """
        return None

    def schedule(self, step: int, steps: int | None) -> float | None:  # noqa: ARG002
        """Return the share of the peak learning rate at a step, counted from 0; None: as the config says.

        Args:
            steps: learning_rate.lr_decay_iters: by default the steps of the run; None: unknown.
        """
        return None

    log = staticmethod(logged.log)
    log_image = staticmethod(logged.log_image)
    log_table = staticmethod(logged.log_table)

    def flops(self, shape: Growable) -> int:
        """Forward and backward FLOPs per sample. Default: 3 times those of the shape's table;
        without one, 6 per weight of a matrix."""
        if isinstance(shape, Shape):
            return 3 * shape.flops()
        return 6 * count_parameters(shape).matmul


NEEDED = ("samples", "module", "loss")
"""Methods that a task must define."""
