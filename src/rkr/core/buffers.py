"""Buffers that all tasks share: running ranges, memories, statistics of a user's own layers.

Earlier tasks depend on them, so once the base is frozen, nothing that a pass writes there may last. Torch does not
count every write (not those of `F.batch_norm`, nor to `.data`), so writes are not detectable: modules use copies.
A pass of the model lends copies to all modules at once, so that one may read what another has written. If you call the
network or a part of it directly, each module with such buffers makes copies for its own call.

Buffers that each task has for itself, such as the statistics of BatchNorm, are not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from rkr.core.adapters.base import TargetLayer


class SharedBuffers:
    """The shared buffers of one module.

    Args:
        module: The module.
        found: Returns them.

    Attributes:
        kept: The values that later passes start from; none before the base is frozen.
        lent: Whether the module computes on copies now.
    """

    def __init__(self, module: nn.Module, found: Callable[[], dict[str, Tensor]]) -> None:
        self._module, self._found = module, found
        self.kept: dict[str, Tensor] = {}
        self.lent = False

    def __bool__(self) -> bool:
        return bool(self._found())

    def keep(self) -> None:
        """Keep the present values."""
        self.kept = {name: b.detach().clone() for name, b in self._found().items()}

    def tensors(self) -> list[Tensor]:
        """The kept values."""
        return list(self.kept.values())

    def lend(self) -> dict[str, Tensor | None]:
        """Let the module compute on copies. Returns its own buffers."""
        self.lent = True
        return self.restore()

    def take_back(self, had: dict[str, Tensor | None]) -> None:
        """Give the module its own buffers back."""
        self.lent = False
        self._module._buffers.update(had)

    def restore(self) -> dict[str, Tensor | None]:
        """Put copies of the kept values into the module: new tensors, because autograd may need the old ones."""
        buffers, had = self._module._buffers, {}
        for name, kept in self.kept.items():
            now = had[name] = buffers.get(name)
            if now is not None and (kept.device, kept.dtype) != (now.device, now.dtype):
                self.kept[name] = kept = kept.to(now)
            buffers[name] = kept.clone()
        return had


def lent_buffers(layers: Sequence[TargetLayer]) -> AbstractContextManager[None]:
    """Let modules compute on copies of the buffers that tasks share, if the base is frozen."""
    lending = [b for layer in layers for b in (layer.buffers,) if b.kept and not b.lent]
    return _lent(lending) if lending else nullcontext()


@contextmanager
def _lent(buffers: Sequence[SharedBuffers]) -> Iterator[None]:
    had = [b.lend() for b in buffers]
    try:
        yield
    finally:
        for b, own in zip(buffers, had, strict=True):
            b.take_back(own)


@contextmanager
def own_buffers(module: Any) -> Iterator[None]:
    """Let a module compute on copies of all its buffers."""
    kept = module._buffers
    module.__dict__["_buffers"] = {name: b if b is None else b.clone() for name, b in kept.items()}
    try:
        yield
    finally:
        module.__dict__["_buffers"] = kept
