"""The residual networks of "Task Incremental Learning Experiments" (RKR, CVPR 2021).

ResNet-18 for CIFAR-100 and ImageNet, ResNet-32 for the CIFAR-10/100 sequence. Modules are named as in
torchvision, so its ResNet-18 weights load unchanged into `resnet18(1000, stem="imagenet")`.
"""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from rkr.errors import UsageError
from rkr.networks._arguments import require_positive
from rkr.registry import register

Stem = Literal["cifar", "imagenet"]
Shortcut = Callable[[int, int, int], nn.Module]


def projection(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Option B of He et al. (2016): a 1x1 convolution matches the shape of the block's output."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class ZeroPad(nn.Module):
    """Option A of He et al. (2016): subsample the image and append channels of zeros, without parameters."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output of a batch."""
        x = x[:, :, :: self.stride, :: self.stride]  # (B, C, H / stride, W / stride)
        return F.pad(x, (0, 0, 0, 0, 0, self.extra))  # (B, C + extra, H / stride, W / stride)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut; `downsample` is the shortcut if the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        same = stride == 1 and in_channels == out_channels
        self.downsample = nn.Identity() if same else shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output of a batch."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.downsample(x))


class ResNet(nn.Module):
    """A stem, stages `layer1`, `layer2`, ... of basic blocks, and the classifier `fc`.

    `blocks` and `widths` give the number of blocks and of channels of each stage; every stage but the first
    halves the image. The stem "cifar" keeps the resolution of 32x32 images; "imagenet" reduces 224x224 to 56x56.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        widths: Sequence[int],
        classes: int,
        stem: Stem = "cifar",
        shortcut: Shortcut = projection,
    ) -> None:
        super().__init__()
        require_positive(classes=classes, **({"width": min(widths)} if widths else {}))
        if stem not in get_args(Stem):
            raise UsageError(f"stem must be one of {', '.join(get_args(Stem))}, but is {stem!r}.")
        if not blocks or len(blocks) != len(widths):
            raise UsageError(f"blocks and widths must name the same stages, but are {blocks} and {widths}.")

        if stem == "cifar":
            self.input_shape = (3, 32, 32)
            self.conv1 = nn.Conv2d(3, widths[0], kernel_size=3, padding=1, bias=False)
            self.maxpool: nn.Module = nn.Identity()
        else:
            self.input_shape = (3, 224, 224)
            self.conv1 = nn.Conv2d(3, widths[0], kernel_size=7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(widths[0])

        self.stages = [f"layer{number}" for number in range(1, len(blocks) + 1)]
        channels = widths[0]
        for name, count, width in zip(self.stages, blocks, widths, strict=True):
            stride = 1 if name == "layer1" else 2
            first = BasicBlock(channels, width, stride, shortcut)
            others = [BasicBlock(width, width, 1, shortcut) for _ in range(count - 1)]
            self.add_module(name, nn.Sequential(first, *others))
            channels = width
        self.fc = nn.Linear(channels, classes)

        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output of a batch."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))  # (B, widths[0], H, W)
        for name in self.stages:
            x = self.get_submodule(name)(x)  # (B, widths[i], H / 2^i, W / 2^i)
        x = x.mean(dim=(2, 3))  # (B, widths[-1])
        return self.fc(x)  # (B, classes)


@register.network(
    "resnet18",
    "ResNet-18, stem for 32x32 (cifar) or 224x224 (imagenet); 11.2 million parameters",
    citation="He et al., CVPR 2016",
)
def resnet18(classes: int = 100, stem: Stem = "cifar", width: int = 64) -> ResNet:
    """ResNet-18 with projection shortcuts: 11,220,132 parameters with 100 classes and the CIFAR stem.

    The four stages have `width`, 2, 4 and 8 times `width` channels. With 16 the network is narrow: 713,076 parameters
    and 1/16 of the multiply-adds.

    Args:
        classes: Size of the classification layer `fc`.
        stem: "cifar" for 32x32 images, "imagenet" for 224x224.
        width: Channels of the first stage.

    Returns:
        The network, with random weights.

    Raises:
        UsageError: A size is below one, or there is no such stem.

    Example:
        >>> import rkr
        >>> sum(p.numel() for p in rkr.networks.resnet18(classes=100).parameters())
        11220132
    """
    return ResNet((2, 2, 2, 2), (width, 2 * width, 4 * width, 8 * width), classes, stem)


@register.network(
    "resnet32", "the CIFAR ResNet-32, 32x32 images; 0.46 million parameters", citation="He et al., CVPR 2016"
)
def resnet32(classes: int = 10) -> ResNet:
    """The CIFAR ResNet-32 (n = 5) with parameter-free shortcuts: 464,154 parameters with 10 classes."""
    return ResNet((5, 5, 5), (16, 32, 64), classes, shortcut=ZeroPad)
