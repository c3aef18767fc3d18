"""Checks across sections of a config. They need no data, no device and no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from instar.config.budget import parse_budget
from instar.config.errors import ConfigProblem, nearest_hint
from instar.config.schema import MUONS, OptimizerConfig, RunConfig, SamplesConfig
from instar.config.torch_optim.arguments import argument_problems
from instar.config.torch_optim.optimizers import OPTIMIZERS, optimizer_problems
from instar.config.torch_optim.schedulers import INSTEAD, SCHEDULERS
from instar.extensions import active_extensions, load_target

DRAWN_ORDERS = {"balance": ("shuffled",), "sample_weights": ("shuffled", "random")}
"""values of data.order that say nothing else than the keys of data that draw samples"""


def cross_checks(config: RunConfig) -> list[ConfigProblem]:
    """Return the conflicts within the config."""
    rules = (
        *(_metrics, _eval_context, _folds, _sampling, _schedule, _elastic, _optimizer),
        *(_sharding, _diloco),
        *(extension_conflicts, parallel_checks),
    )
    return [*config.conflicts(), *chain.from_iterable(rule(config) for rule in rules)]


def rank_checks(config: RunConfig, world_size: int) -> list[ConfigProblem]:
    """Return the conflicts of the config with a number of ranks."""
    rules = _virtual_ranks(config, world_size), _replicas(config, world_size)
    return [*chain.from_iterable(rules), *config.rank_conflicts(world_size)]


def _metrics(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield requested metrics that the task does not measure."""
    metrics, best_of = config.metrics, config.checkpoint.best_of
    if len(set(best_of)) < max(1, len(best_of)):
        message = "checkpoint.best_of must name one metric or several, each once"
        yield ConfigProblem(("checkpoint.best_of",), message, "e.g. [loss]")
    if config.test.at_end and config.test.weights == "best" and not config.checkpoint.on_best:
        yield ConfigProblem(
            ("test.weights", "checkpoint.on_best", "test.at_end"),
            "test.weights is best, but checkpoint.on_best is false: no best checkpoint will exist",
            "set checkpoint.on_best: true, or test.weights: last",
        )
    for key, metric in config.requested_metrics.items():
        if metric not in metrics:
            hint = nearest_hint(metric, metrics, f"there are {', '.join(metrics)}")
            message = f"{key}: this run has no metric '{metric}'"
            yield ConfigProblem((key, key.partition("[")[0]), message, hint)


def _eval_context(config: RunConfig) -> Iterator[ConfigProblem]:
    if config.eval.context is not None and config.longest_context == 1:
        text = "eval.context is for text: the samples of this task have no length in tokens"
        yield ConfigProblem(("eval.context", "task"), text, "leave it out")
    if config.eval.sets and config.longest_context == 1:
        text = "eval.sets are texts: this task has samples of its own"
        yield ConfigProblem(("eval.sets", "task"), text, "leave it out")


def _sampling(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield contradictions of how training samples are drawn."""
    data = config.data
    if not isinstance(data, SamplesConfig):
        return
    keys = [key for key in ("balance", "sample_weights") if getattr(data, key) is not None]
    if len(keys) == 2:
        yield ConfigProblem(
            ("data.sample_weights", "data.balance"),
            "data.balance and data.sample_weights both say how often samples are drawn",
            "leave one of them out: weights of 1 / the size of a sample's class balance classes, too",
        )
    elif keys and data.order not in DRAWN_ORDERS[keys[0]]:
        yield ConfigProblem(
            ("data.order", f"data.{keys[0]}"),
            f"data.order is {data.order}, and data.{keys[0]} draws samples in an order of its own",
            "leave one of them out",
        )


def _folds(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield why the folds of a cross-validation contradict each other, or `data.val`."""
    data = config.data
    if not isinstance(data, SamplesConfig):
        return
    if data.folds is None:
        if data.fold:
            text = f"data.fold {data.fold} is one of data.folds, which is not set"
            yield ConfigProblem(("data.fold", "data.folds"), text, "e.g. data.folds: 5")
        return
    if data.fold >= data.folds:
        text = f"data.fold {data.fold}: {data.folds} folds are 0 to {data.folds - 1}"
        yield ConfigProblem(("data.fold", "data.folds"), text)
    # a config that is read back has all keys, this one with its default
    if data.val != type(data).model_fields["val"].default:
        text = f"data.val {data.val} and data.folds both say what the validation split is"
        hint = f"leave data.val out: a fold has 1/{data.folds} of the samples that are not for the test"
        yield ConfigProblem(("data.val", "data.folds"), text, hint)


def _virtual_ranks(config: RunConfig, world_size: int) -> Iterator[ConfigProblem]:
    slices = config.parallel.elastic.virtual_ranks
    if config.reproducible == "fixed" or slices % world_size == 0:
        return
    *smaller, most = (str(ranks) for ranks in range(1, slices + 1) if slices % ranks == 0)
    yield ConfigProblem(
        ("parallel.elastic.virtual_ranks", "reproducible"),
        f"{world_size} ranks cannot share {slices} virtual ranks evenly",
        f"use {', '.join(smaller)} or {most} ranks"
        if smaller
        else "use 1 rank, or more virtual ranks in a new run",
    )


def _replicas(config: RunConfig, world_size: int) -> Iterator[ConfigProblem]:
    shards = config.parallel.fsdp.shards
    if config.parallel.strategy != "hsdp" or shards is None:
        return
    if world_size == 1 or world_size % shards == 0:  # one process has the whole model
        return
    possible = [str(size) for size in range(2, world_size + 1) if world_size % size == 0]
    yield ConfigProblem(
        ("parallel.fsdp.shards", "parallel.strategy"),
        f"{world_size} ranks cannot be divided into replicas of {shards} ranks (parallel.fsdp.shards)",
        f"use shards of {', '.join(possible)}, or a multiple of {shards} ranks",
    )


def _sharding(config: RunConfig) -> Iterator[ConfigProblem]:
    strategy, shards = config.parallel.strategy, config.parallel.fsdp.shards
    if strategy == "hsdp" and shards is None:
        yield ConfigProblem(
            ("parallel.strategy", "parallel.fsdp.shards"),
            "strategy hsdp needs parallel.fsdp.shards, the number of ranks that share a model",
            "e.g. the number of GPUs of a machine",
        )
    if strategy != "hsdp" and shards is not None:
        yield ConfigProblem(
            ("parallel.fsdp.shards", "parallel.strategy"),
            f"parallel.fsdp.shards is for strategy hsdp, but parallel.strategy is {strategy}",
            "set strategy: hsdp, or leave shards out: fsdp shards over all ranks",
        )
    if config.parallel.fsdp.reduce_each_micro_batch and config.reproducible == "elastic":
        yield ConfigProblem(
            ("parallel.fsdp.reduce_each_micro_batch", "reproducible"),
            "parallel.fsdp.reduce_each_micro_batch cannot be combined with reproducible: elastic, which "
            "adds the gradients of a slice before they are sent",
            "remove one of them, or make train.batch_size larger: fewer micro-batches",
        )
    for option, key, clashes, why in _clashes(config):
        if clashes:
            keys = f"parallel.fsdp.{option.partition(':')[0]}", key
            yield ConfigProblem(keys, f"parallel.fsdp.{option} {why}", "leave one of them out")


def _clashes(config: RunConfig) -> Iterator[tuple[str, str, bool, str]]:
    """Yield options of sharded training, the keys that they may contradict, whether they do, and why."""
    fsdp, precision = config.parallel.fsdp, config.precision
    if fsdp.gather == "bfloat16":
        rounds = precision in ("fp32", "fp16")
        why = f"would round weights that are computed with in {precision}"
        yield "gather: bfloat16", "precision", rounds, why
        why = "cannot be combined with compile: true, which gathers blocks whole"
        yield "gather: bfloat16", "compile", config.compile, why
    if fsdp.offload:
        option, optimizer = "offload: true", config.optimizer.name
        why = "needs strategy fsdp or hsdp"
        yield option, "parallel.strategy", config.parallel.strategy not in ("fsdp", "hsdp"), why
        why = "needs GPUs: on a CPU, everything is in host memory already"
        yield option, "device", config.device == "cpu", why
        why = "would compute Muon's matrix products on the CPU"
        yield option, "optimizer.name", optimizer == "muon", why
        why = "has no gradient scaler for precision: fp16; use bf16"
        yield option, "precision", precision == "fp16", why
        why = "updates on the CPU, whose bits are not a GPU's, but reproducible is elastic"
        yield option, "reproducible", config.reproducible == "elastic", why


def extension_conflicts(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield the conflicts that extensions see in a config."""
    for extension in active_extensions(config.extension_names):
        if extension.conflicts:
            yield from load_target(extension.conflicts)(config)


def _diloco(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield the settings that need the ranks to communicate at every step."""
    if config.parallel.strategy != "diloco":
        return
    if config.reproducible == "elastic":
        yield ConfigProblem(
            ("parallel.strategy", "reproducible"),
            "strategy diloco cannot be combined with reproducible: elastic: what a rank's local steps make "
            "depends on how many ranks share a batch",
            "use strategy: ddp, or reproducible: fixed",
        )
    if config.precision == "fp16":
        yield ConfigProblem(
            ("precision", "parallel.strategy"),
            "strategy diloco cannot be combined with precision: fp16, whose gradient scaler would differ "
            "between ranks",
            "use precision: bf16",
        )
    if config.record.noise_every:
        yield ConfigProblem(
            ("record.noise_every", "parallel.strategy"),
            "record.noise_every needs the gradient of a global batch, which no rank has with strategy diloco",
            "leave it out",
        )


def _optimizer(config: RunConfig) -> Iterator[ConfigProblem]:
    optimizer = config.optimizer
    name, spec = optimizer.name, OPTIMIZERS[optimizer.name]
    if optimizer.nesterov and (name != "sgd" or optimizer.momentum == 0):
        yield ConfigProblem(
            ("optimizer.nesterov", "optimizer.momentum", "optimizer.name"),
            "optimizer.nesterov is for SGD with momentum above 0",
            "set optimizer.name: sgd and optimizer.momentum: 0.9, or leave nesterov out",
        )
    if optimizer.nesterov and optimizer.options.get("dampening"):
        text = "optimizer.nesterov is for SGD without dampening"
        keys = "optimizer.options.dampening", "optimizer.options", "optimizer.nesterov"
        yield ConfigProblem(keys, text, "leave one of them out")
    if optimizer.lr_base_depth is not None and name == "sgd":
        yield ConfigProblem(
            ("optimizer.lr_base_depth", "optimizer.name"),
            "optimizer.lr_base_depth is for adamw and muon: gradients of SGD depend on the scale of the branches",
            "leave it out, or set optimizer.name: adamw",
        )
    for key in ("lr_base_width", "lr_base_depth"):
        if getattr(optimizer, key) is not None and spec.steps_like is None:
            text = f"optimizer.{key} is not for {name}: how its best rate follows the size is not known"
            yield ConfigProblem((f"optimizer.{key}", "optimizer.name"), text, "leave it out")
    fields = OptimizerConfig.model_fields
    of_muon = {key: fields[key].default for key in MUONS}
    for key, message, hint in optimizer_problems(name, optimizer.model_dump(), of_muon):
        section = ("optimizer.options",) if key.startswith("options.") else ()
        keys = (f"optimizer.{key}", *section, "optimizer.name")
        yield ConfigProblem(keys, f"optimizer.{key} {message}", hint)
    if config.parallel.strategy in ("fsdp", "hsdp", "auto") and not spec.is_elementwise:
        yield ConfigProblem(
            ("parallel.strategy", "optimizer.name"),
            f"strategy {config.parallel.strategy} may divide parameters among ranks, and {name} cannot update some rows "
            "of one alone",
            "use strategy: ddp, or another optimizer",
        )
    if not spec.follows_rate:
        yield from _first_rate_only(config)


def _first_rate_only(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield what would change a learning rate that the optimizer reads at a parameter's first step alone."""
    name, schedule = config.optimizer.name, config.learning_rate
    changes: dict[str, tuple[bool, str]] = {
        "shape": (schedule.shape != "constant", "set shape: constant"),
        "warmup_iters": (schedule.warmup_iters > 0, "set warmup_iters: 0"),
        "plateau.factor": (schedule.plateau.factor is not None, "leave it out"),
    }
    for key, (changes_rate, hint) in changes.items():
        if changes_rate:
            yield ConfigProblem(
                (f"learning_rate.{key}", "optimizer.name"),
                f"learning_rate.{key} has no effect on {name}, which finds its steps itself: optimizer.lr is only "
                "the first one",
                hint,
            )


def _schedule(config: RunConfig) -> Iterator[ConfigProblem]:
    schedule, end = config.learning_rate, config.learning_rate.lr_decay_iters
    for index, text in enumerate(config.train.until):
        try:
            parse_budget(text)
        except ValueError as error:
            key = f"train.until[{index}]"
            yield ConfigProblem((key, "train.until"), f"{key}: {error}")
    if not config.train.until:
        message = "train.until is empty: the run would never end"
        yield ConfigProblem(("train.until",), message, "e.g. 2000it")
    yield from _scheduler(config)
    if schedule.shape in ("step", "exponential") and schedule.decay_every is None:
        yield ConfigProblem(
            ("learning_rate.decay_every", "learning_rate.shape"),
            f"learning_rate.decay_every is needed: with shape {schedule.shape}, the rate is "
            f"multiplied by gamma ({schedule.gamma:g}) every decay_every steps",
            "e.g. a third of the run's steps",
        )
    if schedule.has_end and end is not None and schedule.warmup_iters >= end:
        yield ConfigProblem(
            ("learning_rate.warmup_iters", "learning_rate.lr_decay_iters"),
            f"learning_rate.warmup_iters ({schedule.warmup_iters}) must be less than "
            f"learning_rate.lr_decay_iters ({end})",
        )


def _scheduler(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield options that the shape of the learning rate does not have, and keys that a scheduler of torch does not read."""
    rate, shape, peak = config.learning_rate, config.learning_rate.shape, config.optimizer.lr
    arguments = SCHEDULERS.get(shape)
    if arguments is None:
        if rate.options:
            yield ConfigProblem(
                ("learning_rate.options", "learning_rate.shape"),
                f"learning_rate.options are for schedulers of torch, and the shape is {shape}",
                "leave them out, or name the scheduler, e.g. shape: StepLR",
            )
        return
    for option, message, hint in argument_problems(arguments, rate.options, INSTEAD):
        keys = f"learning_rate.options.{option}", "learning_rate.options", "learning_rate.shape"
        yield ConfigProblem(keys, f"learning_rate.options.{option} {message}", hint)
    for option, argument in arguments.items():
        value: Any = rate.options.get(option)
        if argument.is_rate and argument.is_valid(value) and value > peak:
            yield ConfigProblem(
                (f"learning_rate.options.{option}", "learning_rate.options", "optimizer.lr"),
                f"learning_rate.options.{option} ({value:g}) is more than the highest rate, optimizer.lr ({peak:g})",
            )
    for key in ("lr_decay_iters", "decay_fraction", "decay_every", "gamma"):
        if getattr(rate, key) != type(rate).model_fields[key].default:
            yield ConfigProblem(
                (f"learning_rate.{key}", "learning_rate.shape"),
                f"learning_rate.{key} is not for {shape}, whose arguments are learning_rate.options",
                f"leave it out; the options are {', '.join(arguments)}",
            )


def _elastic(config: RunConfig) -> Iterator[ConfigProblem]:
    if config.reproducible == "fixed":
        return
    slices = config.parallel.elastic.virtual_ranks
    if slices & (slices - 1):
        below = 1 << (slices.bit_length() - 1)
        yield ConfigProblem(
            ("parallel.elastic.virtual_ranks", "reproducible"),
            f"parallel.elastic.virtual_ranks must be a power of two, got {slices}: gradients "
            "are added in pairs, and pairs of pairs",
            f"use {below} or {2 * below}",
        )
    if config.compile:
        yield ConfigProblem(
            ("compile", "reproducible"),
            "compile: true cannot be combined with reproducible: elastic: the kernels of a "
            "compiled model depend on the shapes that its process has seen",
            "remove one of them",
        )
    if config.parallel.ddp.exchange == "bfloat16":
        yield ConfigProblem(
            ("parallel.ddp.exchange", "reproducible"),
            "parallel.ddp.exchange: bfloat16 cannot be combined with reproducible: elastic: what is "
            "rounded depends on how many ranks send it",
            "remove one of them",
        )


def parallel_checks(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield conflicts among the keys that describe the ranks."""
    parallel, device = config.parallel, config.device
    devices, size = parallel.devices, parallel.world_size
    duplicates = sorted({index for index in devices if devices.count(index) > 1})
    if duplicates:
        yield ConfigProblem(
            ("parallel.devices",),
            f"parallel.devices names {', '.join(map(str, duplicates))} more than once",
            "each rank needs its own GPU",
        )
    elif devices and size is not None and len(devices) != size:
        yield ConfigProblem(
            ("parallel.world_size", "parallel.devices"),
            f"parallel.world_size is {size}, but parallel.devices are {len(devices)}",
            "remove parallel.world_size: there are as many ranks as devices",
        )
    if device not in ("auto", "cuda") and devices:
        text = f"parallel.devices choose GPUs, but device is {device}"
        yield ConfigProblem(("parallel.devices", "device"), text, "remove one of them")
    if device.startswith("cuda:") and size is not None and size > 1:
        yield ConfigProblem(
            ("device", "parallel.world_size"),
            f"{device} is one device, but parallel.world_size is {size}",
            "set device: cuda, and choose GPUs with parallel.devices",
        )
