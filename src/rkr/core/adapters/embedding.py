"""Embeddings: `nn.Embedding` and `nn.EmbeddingBag`.

An embedding is a fully connected layer without bias on one-hot inputs, whose weight is stored as (inputs, outputs). So
LM has a row for each entry of the table, RM and F a column for each feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from rkr.core.adapters.base import Adapter, MultiplyAdds
from rkr.core.adapters.linear import TransposedLinearAdapter
from rkr.core.portable import LowRank
from rkr.core.portable.linear import PortableEmbedding, PortableEmbeddingBag


class EmbeddingAdapter(Adapter):
    """The row of `padding_idx` is not rectified: its rectification starts at 0 and has no gradient.

    Tables with `max_norm` are not rectified, because torch writes to their weight at every call.
    """

    properties = ("weight",)
    per_sample = True
    portable_layer: ClassVar[type[LowRank]] = PortableEmbedding
    module: nn.Embedding
    groups = False  # only the rows that are looked up

    canonical = TransposedLinearAdapter.canonical
    stored = TransposedLinearAdapter.stored

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        return super().takes(module) and module.max_norm is None

    def lm_std(self, fan: int) -> float:
        """A row of LM has about length 1, so that R moves as fast as full training would move the table."""
        return (self.rank or 1) ** -0.5

    def initial(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if "lm" in tensors and self.module.padding_idx is not None:
            tensors["lm"][self.module.padding_idx] = 0
        return tensors

    def check_input(self, input: Tensor) -> None:
        self.check_device(input)

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._rows(input, weight, self.module.sparse)

    def _rows(self, input: Tensor, table: Tensor, sparse: bool = False) -> Tensor:
        m = self.module
        return F.embedding(input, table, m.padding_idx, None, m.norm_type, m.scale_grad_by_freq, sparse)

    def rectify_input(
        self, input: Tensor, lm: Tensor | None, rm: Tensor | None, f: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """`(W[x] + LM[x]·RM) · F`: only the rows that are looked up."""
        if self.options.layout != "axes":
            return None
        y = self._rows(input, self.weight, self.module.sparse)
        if lm is not None and rm is not None:
            y = y + self._rows(input, lm) @ rm
        return y if f is None else y * f

    @classmethod
    def multiply_adds(
        cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> list[MultiplyAdds]:
        """A look-up has none."""
        return [(module, output.numel(), 0)]


class EmbeddingBagAdapter(EmbeddingAdapter):
    """Sums and means of rows. `mode="max"` is not rectified: a maximum cannot be scaled by a negative F."""

    module: nn.EmbeddingBag  # type: ignore[assignment]
    portable_layer: ClassVar[type[LowRank]] = PortableEmbeddingBag
    per_sample = False  # with offsets, dimension 0 has no samples

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        return super().takes(module) and module.mode != "max"

    def apply(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        m = self.module
        rest = (m.sparse, per_sample_weights, m.include_last_offset, m.padding_idx)
        return F.embedding_bag(input, weight, offsets, None, m.norm_type, m.scale_grad_by_freq, m.mode, *rest)

    def rectify_input(
        self, input: Tensor, lm: Tensor | None, rm: Tensor | None, f: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """A bag of rows of W plus the bag of rows of LM times RM."""
        y = self.apply(input, self.weight, None, *args, **kwargs)
        if lm is not None and rm is not None:
            y = y + self.apply(input, lm, None, *args, **kwargs) @ rm
        return y if f is None else y * f
