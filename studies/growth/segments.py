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
        self, folder: Path, base: Sequence[str], workers: int, kept: Path | None = None
    ) -> None:
        """
        Args:
            base: settings of every segment that has no parent.
            kept: a file with what segments came to, also where their folders are gone; every
                result is added to it.
        """
        self.folder, self.base, self.workers, self.kept = folder, tuple(base), workers, kept
        there = kept is not None and kept.exists()
        self.known: dict[str, Result] = (
            {name: Result(**values) for name, values in json.loads(kept.read_text()).items()}
            if kept is not None and there
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
        names = {name for one in segments for name in one.names}
        found = {name: done for name in names if (done := self.done(name)) is not None}
        todo = self._missing([one for one in segments if not one.names <= found.keys()])
        found |= {
            parent.name: done
            for segment in todo
            if (parent := segment.parent) is not None
            and parent not in todo
            and (done := self.done(parent.name)) is not None
        }
        under_way: dict[Future[dict[str, Result]], str] = {}
        with ThreadPoolExecutor(self.workers) as threads:
            while todo or under_way:
                for segment in list(todo):
                    ready = segment.parent is None or segment.parent.name in found
                    if ready and len(under_way) < self.workers:
                        todo.remove(segment)
                        under_way[threads.submit(self._make, segment)] = segment.name
                over, _ = wait(under_way, return_when=FIRST_COMPLETED)
                for future in over:
                    del under_way[future]
                    made = future.result()
                    found |= made
                    self._keep(made)
                    for name, result in made.items():
                        told = f"{name}: {result.loss:.4f} at step {result.step:,}"
                        print(f"{told}, {len(todo) + len(under_way)} to go", file=sys.stderr)
        return found

    def _missing(self, segments: Sequence[Segment]) -> list[Segment]:
        """Segments to be made for these, parents before their children: also a parent whose result
        is known, if its folder is gone."""
        return list(_with_parents(segments, until=self._stands).values())

    def _stands(self, segment: Segment) -> bool:
        """Whether another can go on from it."""
        return (self.folder / f"{segment.name}.json").exists()

    def done(self, name: str) -> Result | None:
        """What a segment or a branch came to, if it has been made."""
        file = self.folder / f"{name}.json"
        return Result(**json.loads(file.read_text())) if file.exists() else self.known.get(name)

    def _keep(self, made: Mapping[str, Result]) -> None:
        self.known |= made
        if self.kept is not None:
            every = {name: asdict(self.known[name]) for name in sorted(self.known)}
            aside = self.kept.with_suffix(".new")
            aside.write_text(json.dumps(every, indent=1) + "\n")
            aside.rename(self.kept)

    def _make(self, segment: Segment) -> dict[str, Result]:
        run = self.folder / segment.name
        for made in (run, *(branch_of(run, branch) for _, branch, _ in segment.branches)):
            shutil.rmtree(made, ignore_errors=True)  # of a segment that was broken off
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
            aside = self.folder / f".{name}.json"
            aside.write_text(json.dumps(asdict(result)) + "\n")
            aside.rename(self.folder / f"{name}.json")
        return results


def branch_of(run: Path, name: str) -> Path:
    """The folder of a run's branch."""
    return run.with_name(f"{run.name}.{name}")


def _result(run: Path, until: int) -> Result:
    checkpoint, _ = latest_intact(run)
    said, progress = checkpoint.manifest, checkpoint.manifest.progress
    if said.loss is None or said.step != until:
        sys.exit(f"{run.name}: ended at step {said.step:,} without an evaluation")
    tokens, active_s = round(progress["tokens"]), progress["active_s"]
    return Result(said.step, said.loss, tokens, progress["flops"], active_s)


def study_parser(about: str | None) -> argparse.ArgumentParser:
    """A command line with what every study of segments takes."""
    made = parser(about)
    made.add_argument("--work", type=Path, help="where runs are kept; default: thrown away")
    made.add_argument("--workers", type=int, default=2, help="runs at a time (default: 2)")
    return made


@contextmanager
def place_of(parsed: argparse.Namespace) -> Iterator[Path]:
    """The folder of --work, or one that is thrown away."""
    with tempfile.TemporaryDirectory() as scratch:
        work: Path = parsed.work or Path(scratch)
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
        for each in reversed(line):
            if every.setdefault(each.name, each) != each:
                raise ValueError(f"two segments are called {each.name}")
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
