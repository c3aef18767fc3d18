"""tests/README.md names the tests that `make test` leaves out."""

from cases import README, with_list


def test_what_make_test_leaves_out_is_listed() -> None:
    """`python tests/support/cases.py` writes the list anew."""
    readme = README.read_text("utf-8")
    assert with_list(readme) == readme
