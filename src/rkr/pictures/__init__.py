"""Your own pictures: a folder becomes a task of a pretrained network, which answers, is managed and shared."""

from rkr.pictures.evaluate import Evaluation
from rkr.pictures.learn import learn
from rkr.pictures.predict import Prediction
from rkr.pictures.preparation import Preparation
from rkr.pictures.settings import Settings
from rkr.pictures.zoo import Record, Zoo, open_zoo

__all__ = ["Evaluation", "Prediction", "Preparation", "Record", "Settings", "Zoo", "learn", "open_zoo"]
