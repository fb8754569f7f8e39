"""From run folders to numbers, tables and figures. Reads files only, and knows neither torch nor the engine.

The figures are in `rkr.report.figures`, which is not imported here because matplotlib takes its time.
"""

from rkr.report.results import Result, by_recipe, find_results, read_result
from rkr.report.tables import (
    accuracy_table,
    added_by_a_task,
    summary_json,
    summary_table,
    summary_tables,
    zero_shot_table,
)

__all__ = [
    "Result",
    "accuracy_table",
    "added_by_a_task",
    "by_recipe",
    "find_results",
    "read_result",
    "summary_json",
    "summary_table",
    "summary_tables",
    "zero_shot_table",
]
