"""Names that say what happened to a value, or stand for it, and not what it holds: `found`, `each`, `there`.

names.py [--most] [SRC]     counts them by folder of `src/instar`, and fails where there are more than LIMIT;
                            --most lists the 200 most frequent local names instead

A name counts if all of it is a participle, a pronoun or an adverb: where it is bound or used, as an attribute, as a
keyword of a call or as the name of a function. `kept_bytes` says what it holds; `kept` does not.
"""

import ast
import collections
import pathlib
import re
import sys
from collections.abc import Iterator

PRONOUNS = frozenset(
    [
        "another",
        "anything",
        "both",
        "each",
        "everything",
        "few",
        "it",
        "its",
        "many",
        "mine",
        "most",
        "nothing",
        "one",
        "ones",
        "others",
        "ours",
        "own",
        "rest",
        "several",
        "some",
        "something",
        "such",
        "that",
        "their",
        "theirs",
        "them",
        "these",
        "they",
        "this",
        "those",
        "which",
        "who",
        "whole",
        "whom",
        "whose",
    ]
)
ADVERBS = frozenset(
    [
        "again",
        "ahead",
        "alike",
        "almost",
        "alone",
        "along",
        "already",
        "anew",
        "apart",
        "aside",
        "away",
        "behind",
        "beside",
        "beyond",
        "elsewhere",
        "ever",
        "forth",
        "here",
        "hence",
        "into",
        "just",
        "least",
        "nearby",
        "once",
        "otherwise",
        "soon",
        "still",
        "then",
        "there",
        "thus",
        "together",
        "twice",
        "yet",
    ]
)
IRREGULAR = frozenset(
    [
        "been",
        "begun",
        "bound",
        "brought",
        "built",
        "chosen",
        "come",
        "done",
        "drawn",
        "driven",
        "fallen",
        "felt",
        "found",
        "given",
        "gone",
        "grown",
        "heard",
        "held",
        "kept",
        "known",
        "laid",
        "lain",
        "led",
        "left",
        "lent",
        "lost",
        "made",
        "meant",
        "met",
        "moved",
        "paid",
        "read_",
        "risen",
        "said",
        "seen",
        "sent",
        "shown",
        "spent",
        "spoken",
        "spoilt",
        "sought",
        "taken",
        "taught",
        "thought",
        "thrown",
        "told",
        "torn",
        "understood",
        "undone",
        "woken",
        "worn",
        "written",
    ]
)
NO_PARTICIPLES = frozenset(
    [
        "bed",
        "compiled",
        "distributed",
        "disabled",
        "embed",
        "enabled",
        "expected",
        "feed",
        "fixed",
        "masked",
        "need",
        "nested",
        "ragged",
        "red",
        "reversed",
        "seed",
        "shared",
        "shed",
        "sorted",
        "speed",
        "tied",
    ]
)
"""Words in -ed that are nouns, verbs, builtins, or what the field itself says."""

LIMIT = 17
"""Occurrences per 1,000 lines that a folder may have. Lower it; nobody raises it."""


def is_vague(name: str) -> bool:
    """Return whether a name is nothing but a participle, a pronoun or an adverb."""
    word = name.strip("_")
    if word in PRONOUNS or word in ADVERBS or word in IRREGULAR:
        return True
    return re.fullmatch(r"[a-z]{3,}ed", word) is not None and word not in NO_PARTICIPLES


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield each name of a module as often as it stands there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def local_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that functions bind: parameters and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def folder_of(path: pathlib.Path, source: pathlib.Path) -> str:
    """Return the folder that a file counts for: the first below the package, of extensions the second."""
    parts = path.relative_to(source).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("extensions",) else 1]) or "."


def vague_names(source: pathlib.Path) -> dict[str, tuple[int, collections.Counter[str]]]:
    """Return lines and vague names of each folder of a package."""
    lines: collections.Counter[str] = collections.Counter()
    names: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in sorted(source.rglob("*.py")):
        text, folder = path.read_text(encoding="utf-8"), folder_of(path, source)
        lines[folder] += len(text.splitlines())
        names[folder].update(filter(is_vague, names_in(ast.parse(text))))
    return {folder: (count, names[folder]) for folder, count in lines.items()}


def print_most_frequent(source: pathlib.Path, number: int = 200) -> None:
    """Print the most frequent local names with how often they are bound."""
    names: collections.Counter[str] = collections.Counter()
    for path in source.rglob("*.py"):
        names.update(local_names(ast.parse(path.read_text(encoding="utf-8"))))
    for name, count in names.most_common(number):
        print(f"{count:6,} {name}{'  !' if is_vague(name) else ''}")


def main(arguments: list[str]) -> int:
    """Print what the module says; return 1 if a folder is over its limit."""
    paths = [text for text in arguments if not text.startswith("--")]
    source = pathlib.Path(paths[0] if paths else "src/instar")
    if "--most" in arguments:
        print_most_frequent(source)
        return 0
    is_over = False
    for folder, (lines, names) in sorted(vague_names(source).items()):
        rate = 1000 * names.total() / max(lines, 1)
        if rate > LIMIT:
            is_over = True
            words = ", ".join(f"{name} {count}" for name, count in names.most_common(12))
            print(
                f"{source / folder}: {rate:.1f} vague names per 1,000 lines, at most {LIMIT}: {words}"
            )
        elif "--all" in arguments:
            print(f"{folder:24} {rate:6.1f} of {LIMIT}: {names.most_common(8)}")
    if is_over:
        print(
            "name a value after what it holds: checkpoint, ranks, row, path (tests/support/names.py)"
        )
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
