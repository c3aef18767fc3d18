"""What a shell completes: runs, their checkpoints, keys of configs; and the script that makes it do so.

Only names of files are read, nothing of their content, and no code but that of this package is run.
Each function but the command has the signature of click's `shell_complete`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from instar import __version__
from instar.config.files import cache_home, read_regular

Items = list[CompletionItem[str]]

_RUNS = Path("runs")
VARIABLE = "_INSTAR_COMPLETE"
"""environment variable by which a shell asks for completions"""


def run_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> Items:
    """Folders of `runs` that are runs, and `latest`."""
    names = sorted(run.name for run in _runs())
    return matching_items(["latest", *names] if names else [], incomplete)


def checkpoints(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Runs; after a slash, the checkpoints of runs."""
    if "/" not in incomplete:
        return run_names(context, parameter, incomplete)
    return matching_items(
        [str(path) for run in _runs() for path in _checkpoints_of(run)], incomplete
    )


def starts(context: click.Context, _parameter: click.Parameter, incomplete: str) -> Items:
    """What --from takes: pointers and steps of the run that is named before it."""
    # after an option without its value, click leaves all arguments in `args`
    arguments = [context.params.get("run"), context.params.get("resume"), *context.args]
    run_name = next((str(name) for name in arguments if name), "")
    runs = (
        [Path(run_name), _RUNS / run_name] if run_name and run_name != "latest" else [*_runs()][-1:]
    )
    candidates: list[str] = []
    for run in runs:
        with suppress(OSError):
            names = (path.name for path in (run / "checkpoints").iterdir())
            candidates += [name.removeprefix("step-") for name in names if not name.startswith(".")]
    return matching_items(sorted(candidates, key=_by_number) or ["latest", "best"], incomplete)


def keys(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> Items:
    """Dotted keys of the config, for --set; nothing once a value has begun."""
    return [] if "=" in incomplete else matching_items(_keys(), incomplete, with_files=False)


def _runs() -> Iterator[Path]:
    """Yield the runs in `runs`, the most recently changed last."""
    with suppress(OSError):
        paths = [path for path in _RUNS.iterdir() if (path / "run.yaml").is_file()]
        yield from sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def _checkpoints_of(run: Path) -> list[Path]:
    folder = run / "checkpoints"
    paths = folder.glob("step-*") if folder.is_dir() else ()
    return sorted(paths, key=lambda path: _by_number(path.name))


def _by_number(name: str) -> tuple[float, str]:
    digits = name.removeprefix("step-")
    return (float(digits) if digits.isdecimal() else -1.0), name


def matching_items(names: Iterable[str], incomplete: str, *, with_files: bool = True) -> Items:
    """Return the names that begin so; if there is none, `with_files` any file."""
    items = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return items or ([CompletionItem(incomplete, type="file")] if with_files else [])


def _keys() -> list[str]:
    """Return the keys of the built-in tasks. They are cached: the schema takes long to import."""
    home = cache_home("completion")
    schema = Path(__file__).parents[1] / "config"
    files = [*schema.glob("*.py"), *schema.parent.glob("extensions/*/*.py")]
    state = [__version__, *sorted(path.stat().st_mtime_ns for path in files)]
    if home is not None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            cache = json.loads(read_regular(home / "keys.json"))
            if cache["of"] == state:
                return [str(key) for key in cache["keys"]]

    from instar.config.fields import known_tasks, root_of, schema_keys

    every = dict.fromkeys(key for task in known_tasks() for key in schema_keys(root_of(task)))
    if home is not None:
        # hashes and temporary files, which `instar --help` does not wait for
        from instar.record.atomic import atomic_file

        with suppress(OSError), atomic_file(home / "keys.json", durable=False) as temporary:
            temporary.write_text(json.dumps({"of": state, "keys": [*every]}))
    return [*every]


@click.command(
    epilog='bash:  eval "$(instar completion bash)"  in ~/.bashrc; zsh: the same in ~/.zshrc; '
    "fish:  instar completion fish > ~/.config/fish/completions/instar.fish"
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes commands, options, runs, checkpoints and keys."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "instar", VARIABLE).source())
