"""The options of `rkr.rectify`, in one documented place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rkr import validation


def patterns(value: object) -> object:
    """A single name pattern stands for a list of one."""
    return (value,) if isinstance(value, str) else value


def whole(value: object) -> object:
    """1e9 is a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Positive = Annotated[int, BeforeValidator(validation.plain), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(validation.plain), Field(ge=0)]
Share = Annotated[float, BeforeValidator(validation.plain), Field(gt=0, lt=1)]
Layers = bool | Literal["conv", "linear"]
Patterns = Annotated[Sequence[str], BeforeValidator(patterns), AfterValidator(tuple)]


class Options(validation.Options):
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
            other layers use `rank`. With 0 a layer has no LM and RM.
        budget: Numbers that a task may have in LM, RM, F and affine parameters: a share of the network
            (``0.0043``), a number (``13_000``), or ``"paper"`` for as many as `rank` at every layer costs. Each layer
            then gets a rank of its own, 0 included, by the rule in `rkr.core.budget`; they are entered into `ranks`.
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
        kernels: How layers compute. ``"factored"``: layer by layer, without the gradient of the whole weight; the
            least arithmetic. ``"grouped"``: a training step merges the weights of all layers of one shape at once; the
            fewest calls. ``"formula"``: the paper's formula in plain operations, for debugging and for derivatives of
            derivatives, which the others do not have. ``"auto"``: grouped on accelerators and for small weights and
            batches on CPUs, else factored (`ways.py`). They agree up to rounding. Files of earlier versions say
            ``fast``: ``False`` stands for ``"formula"``.

    Raises:
        UsageError: An option does not exist, or has an impossible value. All options are keyword arguments.

    Example:
        >>> import rkr
        >>> options = rkr.Options(rank=4, ranks={"fc1": 8}, exclude="conv1")
        >>> options.rank_of("conv2"), options.rank_of("fc1"), options.selects("conv1")
        (4, 8, False)
        >>> model = rkr.rectify(rkr.networks.small_cnn(), head="fc", options=options)
    """

    rank: Positive = 2
    rectify_weights: Layers = True
    scale_outputs: Layers = True
    include: Patterns = ("*",)
    exclude: Patterns = ()
    ranks: Mapping[str, Whole] = {}
    budget: Literal["paper"] | Positive | Share | None = None
    bn: Literal["auto", "per_task", "stats", "affine", "frozen"] = "auto"
    norm: Literal["frozen", "per_task"] = "frozen"
    layout: Literal["axes", "reshape"] = "axes"
    init_gain: Annotated[float, Field(gt=0)] = 1.0
    cache_bytes: Annotated[int, Field(ge=0), BeforeValidator(whole)] = 1 << 30
    mixed: Literal["auto", "group", "layer"] = "auto"
    kernels: Literal["auto", "factored", "grouped", "formula"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _read_fast(cls, values: Any) -> Any:
        """What earlier versions called `fast`."""
        if isinstance(values, dict) and isinstance(values.get("fast"), bool):
            values = dict(values)
            if not values.pop("fast"):
                values["kernels"] = "formula"
        return values

    def selects(self, path: str) -> bool:
        """Tell whether a layer passes the include and exclude patterns.

        Args:
            path: The layer's name in the network.

        Returns:
            Whether it does.
        """
        return any(fnmatchcase(path, p) for p in self.include) and not any(fnmatchcase(path, p) for p in self.exclude)

    def rank_of(self, path: str) -> int:
        """Tell the rank K of a layer.

        Args:
            path: The layer's name in the network.

        Returns:
            K.
        """
        named = self.named_rank(path)
        return self.rank if named is None else named

    def named_rank(self, path: str) -> int | None:
        """What `ranks` says about the layer at `path`, if it does."""
        matching = [rank for pattern, rank in self.ranks.items() if fnmatchcase(path, pattern)]
        return matching[-1] if matching else None

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
        return self.model_dump()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Options:
        """Rebuild from `to_json`; unknown names raise UsageError."""
        return cls(**values)
