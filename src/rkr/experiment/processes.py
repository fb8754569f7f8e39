"""One process or many: additions to Lightning Fabric, which provides device, precision and collectives.

Learners change shape with every task, so networks are not wrapped for distributed training. Instead each process
computes its share of the batch, and the gradients are summed before the step. BatchNorm computes over the whole batch
too, so that the number of processes changes nothing but rounding.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rkr.errors import UsageError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

ACCELERATORS = ("auto", "cpu", "cuda", "mps")


def make_fabric(accelerator: str = "auto", precision: str | None = None) -> Fabric:
    """A Fabric for this process: a single one, or one of those that torchrun started."""
    if accelerator not in ACCELERATORS:
        raise UsageError(f"--accelerator: choose one of {', '.join(ACCELERATORS)}, not {accelerator!r}")
    from lightning_fabric import Fabric  # takes longer to import than all the rest

    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    try:
        fabric = Fabric(
            accelerator=accelerator,
            strategy="ddp" if world > 1 else "auto",
            devices=local,
            num_nodes=max(world // local, 1),
            precision=precision,  # type: ignore[arg-type]
        )
    except Exception as error:  # Fabric has no common error class
        raise UsageError(f"cannot compute on {accelerator!r}: {error}") from error
    fabric.launch()
    return fabric


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors for the next step.

    A ReLU into a new 10 MB tensor took 6.8 ms without and 1.3 ms with it; whole LeNet steps gained 0 to 20 %.

    By default it returns every large block to the system, and each new one costs a page fault for every 4 kB. Only
    glibc has these settings (malloc.h); elsewhere nothing happens.
    """
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(mmap_threshold, 32 << 20)  # the largest it takes
        mallopt(trim_threshold, 2**31 - 1)


def sum_gradients(fabric: Fabric, parameters: Iterable[Tensor]) -> None:
    """Sum the gradients of all processes, in one message."""
    if fabric.world_size == 1:
        return
    chosen = [p for p in parameters if p.requires_grad]
    if not chosen:
        return
    # A parameter without a gradient here may have one elsewhere; one that has none anywhere must keep none, because
    # optimisers skip it then, weight decay and momentum included.
    there = torch.tensor([p.grad is not None for p in chosen]).to(chosen[0])
    flat = torch.cat([there, *((torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in chosen)])
    dist.all_reduce(flat)
    start = len(chosen)
    for p, count in zip(chosen, flat[:start].tolist(), strict=True):
        if count:
            p.grad = torch.empty_like(p).copy_(flat[start : start + p.numel()].view(p.shape))
        start += p.numel()


def gather(fabric: Fabric, value: Any) -> list[Any]:
    """The values of all processes, in order of rank."""
    if fabric.world_size == 1:
        return [value]
    found: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(found, value)
    return found


class _Sum(torch.autograd.Function):
    """The sum over all processes, through which gradients flow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _summed(gradient)


def _summed(x: Tensor) -> Tensor:
    return _Sum.apply(x)  # type: ignore[no-untyped-call]


_absent = False


@contextlib.contextmanager
def placeholder_batch(absent: bool) -> Iterator[None]:
    """Exclude placeholder batches from BatchNorm statistics."""
    global _absent
    before, _absent = _absent, absent
    try:
        yield
    finally:
        _absent = before


class _Whole:
    """BatchNorm over the shares of all processes. A mixin before the module's own class."""

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        if not module.training:
            return super().forward(x)  # type: ignore[misc]
        module._check_input_dim(x)
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        given, weight = x.dtype, 0 if _absent else 1
        x = x.to(torch.promote_types(given, torch.float32))  # half precision cannot even count exactly
        local = torch.cat([x.sum(dims) * weight, x.new_tensor([x.numel() // x.shape[1] * weight])])
        summed = _summed(local)
        total = summed[-1].detach()
        mean = summed[:-1] / total
        centred = x - mean.view(shape)
        var = _summed(centred.square().sum(dims) * weight) / total
        if module.running_mean is not None:
            with torch.no_grad():
                module.num_batches_tracked.add_(1)
                m = module.momentum if module.momentum is not None else 1 / float(module.num_batches_tracked)
                module.running_mean.lerp_(mean.detach(), m)
                module.running_var.lerp_(var.detach() * total / (total - 1).clamp(min=1), m)
        y = centred * torch.rsqrt(var + module.eps).view(shape)
        if module.affine:
            y = y * module.weight.view(shape) + module.bias.view(shape)
        return y.to(given)


def over_whole_batches(network: nn.Module) -> nn.Module:
    """Let BatchNorm layers compute over the batch of all processes instead of their own share."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            cls: Any = type(module)
            module.__class__ = type(cls.__name__, (_Whole, cls), {})
    return network
