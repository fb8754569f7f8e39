"""How a batch of pictures with a task each is computed, by the way that is quickest on this device.

Two ways. One by one: each task's pictures by themselves, with the task's merged weights. Together: one pass of the base
for all pictures, to which each layer adds what the picture's task changes (`rkr.core.portable`); nothing is merged, and
the time hardly depends on the number of tasks. Both are measured at the start.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rkr.core.portable.base import Portable, PortableByWeight
from rkr.core.portable.head import PortableHead
from rkr.core.portable.network import PortableNetwork, plain_state
from rkr.core.portable.norm import PortableNorm
from rkr.errors import RkrError
from rkr.pictures.zoo import Zoo

RESIDENT = 128  # tasks whose tensors are kept side by side for computing together
LONGEST = 0.5  # seconds of a batch: changes of the folder and urgent pictures wait for it
TOLERATED = 1.05  # a batch pays if a picture takes at most so much longer than in the best one
Times = Mapping[int, float]  # seconds of a batch, by its size


class Computer:
    """Computes batches. Used by one thread only.

    Args:
        zoo: The tasks.

    Attributes:
        alone: Seconds of a batch of one task, by its size.
        together: Seconds of a batch in which each picture has a task of its own; empty if that cannot be computed.
        merging: Seconds to merge the weights of one task.
    """

    def __init__(self, zoo: Zoo) -> None:
        self.zoo, self.model = zoo, zoo.model
        self.alone: dict[int, float] = {}
        self.together: dict[int, float] = {}
        self.merging = 0.0
        self._gathering: PortableNetwork | None = None
        self._resident: dict[str, int] = {}  # places in the tables of `_gathering`
        self._cannot = False

    # -- choosing -----------------------------------------------------------------------------------------

    def measure(self, largest: int, task: str | None, seconds: float = 4.0) -> None:
        """Find out how long batches take, up to a size.

        Args:
            largest: The largest batch.
            task: One that can be used. None if there is none: then the base is measured, and only alone.
            seconds: Larger batches are not tried any more after so long.
        """
        side = self.zoo.preparation.resize
        squares = torch.randint(0, 256, (largest, 3, side, side), dtype=torch.uint8)

        def one(n: int) -> Tensor:
            return self.zoo.features(squares[:n]) if task is None else self._alone(squares[:n], task)

        started = time.perf_counter()
        one(1)
        cold = time.perf_counter() - started
        self.alone = _measured(one, largest, seconds / 2)
        self.merging = max(0.0, cold - self.alone[1])
        if task is None:
            return
        names = [task, *(name for name in self.model.tasks if name != task and name not in self.model.tasks.damaged)]
        try:
            self._gather(names[:2])
            if self._gathering is not None:
                self.together = _measured(lambda n: self._run_gathered(squares[:n], [0] * n), largest, seconds / 2)
        except (RkrError, RuntimeError):
            self._cannot, self.together = True, {}
        self.forget()

    @property
    def size(self) -> int:
        """How many pictures to wait for: beyond that, a larger batch is not quicker."""
        sizes = [_pays(self.alone)]
        if self.together:
            best = _pays(self.together)
            if self.together[best] / best < self.alone[1] + self.merging:
                sizes.append(best)
        return max(sizes)

    def to_json(self) -> dict[str, object]:
        """What was measured, in milliseconds for a picture."""

        def a_picture(times: Times) -> dict[str, float]:
            return {str(n): round(1000 * t / n, 2) for n, t in times.items()}

        return {"size": self.size, "one_task": a_picture(self.alone), "many_tasks": a_picture(self.together)}

    # -- computing ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(self, squares: Tensor, tasks: Sequence[str]) -> list[Tensor]:
        """Logits of squares, uint8 (B, 3, R, R): for each the (C,) of its task."""
        counts = Counter(tasks)
        if len(counts) > 1 and self._together_is_quicker(counts):
            try:
                return self._together(squares, tasks)
            except RkrError:
                self._cannot, self._gathering = True, None
        found: list[Tensor] = [squares] * len(tasks)
        pays = _pays(self.alone)
        for name in counts:
            rows = [row for row, other in enumerate(tasks) if other == name]
            for start in range(0, len(rows), pays):
                some = rows[start : start + pays]
                for row, logits in zip(some, self._alone(squares[some], name), strict=True):
                    found[row] = logits
        return found

    def forget(self) -> None:
        """Tasks have changed."""
        self._resident = {}

    def _together_is_quicker(self, counts: Mapping[str, int]) -> bool:
        if not self.together or self._cannot:
            return False
        pays, cache, table = _pays(self.alone), self.model.active.cache, self.model.tasks
        alone = 0.0
        for name, n in counts.items():
            alone += (n // pays) * self.alone[pays] + (_seconds(self.alone, n % pays) if n % pays else 0)
            alone += 0 if table.in_memory(name) in cache else self.merging
        return _seconds(self.together, sum(counts.values())) < alone

    @torch.no_grad()
    def _alone(self, squares: Tensor, task: str) -> Tensor:
        return self.model(self._inputs(squares), tasks=[task] * len(squares)).float().cpu()

    def _together(self, squares: Tensor, tasks: Sequence[str]) -> list[Tensor]:
        names = list(dict.fromkeys(tasks))
        classes = {name: self.model.tasks[name].classes or 0 for name in names}
        self._gather(names)
        logits = self._run_gathered(squares, [self._resident[name] for name in tasks])
        return [row[: classes[name]] for row, name in zip(logits, tasks, strict=True)]

    @torch.no_grad()
    def _run_gathered(self, squares: Tensor, places: Sequence[int]) -> Tensor:
        assert self._gathering is not None
        task = torch.tensor(places, device=self.zoo.device)
        return self._gathering(self._inputs(squares), task=task).float().cpu()

    def _inputs(self, squares: Tensor) -> Tensor:
        preparation = self.zoo.preparation
        return preparation.normalised(preparation.centre(squares.to(self.zoo.device)))

    def _gather(self, names: Sequence[str]) -> None:
        """Put the tensors of these tasks side by side, if they are not yet."""
        if self._resident and all(name in self._resident for name in names):
            return
        few = len(self.model.tasks) <= RESIDENT  # else most batches would bring new ones, and larger tables take longer
        wanted = dict.fromkeys((*(self._resident if few else ()), *names))
        tasks = [self.model.tasks[name] for name in wanted]
        if len(tasks) == 1:
            tasks *= 2  # a network for one task only is made another way
        if self._gathering is None:
            network = PortableNetwork(self.model, tasks[:2])
            if not all(_gathers(module) for module in network.modules()):
                self._cannot = True
                return
            self._gathering = self._sharing(network)
        table = self._gathering.tasks
        table.states = [plain_state(self.model, task) for task in tasks]
        for module in self._gathering.modules():
            if isinstance(module, Portable):
                module.settle()
        self._gathering.to(self.zoo.device)
        table.states = [{} for _ in tasks]  # what is needed was copied: tasks can leave memory
        self._resident = {name: place for place, name in enumerate(wanted)}

    def _sharing(self, network: PortableNetwork) -> PortableNetwork:
        """The same with the base's own tensors in place of copies."""
        modules = dict(self.model.network.named_modules())
        for path, module in network.network.named_modules():
            own = module.module if isinstance(module, Portable) else module
            for name, tensor in own._parameters.items():
                there = modules[path]._parameters.get(name) if path in modules else None
                if tensor is not None and there is not None:
                    tensor.data = there.data
        return network


def _gathers(module: torch.nn.Module) -> bool:
    """Whether a layer computes all samples at once, and not all of them for each task."""
    if isinstance(module, PortableNorm):
        return not module.one_by_one
    if isinstance(module, PortableHead):
        return module._by_product
    return not isinstance(module, PortableByWeight)


def _measured(run: Callable[[int], object], largest: int, seconds: float) -> dict[int, float]:
    """Seconds of batches of 1, 2, 4, ...: the shortest of up to three, because other programs only make it longer."""
    found: dict[int, float] = {}
    end, n = time.perf_counter() + seconds, 1
    while n <= largest:
        run(n)
        times = []
        for _ in range(3):
            started = time.perf_counter()
            run(n)
            times.append(time.perf_counter() - started)
            if time.perf_counter() > end:
                break
        found[n] = min(times)
        if time.perf_counter() > end:
            break
        n = largest if n < largest < 2 * n else 2 * n
    return found


def _pays(times: Times) -> int:
    """The smallest batch that is about as quick for a picture as the quickest."""
    allowed = {n: t / n for n, t in times.items() if t <= LONGEST or n == min(times)}
    return min(n for n, t in allowed.items() if t <= TOLERATED * min(allowed.values()))


def _seconds(times: Times, n: int) -> float:
    """Seconds of a batch of any size, from those that were measured."""
    if n in times:
        return times[n]
    below = max((m for m in times if m < n), default=min(times))
    above = min((m for m in times if m > n), default=None)
    if above is None:
        return times[below] * n / below
    return times[below] + (times[above] - times[below]) * (n - below) / (above - below)
