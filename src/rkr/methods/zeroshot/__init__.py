"""How zero-shot tasks are learned: one file a method, as in `rkr.methods`."""

from rkr.methods.zeroshot.classifier import ClassifierOptions
from rkr.methods.zeroshot.learner import ZeroShot

__all__ = ["ClassifierOptions", "ZeroShot"]
