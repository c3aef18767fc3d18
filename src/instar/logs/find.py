"""Which runs are meant: by folder, id, name, pattern or file, or the latest."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from instar.config.errors import ConfigError
from instar.record.rundir import RunDir, runs_in

_LATEST = "latest"


def find_runs(texts: Sequence[str], out_dir: Path = Path("runs")) -> list[RunDir]:
    """The runs that `texts` mean, each once, in the order in which they are meant.

    A text is a run's folder, a file in one, a folder of runs, an id, a name (all runs that bear
    it), `latest`, or a pattern of any of these (`runs/sharded_*/events.jsonl`, `demo-*`); patterns
    and names are also looked for under `out_dir`. No text at all is the latest run.

    Raises:
        ConfigError: one of them means no run; suggests one.
    """
    found: dict[Path, RunDir] = {}
    for text in texts or (_LATEST,):
        for run in _meant(text, out_dir):
            found.setdefault(run.path.resolve(), run)
    return list(found.values())


def _meant(text: str, out_dir: Path) -> list[RunDir]:
    path = Path(text)
    if (run := _around(path)) is not None:
        return [run]
    if text and path.is_dir() and (inside := runs_in(path)):
        return inside
    if glob.has_magic(text):
        if matched := list(_matching(text, out_dir)):
            return matched
        raise ConfigError.one(f"no run matches {text!r}", hint=_there_are(out_dir))
    there = runs_in(out_dir)
    if text == _LATEST and there:
        return there[-1:]
    exact = [run for run in there if text in (run.path.name, run.id)]
    if named := exact or [run for run in there if run.name == text]:
        return named
    raise _no_run(text, out_dir)


def _around(path: Path) -> RunDir | None:
    """The run that `path` is the folder of, or a file in."""
    if path.is_file():
        return next((run for run in map(RunDir, path.parents) if run.holds_run()), None)
    return RunDir(path) if path.name and RunDir(path).holds_run() else None


def _matching(pattern: str, out_dir: Path) -> Iterator[RunDir]:
    for base in ("", str(out_dir)):
        found = sorted(glob.glob(pattern, root_dir=base or None, recursive=True))  # noqa: PTH207 (absolute ones too)
        runs = list(_runs_at(Path(base, text) for text in found))
        if runs:
            yield from runs
            return


def _runs_at(paths: Iterable[Path]) -> Iterator[RunDir]:
    for path in paths:
        run = _around(path)
        if run is not None:
            yield run


def _no_run(text: str, out_dir: Path) -> ConfigError:
    path = Path(text)
    if text and path.is_dir():
        return ConfigError.one(f"{path} is not a run, and holds none: it has no run.yaml")
    as_path = path.parent != Path()
    folder = path.parent if as_path else out_dir
    runs = runs_in(folder)
    if not runs:
        return ConfigError.one(f"no run in {folder}", hint="start one with instar train")
    names = [str(run.path) for run in runs]
    if not as_path:
        names = [name for run in runs for name in (run.path.name, run.name, run.id)]
    near = get_close_matches(str(path) if as_path else text, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else _there_are(folder)
    return ConfigError.one(f"no run {text!r}{'' if as_path else f' in {folder}'}", hint=hint)


def _there_are(out_dir: Path) -> str:
    there = runs_in(out_dir)
    if not there:
        return f"there is no run in {out_dir}"
    return f"the latest of {len(there)} in {out_dir} is {there[-1].path.name!r}"
