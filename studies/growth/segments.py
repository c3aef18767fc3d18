"""Training as segments: each goes on from another, is done once, and remembers how it came out.

A study is many runs that share their beginnings. A *segment* is a stretch of training from the end of its parent to
a step; its folder is a run of its own, begun by `instar train` or a copy, and gone on with by `instar resume`. What
a segment and the branches of its schedule came to stands in files; a study that is broken off goes on with what
is missing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from instar.checkpoint.listing import latest_intact
from instar.cli.main import main
from report import parser

_FORKS = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Segment:
    """A stretch of training."""

    name: str
    until: int
    """steps of the whole run at its end"""
    settings: tuple[str, ...]
    """`key=value`, from here on"""
    parent: Segment | None = None
    branches: tuple[tuple[str, str, int], ...] = ()
    """of its schedule: under which name the result is known, the branch's own, and its last step"""

    @property
    def names(self) -> set[str]:
        """Of all its results."""
        return {self.name, *(name for name, _, _ in self.branches)}


@dataclass(frozen=True)
class Result:
    """How the run stood at the end of a segment, everything before it included."""

    step: int
    loss: float
    """on the whole validation split, nats"""
    tokens: int
    flops: float
    active_s: float
    """seconds in training steps"""


class Workshop:
    """The folder where segments are made, several at a time."""

    def __init__(
        self, folder: Path, base: Sequence[str], workers: int, results_file: Path | None = None
    ) -> None:
        """
        Args:
            base: settings of every segment that has no parent.
            results_file: a file with what segments came to, also where their folders are gone; every
                result is added to it.
        """
        self.folder, self.base, self.workers, self.results_file = (
            folder,
            tuple(base),
            workers,
            results_file,
        )
        exists = results_file is not None and results_file.exists()
        self.known_results: dict[str, Result] = (
            {
                name: Result(**values)
                for name, values in json.loads(results_file.read_text()).items()
            }
            if results_file is not None and exists
            else {}
        )
        # segments share the machine by being several, not by having threads
        os.environ["OMP_NUM_THREADS"] = "1"
        # optimizers of torch import the last one in their first step, which takes 2 s
        _FORKS.set_forkserver_preload(
            ["instar.run.worker", "instar.run.offline.grow", "torch._dynamo"]
        )

    def results(self, segments: Sequence[Segment]) -> dict[str, Result]:
        """What every segment, its branches and those that it goes on from came to, by name.

        Those that are ready to begin are begun in the order in which they are given.
        """
        names = {name for target in segments for name in target.names}
        results_by_name = {
            name: known_result
            for name in names
            if (known_result := self.result_of(name)) is not None
        }
        todo = self._missing(
            [target for target in segments if not target.names <= results_by_name.keys()]
        )
        results_by_name |= {
            parent.name: known_result
            for segment in todo
            if (parent := segment.parent) is not None
            and parent not in todo
            and (known_result := self.result_of(parent.name)) is not None
        }
        under_way: dict[Future[dict[str, Result]], str] = {}
        with ThreadPoolExecutor(self.workers) as threads:
            while todo or under_way:
                for segment in list(todo):
                    ready = segment.parent is None or segment.parent.name in results_by_name
                    if ready and len(under_way) < self.workers:
                        todo.remove(segment)
                        under_way[threads.submit(self._make, segment)] = segment.name
                over, _ = wait(under_way, return_when=FIRST_COMPLETED)
                for future in over:
                    del under_way[future]
                    new_results = future.result()
                    results_by_name |= new_results
                    self._keep(new_results)
                    for name, result in new_results.items():
                        summary = f"{name}: {result.loss:.4f} at step {result.step:,}"
                        print(f"{summary}, {len(todo) + len(under_way)} to go", file=sys.stderr)
        return results_by_name

    def _missing(self, segments: Sequence[Segment]) -> list[Segment]:
        """Segments to be made for these, parents before their children: also a parent whose result
        is known, if its folder is gone."""
        return list(_with_parents(segments, until=self._stands).values())

    def _stands(self, segment: Segment) -> bool:
        """Whether another can go on from it."""
        return (self.folder / f"{segment.name}.json").exists()

    def result_of(self, name: str) -> Result | None:
        """What a segment or a branch came to, if it has been made."""
        file = self.folder / f"{name}.json"
        return (
            Result(**json.loads(file.read_text()))
            if file.exists()
            else self.known_results.get(name)
        )

    def _keep(self, new_results: Mapping[str, Result]) -> None:
        self.known_results |= new_results
        if self.results_file is not None:
            every = {name: asdict(self.known_results[name]) for name in sorted(self.known_results)}
            new_file = self.results_file.with_suffix(".new")
            new_file.write_text(json.dumps(every, indent=1) + "\n")
            new_file.rename(self.results_file)

    def _make(self, segment: Segment) -> dict[str, Result]:
        run = self.folder / segment.name
        for run_dir in (run, *(branch_of(run, branch) for _, branch, _ in segment.branches)):
            shutil.rmtree(run_dir, ignore_errors=True)  # of a segment that was broken off
        log = self.folder / f"{segment.name}.log"
        log.unlink(missing_ok=True)
        until = ["--until", f"{segment.until}it"]
        if segment.parent is None:
            settings = (*self.base, *segment.settings, f"record.run_dir={run}")
            _instar(log, "train", *until, *_sets(settings))
        else:
            parent = self.folder / segment.parent.name
            shutil.copytree(parent, run, ignore=shutil.ignore_patterns("events.jsonl"))
            _instar(log, "resume", str(run), *until, *_sets(segment.settings))
        ends = {name: (branch_of(run, branch), step) for name, branch, step in segment.branches}
        ends[segment.name] = run, segment.until
        results = {name: _result(folder, step) for name, (folder, step) in ends.items()}
        for name, result in results.items():  # the segment's own, which says that it is done, last
            new_file = self.folder / f".{name}.json"
            new_file.write_text(json.dumps(asdict(result)) + "\n")
            new_file.rename(self.folder / f"{name}.json")
        return results


def branch_of(run: Path, name: str) -> Path:
    """The folder of a run's branch."""
    return run.with_name(f"{run.name}.{name}")


def _result(run: Path, until: int) -> Result:
    checkpoint, _ = latest_intact(run)
    manifest, progress = checkpoint.manifest, checkpoint.manifest.progress
    if manifest.loss is None or manifest.step != until:
        sys.exit(f"{run.name}: ended at step {manifest.step:,} without an evaluation")
    tokens, active_s = round(progress["tokens"]), progress["active_s"]
    return Result(manifest.step, manifest.loss, tokens, progress["flops"], active_s)


def study_parser(about: str | None) -> argparse.ArgumentParser:
    """A command line with what every study of segments takes."""
    command_line = parser(about)
    command_line.add_argument("--work", type=Path, help="where runs are kept; default: thrown away")
    command_line.add_argument("--workers", type=int, default=2, help="runs at a time (default: 2)")
    return command_line


@contextmanager
def place_of(arguments: argparse.Namespace) -> Iterator[Path]:
    """The folder of --work, or one that is thrown away."""
    with tempfile.TemporaryDirectory() as scratch:
        work: Path = arguments.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        yield work


def _with_parents(
    segments: Sequence[Segment], until: Callable[[Segment], bool]
) -> dict[str, Segment]:
    """By name, parents before their children, up to those of which `until` is true.

    Raises:
        ValueError: two segments have one name.
    """
    every: dict[str, Segment] = {}
    for segment in segments:
        line = [segment]
        while (parent := line[-1].parent) is not None and not until(parent):
            line.append(parent)
        for ancestor in reversed(line):
            if every.setdefault(ancestor.name, ancestor) != ancestor:
                raise ValueError(f"two segments are called {ancestor.name}")
    return every


def _sets(settings: Sequence[str]) -> list[str]:
    return [word for text in settings for word in ("--set", text)]


def _instar(log: Path, *words: str) -> None:
    """One command in a process of its own, which finds torch imported."""
    process = _FORKS.Process(target=_command, args=(log, words))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"instar {' '.join(words)} ended with {process.exitcode}:\n{log.read_text()}")


def _command(log: Path, words: Sequence[str]) -> None:
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.exit(main(words))
