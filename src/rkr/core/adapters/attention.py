"""`nn.MultiheadAttention`: its packed input projection is a Linear from E to 3·E that is not a module.

The module reads the projection's weight and never calls it as a layer, so only the merged weight is provided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from rkr.core.adapters.base import Adapter, MultiplyAdds
from rkr.core.portable import Portable, PortableByWeight, Tasks
from rkr.core.portable.attention import PortableAttention


class AttentionAdapter(Adapter):
    """The packed projection (3·E, E). With separate sizes for keys and values there is none, and nothing to rectify."""

    properties = ("in_proj_weight", "in_proj_bias")
    weight_name, bias_name = "in_proj_weight", "in_proj_bias"

    def portable(self, tasks: Tasks) -> Portable:
        plain = self.original.forward is nn.MultiheadAttention.forward  # type: ignore[attr-defined]
        return (PortableAttention if plain else PortableByWeight)(self, tasks)

    @classmethod
    def multiply_adds(
        cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> list[MultiplyAdds]:
        """The projections of query, key and value, and the output projection, which is not called either."""
        names = ("query", "key", "value")
        q, k, v = (*args, *(kwargs[name] for name in names if name in kwargs))[:3]
        attention = cast("nn.MultiheadAttention", module)
        embed = attention.embed_dim
        found = [(t.numel() // t.shape[-1] * embed, t.shape[-1]) for t in (q, k, v)]
        projections: list[MultiplyAdds] = [(module, values, values * inputs) for values, inputs in found]
        values = q.numel() // q.shape[-1] * embed
        return [*projections, (attention.out_proj, values, values * embed)]
