"""Statistics of differences: between two methods over the same orders and seeds, and from the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rkr.errors import UsageError
from rkr.experiment import metrics
from rkr.experiment.metrics import Spread, spread
from rkr.experiment.results import Result
from rkr.report.protocol import require_one_protocol

ROUNDING = 1e-9  # tolerance for rounding errors at the ends of an interval


@dataclass(frozen=True)
class Paired:
    """The difference of two methods over their common orders and seeds: second minus first, as a fraction."""

    difference: Spread | None  # None if there are no common runs
    p: float | None  # None with fewer than two pairs
    pairs: tuple[str, ...]  # orders and seeds
    unpaired: tuple[str, ...]  # finished runs that only one method has, such as "rkr B seed 3"


def paired(first: Sequence[Result], second: Sequence[Result]) -> Paired:
    """Compare two methods with Student's paired t-test over the orders and seeds that both have finished.

    Pairing removes the variance between orders: with the same order and seed both methods learn the same tasks.
    """
    require_one_protocol([*first, *second])
    a, b = _by_run(first), _by_run(second)
    common = [key for key in a if key in b]
    gained = [metrics.average(b[key].matrix) - metrics.average(a[key].matrix) for key in common]
    alone = [run for runs, others in ((a, b), (b, a)) for key, run in runs.items() if key not in others]
    return Paired(
        difference=spread(gained) if gained else None,
        p=p_value(gained) if len(gained) > 1 else None,
        pairs=tuple(a[key].label for key in common),
        unpaired=tuple(f"{run.method} {run.label}" for run in alone),
    )


def _by_run(runs: Sequence[Result]) -> dict[tuple[str, int], Result]:
    found: dict[tuple[str, int], Result] = {}
    for run in runs:
        if run.finished and found.setdefault((run.order, run.seed), run) is not run:
            raise UsageError(f"{run.folder}: duplicate run of {run.method} {run.label}")
    return found


def p_value(differences: Sequence[float]) -> float:
    """The two-sided p-value of Student's t-test against a mean of 0: 2 P(T > |t|), t = mean √n / s, n - 1 degrees.

    If all differences are equal (s = 0), p is 1 if they are 0 and 0 otherwise.
    """
    if len(differences) < 2:
        raise UsageError("a p-value needs at least two differences")
    from scipy.special import stdtr  # type: ignore[import-untyped]

    found = spread(differences)
    if not found.std:
        return 1.0 if found.mean == 0 else 0.0
    return float(2 * stdtr(found.n - 1, -abs(found.mean) * math.sqrt(found.n) / found.std))


def verdict(
    ours: Spread, paper: float, paper_half_width: float | None = None, comparable: bool = True, why: str = ""
) -> str:
    """Compare our number with the paper's, both in percent:

    - "not comparable: different features" unless `comparable`; `why` follows the colon
    - "within the paper's interval" if the paper reports an interval and it contains our mean, ends included
    - "our interval contains the paper's value" if ours, from at least two runs, contains it
    - "same as the paper" if the difference rounds to 0.00
    - "1.23 below" or "0.40 above" otherwise: our mean relative to the paper's number
    """
    if not comparable:
        return f"not comparable: {why}" if why else "not comparable"
    difference = ours.mean - paper
    if paper_half_width is not None and abs(difference) <= paper_half_width + ROUNDING:
        return "within the paper's interval"
    if ours.n >= 2 and ours.half_width is not None and abs(difference) <= ours.half_width + ROUNDING:
        return "our interval contains the paper's value"
    if round(abs(difference), 2) == 0:
        return "same as the paper"
    return f"{abs(difference):.2f} {'below' if difference < 0 else 'above'}"
