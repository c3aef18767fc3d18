import pytest
from hypothesis import given
from hypothesis import strategies as st

from instar.config.budget import MOST, Budget, Counters, Kind, eta, parse_budget


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("2000it", "steps", 2000),
        ("2_000it", "steps", 2000),
        ("2kit", "steps", 2000),
        ("1.5kit", "steps", 1500),
        ("50Mtok", "tokens", 50_000_000),
        ("1.5Btok", "tokens", 1_500_000_000),
        ("1e9 tok", "tokens", 1_000_000_000),
        ("0.1Btok", "tokens", 100_000_000),
        ("10ksamples", "samples", 10_000),
        ("3ep", "epochs", 3),
        ("0.5ep", "epochs", 0.5),
        ("90s", "seconds", 90),
        ("10min", "seconds", 600),
        ("2h", "seconds", 7200),
        (" 1.5 h ", "seconds", 5400),
        ("loss<3.0", "loss", 3.0),
        ("loss < 1e-3", "loss", 0.001),
        ("loss<-2", "loss", -2.0),
    ],
)
def test_the_forms(text: str, kind: Kind, amount: float) -> None:
    assert parse_budget(text) == Budget(kind, amount)


@pytest.mark.parametrize(
    "text",
    ["", "2000", "it", "-3it", "0it", "1.5it", "3 epochs", "2kmin", "50mtok", "loss>3", "loss<",
     "1e400s", "3it 4it", "²it", "1_ep_", "nan ep", "loss<inf", "1__e5it5"],
)  # fmt: skip
def test_what_is_no_budget_is_told_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a budget.*2000it .*loss<3\.0"):
        parse_budget(text)


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (Budget("steps", 2000), "2000it"),
        (Budget("tokens", 1_500_000_000), "1500Mtok"),
        (Budget("tokens", 2048), "2048tok"),
        (Budget("samples", 10), "10samples"),
        (Budget("epochs", 2.5), "2.5ep"),
        (Budget("seconds", 90), "90s"),
        (Budget("seconds", 600), "10min"),
        (Budget("seconds", 7200), "2h"),
        (Budget("loss", 3.0), "loss<3.0"),
    ],
)
def test_the_canonical_text(budget: Budget, text: str) -> None:
    assert str(budget) == text


integers = st.integers(1, 10**18).map(float)
positive = st.floats(min_value=0, max_value=MOST, exclude_min=True)
finite = st.floats(-MOST, MOST)
budgets = st.one_of(
    st.builds(Budget, st.sampled_from(["steps", "tokens", "samples"]), integers),
    st.builds(Budget, st.sampled_from(["epochs", "seconds"]), positive),
    st.builds(Budget, st.just("loss"), finite),
)


@given(budgets)
def test_a_budget_is_read_back_from_its_text(budget: Budget) -> None:
    assert parse_budget(str(budget)) == budget


@given(st.text(alphabet="0123456789_.eE+-kMBT itokepsmnhlo<"))
def test_any_text_is_a_budget_or_a_value_error(text: str) -> None:
    try:
        budget = parse_budget(text)
    except ValueError:
        return
    assert parse_budget(str(budget)) == budget


@pytest.mark.parametrize("amount", [0, -1, 0.5, float("inf"), float("nan")])
def test_an_impossible_number_of_steps_is_refused(amount: float) -> None:
    with pytest.raises(ValueError, match=r"budget must be|are whole"):
        Budget("steps", amount)


def test_the_time_left_is_that_of_the_pace_of_what_was_timed() -> None:
    budgets, counters = [Budget("steps", 200_000)], Counters(100_060, active_s=60.0)
    assert eta(budgets, counters, 0.0, 60.0, Counters(100_000).amounts(0.0)) == pytest.approx(
        99_940
    )
    assert eta(budgets, Counters(50_000), 0.0, 60.0) == pytest.approx(180)
    assert eta(budgets, Counters(100_000), 0.0, 1.0, Counters(100_000).amounts(0.0)) is None
