"""Numbers, tables and figures from run folders, without torch.

`rkr.report.figures` is not imported here because matplotlib is slow to import. The functions `scan`, `protocol` and
`compare` are in the modules of the same names.
"""

from rkr.experiment.results import find_results
from rkr.report.compare import Comparison, comparison_json, comparison_tables
from rkr.report.export import write_tables
from rkr.report.groups import by_recipe, comparable
from rkr.report.protocol import Protocol, differences, require_one_protocol
from rkr.report.scan import Scan, Skipped
from rkr.report.statistics import Paired, paired, verdict
from rkr.report.tables import (
    accuracy_table,
    added_by_a_task,
    summary_json,
    summary_table,
    summary_tables,
    zero_shot_table,
)

__all__ = [
    "Comparison",
    "Paired",
    "Protocol",
    "Scan",
    "Skipped",
    "accuracy_table",
    "added_by_a_task",
    "by_recipe",
    "comparable",
    "comparison_json",
    "comparison_tables",
    "differences",
    "find_results",
    "paired",
    "require_one_protocol",
    "summary_json",
    "summary_table",
    "summary_tables",
    "verdict",
    "write_tables",
    "zero_shot_table",
]
