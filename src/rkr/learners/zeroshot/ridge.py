"""Ridge regression from features to attributes: what zero-shot learning must beat to be worth its training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.errors import UsageError
from rkr.learners.learner import Capacity, Learner, MakeNetwork, Phase, ReadSamples, SeenTask, nbytes, plain_size
from rkr.measures import harmonic_mean, unseen_and_seen

STRENGTHS = tuple(10.0**k for k in range(-2, 5))


class Ridge(Learner):
    """A linear map of each task from features to attributes; the class of the nearest attributes, by angle, wins.

    It is solved, not trained. Its strength is chosen on a fifth of the seen classes and a fifth of the rows of the
    others, held out of the training rows; then it is solved again with all of them.
    """

    isolating = True

    def __init__(self, make: MakeNetwork, head: str = "") -> None:
        super().__init__(make, head)
        network = make()
        self._features = int(network.input_shape[0])  # type: ignore[index]
        self._plain = plain_size(network.encoder)  # type: ignore[arg-type]
        self.maps = nn.ParameterList()
        self._strength = 0.0

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        if task.attributes is None:
            raise UsageError(f"task {task.name!r} has no attributes: this method is for zero-shot learning")
        shape = (self._features, task.attributes.shape[1])
        self.maps.append(nn.Parameter(task.attributes.new_zeros(shape), requires_grad=False))

    def phases(self) -> Sequence[Phase]:
        return ()

    @torch.no_grad()
    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        found = list(train())
        x = torch.cat([x for x, _ in found])
        y = torch.cat([y for _, y in found]) - self.task.start
        assert self.task.attributes is not None
        seen = y.unique()
        hidden = seen[torch.randperm(len(seen))[: max(1, len(seen) // 5)]]
        held_class = torch.isin(y, hidden)
        held = held_class | (torch.rand(len(y)) < 0.2).to(y.device)
        rows, labels = x[held], y[held].cpu()
        scores = {}
        for strength in STRENGTHS:
            matrix = self._solved(x[~held], self.task.attributes[y[~held]], strength)
            logits = self._logits(rows, matrix, self.task)
            logits[:, list(self.task.unseen)] = -torch.inf  # these are not for choices
            u, s = unseen_and_seen(logits.argmax(1).cpu(), labels, self.task.classes, hidden.tolist())
            scores[strength] = harmonic_mean(u, s)
        self._strength = max(scores, key=lambda strength: scores[strength])
        self.maps[-1].copy_(self._solved(x, self.task.attributes[y], self._strength))

    @staticmethod
    def _solved(x: Tensor, a: Tensor, strength: float) -> Tensor:
        """W that minimises ‖X W - A‖² + strength ‖W‖², (D, A)."""
        gram = x.T @ x
        gram.diagonal().add_(strength)
        return torch.linalg.solve(gram, x.T @ a)

    @staticmethod
    def _logits(x: Tensor, matrix: Tensor, task: SeenTask) -> Tensor:
        assert task.attributes is not None
        return F.normalize(x @ matrix, dim=1) @ F.normalize(task.attributes, dim=1).T

    def predict(self, x: Tensor, number: int) -> Tensor:
        return self._logits(x, self.maps[number], self.seen[number])

    def notes(self) -> dict[str, float]:
        return {"strength": self._strength}

    def capacity(self) -> Capacity:
        own = sum(p.numel() for p in self.maps)
        return Capacity(own, self._plain.parameters, nbytes(self.maps), self.maps[-1].numel())
