"""Image features for zero-shot learning from your own images: `rkr features`, or `extract` from Python."""

from rkr.data.features.extract import Options, Summary, extract, three_numbers
from rkr.data.features.progress import progress

__all__ = ["Options", "Summary", "extract", "progress", "three_numbers"]
