r"""Answers as models and data sets write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.extensions.grpo.answers import final_answer, is_correct, same_answer

EQUAL = [
    # numbers
    ("1,234", "1234"),
    ("1{,}000", "1000"),
    (r"11,\! 000", "11000"),
    (r"10\,000", "10000"),
    ("1 000 000", "1,000,000"),
    ("−7", "-7"),
    ("+3", "3"),
    ("7.", "7"),
    (".5", "0.5"),
    ("0.50", r"\frac12"),
    ("3.2e3", "3200"),
    (r"3.2\times10^{3}", "3200"),
    (r"5\cdot 10^{-3}", "0.005"),
    ("2^{10}", "1024"),
    ("2/4", "1/2"),
    (r"-\infty", r"-\infty"),
    # fractions and roots
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac12", "1/2"),
    (r"\tfrac{3}{4}", "0.75"),
    (r"1\frac{1}{2}", "3/2"),
    (r"-1\frac12", "-3/2"),
    (r"\frac12\frac34", "3/8"),
    (r"2\cdot1\frac12", "3"),
    (r"1\frac12\frac12", "3/4"),
    (r"3/1\frac12", "2"),
    (r"3-1\frac12", "1.5"),
    (r"2^3\frac12", "4"),
    (r"\sqrt2\frac12", r"\frac{\sqrt2}{2}"),
    (r"2\frac{\pi}{3}", r"\frac{2\pi}{3}"),
    (r"0.5\frac12", "1/4"),
    (r"\frac{-1}{2}", r"-\frac12"),
    (r"\frac{\frac12}{2}", "1/4"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"),
    (r"\sqrt[3]{8}", "2"),
    (r"\sqrt{16}", "4"),
    (r"\frac{3}{4}\pi", r"\frac{3\pi}{4}"),
    ("π/2", r"\frac{\pi}{2}"),
    # units and percent
    (r"\$18", "18"),
    ("18 dollars", "$18.00"),
    ("12 apples", "12"),
    (r"5\text{ cm}^2", "5"),
    (r"30^\circ", "30"),
    ("90 degrees", r"90^{\circ}"),
    (r"50\%", "50"),
    ("50%", "0.5"),
    (r"25\%", r"\frac14"),
    # several values
    ("(0,1]", r"\left(0, 1\right]"),
    (r"[0,\infty)", r"\left[0, \infty\right)"),
    (r"(\frac12, -3)", "(0.5,-3.0)"),
    ("(1,234)", "(1, 234)"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1, 2", "2,1"),
    ("1 and 2", "2, 1"),
    (r"1\pm\sqrt{2}", r"1+\sqrt2, 1-\sqrt2"),
    (r"(-\infty,0)\cup(1,\infty)", r"(1,\infty) \cup (-\infty, 0)"),
    (r"\emptyset", r"\{\}"),
    # markup and words
    ("x=5", "5"),
    (r"x \in [1,2]", "[1,2]"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(A)}", "A"),
    ("x^{2}+1", "x^2 + 1"),
]
DIFFERENT = [
    ("3.14", r"\pi"),
    ("1.414", r"\sqrt2"),
    ("1/3", "0.333"),
    ("5 cm", "5 m"),
    ("50%", "0.5%"),
    ("(0,1)", "[0,1]"),
    ("(1,2)", "(2,1)"),
    (r"\{1,2\}", "(1,2)"),
    ("1,1,2", "1,2,2"),
    ("12", "1, 2"),
    ("5x", "5"),
    ("-5", "5"),
    ("10", "1"),
    (r"-1\frac12", "-1/2"),
    (r"\frac12\frac34", "5/4"),
    (r"2\cdot1\frac12", "5/2"),
    ("x", "y"),
    ("", "5"),
    ("", ""),
    (r"\sqrt{-1}", "1"),
    ("1/0", "0"),
    ("9^{9^{9^9}}", "1"),
    ("1e9999", "1"),
    ("(" * 200, "1"),
    ("1" * 100_000, "1"),
]


@pytest.mark.parametrize(("answer", "other"), EQUAL)
def test_two_forms_of_one_answer_are_equal(answer: str, other: str) -> None:
    assert same_answer(answer, other)
    assert same_answer(other, answer)


@pytest.mark.parametrize(("answer", "other"), DIFFERENT, ids=range(len(DIFFERENT)))
def test_two_answers_differ(answer: str, other: str) -> None:
    assert not same_answer(answer, other)
    assert not same_answer(other, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} and 3", r"\frac{1}{2}"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"$\boxed 5$", "5"),
        (r"\boxed{never closed", None),
        ("6 * 7 = 42\n#### 1,234\nmore 5", "1,234"),
        ("#### 1\n#### 2", "2"),
        ("The answer is 7.", "7"),
        ("Answer: -3/4", "-3/4"),
        ("The final answer is $7.50.\nThanks 2", "$7.50"),
        ("12 - 5 = 7 so", "7"),
        ("total: 1,200.", "1,200"),
        ("The answer is **42**.", "42"),
        ("The answer is **42.** So 7", "42"),
        ("The answer is: **42** apples.\nThanks 2", "42 apples"),
        ("The answer is `42`.", "42"),
        ("The **answer** is *x_1*.", "x_1"),
        ("**Final Answer:** 42\n2 thanks", "42"),
        ("**Final Answer**: __-3/4__", "-3/4"),
        ("__Answer__: 2*3*4", "2*3*4"),
        ("#### **1,234**", "1,234"),
        ("The answer is:\n42", "42"),
        ("**Final answer:**\n\n42", "42"),
        ("6 * 7 = 42\n####", "42"),
        ("The answer is :", None),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_answer_of_a_text_is_found(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_completions_are_compared_with_solutions_of_both_data_sets() -> None:
    gsm8k = "He has 20 - 8 = <<20-8=12>>12 left.\nHe buys 6.\n#### 18"
    assert is_correct("20 - 8 is 12, and 6 more are $18. The answer is 18 dollars.", gsm8k)
    assert not is_correct("The answer is 12.", gsm8k)
    solution = r"Factoring gives $x=\boxed{\frac{3}{2}}$, since $2x=3$."
    assert is_correct(r"Thus \boxed{1.5}", solution)
    assert not is_correct(r"2x = 3", solution)
    assert is_correct("7", "7")


texts = st.text(alphabet=r"0123456789.,-+/*^(){}[]\ $%=" + "fracsqtboxedpi∞cup", max_size=60)


@given(texts, texts)
def test_any_text_is_compared_and_equality_is_symmetric(answer: str, other: str) -> None:
    assert same_answer(answer, other) == same_answer(other, answer)
    final_answer(answer)
