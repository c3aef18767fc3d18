"""Small tasks with one right answer, written as text: what a model computes in its context, not what it knows."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A text that ends with its answer."""

    prompt: str
    answer: str

    @property
    def text(self) -> str:
        return f"{self.prompt}{self.answer}\n"


def copying(draw: random.Random) -> Example:
    """`copy q m f a : q m f a`"""
    letters = " ".join(draw.sample(string.ascii_lowercase, draw.randint(3, 6)))
    return Example(f"copy {letters} :", f" {letters}")


def recall(draw: random.Random) -> Example:
    """`recall k 4 b 7 q 2 ; b : 7`: what followed a letter before (induction)."""
    letters = draw.sample(string.ascii_lowercase, draw.randint(3, 6))
    pairs = {letter: draw.choice(string.digits) for letter in letters}
    key = draw.choice(letters)
    listing = " ".join(f"{letter} {digit}" for letter, digit in pairs.items())
    return Example(f"recall {listing} ; {key} :", f" {pairs[key]}")


def depth(draw: random.Random) -> Example:
    """`depth ( ( ) ( : 2`: how many brackets are open."""
    open_brackets, brackets = 0, []
    for _ in range(draw.randint(4, 10)):
        opens = open_brackets == 0 or (open_brackets < 9 and draw.random() < 0.55)
        open_brackets += 1 if opens else -1
        brackets.append("(" if opens else ")")
    return Example(f"depth {' '.join(brackets)} :", f" {open_brackets}")


def assignment(hops: int) -> Callable[[random.Random], Example]:
    """`let a 4 ; b a ; c b ; x 7 ; c : 4`: a value that was assigned over so many variables, and another beside it."""

    def example(draw: random.Random) -> Example:
        names = draw.sample(string.ascii_lowercase, 2 * (hops + 1))
        values = draw.sample(string.digits, 2)
        chains = []
        for chain, value in zip((names[: hops + 1], names[hops + 1 :]), values, strict=True):
            chains.append(
                [f"{name} {operand}" for name, operand in zip(chain, [value, *chain], strict=False)]
            )
        lines: list[str] = []
        while any(chains):
            lines.append(draw.choice([chain for chain in chains if chain]).pop(0))
        index = draw.randrange(2)
        last = names[hops] if index == 0 else names[-1]
        return Example(f"let {' ; '.join(lines)} ; {last} :", f" {values[index]}")

    return example


TASKS: Mapping[str, Callable[[random.Random], Example]] = {
    "copying": copying,
    "recall": recall,
    "bracket depth": depth,
    "assignment, 1 hop": assignment(1),
    "assignment, 2 hops": assignment(2),
    "assignment, 3 hops": assignment(3),
}


def examples(task: str, number: int, seed: int | str) -> list[Example]:
    """Examples of a task, which differ with the seed."""
    draw = random.Random(f"{task} {seed}")
    return [TASKS[task](draw) for _ in range(number)]
