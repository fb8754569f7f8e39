"""`rkr.results`: runs as a tidy pandas DataFrame."""

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
COST = ("capacity_percent", "capacity_to_learn_percent", "bytes", "bytes_to_learn", "parameters", "multiply_adds")
AFTER = ("agnostic", "unchanged", *COST, "finished", "folder", "commit", "train_seconds")
TYPES = {  # equal for all runs; multiply_adds, bytes_to_learn and unchanged may be missing
    **dict.fromkeys(("seed", "task_number", "after_number", "bytes", "parameters"), "int64"),
    **dict.fromkeys(("agnostic", "capacity_percent", "capacity_to_learn_percent", "train_seconds"), "float64"),
    **{"multiply_adds": "Int64", "bytes_to_learn": "Int64", "unchanged": "boolean", "finished": "bool"},
}


def results(root: str | os.PathLike[str], *more: str | os.PathLike[str]) -> pd.DataFrame:
    """Load all runs at or below some folders into a DataFrame: one row per run, task learned and task tested.

    Columns:
        recipe, method, order, seed, protocol: The run. `protocol` is the hash of the settings that comparable runs
            share.
        task, task_number: The task that was tested.
        after, after_number: The task that had just been learned.
        accuracy, top5, or H, U, S for zero-shot tasks: Fractions, with the task given.
        agnostic: Task-agnostic accuracy, NaN if it was not computed.
        unchanged: Whether the logits of the task are bit-identical to those when it was learned.
        capacity_percent, bytes, parameters, multiply_adds: What must be kept, and computed, to use all tasks so far.
        capacity_to_learn_percent, bytes_to_learn: What must be kept to use them and to go on learning.
        finished, folder, commit: The run's state, location and code version.
        train_seconds: Training time of the task `after`.

    Skipped folders are in `frame.attrs["skipped"]` as (folder, reason), with a warning unless they are runs that have
    only just started. Average only rows with equal `protocol`.

    Args:
        root: A folder. All folders below it are searched.
        more: Further folders.

    Returns:
        The DataFrame.

    Raises:
        UsageError: pandas is not installed.
        FileError: A folder does not exist.

    Example:
        >>> import rkr
        >>> frame = rkr.results("runs")
        >>> frame.groupby("method").task.nunique().to_dict()
        {'finetune': 5}
    """
    try:
        import pandas as pd
    except ImportError:
        raise UsageError("rkr.results needs pandas: pip install pandas") from None

    found = scan(root, *more)
    damaged = [item for item in found.skipped if item.reason != BEGUN]
    if damaged:
        text = f"skipped {len(damaged)} folders, such as {damaged[0].path}: {damaged[0].reason}"
        warnings.warn(f"{text}; see attrs['skipped'] for all", UserWarning, stacklevel=2)
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
            "capacity_to_learn_percent": cost.percent_to_learn,
            "bytes": cost.bytes,
            "bytes_to_learn": cost.bytes_to_learn,
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
