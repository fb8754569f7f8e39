"""Elastic weight consolidation (EWC; Kirkpatrick et al., PNAS 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from rkr.errors import UsageError
from rkr.methods.learner import MakeNetwork, ReadSamples
from rkr.methods.shared.anchored import Anchored
from rkr.methods.shared.fisher import ESTIMATORS, fisher
from rkr.registry import register

MODES = ("all", "online")


@register.method(
    "ewc",
    "EWC: Fisher-weighted penalty; about 300 % to go on learning",
    citation="Kirkpatrick et al., PNAS 2017",
)
class Ewc(Anchored):
    """A quadratic penalty on changes of each weight, weighted by its Fisher information F (equation 3).

    Args:
        make: Builds the network.
        head: Its classification layer.
        strength: λ.
        estimator: How the Fisher information is estimated: "exact", "sampled", "empirical" or "batched" (squared mean
            gradients).
        samples: Maximum number of training samples, drawn at random, to estimate it from. Default: all.
        mode: "all": a penalty for every earlier task, Σ_t F_t (θ - θ*_t)², stored as one parabola, their sum.
            "online" (Schwarz et al., ICML 2018): F ← γ F + F_t, around the newest weights.
        gamma: γ of "online".
        bn: See `OneNetwork`.
    """

    checked = "Equation 3 of the paper, and the Fisher information of FACIL, mammoth and GMvandeVen/continual-learning."
    differs = (
        "The Fisher information is computed sample by sample; some public codes square the mean gradient of a batch"
        ' (`estimator = "batched"`).',
        "Every task has its own batch normalisation.",
        "With SGD no weight is held by more than 1 / rate.",
    )

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"strength": (1.0, 10.0, 100.0, 1e3, 5e3, 1e4)}

    def __init__(
        self,
        make: MakeNetwork,
        head: str,
        *,
        strength: float = 100.0,
        estimator: str = "sampled",
        samples: int | None = None,
        mode: str = "all",
        gamma: float = 1.0,
        bn: str = "per_task",
    ) -> None:
        super().__init__(make, head, strength=strength, bn=bn)
        if estimator not in ESTIMATORS:
            raise UsageError(f"estimator must be one of {', '.join(ESTIMATORS)}, not {estimator!r}")
        if mode not in MODES:
            raise UsageError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        if samples is not None and samples < 1:
            raise UsageError(f"samples must be at least 1, or be left out for all of them, not {samples!r}")
        if not 0 <= gamma <= 1:
            raise UsageError(f"gamma must be from 0 to 1, not {gamma!r}")
        self.estimator, self.samples, self.mode, self.gamma = estimator, samples, mode, gamma

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        shared = self.shared()
        self.select(self.task.number)
        found = fisher(self.network, shared, train, self.task.start, self.estimator, self.samples)
        if self.mode == "all":
            self.anchor.add(shared, found)
        else:
            self.anchor.renew(shared, found, self.gamma)

    def kept_to_learn(self) -> tuple[Sequence[Tensor], int]:
        """With "all", also the centre of the summed parabolas from the second task on: no network has these weights."""
        importances, samples = super().kept_to_learn()
        middle = list(self.anchor.values) if self.mode == "all" and self.task.number else []
        return [*importances, *middle], samples
