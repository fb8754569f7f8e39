"""Five tasks of two digits each, learned one after the other: with RKR, and by plain fine-tuning.

Real data that comes with scikit-learn; nothing is downloaded. Run it with `make demo`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rkr

TASKS = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
EPOCHS = 15


class Net(nn.Module):
    """A small convolutional network for 8x8 images."""

    input_shape = (1, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.fc1 = nn.Linear(32 * 4 * 4, 128)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(F.relu(self.fc1(x.flatten(1))))


def split(digits: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images and labels of a task; every fourth image is for testing."""
    data = load_digits()
    chosen = torch.tensor([label in digits for label in data.target])
    x = torch.tensor(data.images, dtype=torch.float32)[chosen].unsqueeze(1) / 16
    y = torch.tensor([digits.index(label) for label in data.target if label in digits])
    test = torch.arange(len(y)) % 4 == 0
    return x[~test], y[~test], x[test], y[test]


def train(model: nn.Module, parameters: list[dict], x: Tensor, y: Tensor) -> None:
    """Any training loop will do."""
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
    model.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    return 100 * (model(x).argmax(1) == y).float().mean().item()


def learn_with_rkr(parts: dict[str, tuple[Tensor, ...]]) -> tuple[rkr.RectifiedModel, list[float], list[float]]:
    torch.manual_seed(0)
    model = rkr.rectify(Net(), rank=2, head="fc")
    during, prints = [], {}
    for name, (x, y, x_test, y_test) in parts.items():
        model.add_task(name, classes=name.split(" or "))
        train(model, model.task_parameters(groups=True), x, y)
        during.append(accuracy(model, x_test, y_test))
        prints[name] = model.fingerprint(name)
    after = []
    for name, (_, _, x_test, y_test) in parts.items():
        model.set_task(name)
        after.append(accuracy(model, x_test, y_test))
        assert model.fingerprint(name) == prints[name], "a task has changed"
    return model, during, after


def learn_by_fine_tuning(parts: dict[str, tuple[Tensor, ...]]) -> list[float]:
    """One network, a head per task, everything trained on every task."""
    torch.manual_seed(0)
    network, heads = Net(), {}
    for name, (x, y, _, _) in parts.items():
        network.fc = heads[name] = nn.Linear(128, 2)
        train(network, [{"params": list(network.parameters())}], x, y)
    after = []
    for name, (_, _, x_test, y_test) in parts.items():
        network.fc = heads[name]
        after.append(accuracy(network, x_test, y_test))
    return after


def main() -> None:
    parts = {f"{a} or {b}": split((a, b)) for a, b in TASKS}
    print("learning five tasks of two digits, one after the other ...")
    model, during, after = learn_with_rkr(parts)
    tuned = learn_by_fine_tuning(parts)
    print(
        f"\n{'test accuracy, %':18} {'RKR, when learned':>18} {'RKR, at the end':>16} {'fine-tuning, at the end':>24}"
    )
    for name, *values in zip(parts, during, after, tuned, strict=True):
        print(f"{name:18} {values[0]:18.1f} {values[1]:16.1f} {values[2]:24.1f}")
    count = len(parts)
    print(f"{'mean':18} {sum(during) / count:18.1f} {sum(after) / count:16.1f} {sum(tuned) / count:24.1f}\n")
    print(model.cost())
    folder = Path(tempfile.mkdtemp(prefix="rkr-demo-"))
    model.save(folder)
    print(f"\nsaved, one file per task, in {folder}:")
    for path in sorted(folder.iterdir()):
        print(f"  {path.name:45} {path.stat().st_size:>9,} bytes")


if __name__ == "__main__":
    main()
