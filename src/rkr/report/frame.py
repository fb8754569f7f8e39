"""`rkr.results`: runs as a tidy table of pandas, for analyses of one's own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rkr.errors import UsageError
from rkr.experiment.results import CLASSIFICATION, Result
from rkr.report.protocol import protocol
from rkr.report.scan import BEGUN, scan

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

BEFORE = ("recipe", "method", "order", "seed", "protocol", "task", "task_number", "after", "after_number")
COST = ("capacity_percent", "bytes", "parameters", "multiply_adds")
AFTER = ("agnostic", "unchanged", *COST, "finished", "folder", "commit", "train_seconds")
TYPES = {  # the same for any runs; multiply-adds and "unchanged" may be unknown
    **dict.fromkeys(("seed", "task_number", "after_number", "bytes", "parameters"), "int64"),
    **dict.fromkeys(("agnostic", "capacity_percent", "train_seconds"), "float64"),
    **{"multiply_adds": "Int64", "unchanged": "boolean", "finished": "bool"},
}


def results(root: str | os.PathLike[str], *more: str | os.PathLike[str]) -> pd.DataFrame:
    """All runs at or below some folders as a pandas frame: a row for each task of a run after each task learned.

    Columns:
        recipe, method, order, seed, protocol: The run; `protocol` is the hash of what makes runs comparable.
        task, task_number: What was tested.
        after, after_number: The task that had just been learned.
        accuracy, top5, or H, U, S for zero-shot tasks: Fractions, with the task given.
        agnostic: Accuracy with the task inferred, NaN where it was not computed.
        unchanged: Whether the task's logits are bit for bit those of when it was learned.
        capacity_percent, bytes, parameters, multiply_adds: What network and tasks cost by then.
        finished, folder, commit: Of the run.
        train_seconds: How long `after` took to learn.

    Folders that cannot be used are in `frame.attrs["skipped"]` as (folder, reason), with a warning if there are any
    but runs that have just begun. Means over rows are comparable only where `protocol` is the same.
    """
    try:
        import pandas as pd
    except ImportError:
        raise UsageError("rkr.results needs pandas: pip install pandas") from None

    found = scan(root, *more)
    damaged = [item for item in found.skipped if item.reason != BEGUN]
    if damaged:
        text = f"{len(damaged)} folders were skipped, such as {damaged[0].path}: {damaged[0].reason}"
        warnings.warn(f"{text}; all are in attrs['skipped']", UserWarning, stacklevel=2)
    measures = list(dict.fromkeys(name for result in found.results for name in result.measures)) or CLASSIFICATION
    rows = [row for result in found.results for row in _rows(result)]
    frame = pd.DataFrame(rows, columns=[*BEFORE, *measures, *AFTER])
    frame = frame.astype({**TYPES, **dict.fromkeys(measures, "float64")})
    frame.attrs["skipped"] = [(str(item.path), item.reason) for item in found.skipped]
    return frame


def _rows(result: Result) -> Iterator[dict[str, Any]]:
    run = {
        "recipe": result.recipe,
        "method": result.method,
        "order": result.order,
        "seed": result.seed,
        "protocol": protocol(result).hash,
        "finished": result.finished,
        "folder": str(result.folder),
        "commit": result.record.get("commit"),
    }
    seconds = {time.number: time.train_seconds for time in result.times}
    for i, cost in enumerate(result.costs):
        inferred = result.agnostic[i]
        state = {
            "after": result.tasks[i],
            "after_number": i + 1,
            "capacity_percent": cost.percent,
            "bytes": cost.bytes,
            "parameters": cost.parameters,
            "multiply_adds": cost.multiply_adds,
            "train_seconds": seconds.get(i + 1),
        }
        for j in range(i + 1):
            task = result.tasks[j]
            then, now = result.proofs[j].get(task), result.proofs[i].get(task)
            yield {
                **run,
                **state,
                "task": task,
                "task_number": j + 1,
                **{name: matrix[i][j] for name, matrix in result.measures.items()},
                "agnostic": None if inferred is None else inferred[j],
                "unchanged": None if then is None or now is None else then == now,
            }
