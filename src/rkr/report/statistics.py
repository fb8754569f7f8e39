"""What differences mean: of two methods over the same orders and seeds, and to a number of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rkr.errors import UsageError
from rkr.experiment import metrics
from rkr.experiment.metrics import Spread, spread
from rkr.experiment.results import Result
from rkr.report.protocol import require_one_protocol

ROUNDING = 1e-9  # of sums of decimal fractions, which must not decide whether a number lies in an interval


@dataclass(frozen=True)
class Paired:
    """How much better the second of two methods is, over runs that both have; in fractions."""

    difference: Spread | None  # None if they have no run in common
    p: float | None  # None from fewer than two pairs
    pairs: tuple[str, ...]  # their orders and seeds
    left_out: tuple[str, ...]  # finished runs without a partner, such as "rkr B seed 3"


def paired(first: Sequence[Result], second: Sequence[Result]) -> Paired:
    """Compare two methods over the orders and seeds in which both have a finished run.

    The same order and seed give both methods the same tasks, so the differences vary less than either method does: the
    interval and p are of Student's paired t-test.
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
        left_out=tuple(f"{run.method} {run.label}" for run in alone),
    )


def _by_run(runs: Sequence[Result]) -> dict[tuple[str, int], Result]:
    found: dict[tuple[str, int], Result] = {}
    for run in runs:
        if run.finished and found.setdefault((run.order, run.seed), run) is not run:
            raise UsageError(f"{run.folder}: {run.method} {run.label} is there twice")
    return found


def p_value(differences: Sequence[float]) -> float:
    """How likely a mean at least this far from 0 is by chance: 2 P(T > |t|), t = mean √n / s with n - 1 degrees.

    Differences that are all the same have no s: p is 0 then, but 1 if they are nothing at all.
    """
    if len(differences) < 2:
        raise UsageError("one difference alone has no p-value")
    from scipy.special import stdtr  # type: ignore[import-untyped]

    found = spread(differences)
    if not found.std:
        return 1.0 if found.mean == 0 else 0.0
    return float(2 * stdtr(found.n - 1, -abs(found.mean) * math.sqrt(found.n) / found.std))


def verdict(
    ours: Spread, paper: float, paper_half_width: float | None = None, comparable: bool = True, why: str = ""
) -> str:
    """Our number beside the paper's, all in the same unit (percent), in words:

    - "not comparable: other features" unless `comparable`; `why` comes after the colon
    - "within the paper's interval" if the paper prints one and our mean lies in it, its ends included
    - "the paper's number is within our interval" if not, but ours, of at least two runs, contains that number
    - "below by 1.23", "above by 0.40" else: from our mean to the paper's number
    - "the same as the paper's" instead where that rounds to 0.00
    """
    if not comparable:
        return f"not comparable: {why}" if why else "not comparable"
    difference = ours.mean - paper
    if paper_half_width is not None and abs(difference) <= paper_half_width + ROUNDING:
        return "within the paper's interval"
    if ours.n >= 2 and ours.half_width is not None and abs(difference) <= ours.half_width + ROUNDING:
        return "the paper's number is within our interval"
    if round(abs(difference), 2) == 0:
        return "the same as the paper's"
    return f"{'below' if difference < 0 else 'above'} by {abs(difference):.2f}"
