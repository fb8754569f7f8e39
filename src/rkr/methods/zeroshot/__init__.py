"""How zero-shot tasks are learned: one file a method, as in `rkr.methods`."""

from rkr.methods.zeroshot.alone import Base, Original
from rkr.methods.zeroshot.classifier import ClassifierOptions
from rkr.methods.zeroshot.learner import ZeroShot
from rkr.methods.zeroshot.lzsl import Lzsl
from rkr.methods.zeroshot.penalty import Penalty
from rkr.methods.zeroshot.ridge import Ridge
from rkr.methods.zeroshot.rkr import ZeroShotRkr

__all__ = ["Base", "ClassifierOptions", "Lzsl", "Original", "Penalty", "Ridge", "ZeroShot", "ZeroShotRkr"]
