"""Your own network and your own training loop: two tasks of handwritten digits, and no forgetting.

python examples/own_loop.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rkr

Data = tuple[Tensor, Tensor]


class Network(nn.Module):
    """Any module will do. Its classification layer is called `classifier`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(x))  # (B, classes)


def digits(first: int, last: int) -> tuple[Data, Data]:
    """Images of some digits, for training and for testing."""
    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16  # (N, 1, 8, 8)
    y = torch.tensor(found.target)
    chosen = (y >= first) & (y <= last)
    x, y = x[chosen], y[chosen] - first
    return (x[::2], y[::2]), (x[1::2], y[1::2])


def train(model: rkr.RectifiedModel, data: Data, epochs: int = 20) -> None:
    """Train the task in use."""
    x, y = data
    optimizer = torch.optim.SGD(model.task_parameters(groups=True), lr=0.05, momentum=0.9, weight_decay=5e-4)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


@torch.no_grad()
def answers(model: rkr.RectifiedModel, task: str, x: Tensor) -> Tensor:
    """Logits of a task."""
    model.eval().set_task(task)
    return model(x)


def main() -> None:
    torch.manual_seed(0)
    low, high = digits(0, 4), digits(5, 9)
    model = rkr.rectify(Network(), rank=2, head="classifier")

    model.add_task("low", classes=5)  # the first task trains the network too
    train(model, low[0])
    before = answers(model, "low", low[1][0])

    model.add_task("high", classes=5)  # freezes the network
    train(model, high[0])

    for task, (_, (x, y)) in {"low": low, "high": high}.items():
        accuracy = (answers(model, task, x).argmax(1) == y).float().mean()
        print(
            f"{task}: {100 * accuracy:.1f} % of {len(y)} test images, {model.cost()[task].percent:.2f} % more numbers"
        )
    print("answers of the first task are unchanged:", torch.equal(before, answers(model, "low", low[1][0])))
    model.save("digits-zoo")


if __name__ == "__main__":
    main()
