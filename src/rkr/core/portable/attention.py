"""`nn.MultiheadAttention` in traced form: its packed projection is rectified, and its output projection is a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rkr.core.portable.base import LowRank


class PortableAttention(LowRank):
    """The same attention. The module itself reads the weights of its projections instead of calling layers."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module = self.module
        same, batched = query is key and key is value, query.dim() == 3
        if not batched:
            if self.tasks.index is not None:
                self.tasks.place(self.path, query, 0)  # raises
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not module.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self._projected(query, None).chunk(3, -1) if same and self._packed else self._apart(query, key, value)
        if module.bias_k is not None:
            k, v = (torch.cat([t, b.expand(len(t), -1, -1)], 1) for t, b in ((k, module.bias_k), (v, module.bias_v)))
        q, k, v = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in (q, k, v))  # (B, heads, L, D)
        if module.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        more = (module.bias_k is not None) + bool(module.add_zero_attn)
        causal = is_causal and key_padding_mask is None and not need_weights  # as torch does it
        mask = None if causal else self._mask(q, attn_mask, key_padding_mask, more)
        weights = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            y = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        y = module.out_proj(y.transpose(1, 2).flatten(2))
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return (y if module.batch_first else y.transpose(0, 1)), weights

    @property
    def _packed(self) -> bool:
        return self.module.in_proj_weight is not None

    def _projected(self, x: Tensor, part: int | None) -> Tensor:
        """The packed projection, or one third of it."""
        own, module = self.prepared(), self.module
        weight, bias = (_third(t, part, 0) for t in (module.in_proj_weight, module.in_proj_bias))
        rm, f = (_third(own.get(name), part, -1) for name in ("rm", "f"))
        assert weight is not None
        y = F.linear(x, weight, bias)
        if rm is not None:
            y = y + self.product(self.product(x, own["lm"]), rm)
        return y if f is None else y * self.pick(f, y, -1)

    def _apart(self, *inputs: Tensor) -> list[Tensor]:
        """Query, key and value, each projected from an input of its own."""
        if self._packed:
            return [self._projected(x, part) for part, x in enumerate(inputs)]
        m = self.module
        weights = m.q_proj_weight, m.k_proj_weight, m.v_proj_weight
        biases = (None, None, None) if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]

    def _mask(self, q: Tensor, mask: Tensor | None, padding: Tensor | None, more: int) -> Tensor | None:
        """What is added to the scores (B, heads, L, S); `more` keys at the end are never masked."""
        total = None
        if mask is not None:
            total = _added(mask, q)
            total = total.unflatten(0, (-1, self.module.num_heads)) if total.dim() == 3 else total
        if padding is not None:
            hidden = _added(padding, q)[:, None, None]
            total = hidden if total is None else total + hidden
        return total if total is None or not more else F.pad(total, (0, more))


def _third(t: Tensor | None, part: int | None, dim: int) -> Tensor | None:
    return t if t is None or part is None else t.chunk(3, dim)[part]


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to add: -inf where a boolean one is True."""
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
