"""How well the task is inferred: the rule of this package beside FeCAM, RanPAC and the most confident softmax.

    python benchmarks/inferring.py digits runs/digits/rkr-plus/fixed

needs a finished run of `rkr-plus`. All rules see the same training samples through the same base, and the chosen task's
own head answers. "Maps" are those of the base's last convolution, which the rule of this package sees; "features" come
into the classification layer, as FeCAM and RanPAC have them. FeCAM (Goswami et al., NeurIPS 2023): a covariance for
each class, square roots of features, shrunk twice and normalised, as published. RanPAC (McDonnell et al., NeurIPS
2023): random projections, ReLU, and ridge regression on all classes; the best of four penalties on the test samples is
to be taken, which favours it. Tasks are described anew, by the version at hand.

Prints the share of samples with the right task, and with the right task and class, in %; then how the probabilities of
the rule fit: the expected calibration error, and the share of samples called unlike all tasks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import rkr
from rkr.core.features import base_features, base_maps
from rkr.core.inferring import KEY, rule_of
from rkr.data import Batches
from rkr.experiment.recipes import load_recipe
from rkr.experiment.results import read_result

Score = Callable[[Tensor], Tensor]
"""From features (B, D) to a score of each task (B, T)."""


def by_task(scores: Tensor, sizes: Sequence[int]) -> Tensor:
    """The highest score of the classes of each task."""
    return torch.stack([part.amax(1) for part in scores.split(list(sizes), 1)], 1)


def fecam(features: Sequence[Tensor], labels: Sequence[Tensor]) -> Score:
    """Mahalanobis distance to each class under its own covariance."""
    means, inverses, sizes = [], [], []
    for x, y in zip(features, labels, strict=True):
        sizes.append(int(y.max()) + 1)
        for c in range(sizes[-1]):
            rows = x[y == c].clamp(min=0).sqrt()
            covariance, eye = torch.cov(rows.T), torch.eye(x.shape[1])
            for _ in range(2):
                own = covariance.diagonal().mean()
                others = (covariance.sum() - covariance.trace()) / (covariance.numel() - len(covariance))
                covariance = covariance + own * eye + others * (1 - eye)
            root = covariance.diagonal().sqrt()
            means.append(F.normalize(rows.mean(0), dim=0))
            inverses.append(torch.linalg.inv(covariance / root[:, None] / root))

    def score(x: Tensor) -> Tensor:
        x = F.normalize(x.clamp(min=0).sqrt(), dim=1)
        gaps = ((x - mean, inverse) for mean, inverse in zip(means, inverses, strict=True))
        return by_task(torch.stack([-((gap @ inverse) * gap).sum(1) for gap, inverse in gaps], 1), sizes)

    return score


def ranpac(features: Sequence[Tensor], labels: Sequence[Tensor], width: int) -> dict[float, Score]:
    """Ridge regression from randomly projected features to all classes, for each penalty."""
    sizes = [int(y.max()) + 1 for y in labels]
    projection = torch.randn(features[0].shape[1], width, generator=torch.Generator().manual_seed(0))
    gram, targets, first = torch.zeros(width, width), torch.zeros(width, sum(sizes)), 0
    for x, y, size in zip(features, labels, sizes, strict=True):
        hidden = F.relu(x @ projection)
        gram += hidden.T @ hidden
        targets[:, first : first + size] += hidden.T @ F.one_hot(y, size).float()
        first += size

    def with_penalty(penalty: float) -> Score:
        weights = torch.linalg.solve(gram + penalty * torch.eye(width), targets)
        return lambda x: by_task(F.relu(x @ projection) @ weights, sizes)

    return {penalty: with_penalty(penalty) for penalty in (1e1, 1e2, 1e3, 1e4)}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="How well the task is inferred.")
    parser.add_argument("recipe")
    parser.add_argument("run", help="folder of a finished run of rkr-plus")
    parser.add_argument("--data", default=os.environ.get("RKR_DATA"))
    parser.add_argument("--width", type=int, default=2000, help="of RanPAC's random projection; its authors take 10000")
    args = parser.parse_args()
    torch.set_num_threads(1)
    learner = rkr.load_learner(args.run).eval()
    model: rkr.RectifiedModel = learner.model  # type: ignore[assignment]
    stream = load_recipe(args.recipe).stream(read_result(args.run).record["order"], args.data)

    def read(samples: object) -> list[tuple[Tensor, Tensor]]:
        return list(Batches(samples, 250, mean=stream.mean, std=stream.std).iter_from(0))  # type: ignore[arg-type]

    for name in model.tasks:  # anew: a run keeps those of the version that trained it
        model.tasks[name].about.pop(KEY)
    model.about.pop(KEY, None)
    for task in stream.tasks:
        model.set_task(task.name)
        model.describe_task(read(task.training.train))
    rule = rule_of(model)
    see: dict[str, Score] = {
        "features": partial(base_features, model),
        "maps": lambda x: base_maps(model, x, rule.width),
    }
    features: dict[str, list[Tensor]] = {name: [] for name in see}
    labels = []
    for task in stream.tasks:
        batches = read(task.training.train)
        for name, of in see.items():
            features[name].append(torch.cat([of(x) for x, _ in batches]))
        labels.append(torch.cat([y for _, y in batches]))
    rules: dict[str, tuple[str, Score]] = {"nearest class mean, maps": ("maps", rule.evidence)}
    for name, own in features.items():
        rules[f"FeCAM, {name}"] = name, fecam(own, labels)
        for penalty, score in ranpac(own, labels, args.width).items():
            rules[f"RanPAC, {name}, {args.width} projections, penalty {penalty:g}"] = name, score
    names = ["most confident softmax", *rules, "model.infer"]
    hits = {name: [0, 0] for name in names}
    count, none, certainty, correct = 0, 0, [], []
    for number, task in enumerate(stream.tasks):
        for x, y in read(task.test):
            seen_by = {name: of(x) for name, of in see.items()}
            probability = [learner.predict(x, seen.number).softmax(1) for seen in learner.seen]
            highest = torch.stack([p.amax(1) for p in probability], 1)
            answers = torch.stack([p.argmax(1) for p in probability], 1)
            chosen = {"most confident softmax": highest.argmax(1)}
            chosen |= {title: score(seen_by[name]).argmax(1) for title, (name, score) in rules.items()}
            found = model.infer(x)
            chosen["model.infer"] = found.task
            for name, own in chosen.items():
                right = own == number
                hits[name][0] += int(right.sum())
                hits[name][1] += int((right & (answers.gather(1, own[:, None])[:, 0] == y)).sum())
            count, none = count + len(y), none + int(found.none.sum())
            certainty.append(found.probability)
            correct.append((found.task == number).float())
    for name in names:
        print(f"{name:50s} task {100 * hits[name][0] / count:6.2f}   task and class {100 * hits[name][1] / count:6.2f}")
    p, ok = torch.cat(certainty), torch.cat(correct)
    bins = (p * 10).long().clamp(max=9)
    error = sum(float((p[bins == b].mean() - ok[bins == b].mean()).abs() * (bins == b).sum()) for b in bins.unique())
    print(f"expected calibration error {100 * error / count:.1f} %, called unlike all tasks {100 * none / count:.1f} %")


if __name__ == "__main__":
    main()
