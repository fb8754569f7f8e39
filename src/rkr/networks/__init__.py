"""The networks of the paper's experiments and of the demo: plain modules, independent of any learning method.

Every network has an `input_shape`, the shape of one sample; every classifier ends in a linear layer `fc`.
"""

from rkr.networks.cada_vae import CadaVae, VisualEncoder
from rkr.networks.lenet import LeNet, lenet
from rkr.networks.resnet import ResNet, resnet18, resnet32
from rkr.networks.small_cnn import SmallCNN, small_cnn

__all__ = ["CadaVae", "LeNet", "ResNet", "SmallCNN", "VisualEncoder", "lenet", "resnet18", "resnet32", "small_cnn"]
