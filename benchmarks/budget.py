"""What each number of a task buys: accuracy against numbers a task, the same rank everywhere and ranks by budget.

    python benchmarks/budget.py RUN results/budget.jsonl --limit 200
    python benchmarks/budget.py --draw results/budget.jsonl docs/images/budget

needs a run of `rkr-plus` on `cifar100-lenet`, whose base is kept. On it the second and third task are learned with the
ranks K = 1, 2, 4 and 8 everywhere, and with the same numbers by budget: schedule, rates and random numbers are the
same, only ranks differ. A fifth of each task's training images is held out, and accuracy is on these; nothing sees the
test images. What the file has already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import rkr
from rkr.data import Augment, Batches, Stream
from rkr.data.task import Samples
from rkr.experiment.recipes import Recipe, load_recipe
from rkr.experiment.results import read_result
from rkr.report.figures import drawing, write

RECIPE, RANKS, TASKS = "cifar100-lenet", (2, 1, 4, 8), (1, 2)


def learned(recipe: Recipe, stream: Stream, base: dict[str, Any], train: Samples, number: int, **ranks: Any) -> Any:
    """Numbers of a task, and its accuracy on the held-out images in percent."""
    torch.manual_seed(0)
    network = recipe.build_network()
    network.load_state_dict(base)
    model = rkr.rectify(network, head=recipe.network.head, **ranks)
    task, training = stream.tasks[number], recipe.training
    model.add_task(task.name, classes=len(task.training.class_names), train_base=False)
    factors = [p for key, p in model.named_task_parameters().items() if key.endswith((".lm", ".rm"))]
    taken = {id(p) for p in factors}
    groups = [
        {**group, "params": [p for p in group["params"] if id(p) not in taken], "rate": 1.0}
        for group in model.task_parameters(groups=True)
    ]
    groups.append({"params": factors, "weight_decay": 0.0, "rate": recipe.options("rkr-plus")["rate"]})
    optimizer = torch.optim.SGD(groups, lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay)
    norm: dict[str, Any] = {"mean": stream.mean, "std": stream.std}
    augment = Augment(**training.augment.model_dump())
    batches = Batches(train, training.batch, seed=0, augment=augment, **norm)
    for epoch in range(training.epochs):
        lr = training.lr * training.gamma ** sum(epoch >= milestone for milestone in training.milestones)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["rate"]
        for x, y in batches.iter_from(epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        hits = torch.cat([model(x).argmax(1) == y for x, y in Batches(task.test, 250, **norm).iter_from(0)])
    return {
        "numbers": model.cost()[task.name].parameters,
        "ranks": model.cost().ranks,
        "accuracy": round(100 * float(hits.float().mean()), 2),
        "held_out": len(hits),
        "images": len(train),
        "epochs": training.epochs,
    }


def measure(run: Path, into: Path, epochs: int, limit: int | None, data: str | None) -> None:
    """Append a line for each task, rank and way."""
    recipe = load_recipe(RECIPE).changed(epochs=epochs).on_validation()
    stream = recipe.stream(read_result(run).record["order"], data)
    learner: Any = rkr.load_learner(run)
    base = learner.model.network.state_dict()
    lines = [json.loads(line) for line in into.read_text().splitlines()] if into.exists() else []
    done = {(line["task"], line["rank"], line["by_budget"]) for line in lines}
    for number in TASKS:
        train = stream.tasks[number].training.train
        rows = [(train.y == c).nonzero()[:limit, 0] for c in range(len(stream.tasks[number].training.class_names))]
        train = train.take(torch.cat(rows).sort().values)
        for rank in RANKS:
            for by_budget in (False, True):
                key = {"task": stream.tasks[number].name, "rank": rank, "by_budget": by_budget}
                if tuple(key.values()) not in done:
                    budget = "paper" if by_budget else None
                    line = {**key, **learned(recipe, stream, base, train, number, rank=rank, budget=budget)}
                    print(line, flush=True)
                    with into.open("a") as file:
                        file.write(json.dumps(line) + "\n")


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Means over the tasks that have all points, with the standard error of a share of so many images."""
    names = dict.fromkeys(line["task"] for line in lines)
    whole = [name for name in names if sum(line["task"] == name for line in lines) == 2 * len(RANKS)]
    lines = [line for line in lines if line["task"] in whole]
    if not lines:
        raise SystemExit("no task has all points")
    with drawing((5.5, 3.4)) as figure:
        axes = figure.add_subplot()
        for by_budget, label in ((False, "the same rank everywhere"), (True, "ranks by budget")):
            points = []
            for rank in RANKS:
                own = [line for line in lines if (line["rank"], line["by_budget"]) == (rank, by_budget)]
                accuracy = sum(line["accuracy"] for line in own) / len(own)
                deviation = (accuracy * (100 - accuracy) / sum(line["held_out"] for line in own)) ** 0.5
                points.append((own[0]["numbers"], accuracy, deviation))
            numbers, accuracies, deviations = zip(*sorted(points), strict=True)
            axes.errorbar(numbers, accuracies, yerr=deviations, marker="o", capsize=3, label=label)
        axes.set_xscale("log")
        axes.set_xticks(numbers, [f"{n:,}" for n in numbers], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("numbers a task")
        axes.set_ylabel("accuracy on held-out images, %")
        axes.legend()
        write(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the run; with --draw the file of results")
    parser.add_argument("into", type=Path, help="the file of results; with --draw the figure")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--limit", type=int, help="training images of a class")
    parser.add_argument("--data", default=os.environ.get("RKR_DATA"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.draw:
        draw([json.loads(line) for line in args.source.read_text().splitlines()], args.into)
    else:
        measure(args.source, args.into, args.epochs, args.limit, args.data)


if __name__ == "__main__":
    main()
