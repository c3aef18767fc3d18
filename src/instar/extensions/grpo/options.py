"""What a GRPO run is told, the names that follow from it, and checks before torch is imported."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from instar.config.errors import ConfigError, ConfigProblem
from instar.extensions.grpo.data import dataset_name

Generation = Literal["local", "server", "vllm"]
MAY_CHANGE = frozenset(
    [
        "max_steps",
        "generation",
        "vllm_port",
        "vllm_group_port",
        "server_timeout",
        "eval_every",
        "eval_prompts",
        "eval_samples",
        "pass_k",
        "save_every",
        "delta_every",
        "wandb",
    ]
)
"""options with which a run may be resumed although they differ"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A GRPO run. `__main__.py` describes each option."""

    dataset: str = "arithmetic"
    model: str = "tiny"
    seed: int = 42
    run_suffix: str | None = None
    generation: Generation = "local"
    vllm_port: int = 8000
    vllm_group_port: int = 51216
    server_timeout: float = 600.0
    max_steps: int = 200
    prompts: int = 8
    generations: int = 8
    micro_batch: int = 8
    num_iterations: int = 1
    lr: float = 1e-6
    beta: float = 0.0
    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    eval_every: int = 40
    eval_prompts: int = 64
    eval_samples: int = 8
    pass_k: int = 4
    save_every: int = 10
    delta_every: int = 1
    wandb: bool = False

    @property
    def suffix(self) -> str:
        """What distinguishes this run from others on its data set."""
        return self.run_suffix or f"seed{self.seed}"

    @property
    def name(self) -> str:
        return f"trl_{dataset_name(self.dataset)}_{self.suffix}"

    @property
    def output_dir(self) -> Path:
        """Checkpoints and the record."""
        return Path("outputs") / self.name

    @property
    def delta_dir(self) -> Path:
        """Differences of the weights between steps."""
        return Path("checkpoints") / f"deltas_{dataset_name(self.dataset)}_{self.suffix}"

    @property
    def log_dir(self) -> Path:
        return Path("logs") / self.name

    @property
    def wandb_name(self) -> str:
        """The name and id of the run in W&B."""
        model = Path(self.model).name.lower()
        return f"trl_{dataset_name(self.dataset)}_grpo_{model}_{self.suffix}"

    @property
    def rows(self) -> int:
        """Completions of one step."""
        return self.prompts * self.generations

    @property
    def accumulation(self) -> int:
        """Micro-batches of one step."""
        return self.rows // self.micro_batch

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def fixed(self) -> dict[str, Any]:
        """Return the options that must be the same when the run is resumed."""
        return {key: value for key, value in asdict(self).items() if key not in MAY_CHANGE}


def check_options(options: Options) -> None:
    """Check options against each other and against what is installed.

    Raises:
        ConfigError: all problems.
    """
    problems = [ConfigProblem((), *problem) for problem in _problems(options)]
    if problems:
        raise ConfigError(*problems)
    packages = ["trl", "transformers", "accelerate", "datasets", "httpx"]
    packages += ["vllm"] if options.generation == "vllm" else []
    packages += ["wandb"] if options.wandb else []
    packages += ["zstandard"] if options.delta_every else []
    check_installed(*packages)


def _problems(options: Options) -> list[tuple[str, str, str]]:
    """Return messages, hints and places."""
    problems = []
    if options.rows % options.micro_batch:
        message = f"{options.prompts} prompts × {options.generations} generations are {options.rows} completions"
        hint = f"which must be a multiple of --micro-batch {options.micro_batch}"
        problems.append((message, hint, "--micro-batch"))
    if options.pass_k > options.eval_samples:
        message = f"pass@{options.pass_k} needs as many samples, not {options.eval_samples}"
        problems.append((message, "raise --eval-samples", "--pass-k"))
    if any(char in options.suffix for char in "/\\\0") or options.suffix in (".", ".."):
        problems.append(("a suffix is part of folder names", "leave out slashes", "--run-suffix"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        hint = "start one process per run; several runs: examples/fleet/grpo.yaml"
        problems.append(("GRPO trains in one process", hint, "WORLD_SIZE"))
    return problems


def check_installed(*packages: str) -> None:
    """Raise ConfigError if one of these packages is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        extra = "pip install vllm" if missing == ["vllm"] else "pip install 'instar[grpo]'"
        extra = "pip install 'instar[wandb]'" if missing == ["wandb"] else extra
        raise ConfigError.of(f"not installed: {', '.join(missing)}", "instar.recipes.grpo", extra)
