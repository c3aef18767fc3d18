"""What happens before the ranks of a run are started: everything that can be checked is, and how to launch them is settled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from instar.config.load import Loaded
from instar.data.text.origin import NOTE
from instar.distributed.placement import LaunchOptions, Placement, RankCount
from instar.run.init_weights import starting_weights
from instar.run.resume import Resume, automatic, choose_checkpoint, continuation
from instar.run.start.ahead import with_rest
from instar.run.start.preflight import Prepared, check_memory, preflight, prepare_run_data


def launch_options(
    loaded_config: Loaded,
    argv: Sequence[str],
    count: RankCount,
    resume: Resume | None = None,
    max_restarts: int = 0,
) -> LaunchOptions:
    """Return how the ranks of a run are launched on this machine.

    Args:
        argv: words of `instar train` that each rank is given.
    """
    parallel = loaded_config.config.parallel
    return LaunchOptions(
        argv,
        count.ranks,
        count.devices or None,
        device=loaded_config.config.device,
        host=parallel.master_address,
        port=parallel.master_port,
        max_restarts=max_restarts,
        resumable=resume is not None or loaded_config.config.resume == "auto",
        config=loaded_config.to_json(),
    )


def preflight_launch(
    loaded_config: Loaded,
    ranks: int,
    resume: Resume | None,
    say: Callable[[str], None],
    devices: Sequence[int] | None = None,
) -> None:
    """Prepare the data and raise all errors that can be found before any rank is started.

    Args:
        devices: GPUs of the ranks; None: the config's.
    """
    resume = resume or automatic(loaded_config.config)
    checkpoint, settings, resumed_run = None, None, None
    if resume is not None:
        checkpoint, _ = choose_checkpoint(resume, check=ranks > 1)
        resumed_run = continuation(resume, loaded_config, checkpoint)
        loaded_config, settings = resumed_run.loaded_config, resumed_run.settings
    devices = loaded_config.config.parallel.devices if devices is None else devices
    if devices or loaded_config.config.device.startswith("cuda"):
        # before the data: tokenising may take hours
        from instar.distributed.world import device_of

        device_of(loaded_config.config.device, Placement(size=ranks, local_size=ranks), devices)
    # rank 0 compares the sources again, and says what has changed
    prepare_run_data(
        loaded_config, ranks, lambda text: None if text.startswith(NOTE) else say(text)
    )
    preparation = preflight(loaded_config, ranks, new=resume is None, settings=settings)
    if resume is not None and resumed_run is not None:
        control = resume.run.control
        preparation = with_rest(preparation, resumed_run, checkpoint, ranks, control=control)
    check_memory(loaded_config, preparation.forecast, loaded_config.config.device, ranks_here=ranks)
    if checkpoint is None:
        starting_weights(loaded_config, preparation.spec)


def preflight_rest(
    loaded_config: Loaded, ranks: int, resume: Resume, assume: Callable[[str], None]
) -> tuple[Loaded, Prepared]:
    """Return the config with which a run would go on, and the forecast of its rest; nothing is started or prepared.

    Args:
        assume: see `preflight`.

    Raises:
        CheckpointError: there is no intact checkpoint.
        ConfigError: the run cannot be resumed so; lists all mistakes.
    """
    checkpoint, _ = choose_checkpoint(resume, check=False)
    resumed_run = continuation(resume, loaded_config, checkpoint)
    loaded_config, settings = resumed_run.loaded_config, resumed_run.settings
    preparation = preflight(loaded_config, ranks, new=False, settings=settings, assume=assume)
    control = resume.run.control
    return loaded_config, with_rest(preparation, resumed_run, checkpoint, ranks, control=control)
