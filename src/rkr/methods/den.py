"""DEN, dynamically expandable networks (Yoon et al., ICLR 2018): selective retraining, and growth where that fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from rkr.core import Adapter, join
from rkr.errors import UsageError
from rkr.methods.growth.growth import NEVER, SLOTS, Growth
from rkr.methods.growth.widths import Space
from rkr.methods.learner import MakeNetwork, Outcome, Phase, ReadSamples, SeenTask, evaluating
from rkr.methods.shared.anchor import departure
from rkr.methods.shared.growing import Growing, over
from rkr.methods.shared.proximal import finest, group_norm, group_threshold, soft_threshold
from rkr.registry import register

STAGES = ("train", "select", "retrain", "grow", "expand", "divide", "split")
"""The phases, in order: "train" is the first task's; "grow" and "divide" change the network, and train nothing."""

UNDECIDED = -1


@register.method(
    "den",
    "DEN: retrains what a task needs, adds units, copies those that drift; to 180 % on LeNet",
    citation="Yoon et al., ICLR 2018",
)
class Den(Growing):
    """Selective retraining, dynamic expansion and split, with time-stamped inference (Algorithm 1).

    The first task is trained with an L1 penalty (equation 2), so that the network becomes sparse. For a later one,

    1. "select": only its head is trained, with L1 (equation 3). Units from which a path of non-zero weights leads to
       any of its outputs are the sub-network of the task. "retrain": the weights between these are trained (equation
       4), held back by λ/2 ||W_t - W_{t-1}||².
    2. If the mean loss over the training samples is still above a threshold, units are added to every layer ("grow"),
       and what is new is trained alone, under L1 and group lasso (equation 5, "expand"). Added units that become zero
       are removed.
    3. Units whose incoming weights drifted far are copied ("divide"): the task continues with the copies, and the
       originals get their old weights back, as do the connections that the task no longer uses. The sub-network, now
       with the new units, is trained once more with the same penalty (equation 6, "split").

    L1 and group lasso are proximal steps after each step of the optimiser, with its learning rate. Earlier tasks
    continue to compute with the units that existed for them. Each task has its own heads and batch normalisation. Units
    that are tied by residual connections are selected, added, dropped and copied together. Phases with nothing to do
    take no epochs; all phases together take at most the recipe's epochs, up to rounding.

    Args:
        make: Builds the network.
        head: Its classification layer.
        l1: μ, of the L1 penalty. The public code thresholds at a fixed 1e-5, whatever the learning rate.
        strength: λ, of the penalty on drift. 0.5 in the public code.
        group_lasso: γ, of the group lasso on what goes into an added unit: its weights, bias, and the shift of its
            normalisation. The public code thresholds at a fixed 1e-3.
        loss_threshold: τ: a task whose loss is above it gets new units.
        drift_threshold: σ: units are copied if their incoming weights moved by more (Euclidean distance).
        expand: k, the number of units added to a layer; below 1, a share of the plain network's units, at least one. 10
            in the public code, for layers of 312 and 128 units.
        split: Maximum number of units copied per layer, those that drifted most; a number or a share, as for `expand`.
            10 in the public code.
        select_share: Share of the epochs for "select": a tenth, as in the public code.
        expand_share: For "expand", which trains a few new weights only.
        split_share: For "split", which starts from trained weights. The rest is for "retrain", which every task needs.
    """

    checked = "The authors' code (jaehong31/DEN), which has fully connected networks only."
    differs = (
        "A sub-network is what leads to any output of the task's head (there: to the first one).",
        "Units that drifted most are copied first (there: least).",
        "The loss that decides on growth is over all training samples (there: one batch).",
        "A copy takes the place of its original for the new task, so that splitting changes nothing by itself.",
        "Thresholds are multiplied by the learning rate (there: fixed).",
    )

    stage: Tensor
    expanded: Tensor
    divided: Tensor
    reached: Tensor

    learns_its_size = "this is before it"

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"l1": (1e-4, 1e-3, 1e-2), "strength": (0.05, 0.5, 5.0)}

    def __init__(
        self,
        make: MakeNetwork,
        head: str,
        *,
        l1: float = 1e-3,
        strength: float = 0.5,
        group_lasso: float = 0.1,
        loss_threshold: float = 0.01,
        drift_threshold: float = 0.05,
        expand: float = 0.0215,
        split: float = 0.0215,
        select_share: float = 0.1,
        expand_share: float = 0.2,
        split_share: float = 0.3,
    ) -> None:
        weights = {"l1": l1, "strength": strength, "group_lasso": group_lasso}
        weights |= {"loss_threshold": loss_threshold, "drift_threshold": drift_threshold}
        for name, value in {**weights, "expand": expand, "split": split}.items():
            if not value >= 0:
                raise UsageError(f"{name} must be at least 0, not {value}")
            if name in ("expand", "split") and value > 1 and value != int(value):
                raise UsageError(f"{name} must be a whole number of units, or a share below 1, not {value}")
        shares = (select_share, expand_share, split_share)
        if min(shares) <= 0 or sum(shares) >= 1:
            raise UsageError(
                f"select_share, expand_share and split_share must be above 0 and leave a rest of 1, not {shares}"
            )
        super().__init__(make, head, Growth(make(), head, "DEN"))
        self.l1, self.strength, self.group_lasso = l1, strength, group_lasso
        self.loss_threshold, self.drift_threshold = loss_threshold, drift_threshold
        self.expand, self.split = expand, split
        self.shares = {"select": select_share, "retrain": 1 - sum(shares)}
        self.shares |= {"expand": expand_share, "split": split_share}
        self._phase, self._rate = "train", 0.0
        self._forget()

    def _forget(self) -> None:
        """Reset the state of the current task."""
        self.register_buffer("stage", torch.tensor(-1))  # of STAGES: the last one that was prepared
        self.register_buffer("expanded", torch.tensor(UNDECIDED))  # whether units were added: 0 or 1
        self.register_buffer("divided", torch.tensor(UNDECIDED))  # whether units were copied: 0 or 1
        self.register_buffer("reached", torch.tensor(0.0, dtype=torch.float64))  # the loss after "retrain"
        for i, space in enumerate(self.growth.spaces.growing):  # which units the sub-network has
            self.register_buffer(f"chosen{i}", torch.ones_like(self.growth.times(space)[0], dtype=torch.bool))

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        self._forget()
        self._anchor(keep=bool(task.number))

    def _anchor(self, keep: bool) -> None:
        """Keep W_{t-1} while task t is learned, or give it up."""
        for i, site in enumerate(self.layers()):
            for name, tensor in (("weight", site.weight), ("bias", site.bias)):
                if tensor is not None:
                    kept = tensor.detach().clone() if keep else tensor.new_empty(0)
                    self.register_buffer(f"old_{name}{i}", kept)

    # -- phases -------------------------------------------------------------------------------------------

    def phases(self) -> Sequence[Phase]:
        if not self.task.number:
            return (Phase(),)
        idle = {"grow", "divide"}
        idle |= {"expand"} if int(self.expanded) == 0 else set()
        idle |= {"split"} if int(self.divided) == 0 else set()
        names = STAGES[1:]
        return tuple(Phase(n, epochs=0) if n in idle else Phase(n, share=self.shares[n]) for n in names)

    def prepare(self, phase: Phase, train: ReadSamples) -> None:
        self._phase, self._rate = phase.name, 0.0
        self.model.set_task(self.task.name)
        if int(self.stage) < STAGES.index(phase.name):  # else it goes on after an interruption
            if phase.name == "retrain":
                self._choose()
            elif phase.name == "grow":
                self._grow(train)
            elif phase.name == "divide":
                self._drop()
                self._divide()
            self.stage.fill_(STAGES.index(phase.name))
        for site in self.layers():
            for parameter in (site.weight, site.bias):
                if parameter is not None:
                    parameter.requires_grad_(phase.name != "select")
        for key, own in self.own.named_parameters():
            own.requires_grad_(phase.name != "select" or key.startswith("head."))
        super().prepare(phase, train)
        if phase.name not in ("train", "select"):
            self._hold_own()

    def groups(self) -> list[dict[str, Any]]:
        if self._phase == "select":
            return [{"params": [p for key, p in self.own.named_parameters() if key.startswith("head.")]}]
        return super().groups()

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        loss, correct = super().loss(x, y)
        if self._phase not in ("train", "select", "expand"):
            loss = loss + self.penalty()
        return Outcome(loss, correct)

    def penalty(self) -> Tensor:
        """λ/2 ||W_t - W_{t-1}||² over the weights and biases that there were before the task."""
        now, before = [], []
        for site, weight, bias in self._before():
            now.append(site.weight[tuple(map(slice, weight.shape))])
            before.append(weight)
            if bias is not None and site.bias is not None:
                now.append(site.bias[: len(bias)])
                before.append(bias)
        return 0.5 * self.strength * departure(now, before)

    def before_step(self, optimizer: Optimizer) -> None:
        self._rate = optimizer.param_groups[0]["lr"]

    @torch.no_grad()
    def after_step(self) -> None:
        head = self.own.get("head.weight")
        assert head is not None
        if self._phase in ("train", "select", "expand"):
            layers = [] if self._phase == "select" else [site.weight for site in self.layers()]
            for weight in (*layers, head):
                soft_threshold(weight, self._rate * self.l1)
        if self._phase == "expand":
            self._shrink_groups(self._rate * self.group_lasso)
        super().after_step()

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        self._anchor(keep=False)

    # -- the sub-network ----------------------------------------------------------------------------------

    @property
    def own(self) -> Any:
        """The tensors of the current task: normalisation and head."""
        return self.model.tasks[self.task.name]

    def _before(self) -> list[tuple[Adapter, Tensor, Tensor | None]]:
        """Every layer with its weight and bias from before the task."""
        found = []
        for i, site in enumerate(self.layers()):
            bias = None if site.bias is None else self.get_buffer(f"old_bias{i}")
            found.append((site, self.get_buffer(f"old_weight{i}"), bias))
        return found

    def _alive(self) -> dict[str, Tensor]:
        """By space, whether the current task has each unit."""
        found = {}
        for space in self.growth.spaces.growing:
            born, dead = self.growth.times(space)
            found[space.name] = (born <= self.task.number) & (dead > self.task.number)
        return found

    def _new(self) -> dict[str, Tensor]:
        """By space, whether each unit was added by the current task."""
        return {space.name: self.growth.times(space)[0] == self.task.number for space in self.growth.spaces.growing}

    def _inside(self) -> dict[str, Tensor]:
        """By space, whether each unit belongs to the sub-network of the task, as new ones do."""
        alive, found = self._alive(), {}
        for i, space in enumerate(self.growth.spaces.growing):
            chosen = self.get_buffer(f"chosen{i}")
            added = chosen.new_ones(len(alive[space.name]) - len(chosen))
            found[space.name] = torch.cat([chosen, added]) & alive[space.name]
        return found

    def reachable(self) -> dict[str, Tensor]:
        """By space, the units from which a path of non-zero weights leads to the task's head (section 3.2)."""
        spaces, number, alive = self.growth.spaces, self.task.number, self._alive()
        found = {space.name: torch.zeros_like(alive[space.name]) for space in spaces.growing}
        top = spaces.into.get(self.head)
        if top is not None:
            used = _per_unit(self.own.get("head.weight") != 0, top.takers[self.head]).any(0)
            found[top.name][self.growth.units(top, number)] = used
        links = {}  # by layer: whether an output takes anything from a unit
        for site in self.layers():
            if site.path in spaces.into:
                links[site.path] = _per_unit(site.weight != 0, spaces.into[site.path].takers[site.path])
        before, count = -1, 0
        while count > before:
            for path, linked in links.items():
                into, out = spaces.into[path], spaces.out.get(path)
                rows = linked if out is None else linked[found[out.name]]
                found[into.name] |= rows.any(0) & alive[into.name]
            for source, target in spaces.pads.values():
                taken, places = self.growth.tied(source, target, number)
                used = found[target.name][self.growth.units(target, number)[places]]
                found[source.name][self.growth.units(source, number)[taken]] |= used
            before, count = count, sum(int(units.sum()) for units in found.values())
        return found

    def _choose(self) -> None:
        for i, units in enumerate(self.reachable().values()):
            self.get_buffer(f"chosen{i}").copy_(units)

    def trained(self, site: Adapter, phase: str) -> Tensor | None:
        """Which entries of a layer's weight, as (O, I), a phase trains; None: all of them."""
        if phase in ("train", "select"):
            return None
        rows, columns = self.sides(site, self._inside(), True)
        if phase != "expand":
            return rows & columns
        new_rows, new_columns = self.sides(site, self._new(), False)
        alive = self.sides(site, self._alive(), True)[1]
        return (new_rows & alive) | (rows & new_columns)  # what is new takes from all units, and gives to the chosen

    def held(self, site: Adapter) -> Tensor | None:
        trained = self.trained(site, self._phase)
        return None if trained is None else ~trained

    def held_bias(self, site: Adapter) -> Tensor | None:
        if self._phase in ("train", "select"):
            return None
        units = self._new() if self._phase == "expand" else self._inside()
        return ~self.sides(site, units, self._phase != "expand")[0][:, 0]

    def _hold_own(self) -> None:
        """The head's inputs from units outside the sub-network; in "expand", from all units that are not new."""
        expand, number, spaces = self._phase == "expand", self.task.number, self.growth.spaces
        units = self._new() if expand else self._inside()
        top, head, bias = spaces.into.get(self.head), self.own.get("head.weight"), self.own.get("head.bias")
        if top is not None:
            trained = units[top.name][self.growth.units(top, number)].repeat_interleave(top.takers[self.head])
            self._hold(head, ~trained[None])
        if expand:
            if bias is not None:
                self._hold(bias, torch.ones_like(bias, dtype=torch.bool))
            for space in spaces.growing:
                old = ~units[space.name][self.growth.units(space, number)]
                for own in self._norms(space, "weight") + self._norms(space, "bias"):
                    self._hold(own, old)

    def _norms(self, space: Space, name: str) -> list[Tensor]:
        """The task's own tensors of one kind, of the normalisation layers over a space."""
        found = [self.own.get(join(path, name)) for path in space.norms]
        return [tensor for tensor in found if tensor is not None]

    # -- expansion ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _grow(self, train: ReadSamples) -> None:
        """Add units if the loss is above the threshold. They have no connections to units outside the sub-network."""
        total, count = 0.0, 0
        with evaluating(self):
            for x, y in train():
                total += float(self.classified(self.model(x), y).loss) * len(y)
                count += len(y)
        self.reached.fill_(total / max(count, 1))
        self.expanded.fill_(int(self.expand > 0 and float(self.reached) > self.loss_threshold))
        if not int(self.expanded):
            return
        self.growth.grow(self.model, {space.name: _count(self.expand, space) for space in self.growth.spaces.growing})
        for site in self.layers():
            rows, columns = self.sides(site, self._new(), False)
            trained = self.trained(site, "expand")
            assert trained is not None
            absent = (rows | columns) & ~trained
            site.weight.masked_fill_(over(absent, site.weight), 0)

    def _incoming(self, space: Space) -> list[Tensor]:
        """Views of all inputs of a space's new units; dimension 0 counts these units."""
        count = int((self.growth.times(space)[0] == self.task.number).sum())
        modules = [self.model.network.get_submodule(path) for path in space.makers]
        found = [p for module in modules for p in module._parameters.values() if p is not None]
        return [p[len(p) - count :] for p in (*found, *self._norms(space, "bias"))]  # they are the last ones

    def _shrink_groups(self, threshold: float) -> None:
        """The proximal step of group lasso, with one group per new unit: all of its inputs."""
        for space in self.growth.spaces.growing:
            groups = self._incoming(space)
            if len(groups[0]):
                zero = group_threshold(groups, threshold)
                for mean in self._norms(space, "running_mean"):  # of what is always 0
                    mean[len(mean) - len(zero) :].masked_fill_(zero, 0)

    def _drop(self) -> None:
        """Remove new units without inputs: they are 0, so nothing depends on them."""
        spaces, number = self.growth.spaces, self.task.number
        if not spaces.keeps_zero:
            return
        idle = {name: torch.zeros_like(new) for name, new in self._new().items()}
        for space in spaces.growing:
            fed = group_norm(self._incoming(space)) > 0
            idle[space.name][len(idle[space.name]) - len(fed) :] = ~fed
        for _ in spaces.pads:  # what a shortcut brings is not 0 unless its source is
            for source, target in spaces.pads.values():
                taken, places = self.growth.tied(source, target, number)
                places, taken = self.growth.units(target, number)[places], self.growth.units(source, number)[taken]
                idle[target.name][places] &= idle[source.name][taken]
        if any(bool(units.any()) for units in idle.values()):
            self.growth.remove(self.model, {name: units.nonzero()[:, 0].tolist() for name, units in idle.items()})

    # -- split --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def drift(self) -> dict[str, Tensor]:
        """By space, how far the weights into each unit have moved since the task began: ρ (Algorithm 4)."""
        alive = self._alive()
        squares = {name: units.new_zeros(len(units), dtype=finest(units.device)) for name, units in alive.items()}
        for site, weight, _ in self._before():
            out = self.growth.spaces.out.get(site.path)
            if out is not None:
                moved = site.weight[tuple(map(slice, weight.shape))] - weight
                squares[out.name][: len(moved)] += moved.flatten(1).square().sum(1)
        return {name: square.sqrt() * alive[name] for name, square in squares.items()}

    @torch.no_grad()
    def _divide(self) -> None:
        """Copy the units that drifted most, and restore what the task no longer uses."""
        wanted, drifts = {}, self.drift()
        for space in self.growth.spaces.growing:
            drift = drifts[space.name]
            order = drift.sort(descending=True, stable=True).indices[: _count(self.split, space)]
            wanted[space.name] = order[drift[order] > self.drift_threshold].tolist()
        self.divided.fill_(int(any(wanted.values())))
        if not int(self.divided):
            return
        self.growth.split(self.model, wanted)
        for site, weight, bias in self._before():
            rows, columns = self.sides(site, self._alive(), True)
            unused = ~(rows & columns)[: weight.shape[0], : weight.shape[1]]
            now = site.weight[tuple(map(slice, weight.shape))]
            now.copy_(torch.where(over(unused, weight), weight, now))
            if bias is not None and site.bias is not None:
                site.bias[: len(bias)] = torch.where(rows[: len(bias), 0], site.bias[: len(bias)], bias)

    # -- what came of it ----------------------------------------------------------------------------------

    def used(self, site: Adapter) -> int:
        """Count only connections between two units that some task has both of."""
        dead = {space.name: self.growth.times(space)[1] for space in self.growth.spaces.growing}
        rows, columns = self.born(site)
        row_ends, column_ends = self.sides(site, dead, NEVER)
        known = torch.maximum(rows, columns) < torch.minimum(row_ends, column_ends)
        return int(known.sum()) * site.weight[0, 0].numel()

    def notes(self) -> dict[str, Any]:
        """Number of units of each layer that the task retrained, added and copied, and the loss that triggered it."""
        if not self.task.number:
            return {}
        counts: dict[str, Any] = {"loss": float(self.reached), "selected": {}, "added": {}, "copied": {}}
        for i, space in enumerate(self.growth.spaces.growing):
            new, own = self._new()[space.name], self.growth.slots(space) // SLOTS == self.task.number
            counts["selected"][space.name] = int(self.get_buffer(f"chosen{i}").sum())
            counts["added"][space.name] = int((new & own).sum())
            counts["copied"][space.name] = int((new & ~own).sum())
        return counts


def _count(amount: float, space: Space) -> int:
    """A number of units, given as a number or as a share of the plain network's."""
    return max(1, round(amount * space.width)) if 0 < amount < 1 else int(amount)


def _per_unit(links: Tensor, values: int) -> Tensor:
    """Whether an output depends on a unit, (O, U): where a weight (O, U · values, ...) is not 0."""
    return links.unflatten(1, (-1, values)).flatten(2).any(2)
