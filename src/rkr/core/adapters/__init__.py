"""Adapters: one for each kind of layer, with everything that tasks need there.

An adapter says which modules it takes, the shapes and initial values of a task's tensors, how the layer computes with
them (by the paper's formula and faster), how they are merged, how a batch with several tasks is computed, and what
it costs. `register_layer` adds kinds; `Adapter` explains how to write one.
"""

from __future__ import annotations

from torch import nn

from rkr.core.adapters.attention import AttentionAdapter
from rkr.core.adapters.base import Adapter, BuffersOnly, NeedsGrouping, TargetLayer
from rkr.core.adapters.conv import CONVS, ConvAdapter
from rkr.core.adapters.conv_transpose import CONV_TRANSPOSES, ConvTransposeAdapter
from rkr.core.adapters.embedding import EmbeddingAdapter, EmbeddingBagAdapter
from rkr.core.adapters.head import HeadLayer
from rkr.core.adapters.linear import LinearAdapter, TransposedLinearAdapter
from rkr.core.adapters.norm import BATCH_NORMS, OTHER_NORMS, BatchNormLayer, NormLayer
from rkr.core.exchange import original_class
from rkr.errors import UsageError

__all__ = [
    "Adapter",
    "AttentionAdapter",
    "BatchNormLayer",
    "BuffersOnly",
    "ConvAdapter",
    "ConvTransposeAdapter",
    "EmbeddingAdapter",
    "EmbeddingBagAdapter",
    "HeadLayer",
    "LinearAdapter",
    "NeedsGrouping",
    "NormLayer",
    "TargetLayer",
    "TransposedLinearAdapter",
    "adapter_for",
    "is_standard",
    "register_layer",
]

_LAYERS: dict[type, type[TargetLayer]] = {
    nn.Linear: LinearAdapter,
    nn.Embedding: EmbeddingAdapter,
    nn.EmbeddingBag: EmbeddingBagAdapter,
    nn.MultiheadAttention: AttentionAdapter,
    **dict.fromkeys(CONVS, ConvAdapter),
    **dict.fromkeys(CONV_TRANSPOSES, ConvTransposeAdapter),
    **dict.fromkeys(BATCH_NORMS, BatchNormLayer),
    **dict.fromkeys(OTHER_NORMS, NormLayer),
}

# Layers of other packages, by name: the package need not be installed, and is never imported here.
_LAYERS_BY_NAME: dict[str, type[TargetLayer]] = {
    "transformers.pytorch_utils.Conv1D": TransposedLinearAdapter,
}


def register_layer(module_class: type[nn.Module], adapter: type[Adapter]) -> None:
    """Rectify layers of this class, and of its subclasses, with an adapter.

    The adapter of the closest base class is used. Models that exist already stay as they are. A saved model needs the
    same adapters to be registered when it is loaded.

    Args:
        module_class: The class of modules.
        adapter: A subclass of `Adapter`, which explains how to write one.
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise UsageError(f"register a subclass of torch.nn.Module, not {module_class!r}")
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        raise UsageError(f"adapter must be a subclass of rkr.core.adapters.Adapter, not {adapter!r}")
    _LAYERS[module_class] = adapter


def registered(module: nn.Module) -> tuple[type, type[TargetLayer]] | None:
    """The registered class that a module is an instance of, and what is registered for it."""
    for cls in original_class(module).__mro__:
        found = _LAYERS.get(cls) or _LAYERS_BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")
        if found is not None:
            return cls, found
    return None


def adapter_for(module: nn.Module) -> type[TargetLayer] | None:
    """The kind of layer that a module is, or None if tasks cannot change it."""
    found = registered(module)
    return found[1] if found is not None and found[1].takes(module) else None


def is_standard(module: nn.Module) -> bool:
    """Whether a module is a layer that every method can update: a Linear or a convolution."""
    found = adapter_for(module)
    return found is not None and found.standard
