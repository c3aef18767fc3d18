r"""Final answers of mathematical texts: found, brought into a normal form, and compared exactly.

The forms are those of GSM8K (`#### 1,234`) and of MATH (`\boxed{\frac{1}{2}}`): numbers with thousands
separators, units and percent signs, fractions, roots, intervals, tuples, sets and lists. Numbers are
compared exactly: rational ones as fractions, others with 50 digits, so that `3.14` is not `\pi`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from instar.extensions.grpo.numbers import NotANumber, Number, evaluate_expression

MOST_CHARACTERS = 400
"""an answer that is longer is compared as text"""

_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_STATED = re.compile(
    r"(?:final |correct )?answer[*_`]*(?: is|:| =)[ \t:]*(.+?)(?:\.?[ \t]*(?:\n|$)|\.[*_`]*[ \t])",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[-−+]?(?:\\?\$)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?(?:\\?%)?")
_EMPHASIZED = re.compile(r"(?<![\w)}])(\*{1,3}|_{1,2}|`+)(?=\S)(.+?)(?<=\S)\1(?!\w)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def final_answer(text: str) -> str | None:
    r"""Return the answer that a text gives at its end, or None.

    The first of these that occurs and is not empty, and of several the last: `\boxed{…}`, `#### …`, "the answer
    is …", a number. Markdown around an answer is no part of it.
    """
    if (box := _boxed_answer(text)) is not None:
        return box
    for pattern in (_MARKED, _STATED):
        answers = [_without_emphasis(match[1]) for match in pattern.finditer(text)]
        if answers and answers[-1]:
            return answers[-1]
    numbers = _NUMBER.findall(text)
    return numbers[-1].rstrip(",") if numbers else None


def _without_emphasis(text: str) -> str:
    """Return a line without the marks of Markdown around it, or around parts of it: `**42** apples` is 42 apples."""
    plain = _EMPHASIZED.sub(r"\2", text).strip(" \t*_`:")
    return plain if plain == text.strip() else plain.removesuffix(".")


def is_correct(completion: str, expected: str) -> bool:
    """Return whether the final answer of a completion equals `expected`, itself an answer or a solution."""
    answer = final_answer(completion)
    return answer is not None and same_answer(answer, final_answer_of_solution(expected))


def final_answer_of_solution(solution: str) -> str:
    r"""Return the answer that a reference solution marks by `\boxed` or `####`, or all of it."""
    marks = _MARKED.findall(solution)
    box = _boxed_answer(solution)
    return box if box is not None else marks[-1].strip() if marks else solution.strip()


def same_answer(answer: str, expected: str) -> bool:
    """Return whether two answers are equal. Commas separate thousands, or else the items of a list."""
    texts = _plain(answer), _plain(expected)
    if texts[0] == texts[1]:
        return bool(texts[0])
    if max(map(len, texts)) > MOST_CHARACTERS:
        return False
    plain_texts = (_THOUSANDS.sub("", texts[0]), _THOUSANDS.sub("", texts[1]))
    return _same(plain_texts[0], plain_texts[1]) or (
        texts != plain_texts and _same(texts[0], texts[1])
    )


def _boxed_answer(text: str) -> str | None:
    """Return the content of the last box, whose braces are balanced, or None."""
    for match in reversed([*_BOX.finditer(text)]):
        following = text[match.end() :]
        if not following.startswith("{"):
            return following.split("$")[0].split()[0] if following.split("$")[0].split() else None
        depth = 0
        for at, char in enumerate(following):
            depth += (char == "{") - (char == "}")
            if depth == 0:
                return following[1:at].strip()
    return None


_REPLACED = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"−|–", "-"),
        (r"\\(?:text|mbox|textbf|textit|mathrm|mathbf|textrm)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\left|\\right|\\displaystyle|\\[bB]igg?[lr]?(?![a-z])", ""),
        (r"\\[()\[\]]|\\?\$|€|£", ""),
        (r",\\!\s*", ","),
        (r"\\[!,;:]|~|\\(?:quad|qquad)(?![a-z])|\\ |(?<=\d)\{,\}(?=\d)", " "),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\\degree(?:s)?(?![a-z])", " degrees "),
        (r"\\%", "%"),
        (r"\\(?:lbrace|\{)", "⦃"),
        (r"\\(?:rbrace|\})", "⦄"),
        (r"∪", r"\\cup "),
        (r"∞", r"\\infty "),
        (r"π", r"\\pi "),
        (r"√", r"\\sqrt"),
        (r"×", r"\\times "),
        (r"±", r"\\pm "),
        (r"\\(?:emptyset|varnothing)(?![a-z])|∅", "⦃⦄"),
    )
]
_DIGIT_GROUPS = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d])")
_ASSIGNED = re.compile(r"^[A-Za-z](?:_\{?\w+\}?|\([a-z]\))?\s*(?:=|\\in(?![a-z])|∈)\s*")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SPACES = re.compile(r"\s+")


def _plain(text: str) -> str:
    """Return a text without markup that has no meaning."""
    for pattern, by in _REPLACED:
        text = pattern.sub(by, text)
    text = _SPACES.sub(" ", text).strip(" ,;:").rstrip(". ")
    text = _DIGIT_GROUPS.sub(lambda match: match[0].replace(" ", ""), text)
    return _ASSIGNED.sub("", text)


def _same(answer: str, expected: str) -> bool:
    """Compare two texts in one reading of their commas."""
    return _value(answer) == _value(expected) or _same_quantity(answer, expected)


@dataclass(frozen=True)
class _Group:
    """Several values: an interval or tuple with its brackets, or a set or list without order."""

    brackets: str
    items: tuple[object, ...]


def _value(text: str) -> object:
    """Return a value whose equality is that of answers."""
    parts = [*_split(text, r"\cup")]
    if len(parts) > 1:
        return _Group("∪", _as_multiset(parts))
    text = parts[0]
    if text[:1] in tuple("([⦃") and text[-1:] in tuple(")]⦄") and _closes_at(text) == len(text) - 1:
        items = [*_split(text[1:-1], ",")]
        if text[0] == "⦃":
            return _Group("", _as_multiset(items))
        if len(items) > 1:
            return _Group(text[0] + text[-1], tuple(map(_value, items)))
        inner = text[1:-1].strip()
        return _value(inner) if text[0] == "(" and text[-1] == ")" and inner else text
    items = [*_split(re.sub(r"\s+(?:and|or)\s+", ",", text), ",")]
    if len(items) > 1:
        return _Group("", _as_multiset(items))
    if r"\pm" in text:
        return _Group("", _as_multiset([text.replace(r"\pm", sign) for sign in "+-"]))
    try:
        return evaluate_expression(text)
    except NotANumber:
        return _as_text(text)


def _as_multiset(texts: list[str]) -> tuple[object, ...]:
    counts = Counter(map(_value, texts))
    return (frozenset(counts.items()),)


def _split(text: str, separator: str) -> Iterator[str]:
    """Yield the parts of a text between separators that no bracket encloses."""
    depth = begin = 0
    for at, char in enumerate(text):
        depth += (char in "([{⦃") - (char in ")]}⦄")
        if depth == 0 and text.startswith(separator, at) and at >= begin:
            yield text[begin:at].strip()
            begin = at + len(separator)
    yield text[begin:].strip()


def _closes_at(text: str) -> int:
    """Return where the first bracket is closed, by a bracket of any kind."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char in "([{⦃") - (char in ")]}⦄")
        if depth == 0:
            return at
    return -1


def _as_text(text: str) -> str:
    """Return the form in which texts are compared: without spaces and braces around one character."""
    if re.fullmatch(r"[A-Za-z]+(?: [A-Za-z]+)*", text):
        return text.lower().replace(" ", "")
    return re.sub(r"\{(\w)\}", r"\1", text.replace(" ", ""))


_WITH_UNIT = re.compile(
    r"(?P<number>.*[\d.)}])(?:\s+|\s*(?=degrees|%))(?P<unit>[^\d+*/=^\\(){}]+(?:\^\{?\d\}?)?)"
)


def _same_quantity(answer: str, expected: str) -> bool:
    """Compare numbers of which one or both have a unit. A missing unit is that of the other.

    50% is 50, as data sets leave the sign out, and 0.5 beside a number without a sign.
    """
    first, two = _quantity(answer), _quantity(expected)
    if first is None or two is None or not (first[1] or two[1]):
        return False
    (number, unit), (other, other_unit) = first, two
    if unit and other_unit:
        return unit == other_unit and number == other
    percent = number if unit == "%" else other if other_unit == "%" else None
    return number == other or (
        percent is not None and (other if unit == "%" else number) == percent / 100
    )


def _quantity(text: str) -> tuple[Number, str] | None:
    match = _WITH_UNIT.fullmatch(text)
    try:
        if match is None:
            return evaluate_expression(text), ""
        unit = match["unit"].strip().lower().replace(" ", "")
        return evaluate_expression(match["number"]), unit.rstrip("s") or unit
    except NotANumber:
        return None
