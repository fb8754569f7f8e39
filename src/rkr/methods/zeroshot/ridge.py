"""Ridge regression from features to attributes, a baseline without training."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.capacity import Capacity
from rkr.data.measures import harmonic_mean, unseen_and_seen
from rkr.errors import UsageError
from rkr.methods.learner import Learner, MakeNetwork, Phase, ReadSamples, SeenTask, nbytes, plain_size
from rkr.registry import register

STRENGTHS = tuple(10.0**k for k in range(-2, 5))


@register.method("ridge", "ridge regression from features to attributes, without a network")
class Ridge(Learner):
    """A linear map of each task from features to attributes; the class of the nearest attributes, by angle, wins.

    It is solved, not trained. Its strength, and whether features and attributes are taken from their means, is chosen
    on a fifth of the seen classes and a fifth of the rows of the others, held out of the training rows; then it is
    solved again with all of them.
    """

    checked = "A reference point by its definition."

    setting = "zero-shot"
    isolating = True
    agnostic = "never"
    loadable = False

    def __init__(self, make: MakeNetwork, head: str = "") -> None:
        super().__init__(make, head)
        network = make()
        self._features = int(network.input_shape[0])  # type: ignore[index]
        self._plain = plain_size(network.encoder)  # type: ignore[arg-type]
        # Of each task: the map (D, A), and the features (D,) and attributes (A,) that it takes for 0.
        self.maps, self.from_x, self.from_a = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        self._strength, self._centred = 0.0, False

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        if task.attributes is None:
            raise UsageError(f"task {task.name!r} has no attributes: this method is for zero-shot learning")
        d, a = self._features, task.attributes.shape[1]
        for kept, shape in ((self.maps, (d, a)), (self.from_x, (d,)), (self.from_a, (a,))):
            kept.append(nn.Parameter(task.attributes.new_zeros(shape), requires_grad=False))

    def phases(self) -> Sequence[Phase]:
        return ()

    @torch.no_grad()
    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        found = list(train())
        x = torch.cat([x for x, _ in found])
        y = torch.cat([y for _, y in found]) - self.task.start
        seen = y.unique()
        hidden = seen[torch.randperm(len(seen))[: max(1, len(seen) // 5)]]
        held_class = torch.isin(y, hidden)
        held = held_class | (torch.rand(len(y)) < 0.2).to(y.device)
        rows, labels = x[held], y[held].cpu()
        scores = {}
        for strength, centred in itertools.product(STRENGTHS, (False, True)):
            self._solve(x[~held], y[~held], strength, centred)
            logits = self.predict(rows, self.task.number)
            logits[:, list(self.task.unseen)] = -torch.inf  # these are not for choices
            u, s = unseen_and_seen(logits.argmax(1).cpu(), labels, self.task.classes, hidden.tolist())
            scores[strength, centred] = harmonic_mean(u, s)
        self._strength, self._centred = max(scores, key=lambda choice: scores[choice])
        self._solve(x, y, self._strength, self._centred)

    def _solve(self, x: Tensor, y: Tensor, strength: float, centred: bool) -> None:
        """The W that minimises ‖X W - A‖² + strength ‖W‖², for rows X (N, D) and the attributes A (N, A) of each."""
        assert self.task.attributes is not None
        a = self.task.attributes[y]
        x0, a0 = self.from_x[-1], self.from_a[-1]
        x0.copy_(x.mean(0) if centred else torch.zeros_like(x0))
        a0.copy_(a.mean(0) if centred else torch.zeros_like(a0))
        x, a = x - x0, a - a0
        gram = x.T @ x
        gram.diagonal().add_(strength)
        self.maps[-1].copy_(torch.linalg.solve(gram, x.T @ a))

    def predict(self, x: Tensor, number: int) -> Tensor:
        attributes = self.seen[number].attributes
        assert attributes is not None
        answer = (x - self.from_x[number]) @ self.maps[number]
        return F.normalize(answer, dim=1) @ F.normalize(attributes - self.from_a[number], dim=1).T

    def notes(self) -> dict[str, float | bool]:
        return {"strength": self._strength, "centred": self._centred}

    def capacity(self) -> Capacity:
        """The maps; the attributes of classes, which take the place of classifiers, are in the bytes."""
        own = sum(p.numel() for p in self.parameters())
        attributes = sum(task.attributes.nbytes for task in self.seen if task.attributes is not None)
        return Capacity(own, self._plain.parameters, nbytes(self) + attributes, self.maps[-1].numel())
