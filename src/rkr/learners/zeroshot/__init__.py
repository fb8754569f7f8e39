"""How zero-shot tasks are learned: one file a method, as in `rkr.learners`."""

from rkr.learners.zeroshot.alone import Base, Original
from rkr.learners.zeroshot.classifier import ClassifierOptions
from rkr.learners.zeroshot.learner import ZeroShot
from rkr.learners.zeroshot.lzsl import Lzsl
from rkr.learners.zeroshot.penalty import Penalty
from rkr.learners.zeroshot.ridge import Ridge
from rkr.learners.zeroshot.rkr import ZeroShotRkr

__all__ = ["Base", "ClassifierOptions", "Lzsl", "Original", "Penalty", "Ridge", "ZeroShot", "ZeroShotRkr"]
