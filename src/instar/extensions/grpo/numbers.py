r"""Values of numerical expressions in LaTeX or plain text, exact.

The grammar, in the order of precedence, with implicit products such as `2\sqrt{3}`, and mixed numbers such as
`1\frac{1}{2}`, a whole number before a fraction of whole numbers:

```
sum      = product (("+" | "-") product)*
product  = signed (("*" | "/" | "\cdot" | "\times" | nothing) signed)*
signed   = ("-" | "+") signed | power
power    = number "\frac" argument argument | atom ("^" argument)?
atom     = number | "(" sum ")" | "{" sum "}" | "\frac" argument argument
         | "\sqrt" ("[" number "]")? argument | "\pi" | "\infty"
argument = atom | one digit, as in \frac12
```
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal, DecimalException, localcontext
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import Any, TypeAlias

DIGITS = 50
"""precision of irrational numbers; they are equal if they agree to ten digits fewer"""
MOST_BITS = 4096
MOST_DEPTH = 32
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
_TOKEN = re.compile(
    r"\s*(?:(\d+\.?\d*|\.\d+)(?:[eE]([-+]?\d{1,4})(?![\d.]))?|(\\[a-z]+|[-+*/^(){}\[\]]))"
)


class NotANumber(ValueError):  # noqa: N818
    """A text is not a numerical expression."""


@dataclass(frozen=True)
class Irrational:
    """A number that is known to 40 digits."""

    rounded: Decimal

    def __truediv__(self, divisor: int) -> Irrational:
        return _irrational(self.rounded / divisor)


Number: TypeAlias = Fraction | Irrational
Value: TypeAlias = Fraction | Decimal


def evaluate_expression(text: str) -> Number:
    """Return the value of an expression.

    Raises:
        NotANumber: it is none, or too large.
    """
    with localcontext(Context(prec=DIGITS)):
        try:
            value = _Parser(text).result()
        except (ArithmeticError, DecimalException, RecursionError) as error:
            raise NotANumber(text) from error
        return value if isinstance(value, Fraction) else _irrational(value)


def _irrational(value: Decimal) -> Irrational:
    return Irrational(Context(prec=DIGITS - 10).plus(value).normalize())


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens: list[str | Fraction] = []
        self._depth = self._at = 0
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise NotANumber(text)
            self._tokens.append(match[3] or _decimal(match[1], match[2]))
            position = match.end()

    def result(self) -> Value:
        value = self._sum()
        if self._at < len(self._tokens):
            raise NotANumber(str(self._next()))
        return value

    def _next(self) -> str | Fraction | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self, *expected: str) -> str | None:
        """Consume the next token if it is one of these."""
        token = self._next()
        if isinstance(token, str) and token in expected:
            self._at += 1
            return token
        return None

    def _sum(self) -> Value:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise NotANumber("too deep")
        value = self._product()
        while sign := self._take("+", "-"):
            value = _combine(add if sign == "+" else sub, value, self._product())
        self._depth -= 1
        return value

    def _product(self) -> Value:
        value = self._signed_term()
        while True:
            if self._take("/", r"\div"):
                value = _combine(truediv, value, self._signed_term())
            elif self._take("*", r"\cdot", r"\times"):
                value = _combine(mul, value, self._signed_term())
            elif (token := self._next()) is None or token in ("+", "-", ")", "}", "]", "^"):
                return value
            elif isinstance(token, Fraction):
                raise NotANumber("two numbers in a row")
            else:
                value = _combine(mul, value, self._power())

    def _signed_term(self) -> Value:
        sign = 1
        while operator := self._take("+", "-"):
            sign = -sign if operator == "-" else sign
        value = self._power()
        return -value if sign < 0 else value

    def _power(self) -> Value:
        literal = self._next()
        value = self._atom()
        if isinstance(literal, Fraction) and self._next() == r"\frac":
            fraction = self._power()
            is_mixed = literal.denominator == 1 and isinstance(fraction, Fraction)
            return _combine(add if is_mixed else mul, value, fraction)
        if not self._take("^"):
            return value
        exponent = self._argument()
        if not isinstance(exponent, Fraction) or exponent.denominator > 2 or abs(exponent) > 1000:
            raise NotANumber("exponent")
        base = value if exponent.denominator == 1 else _root(value, 2)
        return _integer_power(base, exponent.numerator)

    def _atom(self) -> Value:
        token = self._next()
        if isinstance(token, Fraction):
            self._at += 1
            return token
        if bracket := self._take("(", "{"):
            value = self._sum()
            self._close(bracket)
            return value
        if self._take(r"\frac"):
            numerator = self._argument()
            return _combine(truediv, numerator, self._argument())
        if self._take(r"\sqrt"):
            degree = Fraction(2)
            if self._take("["):
                inner = self._sum()
                self._close("[")
                if not isinstance(inner, Fraction) or inner.denominator != 1 or not 1 < inner < 100:
                    raise NotANumber("degree of a root")
                degree = inner
            return _root(self._argument(), int(degree))
        if self._take(r"\pi"):
            return +_PI
        if self._take(r"\infty"):
            return Decimal("Infinity")
        raise NotANumber(str(token))

    def _close(self, bracket: str) -> None:
        if not self._take({"(": ")", "{": "}", "[": "]"}[bracket]):
            raise NotANumber("a bracket is not closed")

    def _argument(self) -> Value:
        r"""Return an atom; of a number without braces, one digit: \frac12 is one half."""
        token = self._next()
        if isinstance(token, Fraction) and token.denominator == 1 and token >= 10:
            digits = str(token.numerator)
            self._tokens[self._at] = Fraction(int(digits[1:]))
            if digits[1] == "0" and len(digits) > 2:
                raise NotANumber(digits)
            return Fraction(int(digits[0]))
        if self._take("-"):  # as in 10^-3
            return -self._atom()
        return self._atom()


def _decimal(number: str, exponent: str | None) -> Fraction:
    if len(number) > MOST_BITS // 4 or abs(int(exponent or 0)) > 1000:
        raise NotANumber(number)
    return Fraction(number.rstrip(".")) * Fraction(10) ** int(exponent or 0)


def _check_bounds(value: Value) -> Value:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
            raise NotANumber("too large")
    elif value.is_nan():
        raise NotANumber("undefined")
    return value


def _real(value: Value) -> Decimal:
    if isinstance(value, Decimal):
        return value
    return Decimal(value.numerator) / Decimal(value.denominator)


def _combine(operation: Callable[[Any, Any], Any], first: Value, second: Value) -> Value:
    """Return the result of an operation: exact of fractions, else of 50 digits."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return _check_bounds(operation(first, second))
    return _check_bounds(operation(_real(first), _real(second)))


def _integer_power(base: Value, exponent: int) -> Value:
    if isinstance(base, Decimal):
        return _check_bounds(base**exponent)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > MOST_BITS:
        raise NotANumber("too large")
    return _check_bounds(base**exponent)


def _root(value: Value, degree: int) -> Value:
    """Return a real root, as a fraction where it is one."""
    if isinstance(value, Fraction):
        sign = -1 if value < 0 else 1
        if sign < 0 and degree % 2 == 0:
            raise NotANumber("root of a negative number")
        top, bottom = (
            _whole_root(abs(part), degree) for part in (value.numerator, value.denominator)
        )
        if top is not None and bottom is not None:
            return Fraction(sign * top, bottom)
        return (
            sign * _real(abs(value)) ** (Decimal(1) / degree) if degree > 2 else _real(value).sqrt()
        )
    return value.sqrt() if degree == 2 else value ** (Decimal(1) / degree)


def _whole_root(number: int, degree: int) -> int | None:
    """Return the whole number whose power this is, or None."""
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**degree < number:
            low = middle + 1
        else:
            high = middle
    return low if low**degree == number else None
