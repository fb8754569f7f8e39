"""The LeNet of "Task Incremental Learning Experiments" (RKR, CVPR 2021): widths 20-50-800-500."""

import torch.nn.functional as F
from torch import Tensor, nn

from rkr.networks._arguments import require_positive
from rkr.registry import register


class LeNet(nn.Module):
    """Two 5x5 convolutions and three linear layers for 32x32 images.

    The widths 20-50-800-500 are those of APD (Yoon et al., ICLR 2020), which the paper compares with. Batch
    normalisation replaces APD's local response normalisation. Only then do the sizes match the paper's memory figures:
    3,038,110 parameters with 100 classes.
    """

    def __init__(self, classes: int = 100, in_channels: int = 3) -> None:
        super().__init__()
        require_positive(classes=classes, in_channels=in_channels)
        self.input_shape = (in_channels, 32, 32)
        self.conv1 = nn.Conv2d(in_channels, 20, kernel_size=5, padding=2)
        self.bn1 = nn.BatchNorm2d(20)
        self.conv2 = nn.Conv2d(20, 50, kernel_size=5, padding=2)
        self.bn2 = nn.BatchNorm2d(50)
        self.fc1 = nn.Linear(50 * 8 * 8, 800)
        self.fc2 = nn.Linear(800, 500)
        self.fc = nn.Linear(500, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of a batch."""
        # Pool before ReLU: the result is the same, and ReLU has a quarter of the values to process.
        x = self.bn1(self.conv1(x))  # (B, 20, 32, 32)
        x = F.relu(F.max_pool2d(x, kernel_size=3, stride=2, padding=1))  # (B, 20, 16, 16)
        x = self.bn2(self.conv2(x))  # (B, 50, 16, 16)
        x = F.relu(F.max_pool2d(x, kernel_size=3, stride=2, padding=1))  # (B, 50, 8, 8)
        x = x.flatten(1)  # (B, 3200), channel by channel whatever the memory format
        x = F.relu(self.fc1(x))  # (B, 800)
        x = F.relu(self.fc2(x))  # (B, 500)
        return self.fc(x)  # (B, classes)


@register.network("lenet", "LeNet 20-50-800-500 with batch normalisation, 32x32 images; 3.0 million parameters")
def lenet(classes: int = 100, in_channels: int = 3) -> LeNet:
    """Build the paper's LeNet.

    Args:
        classes: Size of the classification layer `fc`.
        in_channels: Channels of the images.

    Returns:
        The network, with random weights.

    Raises:
        UsageError: A size is below one.

    Example:
        >>> import rkr
        >>> sum(p.numel() for p in rkr.networks.lenet(classes=100).parameters())
        3038110
    """
    return LeNet(classes, in_channels)
