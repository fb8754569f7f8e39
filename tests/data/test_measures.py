"""U, S and H against scikit-learn, and where there is nothing to count."""

from __future__ import annotations

import hashlib

import pytest
import torch
from lightning_fabric import Fabric
from sklearn.metrics import balanced_accuracy_score, recall_score  # type: ignore[import-untyped]
from torch import Tensor, nn

from rkr.data import Stream, Task, Training
from rkr.data.measures import harmonic_mean, unseen_and_seen
from rkr.data.task import Features
from rkr.experiment.evaluate import BATCH, Evaluator


@pytest.mark.parametrize("seed", range(5))
def test_mean_recall_of_classes(seed: int) -> None:
    """Classes of very different sizes, answers that are right now and then."""
    draw = torch.Generator().manual_seed(seed)
    unseen, seen = (1, 4, 7), (0, 2, 3, 5, 6)
    labels = torch.multinomial(torch.arange(1.0, 9) ** 2, 300, replacement=True, generator=draw)
    guess = torch.randint(8, (300,), generator=draw)
    answers = torch.where(torch.rand(300, generator=draw) < 0.4, labels, guess)
    u, s = unseen_and_seen(answers, labels, 8, unseen)
    there = set(labels.tolist())
    for found, classes in ((u, unseen), (s, seen)):
        tested = [c for c in classes if c in there]
        expected = recall_score(labels, answers, labels=tested, average="macro")
        assert found == pytest.approx(expected, abs=1e-12)
    everything, nothing = unseen_and_seen(answers, labels, 8, range(8))
    assert everything == pytest.approx(balanced_accuracy_score(labels, answers), abs=1e-12)
    assert nothing == 0


def test_classes_without_test_samples_do_not_count() -> None:
    labels, answers = torch.tensor([0, 0, 2, 2, 2, 2]), torch.tensor([0, 1, 2, 3, 2, 2])
    assert unseen_and_seen(answers, labels, 5, (2, 3)) == (0.75, 0.5)  # neither 1, 3 nor 4 is tested
    assert unseen_and_seen(answers, labels, 5, (3,)) == (0.0, 0.625)


def test_harmonic_mean() -> None:
    assert harmonic_mean(0.0, 0.0) == 0.0
    assert harmonic_mean(0.0, 1.0) == 0.0
    assert harmonic_mean(0.5, 0.5) == 0.5
    assert harmonic_mean(0.3339, 0.5134) == pytest.approx(0.4046, abs=5e-5)  # of the paper's table
    assert harmonic_mean(0.2, 0.6) == harmonic_mean(0.6, 0.2) == pytest.approx(0.3)


class Answers(nn.Module):
    """Gives logits that were decided before."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def predict(self, x: Tensor, number: int) -> Tensor:
        return self.logits[x[:, 0].long()]


def test_the_evaluator_on_zero_shot_tasks() -> None:
    draw = torch.Generator().manual_seed(0)
    count, classes, unseen = BATCH + 33, 6, (0, 5)
    y = torch.randint(classes, (count,), generator=draw)
    y[0] = classes - 1
    logits = torch.randn(count, classes, generator=draw)
    logits[torch.arange(count), y] += 1
    x = torch.arange(count, dtype=torch.float32)[:, None].repeat(1, 2)
    attributes = torch.zeros(classes, 3)
    train = Features(torch.zeros(4, 2), torch.tensor([1, 2, 3, 4]))
    task = Task(Training("t", tuple("abcdef"), train, None, attributes, unseen), Features(x, y))
    assert task.measures == ("H", "U", "S")
    stream = Stream("s", (task,), (), (), (tuple(range(6)),))
    row = Evaluator(stream, Fabric(accelerator="cpu", devices=1)).row(Answers(logits), 1)  # type: ignore[arg-type]
    found = logits.argmax(1)
    u = recall_score(y, found, labels=unseen, average="macro")
    s = recall_score(y, found, labels=(1, 2, 3, 4), average="macro")
    assert row.measures["U"] == pytest.approx((u,), abs=1e-12)
    assert row.measures["S"] == pytest.approx((s,), abs=1e-12)
    assert row.main == row.measures["H"] == pytest.approx((2 * u * s / (u + s),), abs=1e-12)
    assert 0.3 < u != s < 0.7
    assert row.tested == (count,)
    parts = [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in logits.split(BATCH)]
    assert row.proof["t"] == hashlib.sha256("".join(parts).encode()).hexdigest()
