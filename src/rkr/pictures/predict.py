"""Answers about pictures, and how they are written down."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from rkr.errors import FileError, UsageError
from rkr.pictures.dataset import pictures_below

if TYPE_CHECKING:
    from rkr.pictures.zoo import Zoo

Source = str | os.PathLike[str] | bytes | Image.Image
BATCH = 32


@dataclass(frozen=True)
class Prediction:
    """The answer for one picture.

    Attributes:
        path: The file, or the number of the picture among those that were given.
        task: The task; None if the picture is unlike all tasks, or cannot be read.
        classes: The most probable classes, the first one most.
        probabilities: Theirs, 0 to 1.
        task_probability: Of the task, if it was inferred.
        error: Why the picture cannot be read.
    """

    path: str
    task: str | None
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    task_probability: float | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        answers = [{"class": c, "probability": p} for c, p in zip(self.classes, self.probabilities, strict=True)]
        found: dict[str, Any] = {"path": self.path, "task": self.task, "answers": answers}
        if self.task_probability is not None:
            found["task_probability"] = self.task_probability
        if self.error is not None:
            found["error"] = self.error
        return found


def predictions(
    zoo: Zoo, pictures: Source | Sequence[Source], task: str | None, top: int, false_alarms: float
) -> Iterator[Prediction]:
    """The answers in order of the pictures; broken ones have an error."""
    from rkr.pictures.zoo import AUTO

    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise UsageError(f"--top must be a whole number of at least 1, not {top!r}")
    name = zoo.chosen(task, auto=True)
    rule = zoo.rule() if name == AUTO else None
    given = [pictures] if isinstance(pictures, str | os.PathLike | bytes | Image.Image) else list(pictures)
    for batch in _batches(zoo, expanded(given)):
        good = [number for number, (_, square) in enumerate(batch) if isinstance(square, Tensor)]
        answers: dict[int, Prediction] = {
            number: Prediction(path, None, error=str(square))
            for number, (path, square) in enumerate(batch)
            if not isinstance(square, Tensor)
        }
        if good:
            squares = torch.stack([square for _, square in batch if isinstance(square, Tensor)])
            paths = [batch[number][0] for number in good]
            if rule is None:
                found = _told(zoo, squares, paths, name, top)
            else:
                found = _inferred(zoo, squares, paths, top, false_alarms)
            answers.update(zip(good, found, strict=True))
        yield from (answers[number] for number in range(len(batch)))


def _told(
    zoo: Zoo, squares: Tensor, paths: Sequence[str], task: str, top: int, certainty: Sequence[float] | None = None
) -> list[Prediction]:
    shares, classes = zoo.logits(squares, task).softmax(1).topk(min(top, len(zoo.tasks[task].classes)))
    names = zoo.tasks[task].classes
    return [
        Prediction(
            path,
            task,
            tuple(names[c] for c in classes[row].tolist()),
            tuple(shares[row].tolist()),
            None if certainty is None else certainty[row],
        )
        for row, path in enumerate(paths)
    ]


def _inferred(zoo: Zoo, squares: Tensor, paths: Sequence[str], top: int, false_alarms: float) -> list[Prediction]:
    rule = zoo.rule()
    found = rule(zoo.features(squares), false_alarms)
    best = found.probability.gather(1, found.task[:, None])[:, 0].tolist()
    answers = [Prediction(path, None, task_probability=p) for path, p in zip(paths, best, strict=True)]
    for number in found.task[~found.none].unique().tolist():
        rows = ((found.task == number) & ~found.none).nonzero()[:, 0].tolist()
        told = _told(zoo, squares[rows], [paths[r] for r in rows], rule.names[number], top, [best[r] for r in rows])
        for row, answer in zip(rows, told, strict=True):
            answers[row] = answer
    return answers


def expanded(given: Iterable[Source]) -> Iterator[tuple[str, Source]]:
    """Names and pictures; folders become the pictures below them."""
    for number, source in enumerate(given):
        if isinstance(source, bytes | Image.Image):
            yield str(getattr(source, "filename", "") or number), source
            continue
        path = Path(source).expanduser()
        if path.is_dir():
            below = pictures_below(path)
            if not below:
                raise FileError(f"{path}: no pictures found")
            yield from ((file, file) for file in below)
        elif not path.exists():
            raise FileError(f"{path}: not found")
        else:
            yield str(path), str(path)


def _batches(zoo: Zoo, named: Iterator[tuple[str, Source]]) -> Iterator[list[tuple[str, Tensor | FileError]]]:
    """Decoded batches, one ahead of the network."""

    def decode(one: tuple[str, Source]) -> tuple[str, Tensor | FileError]:
        try:
            return one[0], zoo.preparation.square(one[1])  # type: ignore[arg-type]
        except FileError as error:
            return one[0], error

    pool = ThreadPoolExecutor(torch.get_num_threads(), "decode")
    try:
        ahead = [pool.submit(decode, one) for one in islice(named, BATCH)]
        while ahead:
            after = [pool.submit(decode, one) for one in islice(named, BATCH)]
            yield [future.result() for future in ahead]
            ahead = after
    finally:
        pool.shutdown(cancel_futures=True)


def as_csv(answers: Iterable[Prediction], top: int) -> str:
    """A table with a line for each picture: path, task, class and probability, for each of `top` classes."""
    file = io.StringIO()
    out = csv.writer(file, lineterminator="\n")
    places = [""] if top == 1 else [f"_{n + 1}" for n in range(top)]
    out.writerow(
        ["path", "task", *(f"{w}{p}" for p in places for w in ("class", "probability")), "task_probability", "error"]
    )
    for one in answers:
        pairs = [(c, f"{p:.6f}") for c, p in zip(one.classes, one.probabilities, strict=True)]
        pairs += [("", "")] * (len(places) - len(pairs))
        certainty = "" if one.task_probability is None else f"{one.task_probability:.6f}"
        task = one.task or ("" if one.error else "none")
        out.writerow([one.path, task, *(cell for pair in pairs for cell in pair), certainty, one.error or ""])
    return file.getvalue()


def as_json(answers: Iterable[Prediction]) -> str:
    """A list with an object for each picture."""
    return json.dumps([one.to_json() for one in answers], indent=1, ensure_ascii=False) + "\n"
