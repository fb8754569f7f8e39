"""Numbers from accuracy matrices: by hand, by closed forms, and by what must hold for every matrix."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkr import UsageError
from rkr.experiment import metrics

MATRIX = [[0.9], [0.7, 0.8], [0.6, 0.75, 0.95]]
ACCURACY = st.floats(0, 1)


@st.composite
def matrices(draw: st.DrawFn, least: int = 1) -> list[list[float]]:
    tasks = draw(st.integers(least, 6))
    return [draw(st.lists(ACCURACY, min_size=i, max_size=i)) for i in range(1, tasks + 1)]


def test_by_hand():
    assert metrics.average(MATRIX) == pytest.approx((0.6 + 0.75 + 0.95) / 3)
    assert metrics.running_mean(MATRIX) == pytest.approx([0.9, 0.75, 2.3 / 3])
    assert metrics.during(MATRIX) == [0.9, 0.8, 0.95]
    assert metrics.after(MATRIX) == [0.6, 0.75, 0.95]
    assert metrics.forgetting(MATRIX) == pytest.approx((0.3 + 0.05) / 2)
    assert metrics.backward_transfer(MATRIX) == pytest.approx(-(0.3 + 0.05) / 2)
    assert metrics.forward_transfer(MATRIX, [0.1, 0.7, 1.0]) == pytest.approx((0.1 - 0.05) / 2)


def test_forgetting_counts_from_the_best_and_not_from_the_first():
    matrix = [[0.5], [0.9, 0.6], [0.7, 0.6, 0.8]]  # task 1 gained 0.4, then lost 0.2
    assert metrics.forgetting(matrix) == pytest.approx(0.1)
    assert metrics.backward_transfer(matrix) == pytest.approx(0.1)


def test_a_final_accuracy_above_all_before_is_negative_forgetting():
    assert metrics.forgetting([[0.5], [0.75, 0.5]]) == -0.25


def test_one_task_cannot_tell_about_others():
    assert metrics.average([[0.5]]) == 0.5
    assert metrics.running_mean([[0.5]]) == [0.5]
    assert metrics.forgetting([[0.5]]) is None
    assert metrics.backward_transfer([[0.5]]) is None
    assert metrics.forward_transfer([[0.5]], [0.4]) is None


@pytest.mark.parametrize("matrix", [[], [[]], [[0.5], [0.5]], [[0.5], [0.5, 0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]])
def test_other_shapes_are_refused(matrix):
    for measure in (metrics.average, metrics.running_mean, metrics.during, metrics.after):
        with pytest.raises(UsageError, match="not a lower-triangular matrix"):
            measure(matrix)


def test_forward_transfer_needs_every_task_alone():
    with pytest.raises(UsageError, match="3 tasks, but 2 accuracies"):
        metrics.forward_transfer(MATRIX, [0.5, 0.5])


@given(matrices(least=2))
def test_forgetting_is_at_least_what_backward_transfer_lost(matrix):
    forgetting, backward = metrics.forgetting(matrix), metrics.backward_transfer(matrix)
    assert forgetting is not None
    assert backward is not None
    assert -1 <= -backward <= forgetting <= 1


@given(st.lists(ACCURACY, min_size=2, max_size=8))
def test_a_method_that_isolates_tasks_forgets_nothing(accuracies):
    matrix = [accuracies[:i] for i in range(1, len(accuracies) + 1)]
    assert metrics.forgetting(matrix) == 0
    assert metrics.backward_transfer(matrix) == 0
    assert metrics.during(matrix) == metrics.after(matrix) == accuracies
    assert metrics.average(matrix) == metrics.running_mean(matrix)[-1]
    assert metrics.forward_transfer(matrix, accuracies) == 0


@given(matrices(), st.floats(0, 1))
def test_means_lie_between_the_extremes(matrix, alone):
    for row, mean in zip(matrix, metrics.running_mean(matrix), strict=True):
        assert min(row) - 1e-12 <= mean <= max(row) + 1e-12
    forward = metrics.forward_transfer(matrix, [alone] * len(matrix))
    if forward is not None:
        assert forward == pytest.approx(sum(metrics.during(matrix)[1:]) / (len(matrix) - 1) - alone, abs=1e-12)


def test_average_incremental_accuracy(a_result):
    run = a_result()
    assert metrics.incremental(run) is None  # only after the last task
    rows = ((0.9,), (0.6, 0.8), (0.3, 0.6, 0.6))
    assert metrics.incremental(replace(run, agnostic=rows)) == pytest.approx((0.9 + 0.7 + 0.5) / 3)
    assert metrics.incremental(replace(run, agnostic=rows[:2])) is None


def test_order_robustness_needs_as_many_orders_as_the_paper(a_result):
    final = [[0.5], [0.5, 0.5], [0.9, 0.6, 0.5]]
    five = [a_result(final, order=order, groups=[[0, 1], [2, 3], [4, 5]]) for order in "ABCDE"]
    assert metrics.order_robustness(five[:4]) is None
    assert metrics.order_robustness([*five[:4], a_result(final, order="A", seed=1)]) is None  # a seed is no order
    found = metrics.order_robustness(five)
    assert found is not None
    assert (found.mean, found.worst) == (0, 0)


def test_order_robustness_follows_the_classes_and_not_the_position(a_result, monkeypatch):
    monkeypatch.setattr(metrics, "ORDERS", 2)
    final = [[0.5], [0.5, 0.5], [0.9, 0.6, 0.5]]
    a = a_result(final, order="A", groups=[[0, 1], [2, 3], [4, 5]])
    b = a_result(final, order="B", groups=[[5, 4], [0, 1], [2, 3]])  # 4 and 5: 0.5 and 0.9; 0 and 1: 0.9 and 0.6
    found = metrics.order_robustness([a, b])
    assert found is not None
    assert found.disparity == pytest.approx({(0, 1): 0.3, (2, 3): 0.1, (4, 5): 0.4})
    assert found.mean == pytest.approx(0.8 / 3)
    assert found.worst == pytest.approx(0.4)


def test_order_robustness_is_undefined_without_the_same_classes(a_result, monkeypatch):
    monkeypatch.setattr(metrics, "ORDERS", 2)
    a = a_result(order="A", groups=[[0, 1], [2, 3], [4, 5]])
    assert metrics.order_robustness([]) is None
    assert metrics.order_robustness([a]) is None
    assert metrics.order_robustness([a, a_result(order="B", groups=[[0, 2], [1, 3], [4, 5]])]) is None
    assert metrics.order_robustness([a, a_result([[0.5]], tasks=3, order="C")]) is None
    twice = [a_result(order=o, groups=[[0, 1], [0, 1], [4, 5]]) for o in "DE"]
    assert metrics.order_robustness(twice) is None


def test_unchanged_pairs_come_from_the_hashes(a_result):
    assert metrics.unchanged_pairs(a_result([[0.5] * i for i in range(1, 11)], isolated=True)) == (45, 45)
    assert metrics.unchanged_pairs(a_result(isolated=False)) == (0, 3)
    assert metrics.unchanged_pairs(a_result([[0.5]])) == (0, 0)
    assert metrics.unchanged_pairs(a_result([[0.5], [0.5, 0.5]], tasks=9, isolated=True)) == (1, 1)


@pytest.mark.parametrize(
    ("n", "t"), [(2, 12.7062), (3, 4.30265), (4, 3.18245), (5, 2.77645), (11, 2.22814), (31, 2.04227)]
)
def test_spread_uses_students_t(n, t):
    """Quantiles from a printed table; the values 1..n have variance n (n + 1) / 12."""
    found = metrics.spread(range(1, n + 1))
    std = math.sqrt(n * (n + 1) / 12)
    assert (found.mean, found.n) == ((n + 1) / 2, n)
    assert found.std == pytest.approx(std)
    assert found.half_width == pytest.approx(t * std / math.sqrt(n), rel=2e-6)


def test_spread_of_one_value_claims_nothing():
    assert metrics.spread([0.5]) == metrics.Spread(0.5, None, None, 1)
    with pytest.raises(UsageError, match="no mean of no values"):
        metrics.spread([])


@given(st.floats(0, 1), st.integers(2, 20))
def test_equal_values_have_no_spread(value, n):
    found = metrics.spread([value] * n)
    assert (found.std, found.half_width) == (0, 0)
    assert found.mean == pytest.approx(value)
