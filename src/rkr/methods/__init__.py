"""How tasks are learned: one file a method. A new method is a file with a `Learner`, and a line in `METHODS`.

Zero-shot tasks have methods of their own, in `rkr.methods.zeroshot`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from torch import nn

from rkr.core import Options
from rkr.errors import UsageError
from rkr.methods.apd import Apd
from rkr.methods.ccll import Ccll
from rkr.methods.den import Den
from rkr.methods.eeil import Eeil
from rkr.methods.eft import Eft
from rkr.methods.ewc import Ewc
from rkr.methods.finetune import Finetune
from rkr.methods.head_only import HeadOnly
from rkr.methods.hnet import Hnet
from rkr.methods.icarl import Icarl
from rkr.methods.joint import Joint
from rkr.methods.l2t import L2Transfer
from rkr.methods.learner import Learner, MakeNetwork, SeenTask
from rkr.methods.lwf import Lwf
from rkr.methods.pgn import ProgressiveNetwork
from rkr.methods.progress_compress import ProgressCompress
from rkr.methods.rcl import ReinforcedLearning
from rkr.methods.rkr import Rkr
from rkr.methods.rps import RpsNet
from rkr.methods.separate import Separate
from rkr.methods.si import SynapticIntelligence
from rkr.methods.zeroshot import Base, Lzsl, Original, Penalty, Ridge, ZeroShot, ZeroShotRkr

__all__ = ["METHODS", "ZERO_SHOT_METHODS", "Learner", "MakeNetwork", "Method", "SeenTask", "methods_for"]


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
        """A learner that has seen nothing yet. `make` is a function, as some methods need several networks."""
        if isinstance(make, nn.Module):
            name = type(make).__name__
            raise UsageError(f"give a function that builds the network, such as lambda: {name}(...), not a network")
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            known = ", ".join(sorted(self.options)) or "none"
            raise UsageError(f"{self.learner.__name__} has no option {unknown[0]!r}; its options: {known}")
        parameters = inspect.signature(self.learner, eval_str=True).parameters
        for name, value in options.items():
            words, fits = KINDS.get(parameters[name].annotation if name in parameters else None, ("", None))
            if fits is not None and not fits(value):
                raise UsageError(f"{name} must be {words}, not {value!r}")
        return self.learner(make, head, **{**self.preset, **options})


KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {  # of options, by their annotations
    int: ("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    float: (
        "a finite number",
        lambda value: isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value),
    ),
    int | None: (
        "a whole number, or be left out",
        lambda value: value is None or (isinstance(value, Integral) and not isinstance(value, bool)),
    ),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str)),
}

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
    "finetune-bn": Method(Finetune, "fine-tuning whose tasks keep their batch normalisation", {"bn": "per_task"}),
    "separate": Method(Separate, 'one network for each task (the paper\'s "Original")'),
    "joint": Method(Joint, "one network, trained on the images of all tasks so far"),
    "head-only": Method(HeadOnly, "the network of the first task, frozen, with a new head for each task"),
    "l2t": Method(
        L2Transfer, "L2-Transfer (Yoon et al. 2020): a penalty on leaving old weights; keeps these, about 200 %"
    ),
    "ewc": Method(Ewc, "EWC (Kirkpatrick et al. 2017): Fisher-weighted penalty; keeps weights and Fisher, about 300 %"),
    "si": Method(
        SynapticIntelligence,
        "SI (Zenke et al. 2017): penalty weighted by path integrals; keeps weights and these, about 300 %",
    ),
    "pc": Method(
        ProgressCompress, "P&C (Schwarz et al. 2018): an active column, distilled with online EWC; keeps about 300 %"
    ),
    "lwf": Method(Lwf, "LwF (Li & Hoiem 2016): distils old heads on new images; keeps the old network, about 200 %"),
    "icarl": Method(
        Icarl,
        "iCaRL (Rebuffi et al. 2017): exemplars, nearest mean; keeps 2,000 images and the old network, 250 % on LeNet",
    ),
    "eeil": Method(
        Eeil,
        "EEIL (Castro et al. 2018): exemplars, distillation, a balanced phase; keeps as iCaRL",
    ),
    "rps-net": Method(
        RpsNet, "RPS-Net (Rajasegaran et al. 2019): random paths through parallel modules; else keeps as iCaRL"
    ),
    "pgn": Method(ProgressiveNetwork, "PGN (Rusu et al. 2016): a thin column for each task beside all earlier ones"),
    "den": Method(
        Den,
        "DEN (Yoon et al. 2018): retrains what a task needs, adds units, copies those that drift; to 180 % on LeNet",
    ),
    "rcl": Method(ReinforcedLearning, "RCL (Xu & Zhu 2018): a policy searches how much wider a task makes each layer"),
    "ccll": Method(Ccll, "CCLL (Singh et al. 2020): every layer's output is calibrated for each task"),
    "eft": Method(Eft, "EFT (Verma et al. 2021): grouped convolutions on every layer's output"),
    "hnet": Method(Hnet, "HNET (von Oswald et al. 2020): a hypernetwork generates the weights of every task"),
    "apd": Method(Apd, "APD (Yoon et al. 2020): weights shared under masks, plus a sparse part of each task"),
}

ZERO_SHOT_METHODS: dict[str, Method] = {
    "rkr": Method(ZeroShotRkr, "rectification of rank 16 and scaling factors of the image encoder", {"rank": 16}),
    "rectify-only": Method(ZeroShotRkr, "RKR without scaling factors", {"rank": 16, "scale_outputs": False}),
    "scale-only": Method(ZeroShotRkr, "RKR without rectification", {"rank": 16, "rectify_weights": False}),
    "rkr-k1": Method(ZeroShotRkr, "RKR of rank 1", {"rank": 1}),
    "rkr-k4": Method(ZeroShotRkr, "RKR of rank 4", {"rank": 4}),
    "rkr-k32": Method(ZeroShotRkr, "RKR of rank 32", {"rank": 32}),
    "rkr-random": Method(
        ZeroShotRkr,
        "RKR whose tasks start at random instead of the previous task",
        {"rank": 16, "init": "random"},
    ),
    "base": Method(Base, "a new network for every task, and only the last one is kept"),
    "sft": Method(ZeroShot, "sequential fine-tuning of the network, nothing against forgetting"),
    "l1": Method(Penalty, "fine-tuning with an L1 penalty on changes of the image encoder", {"norm": 1}),
    "l2": Method(Penalty, "fine-tuning with an L2 penalty on changes of the image encoder", {"norm": 2}),
    "lzsl": Method(Lzsl, "LZSL: selective retraining and distillation of the image encoder"),
    "original": Method(Original, "one network for each task, all of which are kept"),
    "ridge": Method(Ridge, "ridge regression from features to attributes, without a network"),
}


def methods_for(zero_shot: bool) -> dict[str, Method]:
    """The methods for a kind of tasks."""
    return ZERO_SHOT_METHODS if zero_shot else METHODS
