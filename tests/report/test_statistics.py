"""Differences: by hand, and by scipy's own t-test."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from rkr import UsageError
from rkr.experiment.metrics import Spread, spread
from rkr.report import paired, verdict
from rkr.report.statistics import p_value


def runs(a_result, method, values, orders="ABCDE"):
    """A run of one task for each order, with these accuracies."""
    return [a_result([[value]], method=method, order=order) for order, value in zip(orders, values, strict=False)]


def test_pairs_by_hand(a_result):
    """Differences 0.1, 0.2, 0.3: mean 0.2, s 0.1; t = 0.2 √3 / 0.1 = 3.4641, with 2 degrees p = 1 - t / √(t² + 2)."""
    first, second = runs(a_result, "ewc", (0.1, 0.3, 0.5)), runs(a_result, "rkr", (0.2, 0.5, 0.8))
    found = paired(first, second)
    assert found.difference is not None
    assert (found.difference.mean, found.difference.std) == pytest.approx((0.2, 0.1))
    assert found.difference.half_width == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5)
    assert found.difference.n == 3
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))
    assert (found.pairs, found.unpaired) == (("A", "B", "C"), ())
    back = paired(second, first)
    assert back.difference is not None
    assert (back.difference.mean, back.p) == (pytest.approx(-0.2), pytest.approx(found.p))


def test_pairs_are_by_order_and_seed_and_finished(a_result):
    first = [
        a_result([[0.5]], method="ewc", order="A"),
        a_result([[0.6]], method="ewc", order="B", seed=1),
        a_result([[0.1]], method="ewc", order="C"),
    ]
    second = [
        a_result([[0.9]], order="B", seed=2),
        a_result([[0.8]], order="B", seed=1),
        a_result([[0.9]], order="A"),
        a_result([], tasks=1, order="C"),
    ]
    found = paired(first, second)
    assert found.pairs == ("A", "B seed 1")
    assert found.difference is not None
    assert found.difference.mean == pytest.approx((0.4 + 0.2) / 2)
    assert found.unpaired == ("ewc C", "rkr B seed 2")


def test_one_pair_tells_nothing_of_chance(a_result):
    found = paired(runs(a_result, "ewc", [0.5]), runs(a_result, "rkr", [0.75]))
    assert found.difference == Spread(0.25, None, None, 1)
    assert found.p is None
    none = paired(runs(a_result, "ewc", [0.5], "A"), runs(a_result, "rkr", [0.75], "B"))
    assert (none.difference, none.p, none.pairs, none.unpaired) == (None, None, (), ("ewc A", "rkr B"))
    with pytest.raises(UsageError, match="a p-value needs at least two differences"):
        p_value([0.5])


def test_several_tasks(a_result):
    matrix = [[0.5], [0.5, 0.7]]
    found = paired([a_result(matrix, method="ewc")], [a_result([[0.9], [0.8, 0.9]])])
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(0.85 - 0.6)


def test_a_run_is_not_paired_twice_nor_with_another_protocol(a_result):
    one, other = a_result(), a_result(method="ewc", settings={"training": {"epochs": 9}})
    with pytest.raises(UsageError, match="duplicate run of rkr A"):
        paired([one, a_result()], [one])
    with pytest.raises(UsageError, match=r"schedule\.epochs"):
        paired([one], [other])


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=2, max_size=12))
def test_p_is_that_of_scipy(pairs):
    differences = [(b - a) / 1000 for a, b in pairs]
    if len({b - a for a, b in pairs}) == 1:
        assert p_value([0.5] * len(pairs)) == 0
        assert p_value([0.0] * len(pairs)) == 1
        return
    expected = ttest_rel([b / 1000 for _, b in pairs], [a / 1000 for a, _ in pairs])
    assert p_value(differences) == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    interval, found = expected.confidence_interval(0.95), spread(differences)
    assert found.half_width is not None
    assert found.mean - found.half_width == pytest.approx(interval.low, abs=1e-9)
    assert found.mean + found.half_width == pytest.approx(interval.high, abs=1e-9)


ONE, FIVE = Spread(69.0, None, None, 1), Spread(69.0, 0.5, 0.62, 5)


@pytest.mark.parametrize(
    ("ours", "paper", "half_width", "text"),
    [
        (ONE, 69.58, 0.58, "within the paper's interval"),  # at its very end
        (ONE, 69.58, 0.55, "0.58 below"),
        (ONE, 69.58, None, "0.58 below"),
        (ONE, 68.6, None, "0.40 above"),
        (ONE, 69.004, None, "same as the paper"),
        (FIVE, 69.58, 0.55, "our interval contains the paper's value"),
        (FIVE, 69.58, None, "our interval contains the paper's value"),
        (FIVE, 69.62, None, "our interval contains the paper's value"),
        (FIVE, 69.63, 0.6, "0.63 below"),
        (FIVE, 67.77, None, "1.23 above"),
        (Spread(69.0, None, 5.0, 1), 68.0, None, "1.00 above"),  # one run has no interval, whatever it says
    ],
)
def test_verdicts(ours, paper, half_width, text):
    assert verdict(ours, paper, half_width, True, "") == text


def test_no_verdict_on_what_cannot_be_compared():
    assert verdict(ONE, 69.0, 0.5, False, "different features") == "not comparable: different features"
    assert verdict(ONE, 69.0, comparable=False) == "not comparable"
