"""APD, additive parameter decomposition (Yoon et al., ICLR 2020): weights shared under masks, plus a sparse own part.

Where the authors' code and this differ: what is cut to 0 is cut for good, so that what is tested, counted and held in
place is one and the same; an empty cluster keeps its centre instead of becoming NaN; k-means starts from the means of
the groups of last time as they are now, which saves keeping the old centres.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from rkr.capacity import Capacity
from rkr.core import Adapter, LayerUpdate, Options, TaskState, is_statistic
from rkr.errors import UsageError
from rkr.methods.learner import MakeNetwork, ReadSamples, SeenTask
from rkr.methods.learner_file import read_learner, write_learner
from rkr.methods.shared.anchor import gradient
from rkr.methods.shared.changed import Changed
from rkr.registry import register

INITS = ("zero", "sigma")


class Decomposition(LayerUpdate):
    """θ_t = σ ⊙ M_t + τ_t with M_t = sigmoid(v_t), one value per unit or filter, and a bias b_t.

    σ is the base's weight, which every task trains. A group of tasks may share another summand, see `Apd.regroup`.
    """

    opens_base = True

    def __init__(self) -> None:
        self.local = nn.Module()  # buffers "<layer>/group", (T,): each task's group; "<layer>/<group>": what it shares

    def shapes(self, site: Adapter) -> dict[str, tuple[int, ...]]:
        shapes = {"v": tuple(site.weight.shape[:1]), "tau": tuple(site.weight.shape)}
        return shapes if site.bias is None else {**shapes, "bias": tuple(site.bias.shape)}

    def draw(self, site: Adapter) -> dict[str, Tensor]:
        """M = 1/2, τ = 0 and the network's own bias."""
        tensors = {**super().draw(site), "tau": torch.zeros_like(site.weight)}  # in its memory layout
        return tensors if site.bias is None else {**tensors, "bias": site.bias.detach().clone()}

    def weight(self, site: Adapter, task: TaskState) -> Tensor:
        theta, local = self.own(site, task), self.local_of(site, task)
        return theta if local is None else theta + local

    def bias(self, site: Adapter, task: TaskState) -> Tensor | None:
        return site.own(task, "bias")

    def own(self, site: Adapter, task: TaskState) -> Tensor:
        """σ ⊙ M_t + τ_t."""
        return torch.addcmul(site.tensor(task, "tau"), site.weight, of_rows(site.tensor(task, "v").sigmoid(), site))

    def local_of(self, site: Adapter, task: TaskState) -> Tensor | None:
        """The summand that the task's group shares at a layer, if the group has several tasks."""
        group, number = self.local._buffers.get(name_at(site, "group")), task.number
        if group is None or number >= len(group):
            return None
        return self.local._buffers.get(name_at(site, int(group[number])))


@register.method(
    "apd", "APD: weights shared under masks, plus a sparse part of each task", citation="Yoon et al., ICLR 2020"
)
class Apd(Changed):
    """Shared weights that every task trains, and each task's mask, sparse summand τ, biases, normalisation and head.

    The loss of task t is cross-entropy + λ1 Σ_{i≤t} |τ_i|_1 + λ2 Σ_{i<t} ½ |θ_i - θ_i*|², where θ_i* are the weights of
    task i before this task: earlier tasks' τ_i and v_i are trained too, to compensate for changes of σ. Weight decay is
    on τ_t and v_t, and on σ with the first task. The gradient of all but the cross-entropy has a closed form and is
    added before each step, so the loss that runs record is the cross-entropy alone.

    After a task, entries of any τ_i up to λ1 are set to 0. The L1 term is part of the loss, as published, rather than a
    proximal step: so it passes through momentum and Adam like other gradients, and the entries that it suppresses
    oscillate around 0 by less than λ1 (with Adam once the learning rate has decayed, as published).

    With SGD, λ2 is at most 1 / (rate · steepness) in every layer: the penalty's steepest direction grows with the
    tasks, and beyond twice that value plain SGD diverges. The published λ2 is for Adam, whose step length does not
    depend on it.

    Args:
        make: Builds the network.
        head: Its classification layer.
        l1: λ1. Sets the sparsity of τ, and so the capacity.
        l2: λ2.
        init: Initial τ of a new task: "zero", which starts from the shared weights and stays sparse even after short
            training, or "sigma" (σ), as in the authors' code, which λ1 must first shrink.
        consolidate: Number of tasks after which sparse parts are regrouped; 0 for never, "APD(1)".
        clusters: Number of clusters of k-means per `consolidate` tasks.
        tolerance: A cluster shares the entries whose values differ by at most this.
    """

    checked = "The authors' code (jaehong31/APD)."
    differs = (
        'τ starts at 0 (`init = "sigma"` is the authors\' choice).',
        "What is cut to 0 is cut for good, so what is tested, counted and held in place is the same; masks are not "
        "cut.",
        "Every task is taken as its last epoch leaves it (there: the best of the last five on validation samples).",
        "Rate and momentum are the recipe's (there: Adam at 0.001, 0.95 times that after every epoch).",
        "With SGD the retroactive penalty is limited to where it is stable (there: Adam).",
        "Colour channels are not scrambled (there: by a wrong reshape).",
    )

    learns_its_size = "this is before it"

    own_training: ClassVar[dict[str, Any]] = {"weight_decay": 1e-4}

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"l1": (1e-4, 4e-4, 1e-3, 3e-3), "l2": (1.0, 10.0, 100.0)}

    def __init__(
        self,
        make: MakeNetwork,
        head: str,
        *,
        l1: float = 4e-4,
        l2: float = 100.0,
        init: str = "zero",
        consolidate: int = 5,
        clusters: int = 2,
        tolerance: float = 1e-2,
    ) -> None:
        if min(l1, l2, tolerance, consolidate) < 0 or clusters < 1:
            raise UsageError(
                "l1, l2, tolerance and consolidate must be at least 0, clusters at least 1, "
                f"not {l1}, {l2}, {tolerance}, {consolidate}, {clusters}"
            )
        if init not in INITS:
            raise UsageError(f"init must be {' or '.join(map(repr, INITS))}, not {init!r}")
        decomposition = Decomposition()
        super().__init__(make, head, decomposition, Options(bn="per_task"))
        self.decomposition = decomposition
        self.l1, self.l2, self.start = l1, l2, init
        self.consolidate, self.clusters, self.tolerance = consolidate, clusters, tolerance
        self.local = decomposition.local
        self.anchors = nn.Module()  # buffers "<layer>/theta/<task>": θ_i* of earlier tasks, without what groups share

    @torch.no_grad()
    def begin(self, task: SeenTask) -> None:
        """Biases and normalisation start at the previous task's values, the mask at 1/2.

        σ is scaled initially so that the first task starts as the plain network.
        """
        super().begin(task)
        new = self.model.tasks[task.name]
        if not task.number:
            for sigma in {id(site.weight): site.weight for site in self.layers()}.values():
                sigma.div_(1.5 if self.start == "sigma" else 0.5)
        for site in self.layers():
            site.tensor(new, "v").zero_()
            site.tensor(new, "tau").copy_(site.weight if self.start == "sigma" else torch.zeros(()))
            for i, old in enumerate(self.model.tasks.values()[:-1]):
                self.anchors.register_buffer(name_at(site, "theta", i), self.decomposition.own(site, old))

    def groups(self) -> list[dict[str, Any]]:
        *earlier, new = self.model.tasks.values()
        own = [site.tensor(new, name) for site in self.layers() for name in ("v", "tau")]
        held = [site.tensor(old, name) for old in earlier for site in self.layers() for name in ("v", "tau")]
        known = {id(p) for p in own}
        rest = [p for p in new.parameters() if id(p) not in known]
        return [
            {"params": self.shared(), **({"weight_decay": 0.0} if earlier else {})},
            {"params": own},
            {"params": rest + held, "weight_decay": 0.0},
        ]

    def shared(self) -> list[nn.Parameter]:
        """σ and the other parameters that all tasks use, without the network's own biases, normalisation and head."""
        unused = {id(p) for p in self.model.tensors.unused_head()}
        unused |= {id(site.bias) for site in self.layers()}
        norms = [site for site in self.model.norm_layers() if site.affine]
        unused |= {id(p) for site in norms for p in site.module.parameters()}
        return [p for p in self.model.network.parameters() if id(p) not in unused]

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Add the gradients of λ1 Σ |τ_i|_1 + λ2 Σ ½ |θ_i - θ_i*|²: in closed form, without a graph of old weights."""
        *earlier, new = self.model.tasks.values()
        for site in self.layers():
            sigma, tau = site.weight, site.tensor(new, "tau")
            gradient(tau).add_(tau.sign(), alpha=self.l1)
            strength = self.strength(site, optimizer)
            for i, old in enumerate(earlier):
                v, tau = site.tensor(old, "v"), site.tensor(old, "tau")
                mask = v.sigmoid()
                off = self.decomposition.own(site, old).sub_(self.anchors.get_buffer(name_at(site, "theta", i)))
                off.mul_(strength)  # λ2 (θ_i - θ_i*)
                gradient(sigma).addcmul_(off, of_rows(mask, site))
                v.grad = mask * (1 - mask) * (off * sigma).flatten(1).sum(1)
                tau.grad = off.add_(tau.sign(), alpha=self.l1)

    @torch.no_grad()
    def strength(self, site: Adapter, optimizer: Optimizer) -> Tensor:
        """λ2, limited for SGD to where its steps are stable.

        In (σ, τ_i, v_i) of one unit, ½ Σ |θ_i - θ_i*|² curves by at most 1 + Σ m_i² + max_i (m_i (1 - m_i))² |σ|².
        """
        wanted = torch.tensor(self.l2, dtype=site.weight.dtype, device=site.weight.device)
        earlier = self.model.tasks.values()[:-1]
        if not isinstance(optimizer, SGD) or not earlier:
            return wanted
        masks = torch.stack([site.tensor(old, "v").sigmoid() for old in earlier])  # (T - 1, O)
        slopes = (masks * (1 - masks)).square().amax(0) * site.weight.flatten(1).square().sum(1)
        steepness = (1 + masks.square().sum(0) + slopes).amax()
        return (1 / (optimizer.param_groups[0]["lr"] * steepness)).clamp(max=wanted)

    @torch.no_grad()
    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        for task in self.model.tasks.values():
            for site in self.layers():
                cut(site.tensor(task, "tau"), self.l1)
        self.anchors._buffers.clear()
        if self.consolidate and len(self.seen) % self.consolidate == 0:
            self.regroup()

    def regroup(self) -> None:
        """The paper's hierarchical knowledge consolidation: k-means over the tasks' τ in every layer."""
        made: dict[str, Tensor] = {}
        for site in self.layers():
            tasks = self.model.tasks.values()
            taus = [site.tensor(task, "tau") for task in tasks]
            locals_ = [self.decomposition.local_of(site, task) for task in tasks]
            full = torch.stack([t if s is None else t + s for t, s in zip(taus, locals_, strict=True)]).flatten(1)
            group = k_means(full, self._centres(full, self.local._buffers.get(name_at(site, "group"))))
            made[name_at(site, "group")] = group
            for g in group.unique().tolist():
                members = group == g
                if members.sum() > 1:
                    shared, full[members] = split(full[members], self.tolerance)
                    made[name_at(site, g)] = cut(shared, self.l1).view_as(site.weight)
            for tau, values in zip(taus, full, strict=True):
                tau.copy_(values.view_as(tau))
        self.local._buffers.clear()
        for name, value in made.items():
            self.local.register_buffer(name, value)

    def _centres(self, full: Tensor, before: Tensor | None) -> Tensor:
        """Initial centres of k-means: the means of the previous groups, then random tasks."""
        count = min(self.clusters * len(full) // self.consolidate, len(full))
        known = [] if before is None else [full[: len(before)][before == g].mean(0) for g in before.unique()]
        chosen = torch.randperm(len(full))[: max(0, count - len(known))].tolist()
        return torch.stack([*known[:count], *(full[i] for i in chosen)])

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Create the buffers of the state first: which ones exist depends on the progress of training."""
        device = next(self.model.network.parameters()).device
        for start, kept in (("anchors.", self.anchors), ("local.", self.local)):
            kept._buffers.clear()
            for key, value in state_dict.items():
                if key.startswith(start):
                    kept.register_buffer(key.removeprefix(start), torch.empty_like(value, device=device))
        return super().load_state_dict(state_dict, strict, assign)

    def capacity(self) -> Capacity:
        """All non-zero values, and the bytes of `stored`."""
        counted: list[Tensor] = [*self.shared()]
        counted += [
            value
            for task in self.model.tasks.values()
            for key, value in self.model.tensors.task_state(task).items()
            if not is_statistic(key) and key not in ("head.weight", "head.bias")
        ]
        counted += [value for value in self.local.buffers() if value.is_floating_point()]
        head = sum(p.numel() for p in self.model.tensors.unused_head())
        values = head + sum(int(torch.count_nonzero(t)) for t in counted)
        size = sum(t.nbytes for t in self.stored().values())
        return Capacity(values, self._plain.parameters, size, self._plain.multiply_adds)

    def notes(self) -> dict[str, Any]:
        """Number of non-zero values of each task's τ, and of what groups share."""
        taus = [[s.tensor(task, "tau") for s in self.layers()] for task in self.model.tasks.values()]
        counts = [sum(int(torch.count_nonzero(t)) for t in own) for own in taus]
        shared = [t for t in self.local.buffers() if t.is_floating_point()]
        return {"tau": counts, "local": sum(int(torch.count_nonzero(t)) for t in shared)}

    def stored(self) -> dict[str, Tensor]:
        """The state without what only training needs.

        Sparse tensors are stored as a bit mask and their non-zero values.
        """
        found: dict[str, Tensor] = {}
        for key, value in self.state_dict().items():
            sparse = key.endswith(".tau") or (key.startswith("local.") and value.is_floating_point())
            if sparse:
                found[f"{key}.bits"], found[f"{key}.values"] = packed(value)
            elif not key.startswith("anchors."):
                found[key] = value
        return found

    def export(self, folder: Any) -> None:
        """Export as other methods do, with sparse tensors as in `stored`, and their shapes."""
        state = self.stored()
        shapes = {key: list(value.shape) for key, value in self.state_dict().items() if f"{key}.bits" in state}
        write_learner(folder, state, {"shapes": json.dumps(shapes)})

    def restore(self, folder: Any) -> None:
        metadata, found = read_learner(folder)
        shapes = json.loads(metadata.get("shapes", "{}"))
        for key, shape in shapes.items():
            found[key] = unpacked(found.pop(f"{key}.bits"), found.pop(f"{key}.values"), torch.Size(shape))
        self.load_state_dict(found)


# ---------------------------------------------------------------------------------------------------------
# Pieces


def of_rows(values: Tensor, site: Adapter) -> Tensor:
    """One value per unit or filter, shaped to multiply the weight: (O, 1, ...)."""
    return values.view(-1, *[1] * (site.weight.dim() - 1))


def name_at(site: Adapter, *words: str | int) -> str:
    """Name of a buffer. Dots are not allowed there."""
    return "/".join([site.path.replace(".", "/"), *map(str, words)])


def cut(t: Tensor, limit: float) -> Tensor:
    """Set entries up to `limit` to 0, in place."""
    return t.masked_fill_(t.abs() <= limit, 0)


def k_means(points: Tensor, centres: Tensor, steps: int = 100) -> Tensor:
    """Assign points to clusters by Lloyd's iteration from given centres: few points in many dimensions."""
    centres, group = centres.clone(), torch.full((len(points),), -1, device=points.device)
    for _ in range(steps):
        nearest = torch.stack([(points - centre).square().sum(1) for centre in centres]).argmin(0)
        if torch.equal(nearest, group):
            break
        group = nearest
        for g in group.unique().tolist():  # others keep their centre
            centres[g] = points[group == g].mean(0)
    return group


def split(members: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Split the members (M, N) of a cluster into what they share, (N,), the centre of similar entries, and the rest."""
    top, low = members.amax(0), members.amin(0)
    alike = top - low <= tolerance
    return torch.where(alike, (top + low) / 2, 0), torch.where(alike, 0, members)


BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def packed(t: Tensor) -> tuple[Tensor, Tensor]:
    """A mask of the non-zero entries, eight bits per byte, and these entries."""
    flat = t.detach().flatten()
    bits = torch.nn.functional.pad((flat != 0).to(torch.uint8), (0, -flat.numel() % 8)).view(-1, 8)
    return (bits * bits.new_tensor(BITS)).sum(1, dtype=torch.uint8), flat[flat != 0]


def unpacked(bits: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Undo `packed`."""
    there = (bits[:, None] & bits.new_tensor(BITS)).flatten()[: shape.numel()] != 0
    flat = torch.zeros(shape.numel(), dtype=values.dtype, device=values.device)
    return flat.masked_scatter_(there, values).view(shape)
