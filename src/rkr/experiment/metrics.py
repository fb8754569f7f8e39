"""Numbers from an accuracy matrix: a_ij is the accuracy on task j after learning task i, j ≤ i ≤ T.

The matrix is lower-triangular, row i with i entries. What a matrix of one task cannot tell is None, not 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rkr.errors import UsageError
from rkr.experiment.results import Result

Matrix = Sequence[Sequence[float]]


FOR_A_BAND = 3  # runs: of two, the interval is as wide as a figure
ORDERS = 5  # from which AOPD and MOPD are computed: as many as in the paper


@dataclass(frozen=True)
class Spread:
    """A mean and its uncertainty, which is None for a single value."""

    mean: float
    std: float | None  # of the sample: divided by n - 1
    half_width: float | None  # the 95 % confidence interval is mean ± half_width
    n: int


@dataclass(frozen=True)
class OrderRobustness:
    """How much the final accuracy on classes depends on when they are learned (APD, Yoon et al. 2020)."""

    disparity: Mapping[tuple[int, ...], float]  # for each group of classes
    mean: float  # AOPD
    worst: float  # MOPD


def average(matrix: Matrix) -> float:
    """Mean accuracy over all tasks at the end: 1/T Σ_j a_Tj."""
    return fmean(_checked(matrix)[-1])


def running_mean(matrix: Matrix) -> list[float]:
    """Mean accuracy over the tasks so far, 1/i Σ_{j≤i} a_ij after each task i (the paper's ImageNet table)."""
    return [fmean(row) for row in _checked(matrix)]


def during(matrix: Matrix) -> list[float]:
    """Accuracy on each task right after learning it: a_jj."""
    return [row[-1] for row in _checked(matrix)]


def after(matrix: Matrix) -> list[float]:
    """Accuracy on each task at the end: a_Tj."""
    return list(_checked(matrix)[-1])


def forgetting(matrix: Matrix) -> float | None:
    """Mean drop from the best accuracy: 1/(T-1) Σ_{j<T} (max_{j≤i<T} a_ij - a_Tj), Chaudhry et al. 2018."""
    *earlier, final = _checked(matrix)
    lost = [max(row[j] for row in earlier[j:]) - final[j] for j in range(len(earlier))]
    return fmean(lost) if lost else None


def backward_transfer(matrix: Matrix) -> float | None:
    """Mean effect of later tasks on earlier ones: 1/(T-1) Σ_{j<T} (a_Tj - a_jj), Lopez-Paz & Ranzato 2017."""
    *earlier, final = _checked(matrix)
    gained = [final[j] - row[j] for j, row in enumerate(earlier)]
    return fmean(gained) if gained else None


def forward_transfer(matrix: Matrix, alone: Sequence[float]) -> float | None:
    """Mean effect of earlier tasks on later ones: 1/(T-1) Σ_{j>1} (a_jj - s_j).

    s_j is the accuracy of a network that learned only task j. With a head for each task there is nothing to test before
    the task is learned, so transfer is measured on what learning it yields.
    """
    learned = during(matrix)
    if len(alone) != len(learned):
        raise UsageError(f"{len(learned)} tasks, but {len(alone)} accuracies of tasks alone")
    gained = [a - s for a, s in zip(learned[1:], alone[1:], strict=True)]
    return fmean(gained) if gained else None


def incremental(result: Result) -> float | None:
    """Average incremental accuracy (iCaRL, Rebuffi et al. 2017): the mean over i of the accuracy on the tasks up to i,
    the task not being told. None where that was not tested after every task."""
    rows = [row for row in result.agnostic if row is not None]
    return fmean(map(fmean, rows)) if len(rows) == len(result.tasks) > 1 else None


def order_robustness(results: Sequence[Result]) -> OrderRobustness | None:
    """For each group of classes c, max_r p_rc - min_r p_rc over runs r in different orders; its mean and maximum.

    p_rc is the final accuracy in run r on the task of these classes. None unless all runs are finished and have the
    same groups, all different, or if there are fewer than `ORDERS` orders: a range grows with their number.
    """
    if len({result.order for result in results}) < ORDERS or not all(result.finished for result in results):
        return None
    finals = []
    for result in results:
        groups = [tuple(sorted(group)) for group in result.groups]
        final = dict(zip(groups, after(result.matrix), strict=True))
        if len(final) < len(groups):
            return None  # equal numbers of different sources, as in CIFAR-10 then CIFAR-100, cannot be told apart
        finals.append(final)
    if any(final.keys() != finals[0].keys() for final in finals):
        return None
    disparity = {g: max(f[g] for f in finals) - min(f[g] for f in finals) for g in sorted(finals[0])}
    return OrderRobustness(disparity, fmean(disparity.values()), max(disparity.values()))


def unchanged_pairs(result: Result) -> tuple[int, int]:
    """Number of pairs of a task and a later row whose logits are as when the task was learned, and of all pairs.

    T tasks make T (T-1) / 2 pairs. This compares the hashes themselves and does not rely on the run's own verdict.
    """
    same = pairs = 0
    for i, proof in enumerate(result.proofs):
        for task, then in zip(result.tasks[:i], result.proofs, strict=False):
            if task in proof and task in then:
                pairs += 1
                same += proof[task] == then[task]
    return same, pairs


def spread(values: Sequence[float]) -> Spread:
    """Mean, sample standard deviation s, and t_{0.975, n-1} s / √n, the half-width of Student's 95 % interval."""
    n = len(values)
    if n == 0:
        raise UsageError("there is no mean of no values")
    if n == 1:
        return Spread(float(values[0]), None, None, 1)
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # here because most callers have one value

    s = stdev(values)
    return Spread(fmean(values), s, float(stdtrit(n - 1, 0.975)) * s / math.sqrt(n), n)


def _checked(matrix: Matrix) -> Matrix:
    if not matrix or any(len(row) != i for i, row in enumerate(matrix, 1)):
        raise UsageError(f"not a lower-triangular matrix: rows of {[len(row) for row in matrix]} accuracies")
    return matrix
