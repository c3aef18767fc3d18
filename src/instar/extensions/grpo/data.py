"""Questions with exact answers: GSM8K, MATH, files in the same shape, and sums made on the spot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError
from instar.config.files import of_bounded_depth, open_regular

ARITHMETIC = "arithmetic"
INSTRUCTION = "Solve the problem step by step, and put the final answer in \\boxed{}."
COLUMNS = (("question", "answer"), ("problem", "solution"))
"""the columns of a data set: those of GSM8K, or those of MATH"""
_ON_THE_HUB = {
    "gsm8k": ("openai/gsm8k", "main"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", "default"),
}
_HELD_OUT = 0.1
_SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Question:
    """A question, and its answer or a solution that marks the answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Questions:
    """The questions of a data set, for training and for evaluation."""

    train: tuple[Question, ...]
    test: tuple[Question, ...]
    instruction: str = INSTRUCTION
    """what a model with a chat template is told beside the question"""


def load_questions(dataset: str) -> Questions:
    """Return the questions of `gsm8k`, `math`, `arithmetic`, or a file or folder.

    A folder has train.jsonl and test.jsonl, or .parquet; of one file, the last tenth is held out.

    Raises:
        ConfigError: there is no such data set, or it lacks the columns.
    """
    if dataset == ARITHMETIC:
        return _sums()
    if dataset in _ON_THE_HUB:
        return _from_hub(dataset)
    path = Path(dataset)
    if path.is_dir():
        return Questions(_read(_split_file(path, "train")), _read(_split_file(path, "test")))
    if path.suffix not in _SUFFIXES or not path.exists():
        raise ConfigError.of(
            f"there is no data set {dataset!r}",
            where="--dataset",
            hint=f"write {', '.join(_ON_THE_HUB)}, {ARITHMETIC}, or the path of a .jsonl or .parquet file",
        )
    questions = _read(path)
    held_out = max(1, int(_HELD_OUT * len(questions)))
    if len(questions) < 2:
        raise ConfigError.of(
            f"{path} has {len(questions)} question; one for training and one for evaluation are needed",
            where="--dataset",
        )
    return Questions(questions[:-held_out], questions[-held_out:])


def dataset_name(dataset: str) -> str:
    """Return the name of a data set in the names of folders."""
    return Path(dataset).stem


def _sums() -> Questions:
    """All sums of two digits below 5; too few to hold some out."""
    sums = tuple(Question(f"{a}+{b}=", str(a + b)) for a in range(5) for b in range(5))
    return Questions(sums, sums, instruction="")


def _from_hub(name: str) -> Questions:
    from datasets import load_dataset

    path, config = _ON_THE_HUB[name]
    try:
        splits = load_dataset(path, config)
    except Exception as error:  # its errors share no class: the hub's, requests', its own
        raise ConfigError.of(
            f"{path} cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0][:200]}",
            where=f"--dataset {name}",
            hint="check the connection to the Hugging Face hub, or give the path of a file with its rows",
        ) from error
    train, test = (_questions(splits[split], f"{path}/{split}") for split in ("train", "test"))
    return Questions(train, test)


def _split_file(folder: Path, split: str) -> Path:
    for suffix in _SUFFIXES:
        if (path := folder / f"{split}{suffix}").exists():
            return path
    hint = "give one file, of which a tenth is held out, or a folder with both"
    raise ConfigError.of(f"{folder} has no {split}.jsonl or {split}.parquet", "--dataset", hint)


def _read(path: Path) -> tuple[Question, ...]:
    try:
        if path.suffix == ".parquet":
            from pyarrow import ArrowException
            from pyarrow.parquet import read_table

            try:
                return _questions(read_table(path).to_pylist(), str(path))
            except ArrowException as error:
                raise ConfigError.of(f"{path}: {error}", where="--dataset") from error
        return _questions(_json_lines(path), str(path))
    except OSError as error:
        raise ConfigError.of(f"{path}: {error.strerror or error}", where="--dataset") from error


def _json_lines(path: Path) -> Iterator[Any]:
    with open_regular(path, follow=True) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield json.loads(of_bounded_depth(line))
                except ValueError as error:
                    raise ConfigError.of(
                        f"{path}:{number}: not a JSON object: {error}", where="--dataset"
                    ) from error


def _questions(rows: Iterable[Any], source: str) -> tuple[Question, ...]:
    return tuple(
        Question(*_cells(row, f"{source}, row {number}")) for number, row in enumerate(rows, 1)
    )


def _cells(row: Any, where: str) -> Sequence[str]:
    if isinstance(row, Mapping):
        for columns in COLUMNS:
            if all(isinstance(row.get(column), str) for column in columns):
                return [row[column] for column in columns]
    cells = (
        f"columns {', '.join(map(str, row))}" if isinstance(row, Mapping) else type(row).__name__
    )
    hint = f"rows have texts {' and '.join(COLUMNS[0])}, or {' and '.join(COLUMNS[1])}"
    raise ConfigError.of(f"{where}: {cells}", "--dataset", hint)


def texts(questions: Questions) -> Iterator[str]:
    """Yield all questions and answers for training, as texts for a tokenizer."""
    return chain.from_iterable((question.question, question.answer) for question in questions.train)
