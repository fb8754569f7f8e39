"""The one loop: train, test, save, resume. A run is a folder."""

from rkr.engine.run import Experiment, Run, Schedule

__all__ = ["Experiment", "Run", "Schedule"]
