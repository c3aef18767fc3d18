"""What ranks send at a step, from 8 to 1,024 GPUs, and what share of their speed is left.

    python benchmarks/communication.py [--quick]

Nothing is trained. A closed form gives the seconds of a step for each `parallel.strategy`; it is held
against a simulation of every message of every rank (rings of reduce-scatters and all-gathers, link by
link) and of the order in which a step's computations and collectives wait for each other. The GPUs, links
and latencies are assumptions, named in `CLUSTERS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from report import Case, case, options, parser, publish

FLOAT32 = 4
"""bytes: gradients are reduced and weights gathered in float32"""
ADAMW = 4
"""weights, gradients, and two moments"""


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes. Every GPU has a link to its neighbours and its share of the node's network."""

    name: str
    flops: float
    """that a GPU sustains in training, per second"""
    memory: float
    """of a GPU, bytes"""
    link: float
    """bytes per second that a GPU sends to another one of its node"""
    network: float
    """bytes per second that a GPU sends to other nodes, when all of its node do"""
    link_s: float
    """latency of a message inside a node"""
    network_s: float
    """latency of a message between nodes"""
    per_node: int = 8


CLUSTERS = (
    Cluster("400 Gb/s per GPU", 400e12, 80e9, 450e9, 50e9, 2e-6, 8e-6),
    Cluster("100 Gb/s per node", 400e12, 80e9, 450e9, 1.5625e9, 2e-6, 20e-6),
)


@dataclass(frozen=True)
class Model:
    """A transformer, as far as communication is concerned."""

    name: str
    parameters: float
    blocks: int


MODELS = (Model("1.3 B", 1.3e9, 24), Model("7 B", 7e9, 32), Model("70 B", 70e9, 80))
RANKS = (8, 64, 256, 1024)
STRATEGIES = ("ddp", "fsdp", "hsdp")
MICRO_BATCHES = (1, 4)
TOKENS = 8192
"""per GPU and micro-batch"""
SHARE = 0.9
"""of the GPUs' speed"""


@dataclass(frozen=True)
class Group:
    """Ranks that take part in a collective, and how they are connected."""

    ranks: int
    rings: int
    """each carries its share of the data over the network interface of another GPU"""
    links: Mapping[str, tuple[int, float, float]]
    """by kind: how many of a ring's links, bytes per second of one, latency"""

    def message_s(self, size: float) -> float:
        """Seconds that a ring takes for each message of `size` bytes, when all ranks send at once: its
        slowest link is busy all the time, or a message that goes around the ring meets no other."""
        kinds = self.links.values()
        around = sum(number * (size / speed + latency) for number, speed, latency in kinds)
        return max(around / self.ranks, *(size / speed for number, speed, _ in kinds if number))


def groups(cluster: Cluster, ranks: int, shards: int) -> tuple[Group, Group]:
    """The ranks that share a model, which are neighbours, and those that hold the same rows."""
    return neighbours(cluster, shards), one_rank_per_node(cluster, ranks // shards)


def neighbours(cluster: Cluster, ranks: int) -> Group:
    """Rings along the nodes; each leaves its node by another GPU."""
    nodes, rings = max(1, ranks // cluster.per_node), min(ranks, cluster.per_node)
    inside = cluster.link / rings, cluster.link_s
    if nodes == 1:
        return Group(ranks, rings, {"inside": (ranks, *inside)})
    between = cluster.network, cluster.network_s
    return Group(ranks, rings, {"inside": (ranks - nodes, *inside), "between": (nodes, *between)})


def one_rank_per_node(cluster: Cluster, ranks: int) -> Group:
    """One rank in each node."""
    return Group(ranks, 1, {"between": (ranks, cluster.network, cluster.network_s)})


def scatter_s(group: Group, size: float) -> float:
    """Closed form of a reduce-scatter or an all-gather of `size` bytes; an all-reduce is both."""
    if group.ranks == 1:
        return 0.0
    return (group.ranks - 1) * group.message_s(size / group.rings / group.ranks)


def simulated_scatter_s(group: Group, size: float) -> float:
    """The same by message: a rank sends on what it received, and one message at a time."""
    if group.ranks == 1:
        return 0.0
    chunk = size / group.rings / group.ranks
    kinds = [kind for kind in group.links.values() if kind[0]]
    # links of the rare kind are spread evenly over the ring
    common, rare = (*sorted(kinds, reverse=True), (0, 1.0, 0.0))[:2]
    is_rare = np.zeros(group.ranks, bool)
    is_rare[np.arange(rare[0]) * group.ranks // max(1, rare[0])] = True
    sending = np.where(is_rare, chunk / rare[1], chunk / common[1])
    latency = np.where(is_rare, rare[2], common[2])
    arrival = np.zeros(group.ranks)
    free = np.zeros(group.ranks)
    for _ in range(group.ranks - 1):
        free = np.maximum(arrival, free) + sending
        arrival = np.roll(free + latency, 1)
    return float(arrival.max())


@dataclass(frozen=True)
class Step:
    """A step: seconds of its parts, for one block."""

    strategy: str
    blocks: int
    micro_batches: int
    compute: float
    """of a forward pass; a backward pass takes twice as long"""
    gather: float
    reduce: float
    """reduce-scatter; of ddp the all-reduce"""
    replicate: float
    """all-reduce between replicas of shards"""

    @property
    def computing_s(self) -> float:
        """Seconds if nothing were sent."""
        return 3 * self.micro_batches * self.blocks * self.compute

    def seconds(self) -> float:
        """Closed form: each pass takes as long as the slower of its computations and its messages, and
        what overlaps with nothing at its beginning and its end."""
        forward, backward, other_blocks = self.compute, 2 * self.compute, self.blocks - 1
        early = (self.micro_batches - 1) * (
            2 * self.gather
            + other_blocks * (max(forward, self.gather) + max(backward, self.gather))
            + forward
            + backward
        )
        last = (
            2 * self.gather
            + other_blocks * max(forward, self.gather)
            + other_blocks * max(backward, self.gather + self.reduce, self.replicate)
            + forward
            + backward
            + self.reduce
            + self.replicate
        )
        return early + last

    def simulated_seconds(self) -> float:
        """By task: each waits for what it needs, and for the tasks before it that use the same GPU or
        the same network."""
        ends: dict[tuple[object, ...], float] = {}
        free = {"gpu": 0.0, "shards": 0.0, "replicas": 0.0}
        for name, resource, seconds, needs in self._tasks():
            begin = max(free[resource], *(ends.get(need, 0.0) for need in needs))
            ends[name] = free[resource] = begin + seconds
        return max(free.values())

    def _tasks(
        self,
    ) -> Iterator[tuple[tuple[object, ...], str, float, Sequence[tuple[object, ...]]]]:
        """Yield name, resource, seconds and needs, in the order in which they are started."""
        for micro in range(self.micro_batches):
            backward = [(micro, "backward", n) for n in reversed(range(self.blocks))]
            passes = [*((micro, "forward", n) for n in range(self.blocks)), *backward]
            for index, (_, kind, block) in enumerate(passes):
                # a block is gathered while the one before it is computed, in the memory of the one
                # before that
                before = passes[index - 2] if index > 1 else (micro - 1, "backward", 0)
                gather_task = micro, "gather", kind, block
                yield gather_task, "shards", self.gather, [before]
                if (
                    kind == "backward"
                    and micro == self.micro_batches - 1
                    and block < self.blocks - 1
                ):
                    yield from self._reduce_tasks(micro, block + 1)
                seconds = self.compute * (2 if kind == "backward" else 1)
                yield (micro, kind, block), "gpu", seconds, [gather_task]
        yield from self._reduce_tasks(self.micro_batches - 1, 0)

    def _reduce_tasks(
        self, micro: int, block: int
    ) -> Iterator[tuple[tuple[object, ...], str, float, Sequence[tuple[object, ...]]]]:
        reduce_task = micro, "reduce", block
        yield reduce_task, "shards", self.reduce, [(micro, "backward", block)]
        yield (micro, "replicate", block), "replicas", self.replicate, [reduce_task]


def step(
    strategy: str,
    cluster: Cluster,
    model: Model,
    ranks: int,
    *,
    tokens: float = TOKENS,
    micro_batches: int = 1,
    simulate: bool = False,
) -> Step:
    """A step of `micro_batches` of `tokens` tokens on every rank; `simulate`: its collectives."""
    scatter = simulated_scatter_s if simulate else scatter_s
    shards = {"ddp": 1, "fsdp": ranks, "hsdp": min(ranks, cluster.per_node)}[strategy]
    size = FLOAT32 * model.parameters / model.blocks
    if strategy == "ddp":
        gather, reduce, replicate = 0.0, 2 * scatter(neighbours(cluster, ranks), size), 0.0
    else:
        sharers, replicas = groups(cluster, ranks, shards)
        gather = reduce = scatter(sharers, size)
        replicate = 2 * scatter(replicas, size / shards)
    compute = 2 * model.parameters / model.blocks * tokens / cluster.flops
    return Step(strategy, model.blocks, micro_batches, compute, gather, reduce, replicate)


def persistent_bytes(strategy: str, cluster: Cluster, model: Model, ranks: int) -> float:
    """Of weights, gradients and AdamW's moments, on one rank."""
    shards = {"ddp": 1, "fsdp": ranks, "hsdp": min(ranks, cluster.per_node)}[strategy]
    return ADAMW * FLOAT32 * model.parameters / shards


def fewest_tokens(strategy: str, cluster: Cluster, model: Model, ranks: int) -> float:
    """Tokens per GPU and micro-batch from which `SHARE` of the GPUs' speed is left."""
    low, high = 1.0, 1e9
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        trial = step(strategy, cluster, model, ranks, tokens=middle)
        low, high = (
            (low, middle) if trial.computing_s / trial.seconds() >= SHARE else (middle, high)
        )
    return high


def main() -> None:
    run_options = options(parser(__doc__).parse_args())
    ranks = RANKS[:2] if run_options.quick else RANKS
    cases: list[Case] = []
    for cluster, model in product(CLUSTERS, MODELS):
        for size, strategy in product(ranks, STRATEGIES):
            cases += figures(strategy, cluster, model, size)
    cases.append(
        case("closed form / simulation, worst case", [min(agreements(ranks))], "ratio", least=0.95)
    )
    publish("communication", cases, run_options)


def figures(strategy: str, cluster: Cluster, model: Model, ranks: int) -> list[Case]:
    training_step = step(strategy, cluster, model, ranks)
    title = f"{cluster.name}, {model.name}, {ranks:,} GPUs, {strategy}"
    needed_bytes = persistent_bytes(strategy, cluster, model, ranks)
    if needed_bytes > cluster.memory:
        return [case(f"{title}: does not fit", [needed_bytes / 1e9], "GB")]
    tokens = fewest_tokens(strategy, cluster, model, ranks)
    return [
        case(
            f"{title}: speed left", [training_step.computing_s / training_step.seconds()], "ratio"
        ),
        case(f"{title}: tokens for {SHARE:g} of it", [tokens], "tokens"),
    ]


def agreements(ranks: Sequence[int]) -> list[float]:
    """Closed form and simulation of all cases: the smaller as a share of the larger."""
    shares = []
    for cluster, model, size, strategy, number in product(
        CLUSTERS, MODELS, ranks, STRATEGIES, MICRO_BATCHES
    ):
        closed_form, simulation = (
            step(strategy, cluster, model, size, micro_batches=number, simulate=simulate)
            for simulate in (False, True)
        )
        times = closed_form.seconds(), simulation.simulated_seconds()
        shares.append(min(times) / max(times))
    return shares


if __name__ == "__main__":
    main()
