"""A small convolutional network for small images, used by the demo."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from rkr.networks._arguments import require_positive
from rkr.registry import register


class SmallCNN(nn.Module):
    """Two convolutions with BatchNorm, one pooling, two fully connected layers; for 8x8 images by default."""

    def __init__(self, classes: int = 10, in_channels: int = 1, size: int = 8) -> None:
        super().__init__()
        require_positive(classes=classes, in_channels=in_channels, size=size)
        self.input_shape = (in_channels, size, size)
        self.conv1 = nn.Conv2d(in_channels, 16, kernel_size=3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.fc1 = nn.Linear(32 * (size // 2) ** 2, 128)
        self.fc = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of a batch."""
        x = F.relu(self.bn1(self.conv1(x)))  # (B, 16, S, S)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)  # (B, 32, S/2, S/2)
        return self.fc(F.relu(self.fc1(x.flatten(1))))  # (B, classes)


@register.network("digits-net", "a small convolutional network for 8x8 digits")
def small_cnn(classes: int = 10, in_channels: int = 1, size: int = 8) -> SmallCNN:
    """Build the demo's network.

    Args:
        classes: Size of the classification layer `fc`.
        in_channels: Channels of the images.
        size: Height and width of the images.

    Returns:
        The network, with random weights.

    Raises:
        UsageError: A size is below one.

    Example:
        >>> import rkr, torch
        >>> rkr.networks.small_cnn(classes=3)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 3])
    """
    return SmallCNN(classes, in_channels, size)
