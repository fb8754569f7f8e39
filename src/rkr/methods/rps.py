"""RPS-Net (Rajasegaran et al., "Random Path Selection for Incremental Learning", NeurIPS 2019): parallel modules.

Every layer of a network has several parallel modules, and a path takes one of each layer. Every few tasks a new path is
drawn; modules of earlier paths stay as they are, and the network computes with the modules of all paths so far.

The paper's modules are residual blocks. Here a module is one convolution or linear layer with the batch normalisation
behind it, so that any network will do. In residual networks the identity is the network's own shortcut, behind every
second layer; a projection in a shortcut is a layer with modules as any other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from rkr.capacity import Capacity
from rkr.core import BATCH_NORMS, is_standard, multiply_adds, version_key
from rkr.errors import UsageError
from rkr.methods.learner import MakeNetwork, Outcome, ReadSamples, SeenTask
from rkr.methods.shared.graph import norm_after, traced
from rkr.methods.shared.rehearsing import Rehearsing
from rkr.registry import register

EXEMPLARS = ("random", "herding")


class Parallel(nn.Module):
    """Parallel modules that replace one layer. Their outputs are added: sum_m BN_m(W_m x + b_m).

    Finished modules are linear, so they are computed together as one layer.

    Args:
        first: Module 0: the network's own layer and the batch normalisation after it, if any.
    """

    def __init__(self, *first: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"0": nn.Sequential(*first)})  # those on a path, in the order of the paths
        self.finished: set[str] = set()  # those that stay as they are
        self._folded: tuple[Any, list[nn.Module]] = (None, [])  # these as one layer; a list, as it is no part of this

    def finish(self, modules: set[str]) -> None:
        """Freeze these modules, and no others."""
        self.finished = modules
        for number, branch in self.branches.items():
            branch.requires_grad_(number not in modules)
        self.train(self.training)

    def train(self, mode: bool = True) -> Parallel:
        """Freeze the statistics of finished modules."""
        super().train(mode)
        for number in self.finished:
            self.branches[number].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self._parts()
        y: Tensor = first(x)
        for part in others:
            y = y + part(x)
        return y

    def _parts(self) -> list[nn.Module]:
        """The modules to add up, with all finished ones merged into one."""
        fixed = [cast("nn.Sequential", self.branches[n]) for n in self.branches if n in self.finished]
        if len(fixed) < 2 or not all(map(_is_linear, fixed)):
            return list(self.branches.values())
        key = [version_key(t) for branch in fixed for t in (*branch.parameters(), *branch.buffers())]
        if self._folded[0] != key:
            self._folded = key, [_fold(fixed)]
        return self._folded[1] + [branch for n, branch in self.branches.items() if n not in self.finished]


def _is_linear(branch: nn.Sequential) -> bool:
    """Whether a module that no longer learns is a linear function."""
    norms: Any = branch[1:]
    return all(isinstance(p, nn.modules.batchnorm._BatchNorm) and p.running_var is not None for p in norms)


@torch.inference_mode(False)
@torch.no_grad()
def _fold(branches: Sequence[nn.Sequential]) -> nn.Module:
    """One layer that computes the sum of the modules, with fixed normalisation statistics."""
    layers: list[Any] = []
    for branch in branches:
        layer, *norms = list(branch)
        fuse: Any = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
        layers.append(fuse(layer, *norms) if norms else deepcopy(layer))
    total, *others = layers
    for layer in others:
        total.weight += layer.weight
        if total.bias is not None:
            total.bias += layer.bias
    folded: nn.Module = total.requires_grad_(False)
    return folded


@register.method(
    "rps-net",
    "RPS-Net: random paths through parallel modules; else keeps as iCaRL",
    citation="Rajasegaran et al., NeurIPS 2019",
    search={"candidates": 8},
)
class RpsNet(Rehearsing):
    """Random paths through parallel modules; exemplars, and a distillation whose weight grows with the tasks.

    The first path is the network itself. Every `jump` tasks a new path is chosen: candidates are drawn and trained
    separately, and the one with the best accuracy on held-out samples is kept. Without candidates, the first path drawn
    is trained. Parameters outside of modules, such as LayerNorms, belong to the first path.

    The loss of task t (0, 1, ...) is the cross-entropy over all classes so far plus phi KL(target || answers), both
    softened by the temperature. The target has what the network before the task answers for old classes, and the
    one-hot label for new ones. phi is 1 for t <= jump, then rigidity (t - jump): the paper's controller. As in the
    authors' code the terms of the divergence are cut off at 0, one by one: only answers that are too low count.

    Unlike in the authors' code, statistics of finished modules are frozen, the network before the task does not use
    modules that it had not learned, classes of later tasks have no outputs yet, and nothing is chosen on test samples.
    Their optimiser is Adam at 0.001, halved after 20, 40, 60 and 80 of 100 epochs; here the recipe sets it.

    Args:
        make: Builds the network.
        head: Its classification layer.
        modules: Number of modules per layer (M). When all are finished, later paths train nothing new there.
        jump: Number of tasks that share a path (J).
        candidates: Number of paths to try when a new one is chosen; 1 for a random path, with no samples held out.
        reuse: Whether paths are drawn from all modules, including finished ones, as the authors do, so that some layers
            have nothing new to train. Otherwise they are drawn from unused modules while there are any, and candidates
            differ in initial values.
        memory: Number of exemplars of all classes together.
        exemplars: How they are chosen: at "random", as in the authors' code, or by "herding".
        rigidity: Growth rate of phi.
        temperature: Temperature of the distillation.
    """

    checked = "The authors' code (brjathu/RPSnet)."
    differs = (
        "A module is a layer with its batch normalisation, so that any network will do (there: a residual block).",
        "Statistics of finished paths are frozen (there: they move).",
        "Paths are chosen on a tenth of the task's samples that is held out, with the task told (there: on the "
        "test, over all classes).",
        "Paths take modules that no earlier one has, as long as there are some; `reuse = true` draws from all "
        "modules, as the authors do.",
        "The optimiser is the recipe's (there: Adam).",
    )

    def __init__(
        self,
        make: MakeNetwork,
        head: str,
        *,
        modules: int = 8,
        jump: int = 2,
        candidates: int = 8,
        reuse: bool = False,
        memory: int = 2000,
        exemplars: str = "random",
        rigidity: float = 2.5,
        temperature: float = 2.0,
    ) -> None:
        for name, value in (("modules", modules), ("jump", jump), ("candidates", candidates)):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        if exemplars not in EXEMPLARS:
            raise UsageError(f"exemplars must be one of {', '.join(EXEMPLARS)}, not {exemplars!r}")
        if rigidity < 0 or temperature <= 0:
            raise UsageError(f"rigidity must be 0 or more and temperature above 0, not {rigidity} and {temperature}")
        super().__init__(make, head, memory=memory)
        self.count, self.jump, self.candidates, self.reuse = modules, jump, candidates, reuse
        self.exemplars, self.rigidity, self.temperature = exemplars, rigidity, temperature
        plain = make()
        self._layers = layers_and_norms(plain, head)
        for layer, norm in self._layers.items():
            _put_parallel(self.network, layer, norm)
        shape, self._macs = getattr(plain, "input_shape", None), [0] * len(self._layers)
        if shape is not None:
            values, layers = multiply_adds(plain, shape)[1], [plain.get_submodule(layer) for layer in self._layers]
            self._macs = [values[layer] * cast("Tensor", layer.weight)[0].numel() for layer in layers]  # of a module

    # -- paths --------------------------------------------------------------------------------------------

    @property
    def paths(self) -> list[list[int]]:
        """All paths so far, as the module's number for each layer. The last one is being trained."""
        return [path.tolist() for key, path in self.named_buffers(recurse=False) if key.startswith("path_")]

    def begin(self, task: SeenTask) -> None:
        super().begin(task)  # the network of before is copied without the new path
        if task.number % self.jump == 0:
            drawn = self._draw(self.paths)
            self.register_buffer("drawn", drawn)
            self.register_buffer(f"path_{task.number // self.jump}", drawn[0].clone())
        self._fit()

    def rounds(self) -> int:
        """One round for every new path, if there is a choice."""
        return int(self.task.number % self.jump == 0 and len(self.propose(0)) > 1)

    def propose(self, number: int) -> list[Any]:
        """The paths that were drawn when this one was chosen."""
        drawn: list[list[int]] = self.get_buffer("drawn").tolist()
        return [path for path in drawn if path[0] >= 0]

    def adopt(self, candidate: Any) -> None:
        """Take this path instead of the one that `begin` took."""
        self.get_buffer(f"path_{self.task.number // self.jump}").copy_(torch.tensor(candidate))
        self._fit()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the paths first: they determine which modules exist."""
        for key, path in self.named_buffers(recurse=False):
            if key.startswith("path_") and key in state_dict:
                path.copy_(state_dict[key])
        if self.seen:
            with torch.random.fork_rng(devices=[]):  # new modules take their values from the state
                self._fit()
        return super().load_state_dict(state_dict, strict, assign)

    def train(self, mode: bool = True) -> RpsNet:
        """Statistics outside of modules are those of the first path."""
        super().train(mode)
        if len(self.paths) > 1:
            for part in self._rest():
                if isinstance(part, BATCH_NORMS):
                    part.eval()
        return self

    # -- learning -----------------------------------------------------------------------------------------

    @property
    def phi(self) -> float:
        """Weight of the distillation."""
        over = self.task.number - self.jump
        return self.rigidity * over if over > 0 else 1.0

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        logits = self.logits(x)  # (B, classes so far)
        loss = F.cross_entropy(logits, y)
        correct = (logits.detach().argmax(1) == y).sum()
        if self.teacher is not None:
            new = F.one_hot(y, logits.shape[1])[:, self.task.start :]  # zeros for exemplars
            target = torch.cat([self.wanted(x), new.to(logits)], 1) / self.temperature
            answers = F.log_softmax(logits / self.temperature, 1)
            terms = F.kl_div(answers, target.log_softmax(1), reduction="none", log_target=True)  # (B, C)
            loss = loss + self.phi * terms.clamp(min=0).sum(1).mean()
        return Outcome(loss, correct)

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        self.fill_memory(train)

    def fill_memory(self, train: ReadSamples) -> None:
        if self.exemplars == "herding":
            super().fill_memory(train)
            return
        labels = []
        for x, y in train():
            self.sample_bytes.fill_(x[0].numel())
            labels.append(y.cpu())
        own = torch.cat(labels)
        own = own[own >= self.task.start] - self.task.start  # exemplars of earlier tasks are read first
        rows = [(own == label).nonzero()[:, 0] for label in range(self.task.classes)]
        self.memory.keep([r[torch.randperm(len(r))] for r in rows])

    def capacity(self) -> Capacity:
        """Count all modules on paths: they are kept and computed."""
        kept, macs = super().capacity(), self._plain.multiply_adds
        branches = [b for layer in self._parallel(self.network) for b in list(layer.branches.values())[1:]]
        more = sum(p.numel() for branch in branches for p in branch.parameters())
        if macs is not None:
            for layer, of_module in zip(self._parallel(self.network), self._macs, strict=True):
                macs += (len(layer.branches) - 1) * of_module
        return replace(kept, parameters=kept.parameters + more, multiply_adds=macs)

    def notes(self) -> dict[str, Any]:
        return {"path": self.paths[-1]}

    # -- pieces -------------------------------------------------------------------------------------------

    def _parallel(self, network: nn.Module) -> list[Parallel]:
        return [cast("Parallel", network.get_submodule(layer)) for layer in self._layers]

    def _rest(self) -> list[nn.Module]:
        """The parts of the network that are neither in modules nor heads."""
        inside = {part for top in (self.heads, *self._parallel(self.network)) for part in top.modules()}
        return [part for part in self.network.modules() if part not in inside]

    def _draw(self, paths: list[list[int]]) -> Tensor:
        """Distinct candidates for the next path, (candidates, L), with rows of -1 if there are fewer."""
        drawn = torch.full((self.candidates, len(self._layers)), -1)
        if not paths:
            drawn[0] = 0
            return drawn
        finished = torch.zeros(len(self._layers), self.count, dtype=torch.bool)
        for path in paths:
            finished.scatter_(1, torch.tensor(path)[:, None], True)
        usable = torch.ones_like(finished) if self.reuse else ~finished | finished.all(1, keepdim=True)
        old = (usable & finished).any(1)  # (L,): layers where a path may have nothing new
        ways = math.prod(((usable & ~finished).sum(1) + old).tolist()) - int(old.all())
        found: dict[tuple[int, ...], Tensor] = {}  # by what is new in it
        for _ in range(100 * self.candidates):
            one = torch.multinomial(usable.float(), 1)  # (L, 1)
            new = one.masked_fill(finished.gather(1, one), -1)
            if not ways or (new >= 0).any():
                found.setdefault(tuple(new[:, 0].tolist()), one[:, 0])
            if len(found) == max(1, min(ways, self.candidates)):
                break
        chosen = list(found.values()) or [one[:, 0]]
        drawn[: len(chosen)] = torch.stack(chosen)
        return drawn

    def _fit(self) -> None:
        """Keep exactly the modules on paths; only those new on the last path are trained."""
        paths = self.paths
        if len(paths) > 1:
            for part in self._rest():
                for p in part.parameters(recurse=False):
                    p.requires_grad_(False)
        self._take(self.network, paths, finished=len(paths) - 1)
        if self.teacher is not None:
            old = (self.task.number - 1) // self.jump + 1
            self._take(self.teacher, paths[:old], finished=old)

    def _take(self, network: nn.Module, paths: list[list[int]], finished: int) -> None:
        """Have the modules of these paths in a network; so many paths are finished.

        Modules that are missing are layers of a new network, so they start as the network's own did.
        """
        made: dict[int, nn.Module] = {}  # a new network for each path that needs one
        for i, ((layer, norm), parallel) in enumerate(zip(self._layers.items(), self._parallel(network), strict=True)):
            there = parallel.branches
            branches: dict[str, nn.Module] = {}
            for k, path in enumerate(paths):
                number = str(path[i])
                if number in there:
                    branches[number] = there[number]
                elif number not in branches:
                    if k not in made:
                        made[k] = self.make()
                    parts = (made[k].get_submodule(name) for name in (layer, norm) if name is not None)
                    branches[number] = nn.Sequential(*parts).train(parallel.training)
            parallel.branches = nn.ModuleDict(branches)
            parallel.finish({str(path[i]) for path in paths[:finished]})


def layers_and_norms(network: nn.Module, head: str) -> dict[str, str | None]:
    """The layers that a network calls, its head excepted, and the batch normalisation of each.

    A BatchNorm belongs to a layer if it normalises its output and nothing else.
    """
    graph = traced(network, "RPS-Net")
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    norms = norm_after(network, "RPS-Net")
    found: dict[str, str | None] = {}
    for name in calls:
        if name != head and is_standard(network.get_submodule(name)):
            norm = norms.get(name)
            found[name] = norm if norm is not None and calls[name] == calls[norm] == 1 else None
    if not found:
        raise UsageError(f"RPS-Net needs layers besides the head {head!r}, and this network calls none")
    return found


def _put_parallel(network: nn.Module, layer: str, norm: str | None) -> None:
    """Replace a layer, and its batch normalisation if any, with parallel modules."""
    own, *norms = [network.get_submodule(name) for name in (layer, norm) if name is not None]
    for part in norms:
        _exchange(network, part, nn.Identity())
    _exchange(network, own, Parallel(own, *norms))


def _exchange(network: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, under all its names."""
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if module is old:
            parent, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(parent), leaf, new)
