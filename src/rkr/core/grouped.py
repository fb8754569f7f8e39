"""Merged weights of many layers at once, in few calls: `(W + R)·F` and `b·F`, before a training step.

On an accelerator every call is a kernel launch, so what counts is their number. Layers of equal shape are a group:
R of all of them is one batched product, in the order of the weights in memory, and so are the gradients of LM and RM.
What has few numbers (laying out LM and RM for the products, scaling RM and biases by F, and the way back) is done for
all groups in one call. Then the plain layers compute with these weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
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
LAYER, RANK, COPY = -1, -2, 10  # names of dimensions besides those of a weight, 0, 1, ...; copies of these


class Group:
    """N layers whose canonical weight has one shape (O, I, *outer, inner) and one order in memory.

    RM has the dimensions K, outer and O, LM has inner, I and K. The first dimensions of the memory that belong to one
    of them are the rows of a matrix, all others its columns, and R is a product of two matrices: one has the numbers of
    that factor, the other those of the other factor. A channels_last weight is (O·outer, K) times (K, inner·I). What a
    factor has beyond the rows is repeated in the columns, where the other matrix has zeros between: a contiguous weight
    is (O, K·outer) times (K·outer, I·outer·inner).

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
        kernel = tuple(range(2, len(shape)))
        self.of_rm, self.of_lm = (*kernel[:-1], 0), (*kernel[-1:], 1)
        self.rm_first = order[0] in self.of_rm
        own = self.of_rm if self.rm_first else self.of_lm
        self.rows = tuple(takewhile(own.__contains__, order))
        self.columns = order[len(self.rows) :]
        self.repeated = tuple(d for d in own if d not in self.rows)
        self.room = [shape[d] for d in order]

    def size(self, dims: Sequence[int]) -> int:
        """How many numbers these dimensions have."""
        return prod(self.shape[d] for d in dims)

    def stack(self, weights: Sequence[Tensor]) -> Tensor:
        """(N, *room), in the order of the weights: one call, none for a single layer."""
        if len(weights) == 1:
            return weights[0].permute(self.order).contiguous().unsqueeze(0)
        return torch.stack([w.permute(self.order) for w in weights])

    def unstack(self, stacked: Tensor) -> tuple[Tensor, ...]:
        """The reverse: weights (O, I, *kernel)."""
        places = (self.order.index(d) for d in range(len(self.order)))
        return stacked.permute(0, *(1 + at for at in places)).unbind()

    def matrices(self, stacked: Tensor) -> Tensor:
        """(N, *room) as (N, rows, columns)."""
        return stacked.view(len(self.members), self.size(self.rows), -1)

    def per_output(self, f: Tensor) -> Tensor:
        """F (N·O), such that it multiplies (N, *room)."""
        return f.view(len(self.members), *[-1 if d == 0 else 1 for d in self.order])

    def dot(self, gradients: Tensor, stack: Tensor, out: Tensor) -> None:
        """For each output the sum of gradient times weight, into `out` (N·O)."""
        if self.order[0] == 0:  # each output's weights lie together
            outputs = len(out)
            torch.bmm(gradients.view(outputs, 1, -1), stack.view(outputs, -1, 1), out=out.view(-1, 1, 1))
        else:
            over = [1 + at for at, d in enumerate(self.order) if d != 0]
            torch.sum(gradients * stack, over, out=out.view(len(stack), -1))

    def laid_out(self, lm: Tensor, rm: Tensor, zero: int) -> tuple[Tensor, Tensor]:
        """Of numbers LM (N, inner, I, K) and RM (N, K, outer, O): both as matrices, `zero` between what is repeated."""
        of_rm, of_lm = (LAYER, RANK, *self.of_rm), (LAYER, *self.of_lm, RANK)
        (first, own), (second, others) = ((rm, of_rm), (lm, of_lm)) if self.rm_first else ((lm, of_lm), (rm, of_rm))
        left = _arranged(first, own, (LAYER, *self.rows, RANK, *self.repeated))
        dims = (LAYER, RANK, *(COPY + d for d in self.repeated), *self.columns)
        right = _arranged(second, others, dims)
        for d in self.repeated:
            places = torch.arange(self.shape[d])
            same = _arranged(places, (d,), dims) == _arranged(places, (COPY + d,), dims)
            right = torch.where(same, right, zero)
        return (right, left) if self.rm_first else (left, right)


def _arranged(x: Tensor, names: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """A tensor whose dimensions have names, with those that are wanted, of size 1 if it does not have them."""
    found = x.permute([names.index(d) for d in wanted if d in names])
    for at, d in enumerate(wanted):
        found = found if d in names else found.unsqueeze(at)
    return found


class Plan:
    """Which layers are computed together, and where their small tensors lie in one flat tensor.

    From the flat tensor, whose last number is 0, `index` takes what the products are made of: RM as matrices and biases
    where F scales them, then RM where it does not, then LM as matrices.

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
        self.sizes = [self.layers[i].shape[0] for i in self.biased]
        self.flat: list[int] = []  # what is in the flat tensor, by its place among `tensors`
        self.f: dict[Group, slice] = {}  # in the flat tensor
        self.rm: dict[Group, slice] = {}  # these are in what `index` takes
        self.lm: dict[Group, slice] = {}
        self._end = 0
        self._arrange()
        self.zero = self.layers[0].weight.detach().new_zeros(1)

    def _arrange(self) -> None:
        factors: dict[int, Tensor] = {}  # where the flat tensor has F of each layer
        numbers: dict[Group, tuple[Tensor, Tensor]] = {}  # where it has LM and RM
        for g in self.groups:
            if g.scaled:
                where = self._lay(g.members, 4, g.shape[0])
                self.f[g] = slice(int(where[0, 0]), int(where[-1, -1]) + 1)
                factors |= dict(zip(g.members, where, strict=True))
            if g.rank is not None:
                lm = self._lay(g.members, 2, g.rank * g.size(g.of_lm))
                rm = self._lay(g.members, 3, g.rank * g.size(g.of_rm))
                of_lm, of_rm = ([g.shape[d] for d in dims] for dims in (g.of_lm, g.of_rm))
                numbers[g] = lm.view(-1, *of_lm, g.rank), rm.view(-1, g.rank, *of_rm)
        biases = [self._lay([i], 1, size)[0] for i, size in zip(self.biased, self.sizes, strict=True)]
        scale: list[Tensor] = []
        index: list[Tensor] = []
        laid = {g: g.laid_out(lm, rm, self._end) for g, (lm, rm) in numbers.items()}
        end = 0

        def put(matrices: Tensor) -> slice:
            nonlocal end
            start, end = end, end + matrices.numel()
            index.append(matrices.flatten())
            return slice(start, end)

        for g in (g for g in laid if g.scaled):
            lm, rm = numbers[g]
            own = torch.stack([factors[i] for i in g.members])  # (N, O)
            own = own.view(len(own), *[1] * (rm.dim() - 2), -1).expand_as(rm)
            scale.append(g.laid_out(lm, own, self.f[g].start)[1].flatten())
            self.rm[g] = put(laid[g][1])
        scale += [factors[i] for i in self.biased]
        self.bias = slice(end, end + sum(self.sizes))
        for bias in biases:
            put(bias)
        self.scaled = slice(0, end)
        for g, (_, rm) in laid.items():
            if not g.scaled:
                self.rm[g] = put(rm)
        for g, (lm, _) in laid.items():
            self.lm[g] = put(lm)
        device = self.layers[0].weight.device
        self.index, self.scale = (
            (torch.cat(x) if x else torch.empty(0, dtype=torch.long)).to(device) for x in (index, scale)
        )

    def _lay(self, members: Sequence[int], part: int, size: int) -> Tensor:
        """Append a tensor of each of these layers to the flat one: where its numbers are, (N, size)."""
        self.flat += [PARTS * i + part for i in members]
        start, self._end = self._end, self._end + len(members) * size
        return torch.arange(start, self._end).view(len(members), size)

    def products(self, g: Group, found: Tensor, scaled: Tensor | None) -> tuple[Tensor, Tensor]:
        """The matrices (N, rows, K·repeated) and (N, K·repeated, columns) of a group; with `scaled`, RM times F."""
        count = len(g.members)
        rm = (found if scaled is None or not g.scaled else scaled)[self.rm[g]]
        left, right = (rm, found[self.lm[g]]) if g.rm_first else (found[self.lm[g]], rm)
        return left.view(count, g.size(g.rows), -1), right.view(count, -1, g.size(g.columns))

    @property
    def largest(self) -> int:
        """How many layers the largest group has."""
        return max(len(g.members) for g in self.groups)

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

    The backward pass has the gradients of the two matrices whose product is R, from the gradient of a merged weight.
    Those of F are the sum of gradient times W for each output, and those of what F scales times that.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        weights = tensors[::PARTS]
        with torch.autocast(weights[0].device.type, enabled=False):  # type: ignore[union-attr]
            small: list[Tensor] = [tensors[i] for i in plan.flat]  # type: ignore[misc]
            flat = torch._C._nn.flatten_dense_tensors([*small, plan.zero])
            found = flat.index_select(0, plan.index)
            scale = scaled = None
            if plan.f:
                scale = flat.index_select(0, plan.scale)
                scaled = found[plan.scaled] * scale
            stacks, merged = [], [flat] * len(weights)
            for g in plan.groups:
                stack = g.stack([weights[i] for i in g.members])  # type: ignore[misc]
                stacks.append(stack)
                whole = stack * (g.per_output(flat[plan.f[g]]) if g.scaled else 1)
                if g.rank is not None:
                    g.matrices(whole).baddbmm_(*plan.products(g, found, scaled))
                for i, one in zip(g.members, g.unstack(whole), strict=True):
                    merged[i] = one
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.small = plan, small  # for their shapes
        ctx.save_for_backward(flat, found, scale, scaled, *stacks)
        biases = () if scaled is None else scaled[plan.bias].split(plan.sizes)
        return (*merged, *biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        flat, found, scale, scaled, *stacks = ctx.saved_tensors
        need = ctx.needs_input_grad[1:]
        answer: list[Tensor | None] = [None] * len(need)
        with torch.autocast(flat.device.type, enabled=False):
            back, parts = torch.zeros_like(flat), torch.zeros_like(found)  # the gradients of `flat`, and of its parts
            for g, stack in zip(plan.groups, stacks, strict=True):
                given = [gradients[i] for i in g.members]
                if all(d is None for d in given):
                    continue
                whole = g.stack([flat.new_zeros(g.shape) if d is None else d for d in given])
                if g.rank is not None:
                    left, right = plan.products(g, found, scaled)
                    d_left, d_right = plan.products(g, parts, None)
                    torch.bmm(g.matrices(whole), right.transpose(1, 2), out=d_left)
                    torch.bmm(left.transpose(1, 2), g.matrices(whole), out=d_right)
                if g.scaled:
                    g.dot(whole, stack, back[plan.f[g]])
                if any(need[PARTS * i] for i in g.members):
                    dw = g.unstack(whole * (g.per_output(flat[plan.f[g]]) if g.scaled else 1))
                    for n, i in enumerate(g.members):
                        answer[PARTS * i] = dw[n] if need[PARTS * i] and given[n] is not None else None
            if plan.biased:
                d_biases = zip(gradients[len(plan.layers) :], plan.sizes, strict=True)
                torch.cat([flat.new_zeros(n) if d is None else d for d, n in d_biases], out=parts[plan.bias])
            if plan.f:
                back.index_add_(0, plan.scale, parts[plan.scaled] * found[plan.scaled])
                parts[plan.scaled].mul_(scale)
            back.index_add_(0, plan.index, parts)
        for i, part in zip(plan.flat, torch._C._nn.unflatten_dense_tensors(back, ctx.small), strict=True):
            if need[i] and gradients[i // PARTS] is not None:  # a layer that was not used has no gradient
                answer[i] = part
        return None, *answer
