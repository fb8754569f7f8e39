"""Merged weights of many layers at once, in few calls: `(W + R)·F` and `b·F`, before a training step.

On an accelerator every call is a kernel launch, so what counts is their number. Layers of equal shape are a group:
R of all of them is one batched product, and so are the gradients of LM and RM. What has few numbers (scaling RM and
biases by F, and the way back) is done for all groups in one call. Then the plain layers compute with these weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from rkr.core.adapters.base import Adapter
    from rkr.core.state import TaskState

Merged = dict[str, tuple[Tensor, Tensor | None]]
Tensors = Sequence[Tensor | None]
PARTS = 5  # tensors of each layer: W, b, LM, RM, F


class Group:
    """N layers whose canonical weight has one shape (O, I, *outer, inner) and one order in memory.

    Their R, and gradients of their weights, are matrices (N, inner·I, outer·O), as in `rectification`.

    Args:
        members: The layers' numbers in the plan.
        shape: Of the weight.
        rank: K, or None.
        scaled: Whether there is F.
        order: The weight's dimensions from the largest stride to the smallest.
    """

    def __init__(
        self, members: list[int], shape: torch.Size, rank: int | None, scaled: bool, order: tuple[int, ...]
    ) -> None:
        self.members, self.shape, self.rank, self.scaled, self.order = members, shape, rank, scaled, order
        outputs, inputs, *kernel = shape
        dims = tuple(range(2, len(shape)))
        self.to_product = (*dims[-1:], 1, *dims[:-1], 0)  # (O, I, *outer, inner) to (inner, I, *outer, O)
        self.rows, self.columns = prod(kernel[-1:]) * inputs, prod(kernel[:-1]) * outputs
        self.is_matrix = prod(kernel) == 1

    def stack(self, weights: Sequence[Tensor]) -> Tensor:
        """(N, O, I, *kernel) in the order of the weights: one call, none for a single layer."""
        if len(weights) == 1:
            return weights[0].unsqueeze(0)
        return _permute(torch.stack([w.permute(self.order) for w in weights]), _inverse(self.order))

    def room(self, like: Tensor) -> Tensor:
        """Memory for merged weights, (N, O, I, *kernel) in the order of the weights."""
        room = like.new_empty(len(self.members), *[self.shape[d] for d in self.order])
        return _permute(room, _inverse(self.order))

    def product(self, gradients: Tensor) -> Tensor:
        """Gradients (N, O, I, *kernel) as (N, inner, I, *outer, O), such that they are also matrices."""
        product = _permute(gradients, self.to_product)
        return product if self.is_matrix else product.contiguous()

    def matrices(self, product: Tensor) -> Tensor:
        """(N, inner, I, *outer, O) as (N, inner·I, outer·O)."""
        return product.view(len(product), self.rows, self.columns)

    def like_weights(self, matrices: Tensor) -> Tensor:
        """(N, inner·I, outer·O) as (N, O, I, *kernel)."""
        product = matrices.view(len(matrices), *[self.shape[d] for d in self.to_product])
        return _permute(product, _inverse(self.to_product))

    def dot(self, gradients: Tensor, stack: Tensor, out: Tensor) -> None:
        """For each output the sum of gradient times weight, into `out` (N·O)."""
        if self.order[0] == 0:  # each output's weights lie together
            rows, columns = (_permute(x, self.order).reshape(len(out), -1) for x in (gradients, stack))
            torch.bmm(rows.unsqueeze(1), columns.unsqueeze(2), out=out.view(-1, 1, 1))
        else:
            over = tuple(range(2, stack.dim()))
            torch.sum(gradients * stack, over, out=out.view(len(stack), -1))

    def per_output(self, f: Tensor) -> Tensor:
        """F (N·O) as (N, O, 1, ...)."""
        return f.view(len(self.members), -1, *[1] * (len(self.shape) - 1))


def _permute(x: Tensor, order: Sequence[int]) -> Tensor:
    """Permute all dimensions but the first."""
    return x.permute(0, *(d + 1 for d in order))


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=lambda d: order[d]))


class Plan:
    """Which layers are computed together, and where their small tensors lie in one flat tensor.

    The flat tensor has four parts: RM and biases that F scales, RM that it does not, LM, and F.

    Args:
        layers: Layers with one device and one type of numbers.
    """

    def __init__(self, layers: Sequence[Adapter]) -> None:
        self.layers = list(layers)
        found: dict[Any, list[int]] = {}
        for i, layer in enumerate(self.layers):
            w = layer.canonical(layer.weight)
            strides: Sequence[int] = w.stride()
            order = tuple(sorted(range(w.dim()), key=lambda d, strides=strides: -strides[d]))  # type: ignore[misc]
            found.setdefault((w.shape, layer.rank, layer.scaled, order), []).append(i)
        self.groups = [Group(members, *what) for what, members in found.items()]
        self.biased = [i for g in self.groups if g.scaled for i in g.members if self.layers[i].bias is not None]
        self.rm: dict[Group, slice] = {}
        self.lm: dict[Group, slice] = {}
        self.f: dict[Group, slice] = {}
        self.flat: list[int] = []  # what is in the flat tensor, by its place among `tensors`
        self._end = 0
        ranked = [g for g in self.groups if g.rank is not None]
        for g in (g for g in ranked if g.scaled):
            self.rm[g] = self._lay(g.members, 3, g.rank * g.columns)  # type: ignore[operator]
        start = self._end
        for i in self.biased:
            self._lay([i], 1, self.layers[i].shape[0])
        self.bias = slice(start, self._end)
        self.scaled = slice(0, self._end)
        for g in (g for g in ranked if not g.scaled):
            self.rm[g] = self._lay(g.members, 3, g.rank * g.columns)  # type: ignore[operator]
        for g in ranked:
            self.lm[g] = self._lay(g.members, 2, g.rank * g.rows)  # type: ignore[operator]
        start = self._end
        for g in (g for g in self.groups if g.scaled):
            self.f[g] = self._lay(g.members, 4, g.shape[0])
        self.factors = slice(start, self._end)
        self.index = self._index()

    def _lay(self, members: Sequence[int], part: int, size: int) -> slice:
        """Append a tensor of each of these layers to the flat one."""
        self.flat += [PARTS * i + part for i in members]
        start, self._end = self._end, self._end + len(members) * size
        return slice(start, self._end)

    def _index(self) -> Tensor:
        """For each number that F scales, where in F its factor is."""
        start, found = self.factors.start, []
        first: dict[int, int] = {}
        for g, place in self.f.items():
            at = place.start - start
            first |= {i: at + n * g.shape[0] for n, i in enumerate(g.members)}
            if g in self.rm:  # (N, K, outer, O)
                own = torch.arange(at, at + len(g.members) * g.shape[0]).view(len(g.members), 1, 1, -1)
                found.append(own.expand(-1, g.rank, g.columns // g.shape[0], -1).flatten())  # type: ignore[arg-type]
        found += [torch.arange(first[i], first[i] + self.layers[i].shape[0]) for i in self.biased]
        index = torch.cat(found) if found else torch.empty(0, dtype=torch.long)
        return index.to(self.layers[0].weight.device)

    def factors_of(self, g: Group, flat: Tensor, scaled: Tensor | None) -> tuple[Tensor, Tensor]:
        """LM (N, inner·I, K) and RM (N, K, outer·O) of a group; with `scaled`, RM times F."""
        source = flat if scaled is None or not g.scaled else scaled
        count = len(g.members)
        return flat[self.lm[g]].view(count, g.rows, -1), source[self.rm[g]].view(count, -1, g.columns)

    def shared(self, smallest: int) -> list[Adapter]:
        """The layers whose groups have at least so many."""
        return [self.layers[i] for g in self.groups if len(g.members) >= smallest for i in g.members]

    def tensors(self, task: TaskState) -> list[Tensor | None]:
        """W, b, LM, RM and F of each layer."""
        return [t for x in self.layers for t in (x.canonical(x.weight), x.bias, *x.factors(task))]

    def merged(self, task: TaskState) -> Merged:
        """The merged weight and bias of each layer by its path, as the module stores them."""
        found = GroupedWeights.apply(self, *self.tensors(task))  # type: ignore[no-untyped-call]
        biases = dict(zip(self.biased, found[len(self.layers) :], strict=True))
        pairs = enumerate(zip(self.layers, found, strict=False))
        return {x.path: (x.stored(w), biases.get(i, x.bias)) for i, (x, w) in pairs}


class GroupedWeights(torch.autograd.Function):
    """Merged weights of all layers of a plan, then merged biases of those whose bias F scales.

    Backward, with G the gradient of a merged weight as a matrix, unscaled: LM gets G·(RM·F)', RM gets (LM'·G)·F, and F
    the sum of G·(W + R) for each output, where that of G·R is the sum of (LM'·G)·RM.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        weights = tensors[::PARTS]
        with torch.autocast(weights[0].device.type, enabled=False):  # type: ignore[union-attr]
            small: list[Tensor] = [tensors[i] for i in plan.flat]  # type: ignore[misc]
            flat = torch._C._nn.flatten_dense_tensors(small)
            scale = scaled = None
            if plan.f:
                scale = flat[plan.factors].index_select(0, plan.index)
                scaled = flat[plan.scaled] * scale
            stacks, merged = [], [flat] * len(weights)
            for g in plan.groups:
                stack = g.stack([weights[i] for i in g.members])  # type: ignore[misc]
                stacks.append(stack)
                f = g.per_output(flat[plan.f[g]]) if g.scaled else None
                if g.rank is None:
                    whole = torch.mul(stack, 1 if f is None else f, out=g.room(stack))
                else:
                    lm, rm = plan.factors_of(g, flat, scaled)
                    r = g.like_weights(torch.bmm(lm, rm))
                    whole = (
                        torch.add(stack, r, out=g.room(stack))
                        if f is None
                        else torch.addcmul(r, stack, f, out=g.room(stack))
                    )
                for i, one in zip(g.members, whole.unbind(), strict=True):
                    merged[i] = one
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.small = plan, small  # for their shapes
        ctx.save_for_backward(flat, scale, scaled, *stacks)
        biases = () if scaled is None else scaled[plan.bias].split([len(tensors[PARTS * i + 1]) for i in plan.biased])  # type: ignore[arg-type]
        return (*merged, *biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        flat, scale, scaled, *stacks = ctx.saved_tensors
        need = ctx.needs_input_grad[1:]
        found: list[Tensor | None] = [None] * len(need)
        with torch.autocast(flat.device.type, enabled=False):
            back = torch.empty_like(flat)  # the gradients of the flat tensor; those of what F scales as if F were 1
            for g, stack in zip(plan.groups, stacks, strict=True):
                if all(gradients[i] is None for i in g.members):
                    for places in (plan.rm, plan.lm, plan.f):
                        if g in places:
                            back[places[g]].zero_()
                    continue
                given = [gradients[i] for i in g.members]
                whole = g.stack([stack[n].new_zeros(g.shape) if d is None else d for n, d in enumerate(given)])
                product = g.product(whole) if g.rank is not None else whole
                if g.rank is not None:
                    lm, rm = plan.factors_of(g, flat, scaled)
                    dlm, drm = plan.factors_of(g, back, None)
                    matrices = g.matrices(product)
                    torch.bmm(lm.transpose(1, 2), matrices, out=drm)
                    torch.bmm(matrices, rm.transpose(1, 2), out=dlm)
                if g.scaled:
                    g.dot(whole, stack, back[plan.f[g]])
                if any(need[PARTS * i] for i in g.members):
                    f = g.per_output(flat[plan.f[g]]) if g.scaled else 1
                    dw = torch.mul(whole, f, out=g.room(stack))
                    for n, i in enumerate(g.members):
                        found[PARTS * i] = dw[n] if need[PARTS * i] and given[n] is not None else None
            if plan.biased:
                given = list(gradients[len(plan.layers) :])
                sizes = [plan.layers[i].shape[0] for i in plan.biased]
                parts = [flat.new_zeros(n) if d is None else d for d, n in zip(given, sizes, strict=True)]
                torch.cat(parts, out=back[plan.bias])
            if plan.f:
                back[plan.factors].index_add_(0, plan.index, back[plan.scaled] * flat[plan.scaled])
                back[plan.scaled].mul_(scale)
        for i, part in zip(plan.flat, torch._C._nn.unflatten_dense_tensors(back, ctx.small), strict=True):
            if need[i] and gradients[i // PARTS] is not None:  # a layer that was not used has no gradient
                found[i] = part
        return None, *found
