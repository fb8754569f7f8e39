"""What is learned: data sets, tasks cut from them, streams of tasks, and batches for training and evaluation."""

from rkr.tasks.augment import Augment
from rkr.tasks.batches import Batches
from rkr.tasks.sources import SOURCES, load_source
from rkr.tasks.streams import APD_ORDERS, mnist_then, split, split_cifar
from rkr.tasks.task import ImageFiles, Images, Source, Stream, Task, Training

__all__ = [
    "APD_ORDERS",
    "SOURCES",
    "Augment",
    "Batches",
    "ImageFiles",
    "Images",
    "Source",
    "Stream",
    "Task",
    "Training",
    "load_source",
    "mnist_then",
    "split",
    "split_cifar",
]
