"""Whether an exported network answers as the model does."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rkr.core.export.program import Run
from rkr.core.export.styles import Case
from rkr.errors import UsageError

TOLERANCE = 1e-3  # of the largest value: exported networks round in another order


def check(run: Run, case: Case, hint: str) -> None:
    """Raise UsageError if an exported network does not answer as expected."""
    wanted = [leaf for leaf in pytree.tree_leaves(case.expected) if isinstance(leaf, Tensor)]
    for got, want in zip(run(case.example, case.extra), wanted, strict=True):
        problem = difference(got, want)
        if problem:
            raise UsageError(f"the exported network does not answer as the model does ({problem}){hint}")


def difference(got: Tensor, want: Tensor) -> str | None:
    """What is wrong with an output. It may be wider than expected if the rest is -inf."""
    if got.dim() != want.dim() or any(g < w for g, w in zip(got.shape, want.shape, strict=True)):
        return f"its output has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not want.is_floating_point():  # rounding may change which of two equal scores is the largest
        return None if got.shape == want.shape else f"its output has shape {tuple(got.shape)}"
    wide = want.new_full(got.shape, -torch.inf)
    wide[tuple(map(slice, want.shape))] = want
    finite = wide.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return "its output is finite in other places"
    if not finite.any():
        return None
    apart, largest = float((got - wide)[finite].abs().max()), float(wide[finite].abs().max())
    return f"{apart:.2g} apart, where values go up to {largest:.2g}" if apart > TOLERANCE * largest else None
