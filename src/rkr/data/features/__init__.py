"""Image features for zero-shot learning from images of one's own: `rkr features`, or `extract` from Python."""

from rkr.data.features.extract import Options, Summary, extract, three_numbers
from rkr.data.features.progress import choose_progress

__all__ = ["Options", "Summary", "choose_progress", "extract", "three_numbers"]
