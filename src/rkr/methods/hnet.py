"""HNET (von Oswald et al., "Continual learning with hypernetworks", ICLR 2020): one network generates the weights.

Differences from the authors' code: it has separate optimisers for the task embedding and for Θ; here one optimiser has
a parameter group for each. The penalty does not depend on that embedding, so the steps are the same. Its initial values
are called "xavier" here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rkr.capacity import Capacity
from rkr.core import (
    BATCH_NORMS,
    STATISTICS,
    Adapter,
    LayerUpdate,
    Options,
    RectifiedModel,
    TargetLayer,
    TaskState,
    is_standard,
    join,
    version_key,
)
from rkr.errors import UsageError
from rkr.methods.learner import Learner, MakeNetwork, Outcome, SeenTask, nbytes, plain_size
from rkr.registry import register

INITS = ("fan_in", "xavier")
CHUNKS = 67


class Generated(LayerUpdate):
    """Uses generated weights, biases and affine parameters of the current task, and the task's own statistics."""

    def __init__(self) -> None:
        self._tensors: Mapping[str, Tensor] = {}  # by the names of the network's parameters
        self._rows = slice(0)  # of the head, which belong to the task

    @contextmanager
    def given(self, tensors: Mapping[str, Tensor], rows: slice) -> Iterator[None]:
        """Compute with these parameters. Without them, calls raise UsageError."""
        self._tensors, self._rows = tensors, rows
        try:
            yield
        finally:
            self._tensors = {}

    def weight(self, site: Adapter, task: TaskState) -> Tensor:
        if not self._tensors:
            raise UsageError("the weights of this network are generated: use the learner's `predict`")
        return self._tensors[join(site.path, "weight")]

    def bias(self, site: Adapter, task: TaskState) -> Tensor | None:
        return self._tensors.get(join(site.path, "bias"))

    def norm(self, site: TargetLayer, task: TaskState, name: str) -> Tensor | None:
        return super().norm(site, task, name) if name in STATISTICS else self._tensors.get(join(site.path, name))

    def head(self, site: TargetLayer, task: TaskState, name: str) -> Tensor | None:
        whole = self._tensors.get(join(site.path, name))
        return None if whole is None else whole[self._rows]


class Outputs(NamedTuple):
    """The output of a linear hypernetwork, without a copy for each task: chunk c of task t is shared[c] + own[t]."""

    shared: Tensor  # (C, S)
    own: Tensor  # (T, S)


def outputs(weight: Tensor, bias: Tensor, chunks: Tensor, tasks: Tensor) -> Outputs:
    """h(e_t, c; Θ) = W [e_t, c] + b, with W (S, E_t + E_c), b (S,), c (C, E_c) and e (T, E_t).

    W [e, c] is the sum of a term in e and a term in c, so tasks share most of the work.
    """
    width = tasks.shape[1]
    return Outputs(chunks @ weight[:, width:].T + bias, tasks @ weight[:, :width].T)


class Hypernetwork(nn.Module):
    """Θ, which all tasks share, is W, b and an embedding for each chunk; each task has an embedding of its own.

    The matrix has Xavier initialisation, biases are 0 and embeddings normal, as in the authors' code.
    """

    def __init__(self, chunks: int, chunk: int, task_embedding: int, chunk_embedding: int, like: Tensor) -> None:
        super().__init__()
        weight = nn.init.xavier_uniform_(torch.empty(chunk, task_embedding + chunk_embedding))
        self.weight = nn.Parameter(weight.to(like))
        self.bias = nn.Parameter(torch.zeros(chunk).to(like))
        self.chunks = nn.Parameter(torch.randn(chunks, chunk_embedding).to(like))
        self.tasks = nn.ParameterList()
        self._width = task_embedding

    @property
    def theta(self) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
        """What all tasks share."""
        return self.weight, self.bias, self.chunks

    def embeddings(self) -> list[nn.Parameter]:
        """Of the tasks."""
        return list(self.tasks)

    def add(self) -> None:
        """An embedding for a new task."""
        self.tasks.append(nn.Parameter(torch.randn(self._width).to(self.weight)))


@register.method(
    "hnet", "HNET: a hypernetwork generates the weights of every task", citation="von Oswald et al., ICLR 2020"
)
class Hnet(Learner):
    """A linear hypernetwork h generates all weights of a plain network, chunk by chunk, from embeddings (section 2).

    A penalty keeps it generating the same weights for earlier tasks (equation 2):

        cross-entropy + β / (t - 1) Σ_{j<t} ||h(e_j, Θ*) - h(e_j, Θ + ΔΘ)||²

    with Θ* as earlier tasks left it, and ΔΘ the step that the optimiser would take for the cross-entropy alone. The
    network has one classification layer for the classes of all tasks; each task uses only its own rows, and the penalty
    covers only these. Every task has its own BatchNorm statistics, initially reset. W [e, c] + b is a term for the task
    plus one for the chunk: a task adds one vector of a chunk's size to every chunk.

    Args:
        make: Builds the plain network, which must have linear, convolution and BatchNorm layers only.
        head: Its classification layer.
        beta: β.
        lookahead: Whether to use ΔΘ. False sets ΔΘ = 0, which the authors' code offers too.
        task_embedding: Size of e_t.
        chunk_embedding: Size of c.
        chunk: Size of a chunk. Default: 1/67 of the network's parameters, as published (67 chunks of 7,000 for
            ResNet-32), so that the hypernetwork has about 98 % of the network's size.
        init: "xavier": as in the authors' code. Weights start with the same spread in all layers, which is far too
            large without BatchNorm after every layer. "fan_in": generated values are multiplied by a fixed number per
            layer, so that weights start as in He et al. (2015), biases as in torch, and BatchNorm near the identity.
            This follows the idea of Chang et al. (ICLR 2020), whose initialisation does not allow chunks that span
            several layers.
        balance: Whether to divide gradients of W and b by E_t + E_c + 1, the mean of ||[e, c, 1]||², so that SGD moves
            generated weights about as far as a plain network's. Without it SGD may diverge. No effect with Adam.
        continue_embeddings: Whether the penalty trains embeddings of earlier tasks. Otherwise they are frozen.
    """

    checked = "The authors' code (chrhenning/hypercl)."
    differs = (
        "Weights start in proportion to each layer's inputs (`init = \"xavier\"` is the authors' choice).",
        "One optimiser has embeddings and weights in groups of its own (there: two, with the same steps).",
        "Milestones and batches are the recipe's (there: 32 samples, and the rate follows the test accuracy as well).",
        "The recipe of LeNet has a rate of 1e-4, as the authors have for a network without batch normalisation.",
    )

    before: Hypernetwork | None
    _factors: Tensor
    _offsets: Tensor
    _body: Tensor
    _columns: Tensor

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"beta": (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)}

    own_training: ClassVar[dict[str, Any]] = {"optimizer": "adam", "lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}

    def __init__(
        self,
        make: MakeNetwork,
        head: str,
        *,
        beta: float = 0.05,
        lookahead: bool = True,
        task_embedding: int = 32,
        chunk_embedding: int = 32,
        chunk: int | None = None,
        init: str = "fan_in",
        balance: bool = False,
        continue_embeddings: bool = False,
    ) -> None:
        super().__init__(make, head)
        if beta < 0:
            raise UsageError(f"beta must be at least 0, not {beta!r}")
        for name, value in (("task_embedding", task_embedding), ("chunk_embedding", chunk_embedding), ("chunk", chunk)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value!r}")
        if init not in INITS:
            raise UsageError(f"init must be one of {', '.join(INITS)}, not {init!r}")
        self.beta, self.lookahead, self.continue_embeddings = beta, lookahead, continue_embeddings
        network = make()
        _check_layers(network)
        parameters = dict(network.named_parameters())
        like = next(iter(parameters.values())).detach()
        self._plain = plain_size(network)
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self._channels_last = [name for name, p in parameters.items() if _is_channels_last(p)]
        if chunk is None:
            chunk = -(-self._plain.parameters // CHUNKS)
        inputs, chunks = task_embedding + chunk_embedding, -(-self._plain.parameters // chunk)
        drawn = (2 * inputs / (inputs + chunk)) ** 0.5  # standard deviation of W [e, c] as it is drawn
        wanted = [(drawn, 0.0)] * len(parameters) if init == "xavier" else _start(network, head)
        sizes = [p.numel() for p in parameters.values()]
        factors = torch.cat([torch.full((n,), std / drawn) for n, (std, _) in zip(sizes, wanted, strict=True)])
        offsets = torch.cat([torch.full((n,), mean) for n, (_, mean) in zip(sizes, wanted, strict=True)])
        self.register_buffer("_factors", factors.to(like), persistent=False)
        self.register_buffer("_offsets", offsets.to(like), persistent=False)
        self._change = Generated()
        self.model = RectifiedModel(network, Options(bn="stats"), head, update=self._change)
        self.hyper = Hypernetwork(chunks, chunk, task_embedding, chunk_embedding, like)
        self.register_module("before", None)  # the hypernetwork as earlier tasks left it, with Θ*
        self._slow = 1 / (inputs + 1) if balance else 1.0
        self._latest: tuple[Any, dict[str, Tensor]] | None = None
        self._targets: tuple[Any, Outputs] | None = None
        # What the square of a difference counts where all tasks are held, (C, S): not in the head, nor in the rest of
        # the last chunk, which nobody uses.
        body = torch.cat([self._factors.square(), like.new_zeros(chunks * chunk - sum(sizes))])
        for rows in self._head_rows(slice(0, self._shapes[f"{head}.weight"][0])):
            body[rows] = 0
        self.register_buffer("_body", body.view(chunks, chunk), persistent=False)
        self.register_buffer("_columns", self._body.sum(0), persistent=False)
        # The plain network's own parameters are never used, so they take no memory and are not part of the state.
        for p in network.parameters():
            p.requires_grad_(False).data = p.new_zeros(()).expand(p.shape)
        self._unused = {f"model.network.{name}" for name in self._shapes}
        self.register_load_state_dict_post_hook(_nothing_unused_is_missing)  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Without the plain network's parameters."""
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        for key in self._unused:
            state.pop(kwargs.get("prefix", "") + key, None)
        return state

    def expects(self, classes: Sequence[int]) -> None:
        rows = self._shapes[f"{self.head}.weight"][0]
        if sum(classes) > rows:
            raise UsageError(
                f"the tasks have {sum(classes)} classes, the network's classification layer {rows}: HNET generates one "
                "layer for all tasks, so make the network with as many classes"
            )

    def begin(self, task: SeenTask) -> None:
        self.expects([task.labels.stop])
        super().begin(task)
        state = self.model.add_task(task.name, task.class_names, init="random", train_base=False)
        for name in ("head.weight", "head.bias"):
            state.discard(name)  # it is generated
        if task.number:
            self.before = copy.deepcopy(self.hyper).requires_grad_(False)
        if not self.continue_embeddings:
            for embedding in self.hyper.embeddings():
                embedding.requires_grad_(False).grad = None
        self.hyper.add()

    def train(self, mode: bool = True) -> Hnet:
        """Discard generated weights when the mode changes."""
        self._latest = None
        super().train(mode)
        return self

    def groups(self) -> list[dict[str, Any]]:
        """W and b, then embeddings without weight decay, because they are inputs."""
        weight, bias, chunks = self.hyper.theta
        tasks = [e for e in self.hyper.embeddings() if e.requires_grad]
        return [{"params": [weight, bias]}, {"params": [chunks, *tasks], "weight_decay": 0.0}]

    # -- generating ---------------------------------------------------------------------------------------

    def generated(self, number: int) -> dict[str, Tensor]:
        """The plain network's parameters for a task, by name. Without gradients those of the last task are kept."""
        weight, bias, chunks = self.hyper.theta
        task = self.hyper.embeddings()[number]
        key = number, version_key(weight, bias, chunks, task)
        if torch.is_grad_enabled():
            self._latest = None
        elif self._latest is not None and self._latest[0] == key:
            return self._latest[1]
        with torch.autocast(weight.device.type, enabled=False):
            found = outputs(_slowed(weight, self._slow), _slowed(bias, self._slow), chunks, task[None])
            flat = (found.shared + found.own).flatten()[: len(self._factors)]
            flat = torch.addcmul(self._offsets, flat, self._factors)
        parts = flat.split([shape.numel() for shape in self._shapes.values()])
        tensors = {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}
        for name in self._channels_last:
            tensors[name] = tensors[name].contiguous(memory_format=torch.channels_last)
        if not torch.is_grad_enabled():
            self._latest = key, tensors
        return tensors

    def predict(self, x: Tensor, number: int) -> Tensor:
        self.model.set_task(self.seen[number].name)
        with self._change.given(self.generated(number), self.seen[number].labels):
            return self.model(x)

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        """Cross-entropy; the gradients of the penalty come in `before_step`."""
        return self.classified(self.predict(x, self.task.number), y)

    # -- the penalty --------------------------------------------------------------------------------------

    def penalty(self, weight: Tensor, bias: Tensor, chunks: Tensor, tasks: Tensor) -> Tensor:
        """β / (t - 1) Σ_{j<t} ||h(e_j, Θ*) - h(e_j, Θ)||² for Θ = (weight, bias, chunks) and e = tasks (t - 1, E_t).

        A difference is d_c + q_j for chunk c and task j. Its squares have a mean over tasks of (d_c + q)² + var(q_j),
        with q the mean of the q_j, so that one pass over the weights is enough for any number of tasks.
        """
        now, then = outputs(weight, bias, chunks, tasks), self._wanted()
        d, q = now.shared - then.shared, now.own - then.own  # (C, S), (T, S)
        mean = q.mean(0)
        total = (self._body * (d + mean).square()).sum()
        total = total + (self._columns * (q - mean).square().mean(0)).sum()
        for task, own in zip(self.seen, q, strict=False):
            for rows in self._head_rows(task.labels):
                places = torch.arange(rows.start, rows.stop, device=own.device) % len(own)
                difference = (d.flatten()[rows] + own[places]) * self._factors[rows]
                total = total + difference.square().sum() / len(q)
        return self.beta * total

    def before_step(self, optimizer: Optimizer) -> None:
        """Add the gradients of the penalty at Θ + ΔΘ, where the optimiser would go without it (section 2)."""
        if not self.task.number or not self.beta:
            return
        old = self.hyper.embeddings()[: self.task.number]
        held = [*self.hyper.theta, *(old if self.continue_embeddings else ())]
        values = stepped(optimizer, held) if self.lookahead else [p.detach().clone() for p in held]
        there = [value.requires_grad_() for value in values]
        tasks = torch.stack(there[3:] or cast("list[Tensor]", old))
        weight, bias, chunks = there[:3]
        found = torch.autograd.grad(self.penalty(weight, bias, chunks, tasks), there)
        for p, gradient, factor in zip(held, found, [self._slow, self._slow, *[1.0] * len(held)], strict=False):
            gradient = gradient * factor
            p.grad = gradient if p.grad is None else p.grad + gradient

    def _wanted(self) -> Outputs:
        """h(e_j, Θ*), computed once per task."""
        assert self.before is not None
        theta, tasks = self.before.theta, self.before.embeddings()
        key = version_key(*theta, *tasks)
        if self._targets is None or self._targets[0] != key:
            with torch.no_grad():
                self._targets = key, outputs(*theta, torch.stack(cast("list[Tensor]", tasks)))
        return self._targets[1]

    def _head_rows(self, rows: slice) -> list[slice]:
        """Where rows of the head lie among the generated numbers: those of its weight, and of its bias."""
        found, start = [], 0
        for name, shape in self._shapes.items():
            if name.rpartition(".")[0] == self.head:
                row = shape[1:].numel()
                found.append(slice(start + row * rows.start, start + row * rows.stop))
            start += shape.numel()
        return found

    def capacity(self) -> Capacity:
        """Θ and the embeddings, and each task's statistics in bytes.

        `before` is not counted: the next task creates it again.
        """
        kept = sum(p.numel() for p in self.hyper.parameters())
        size = nbytes(self.hyper) + nbytes(self.model.tasks)
        return Capacity(kept, self._plain.parameters, size, self._plain.multiply_adds)


def stepped(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The parameters after the optimiser's next step, computed on copies of the parameters and its state."""
    copies = {p: nn.Parameter(p.detach().clone()) for p in parameters}
    groups = [{**g, "params": [copies[p] for p in g["params"] if p in copies]} for g in optimizer.param_groups]
    twin = cast("Any", type(optimizer))([group for group in groups if group["params"]])
    for p, twin_p in copies.items():
        twin_p.grad = None if p.grad is None else p.grad.detach().clone()
        if p in optimizer.state:
            values = optimizer.state[p].items()
            twin.state[twin_p] = {key: v.clone() if isinstance(v, Tensor) else v for key, v in values}
    twin.step()
    return [p.detach() for p in copies.values()]


# ---------------------------------------------------------------------------------------------------------
# Pieces


class _Slowed(torch.autograd.Function):
    """The same tensor, with its gradient multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def _slowed(x: Tensor, factor: float) -> Tensor:
    return _Slowed.apply(x, factor)  # type: ignore[no-untyped-call]


def _check_layers(network: nn.Module) -> None:
    for path, module in network.named_modules():
        known = is_standard(module) or isinstance(module, BATCH_NORMS)
        if not known and any(p is not None for p in module._parameters.values()):
            raise UsageError(
                "HNET generates linear, convolution and BatchNorm layers, but the network has parameters in "
                f"{path!r}, a {type(module).__name__}"
            )


def _start(network: nn.Module, head: str) -> list[tuple[float, float]]:
    """Standard deviation and mean of each parameter's initial values."""
    found = []
    for name, _ in network.named_parameters():
        path, _, kind = name.rpartition(".")
        layer = network.get_submodule(path)
        if isinstance(layer, BATCH_NORMS):
            found.append((0.1, 1.0 if kind == "weight" else 0.0))
            continue
        inputs = cast("Tensor", layer.weight)[0].numel()
        variance = 1 / 3 if kind == "bias" else 1.0 if path == head else 2.0  # times 1 / inputs
        found.append(((variance / inputs) ** 0.5, 0.0))
    return found


def _is_channels_last(p: Tensor) -> bool:
    return p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()


def _nothing_unused_is_missing(learner: nn.Module, keys: Any) -> None:
    """After `load_state_dict`: states do not have what the network does not use."""
    unused = cast("Hnet", learner)._unused
    keys.missing_keys[:] = [key for key in keys.missing_keys if key not in unused]
