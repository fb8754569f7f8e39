"""What is learned: datasets, tasks cut from them, streams of tasks, and batches for training and evaluation."""

from rkr.data.augment import Augment
from rkr.data.batches import Batches
from rkr.data.sources import load_source, missing_data
from rkr.data.streams import APD_ORDERS, mnist_then, split, split_cifar
from rkr.data.task import Features, ImageFiles, Images, Pictures, Source, Stream, Task, Training
from rkr.data.xlsa17 import load_xlsa17
from rkr.data.zeroshot import ZeroShotSource, validation_source, zero_shot_stream

__all__ = [
    "APD_ORDERS",
    "Augment",
    "Batches",
    "Features",
    "ImageFiles",
    "Images",
    "Pictures",
    "Source",
    "Stream",
    "Task",
    "Training",
    "ZeroShotSource",
    "load_source",
    "load_xlsa17",
    "missing_data",
    "mnist_then",
    "split",
    "split_cifar",
    "validation_source",
    "zero_shot_stream",
]
