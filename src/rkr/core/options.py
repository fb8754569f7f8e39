"""The options of `rkr.rectify`, in one documented place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any

from rkr.errors import UsageError

LAYER_CHOICES = (True, False, "conv", "linear")
BN_POLICIES = ("auto", "per_task", "stats", "affine", "frozen")
LAYOUTS = ("axes", "reshape")
MIXED = ("auto", "group", "layer")


@dataclass(frozen=True)
class Options:
    """How a network is rectified. Fixed when `rectify` is called and stored with the model.

    Attributes:
        rank: K, the inner size of `R = LM·RM` (paper, "Reducing Parameters"). The paper uses 2 for
            classification and 16 for the zero-shot encoder.
        rectify_weights: Where weights are rectified (equation 1): ``True`` for every layer, ``False``
            for none, ``"conv"`` for convolutions only (transposed ones included), ``"linear"`` for all others only.
        scale_outputs: Where outputs are scaled by F (equation 2); same values. RKR-Lite is
            ``rectify_weights="conv", scale_outputs="linear"``.
        include: Shell-style name patterns (``"layer4.*"``); only layers that match one are rectified.
        exclude: Layers that match one of these are not rectified, even if included. For normalisation layers use `bn`
            and `norm`.
        ranks: Rank by name pattern, e.g. ``{"layer4.*": 8}``; the last pattern that matches wins,
            other layers use `rank`.
        bn: What each task keeps of a BatchNorm (or InstanceNorm) layer. ``"per_task"``: affine
            parameters and running statistics. ``"stats"``: statistics only; the affine parameters stay
            as the first task left them. ``"affine"``: the opposite. ``"frozen"``: nothing. ``"auto"``
            is ``"per_task"`` where convolutions are scaled and ``"stats"`` elsewhere, because the paper
            counts the affine parameters as scaling. Shared statistics never move.
        norm: ``"frozen"`` or ``"per_task"``: the affine parameters of LayerNorm, GroupNorm, RMSNorm.
        layout: How `LM·RM` becomes a kernel. ``"axes"``: rows are (width, input channel), columns
            (height, output channel), so that R is a separable convolution. ``"reshape"``: row-major
            reshape to (width, height, input, output), for fidelity studies; slower.
        init_gain: Multiplies the standard deviation with which LM is drawn (see `rectification.lm_std`).
        cache_bytes: Bound on the memory that holds merged weights of recently used tasks. The task in
            use is always cached.
        mixed: How a batch with several tasks is computed. ``"group"``: one pass per task. ``"layer"``:
            one pass, each layer applies each sample's own factors, if it is proved that each sample's output
            depends on that sample alone (`rowwise.py`), otherwise ``"group"``. ``"auto"``: ``"layer"`` for networks
            made mostly of linear layers, where it is faster. The two agree up to rounding.
        fast: ``False`` computes the paper's formula literally, for debugging and for derivatives of
            derivatives, which the fast kernels do not have.
    """

    rank: int = 2
    rectify_weights: bool | str = True
    scale_outputs: bool | str = True
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)
    bn: str = "auto"
    norm: str = "frozen"
    layout: str = "axes"
    init_gain: float = 1.0
    cache_bytes: int = 1 << 30
    mixed: str = "auto"
    fast: bool = True

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            value = getattr(self, name)
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, Sequence) or not all(isinstance(v, str) for v in texts):
                raise UsageError(f"{name} must be a name pattern or a list of them, not {value!r}")
            object.__setattr__(self, name, tuple(texts))
        if not isinstance(self.ranks, Mapping) or not all(isinstance(k, str) for k in self.ranks):
            raise UsageError(f"ranks must map name patterns to ranks, not {self.ranks!r}")
        ranks = {pattern: _rank(f"ranks[{pattern!r}]", rank) for pattern, rank in self.ranks.items()}
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "rank", _rank("rank", self.rank))
        _check_choice("rectify_weights", self.rectify_weights, LAYER_CHOICES)
        _check_choice("scale_outputs", self.scale_outputs, LAYER_CHOICES)
        _check_choice("bn", self.bn, BN_POLICIES)
        _check_choice("norm", self.norm, ("frozen", "per_task"))
        _check_choice("layout", self.layout, LAYOUTS)
        _check_choice("mixed", self.mixed, MIXED)
        _check_choice("fast", self.fast, (True, False))
        if (
            isinstance(self.init_gain, bool)
            or not isinstance(self.init_gain, int | float)
            or not 0 < self.init_gain < float("inf")
        ):
            raise UsageError(f"init_gain must be greater than 0, not {self.init_gain!r}")
        if not _is_number(self.cache_bytes) or not self.cache_bytes >= 0 or self.cache_bytes % 1:
            raise UsageError(f"cache_bytes must be a whole number of at least 0, not {self.cache_bytes!r}")
        object.__setattr__(self, "cache_bytes", int(self.cache_bytes))  # 1e9 is one

    def selects(self, path: str) -> bool:
        """Whether the layer at `path` passes the include and exclude patterns."""
        return any(fnmatchcase(path, p) for p in self.include) and not any(fnmatchcase(path, p) for p in self.exclude)

    def rank_of(self, path: str) -> int:
        """K for the layer at `path`."""
        matching = [rank for pattern, rank in self.ranks.items() if fnmatchcase(path, pattern)]
        return matching[-1] if matching else self.rank

    def rectifies(self, kind: str) -> bool:
        """Whether layers of this kind ("conv" or "linear") get a weight rectification."""
        return self.rectify_weights is True or self.rectify_weights == kind

    def scales(self, kind: str) -> bool:
        """Whether layers of this kind ("conv" or "linear") get scaling factors."""
        return self.scale_outputs is True or self.scale_outputs == kind

    @property
    def bn_affine(self) -> bool:
        """Whether each task has its own BatchNorm affine parameters."""
        return self._bn_policy in ("per_task", "affine")

    @property
    def bn_stats(self) -> bool:
        """Whether each task has its own BatchNorm running statistics."""
        return self._bn_policy in ("per_task", "stats")

    @property
    def _bn_policy(self) -> str:
        if self.bn != "auto":
            return self.bn
        return "per_task" if self.scales("conv") else "stats"

    def to_json(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Options:
        """Rebuild from `to_json`; unknown names raise UsageError."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UsageError(f"unknown option {unknown[0]!r}; known options: {', '.join(sorted(known))}")
        return cls(**values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rank(name: str, value: Any) -> int:
    """Convert to int or raise UsageError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
    return int(value)


def _check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if not any(type(value) is type(a) and value == a for a in allowed):
        raise UsageError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
