"""The one loop: train, test, save, resume. A run is a folder."""

from rkr.engine.experiment import Experiment, Schedule
from rkr.engine.run import Run

__all__ = ["Experiment", "Run", "Schedule"]
