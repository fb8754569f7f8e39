"""Which task a sample belongs to, from the base's own features: one pass of the base for any number of tasks.

The task with the nearest class mean is chosen, under one covariance that all tasks share (Mensink et al., TPAMI 2013;
Lee et al., NeurIPS 2018). Features are compressed by a signed square root and scaled to length 1 first, which makes
classes rounder (FeCAM, Goswami et al., NeurIPS 2023, uses a power transform too).

Each task keeps a `Description`, made from its training part alone: class means, the main directions in which samples of
a class differ, and how far samples lie from their nearest class mean. The covariance of all tasks can be kept whole
beside the base (`Shared`), and each task refines it. Without one it is put together from the descriptions at hand: then
it needs no file of its own, does not depend on the order of tasks, and a task taken from elsewhere brings its part.
Whether a sample is like none of the tasks is decided by the plain distance, whose quantiles are the task's own and do
not change when tasks are added.

Functions on tensors only: nothing here knows models or files.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rkr.errors import UsageError

DIRECTIONS = 16  # of the scatter within classes, that a description keeps
SHRINKAGE = 0.3  # of the shared covariance towards a multiple of the identity, at most
TEMPERATURE = 0.02  # for each dimension of the features: makes distances into probabilities
SLIGHT = 0.03  # shrinkage of a covariance that is kept whole, at least
SCALE = 6.0  # as TEMPERATURE, for distances under such a covariance, all dimensions together
QUANTILES = 101  # of distances: 0, 1, ..., 100 %
MEANS_BYTES = 400_000  # of the class means of a task
OVERHEAD = 600  # bytes of a description in a file besides its tensors, at most
FALSE_ALARMS = 0.05  # share of a task's own samples that may be called none of the tasks


@dataclass(frozen=True, eq=False)
class Description:
    """What a task keeps so that it can be inferred.

    Attributes:
        means: Of each class's embedded features, float16 (C, D); where there are very many, of groups of classes.
        directions: Main directions of the scatter within classes, float16 (r, D).
        variances: Along these, float32 (r,).
        rest: Mean variance along all others.
        samples: How many samples the scatter is from.
        quantiles: Of the squared distance from a sample to the nearest class mean, the sample itself left out of its
            class's mean: float32 (101,).
    """

    means: Tensor
    directions: Tensor
    variances: Tensor
    rest: float
    samples: int
    quantiles: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (self.means, self.directions, self.variances, self.quantiles))

    def threshold(self, false_alarms: float) -> float:
        """The squared distance that this share of the task's own samples exceeds."""
        if not 0 < false_alarms < 1:
            raise UsageError(f"the false-alarm rate must be a share between 0 and 1, not {false_alarms}")
        place = (1 - false_alarms) * (len(self.quantiles) - 1)
        low = int(place)
        high = min(low + 1, len(self.quantiles) - 1)
        return float(torch.lerp(self.quantiles[low], self.quantiles[high], place - low))

    def to_json(self) -> dict[str, Any]:
        """As plain values; tensors in base64."""
        tensors = {name: _packed(getattr(self, name)) for name in ("means", "directions", "variances", "quantiles")}
        return {**tensors, "rest": self.rest, "samples": self.samples}

    @classmethod
    def from_json(cls, values: Any) -> Description:
        """From `to_json`; UsageError if something is wrong."""
        try:
            names = ("means", "directions", "variances", "quantiles")
            tensors = {name: _unpacked(values[name]) for name in names}
            found = cls(**tensors, rest=float(values["rest"]), samples=int(values["samples"]))
            r, d = found.directions.shape
            fits = found.means.dim() == 2 and found.means.shape[1] == d and found.variances.shape == (r,)
            fits = fits and found.quantiles.shape == (QUANTILES,) and found.samples > 0
            if not fits or not all(bool(t.isfinite().all()) for t in tensors.values()):
                raise ValueError("its tensors do not fit together")
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"the description of a task cannot be read: {error}") from error
        return found


def embed(features: Tensor, width: int | None = None) -> Tensor:
    """Signed square root, scaled to length 1: (..., D).

    With a larger `width`, a fixed random projection to so many values and ReLU follow, as in RanPAC (McDonnell et al.,
    NeurIPS 2023): few features do not tell many classes apart by distances alone.
    """
    x = features.float()
    x = F.normalize(x.sign() * x.abs().sqrt(), dim=-1)
    if width is None or width <= x.shape[-1]:
        return x
    projection = torch.randn(x.shape[-1], width, generator=torch.Generator().manual_seed(0))
    return F.relu(x @ projection.to(x.device))


def describe(
    features: Tensor,
    y: Tensor,
    classes: int,
    directions: int = DIRECTIONS,
    limit: int | None = None,
    width: int | None = None,
) -> Description:
    """The description of a task.

    Args:
        features: The base's features of its training samples, (N, D).
        y: Their classes, (N,).
        classes: How many there are.
        directions: At most so many are kept.
        limit: Bytes of the description in a file. Directions are left out first, then class means are grouped. One
            mean is kept whatever the limit.
        width: See `embed`.
    """
    x = embed(features, width)
    most, width = most_means(x.shape[1]), 2 * x.shape[1]
    if limit is not None:
        room = tensor_bytes(limit)
        most = max(min(most, room // width), 1)
        directions = max(min(directions, (room - width * min(classes, most)) // (width + 4)), 0)
    counts = torch.bincount(y, minlength=classes)
    if bool((counts == 0).any()):
        raise UsageError(f"class {int((counts == 0).nonzero()[0])} has no samples")
    means = x.new_zeros(classes, x.shape[1]).index_add_(0, y, x) / counts[:, None]
    centred = x - means[y]
    freedom = max(len(x) - classes, 1)
    r = min(directions, *centred.shape)
    _, singular, basis = torch.linalg.svd(centred, full_matrices=False)
    variances = singular.square() / freedom  # (min(N, D),)
    rest = float(variances[r:].sum() / max(x.shape[1] - r, 1))
    distances = torch.cdist(x, means).square()
    n = counts[y].float()
    own = torch.arange(len(x), device=x.device)
    alone = n < 2  # its class mean is the sample itself: it says nothing of distances
    # ‖x - m'‖ = n / (n - 1) ‖x - m‖ for the mean m' of the class's other samples.
    distances[own, y] *= (n / (n - 1).clamp(min=1)).square()
    nearest = distances.amin(1)[~alone] if bool((~alone).any()) else distances.amin(1)
    kept = means
    if len(means) > most:
        kept = _grouped(means, most)
        nearest = torch.cdist(x, kept).square().amin(1)
    quantiles = torch.quantile(nearest, torch.linspace(0, 1, QUANTILES, device=x.device))
    return Description(kept.half().cpu(), basis[:r].half().cpu(), variances[:r].cpu(), rest, len(x), quantiles.cpu())


def tensor_bytes(limit: int) -> int:
    """Bytes for means and directions in a description of so many bytes: tensors are written in base64."""
    return (limit - OVERHEAD) * 3 // 4 - 4 * QUANTILES


def most_means(width: int) -> int:
    """How many means a description may have, so that its size is bounded. Class means beyond that are grouped."""
    return max(MEANS_BYTES // (2 * width), 1)


def _grouped(means: Tensor, groups: int, passes: int = 10) -> Tensor:
    """The centres of so many groups of class means, by k-means from evenly spaced classes: (groups, D)."""
    centres = means[torch.linspace(0, len(means) - 1, groups).round().long()].clone()
    for _ in range(passes):
        group = torch.cdist(means, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, group, means)
        sizes = torch.bincount(group, minlength=groups)[:, None]
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
    return centres


def shared_covariance(descriptions: Sequence[Description], shrinkage: float | None = None) -> Tensor:
    """The covariance within classes over all tasks, weighted by samples and shrunk to the identity: (D, D).

    By default it is shrunk by D divided by the number of samples: the more there are, the less.
    """
    d = descriptions[0].means.shape[1]
    total = sum(one.samples for one in descriptions)
    shrinkage = min(SHRINKAGE, d / total) if shrinkage is None else shrinkage
    found = torch.zeros(d, d)
    for one in descriptions:
        v = one.directions.float()
        weight = one.samples / total
        found += weight * (v.T * (one.variances - one.rest)) @ v
        found.diagonal().add_(weight * one.rest)
    level = found.diagonal().mean().clamp(min=1e-12)
    return (1 - shrinkage) * found + shrinkage * level * torch.eye(d)


@dataclass(frozen=True, eq=False)
class Shared:
    """The covariance within classes of all tasks, kept once beside the base.

    Attributes:
        covariance: (D, D).
        samples: How many it is from.
        tasks: Names of the tasks that it is from.
    """

    covariance: Tensor
    samples: int
    tasks: tuple[str, ...]

    def shrunk(self) -> Tensor:
        """Shrunk to a multiple of the identity, the less the more samples there are."""
        size = len(self.covariance)
        shrinkage = min(max(SLIGHT, size / (50 * self.samples)), SHRINKAGE)
        return (1 - shrinkage) * self.covariance + shrinkage * self.covariance.diagonal().mean() * torch.eye(size)

    @classmethod
    def refined(cls, before: Shared | None, task: str, x: Tensor, y: Tensor, classes: int) -> Shared:
        """With the embedded samples (N, D) of one more task; a task counts once."""
        if before is not None and task in before.tasks:
            return before
        counts = torch.bincount(y, minlength=classes).clamp(min=1)
        means = x.new_zeros(classes, x.shape[1]).index_add_(0, y, x) / counts[:, None]
        centred = x - means[y]
        own = centred.T @ centred / max(len(x) - classes, 1)
        if before is None:
            return cls(own, len(x), (task,))
        total = before.samples + len(x)
        covariance = (before.samples * before.covariance + len(x) * own) / total
        return cls(covariance, total, (*before.tasks, task))

    def to_json(self) -> dict[str, Any]:
        """As plain values: the lower triangle in float16, relative to the largest value, in base64."""
        rows, columns = torch.tril_indices(*self.covariance.shape)
        level = float(self.covariance.abs().max().clamp(min=1e-30))
        values = _packed((self.covariance[rows, columns] / level).half().cpu())
        return {"covariance": values, "level": level, "samples": self.samples, "tasks": list(self.tasks)}

    @classmethod
    def from_json(cls, values: Any) -> Shared:
        """From `to_json`; UsageError if something is wrong."""
        try:
            flat = _unpacked(values["covariance"]).float() * float(values["level"])
            size = int((8 * len(flat) + 1) ** 0.5 - 1) // 2
            if flat.dim() != 1 or size * (size + 1) // 2 != len(flat) or not bool(flat.isfinite().all()):
                raise ValueError("it is no triangle of numbers")
            covariance = torch.zeros(size, size)
            rows, columns = torch.tril_indices(size, size)
            covariance[rows, columns] = covariance[columns, rows] = flat
            return cls(covariance, int(values["samples"]), tuple(map(str, values["tasks"])))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"the covariance of the tasks cannot be read: {error}") from error


@dataclass(frozen=True, eq=False)
class Inferred:
    """Which tasks samples belong to.

    Attributes:
        task: Number of the most probable task, int64 (B,).
        probability: Of each task, (B, T).
        none: Whether the sample is unlike all tasks, bool (B,).
    """

    task: Tensor
    probability: Tensor
    none: Tensor


class Rule:
    """Infers the task among some, in their order.

    Attributes:
        names: The tasks.
        width: Values of the embedded features.
    """

    def __init__(self, descriptions: Mapping[str, Description], shared: Shared | None = None) -> None:
        if not descriptions:
            raise UsageError("there is no task to choose from")
        self.names = tuple(descriptions)
        self._tasks = tuple(descriptions.values())
        widths = {one.means.shape[1] for one in self._tasks}
        if len(widths) > 1:
            raise UsageError(f"tasks are described by features of different widths: {sorted(widths)}")
        self.width = widths.pop()
        # Mahalanobis distances are plain ones of rows times a matrix V with V Vᵀ = covariance⁻¹.
        if shared is None or len(shared.covariance) != self.width:
            covariance, self._scale = shared_covariance(self._tasks), 2 * TEMPERATURE * self.width
            self._whiten = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(covariance)))
        else:
            # Float16 may have made a small eigenvalue negative.
            variances, basis = torch.linalg.eigh(shared.shrunk())
            least = SLIGHT * variances.mean().clamp(min=1e-12)
            self._whiten, self._scale = basis / variances.clamp(min=least).sqrt(), SCALE
        self._means = torch.cat([one.means.float() for one in self._tasks])  # (sum of C, D)
        self._whitened = self._means @ self._whiten
        self._sizes = [len(one.means) for one in self._tasks]

    def __call__(self, features: Tensor, false_alarms: float = FALSE_ALARMS) -> Inferred:
        """Infer the task of samples from the base's features (B, D).

        Args:
            features: Of the base, in any device's memory.
            false_alarms: Share of the tasks' own samples that may be called none of them.
        """
        evidence = self.evidence(features)
        return Inferred(evidence.argmax(1), evidence.softmax(1), self.none(features, false_alarms))

    def none(self, features: Tensor, false_alarms: float = FALSE_ALARMS) -> Tensor:
        """Whether samples are unlike all tasks: bool (B,)."""
        plain = _nearest(embed(features.cpu(), self.width), self._means, self._sizes)
        limits = torch.tensor([one.threshold(false_alarms) for one in self._tasks])
        return (plain > limits).all(1)

    def evidence(self, features: Tensor) -> Tensor:
        """The logarithm of each task's probability, up to what is the same for all tasks: (B, T)."""
        return torch.stack([part.amax(1) for part in self._by_mean(features)], 1)

    def by_class(self, features: Tensor) -> list[Tensor]:
        """The logarithm of the probability of each class mean of each task: (B, C) for a task."""
        every = torch.cat(self._by_mean(features), 1).log_softmax(1)
        return list(every.split(self._sizes, 1))

    def _by_mean(self, features: Tensor) -> tuple[Tensor, ...]:
        x = embed(features.cpu(), self.width)
        distances = torch.cdist(x @ self._whiten, self._whitened).square()
        return (-distances / self._scale).split(self._sizes, 1)


def _nearest(x: Tensor, means: Tensor, sizes: Sequence[int]) -> Tensor:
    """Squared distance to the nearest class mean of each task: (B, T)."""
    distances = torch.cdist(x, means).square()
    return torch.stack([part.amin(1) for part in distances.split(list(sizes), 1)], 1)


def _packed(tensor: Tensor) -> dict[str, Any]:
    data = tensor.contiguous().numpy().tobytes()
    return {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "data": base64.b64encode(data).decode()}


def _unpacked(values: Mapping[str, Any]) -> Tensor:
    kinds = {"float16": torch.float16, "float32": torch.float32}
    data, kind = bytearray(base64.b64decode(values["data"], validate=True)), kinds[values["dtype"]]
    found = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
    return found.view([int(n) for n in values["shape"]])
