"""Run folders as the engine writes them, with the accuracies that a test wants."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rkr.experiment import metrics
from rkr.experiment.results import Result, read_result

MATRIX = [[0.9], [0.7, 0.8], [0.6, 0.75, 0.95]]
GROUPS = [[5, 1], [0, 3], [2, 4]]


def lines_of(
    matrix: Sequence[Sequence[float]], isolated: bool, agnostic: bool, zero_shot: bool = False
) -> list[dict[str, Any]]:
    """The lines of results.jsonl up to the end: two epochs a task; isolated tasks keep their logits.

    Of zero-shot tasks the matrix is H, U is 0.1 less and S 0.05 more.
    """
    lines: list[dict[str, Any]] = []
    for number, row in enumerate(matrix, 1):
        task = f"toy-{number}"
        for epoch, loss in enumerate((2.0, 1.0)):
            line = {"event": "epoch", "number": number, "task": task, "phase": "train", "epoch": epoch}
            lines.append({**line, "loss": loss, "accuracy": None if epoch else 0.5, "lr": 0.01})
        proof = {f"toy-{j}": f"{j}-{j if isolated else number}" for j in range(1, number + 1)}
        measures: dict[str, Any] = {"accuracy": list(row), "top5": [1.0] * number}
        if zero_shot:
            measures = {"H": list(row), "U": [h - 0.1 for h in row], "S": [h + 0.05 for h in row]}
            measures["notes"] = {"classifier_epochs": 10 * number}
        lines.append(
            {
                "event": "task",
                "number": number,
                "task": task,
                "classes": 2,
                **measures,
                "agnostic": [a / 2 for a in row] if agnostic and number == len(matrix) else None,
                "tested": [100] * number,
                "proof": proof,
                "unchanged": True if isolated else None,
                "cost": {
                    "parameters": 1000 + 10 * number,
                    "percent": 100.0 + number,
                    "bytes": 4000 + 1000 * number,
                    "multiply_adds": 123456,
                    "learning": {
                        "parameters": 1000 + 20 * number,
                        "percent": 100.0 + 2 * number,
                        "bytes": 4000 + 2000 * number,
                    },
                },
            }
        )
    return lines


def write(
    folder: Path,
    matrix: Sequence[Sequence[float]] = MATRIX,
    *,
    tasks: int | None = None,
    method: str = "rkr",
    order: str | int = "A",
    groups: Sequence[Sequence[int]] | None = None,
    recipe: str = "toy",
    isolated: bool = False,
    agnostic: bool = True,
    zero_shot: bool = False,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
) -> Path:
    """A run folder; unfinished if the stream has more `tasks` than the matrix has rows."""
    tasks = tasks or len(matrix)
    groups = groups or [[2 * i, 2 * i + 1] for i in range(tasks)]
    stream = {
        "name": recipe,
        "order": groups,
        "tasks": [
            {"name": f"toy-{i}", "class_names": ["a", "b"], "images": {"test": 100}} for i in range(1, tasks + 1)
        ],
        "sha256": "0" * 64,
    }
    if zero_shot:
        for task in stream["tasks"]:
            task["unseen"] = [1]  # type: ignore[index]
    settings = settings or {"epochs": 2}
    run = {"format": 2, "recipe": recipe, "method": method, "order": order, "seed": seed, "settings": settings}
    run |= {"stream": stream, "network": {"parameters": 1000}, "versions": {}, "commit": None}
    lines = lines_of(matrix, isolated, agnostic and not zero_shot, zero_shot)
    if len(matrix) == tasks:
        lines.append({"event": "end", "tasks": tasks})
    times = [
        {"number": i, "task": f"toy-{i}", "train_seconds": 10.0 * i, "test_seconds": 1.0, "epoch_seconds": 1.5 * i}
        for i in range(1, len(matrix) + 1)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "times.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a run folder where the engine would put it."""

    def at(*args: Any, **options: Any) -> Path:
        label = f"{options.get('order', 'A')}{'-seed-' * bool(seed := options.get('seed', 0))}{seed or ''}"
        names = (options.get("recipe", "toy"), options.get("method", "rkr"), label)
        return write(tmp_path.joinpath("runs", *names), *args, **options)

    return at


@pytest.fixture
def two_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOPD and MOPD of two orders, not of five."""
    monkeypatch.setattr(metrics, "ORDERS", 2)


@pytest.fixture
def write_search(tmp_path: Path) -> Callable[..., Path]:
    """Write what a search leaves beside runs: trials 1 and 3 have results, 2 was stopped, 4 has learned nothing."""

    def write(name: str = "search-fixed", **changes: Any) -> Path:
        trials = [
            {
                "number": n,
                "state": state,
                "options": {"strength": 10**n, "bn": "shared"},
                "value": value,
                "after_task": after,
            }
            for n, (state, value, after) in enumerate(
                [
                    ("complete", 0.61, {"1": 0.7, "2": 0.61}),
                    ("pruned", None, {"1": 0.335}),
                    ("complete", 0.5, {"1": 0.6, "2": 0.5}),
                    ("running", None, {}),
                ]
            )
        ]
        known = {"method": "ewc", "sampler": "tpe", "seed": 0, "recipe": "toy"}
        values = {**known, "trials": trials, "importance": {"strength": 0.75, "bn": 0.25}, **changes}
        path = tmp_path / "runs" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(values))
        return path

    return write


@pytest.fixture
def a_result(run_folder: Callable[..., Path]) -> Callable[..., Result]:
    """Write a run folder and read it."""
    return lambda *args, **options: read_result(run_folder(*args, **options))
