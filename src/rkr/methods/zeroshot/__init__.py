"""Methods for zero-shot tasks, one file each, as in `rkr.methods`."""

from rkr.methods.zeroshot.classifier import ClassifierOptions
from rkr.methods.zeroshot.learner import ZeroShot

__all__ = ["ClassifierOptions", "ZeroShot"]
