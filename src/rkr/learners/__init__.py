"""How tasks are learned: one file a method. A new method is a file with a `Learner`, and a line in `METHODS`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rkr.core.options import Options
from rkr.errors import UsageError
from rkr.learners.finetune import Finetune
from rkr.learners.head_only import HeadOnly
from rkr.learners.joint import Joint
from rkr.learners.learner import Learner, MakeNetwork
from rkr.learners.rkr import Rkr
from rkr.learners.separate import Separate

__all__ = ["METHODS", "Learner", "MakeNetwork", "Method"]


@dataclass(frozen=True)
class Method:
    """A learner with some of its options set, and one line that says what it is."""

    learner: type[Learner]
    description: str
    preset: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Every option and its value."""
        known: dict[str, Any] = {}
        for name, parameter in inspect.signature(self.learner).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY:
                known[name] = parameter.default
            elif parameter.kind is parameter.VAR_KEYWORD:  # passed on to `rectify`
                known |= {k: list(v) if isinstance(v, tuple) else v for k, v in Options().to_json().items()}
        return {**known, **self.preset}

    def build(self, make: MakeNetwork, head: str, **options: Any) -> Learner:
        """A learner that has seen nothing yet."""
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            known = ", ".join(sorted(self.options)) or "none"
            raise UsageError(f"{self.learner.__name__} has no option {unknown[0]!r}; its options: {known}")
        return self.learner(make, head, **{**self.preset, **options})


METHODS: dict[str, Method] = {
    "rkr": Method(Rkr, "rectification of rank 2 and scaling factors for every layer"),
    "rkr-lite": Method(
        Rkr,
        "RKR-Lite: rectification of convolutions, scaling of fully connected layers",
        {"rectify_weights": "conv", "scale_outputs": "linear"},
    ),
    "rectify-only": Method(Rkr, "RKR without scaling factors", {"scale_outputs": False}),
    "scale-only": Method(Rkr, "RKR without rectification", {"rectify_weights": False}),
    "rkr-k1": Method(Rkr, "RKR of rank 1", {"rank": 1}),
    "rkr-k4": Method(Rkr, "RKR of rank 4", {"rank": 4}),
    "rkr-k8": Method(Rkr, "RKR of rank 8", {"rank": 8}),
    "rkr-random": Method(Rkr, "RKR whose tasks start at random instead of the previous task", {"init": "random"}),
    "finetune": Method(Finetune, "one network fine-tuned on each task, nothing against forgetting"),
    "separate": Method(Separate, 'one network for each task (the paper\'s "Original")'),
    "joint": Method(Joint, "one network, trained on the images of all tasks so far"),
    "head-only": Method(HeadOnly, "the network of the first task, frozen, with a new head for each task"),
}
