"""The evaluator, the only owner of test samples. Learners get them batch by batch, without labels, to predict.

Candidates of a task are compared here as well, on samples that are held out of training, never on those of the test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rkr.data import Batches, Stream
from rkr.experiment.processes import gather
from rkr.methods import Learner

if TYPE_CHECKING:
    from lightning_fabric import Fabric

BATCH = 250  # constant, so that outputs are bit-identical


@dataclass(frozen=True)
class Row:
    """All tasks so far, tested after one of them was learned. Fractions, in the order of tasks."""

    measures: dict[str, tuple[float, ...]]  # by name, the one that counts first: see `Task.measures`
    tested: tuple[int, ...]
    proof: dict[str, str]  # for each task, the SHA-256 of its logits

    @property
    def main(self) -> tuple[float, ...]:
        """The main measure."""
        return next(iter(self.measures.values()))


class Evaluator:
    """Tests a learner on the tasks of a stream."""

    def __init__(self, stream: Stream, fabric: Fabric, workers: int | None = None) -> None:
        self._tasks, self._fabric = stream.tasks, fabric
        self._batches = [
            Batches(
                task.test,
                BATCH,
                mean=stream.mean,
                std=stream.std,
                device=fabric.device,
                workers=workers,
            )
            for task in stream.tasks
        ]

    def _own_batches(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Distribute whole batches over the processes, so that outputs do not depend on the number of processes."""
        batches = self._batches[number]
        first = self._fabric.global_rank
        return batches.iter_from(0, min(first, len(batches)), self._fabric.world_size)

    @torch.no_grad()
    def row(self, learner: Learner, learned: int) -> Row:
        """Test the first `learned` tasks, with the task given."""
        learner.eval()
        found, tested, proof = [], [], {}
        for number in range(learned):
            task, own = self._tasks[number], []
            for x, _ in self._own_batches(number):
                with self._fabric.autocast():
                    logits = learner.predict(x, number)
                ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices.cpu()  # (B, 5)
                digest = hashlib.sha256(logits.float().cpu().contiguous().numpy().tobytes()).hexdigest()
                own.append((ranked, digest))
            batches = _in_order(gather(self._fabric, own))
            found.append(task.measure(torch.cat([ranked for ranked, _ in batches])))
            tested.append(len(task.test))
            proof[task.name] = hashlib.sha256("".join(digest for _, digest in batches).encode()).hexdigest()
        measures = zip(self._tasks[0].measures, zip(*found, strict=True), strict=True)
        return Row(dict(measures), tuple(tested), proof)

    @torch.no_grad()
    def agnostic(self, learner: Learner, learned: int) -> tuple[float, ...]:
        """Test the first `learned` tasks without telling the task. A sample counts as right if task and class are."""
        learner.eval()
        found = []
        for number in range(learned):
            hits = count = 0
            for x, y in self._own_batches(number):
                with self._fabric.autocast():
                    task, label = learner.infer(x)
                hits += int(((task == number) & (label == y)).sum())
                count += len(y)
            shares = gather(self._fabric, (hits, count))
            found.append(sum(s[0] for s in shares) / sum(s[1] for s in shares))
        return tuple(found)


@torch.no_grad()
def held_out_accuracy(learner: Learner, batches: Batches, number: int, fabric: Fabric) -> float:
    """The accuracy of a learner with the task given; labels count within the task."""
    learner.eval()
    hits = 0
    for x, y in batches.iter_from(0, min(fabric.global_rank, len(batches)), fabric.world_size):
        with fabric.autocast():
            hits += int((learner.predict(x, number).argmax(1) == y).sum())
    return sum(gather(fabric, hits)) / len(batches.samples)


def _in_order(shares: list[list[Any]]) -> list[Any]:
    """Gather the results of every n-th batch from the processes, in the order of batches."""
    return [shares[k % len(shares)][k // len(shares)] for k in range(sum(map(len, shares)))]
