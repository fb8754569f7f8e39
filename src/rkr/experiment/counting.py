"""The cost of methods without training: a learner begins the tasks and is counted after each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from rkr.capacity import Capacity
from rkr.errors import UsageError
from rkr.registry import Method, methods, networks
from rkr.validation import choose

if TYPE_CHECKING:
    from rkr.methods import Learner


def begun(
    method: Method,
    make: Callable[[], nn.Module],
    head: str,
    options: Mapping[str, Any],
    tasks: Sequence[int],
    then: Callable[[Learner], None] = lambda learner: None,
    zero_shot: bool = False,
) -> Learner:
    """An untrained learner that has begun tasks, one for each number of classes; `then` is called after each."""
    import torch

    from rkr.methods.learner import SeenTask

    seen: dict[str, Any] = {}
    if zero_shot:
        seen = {"attributes": torch.zeros(max(tasks), 2), "unseen": (1,)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the base is not trained, only counted
        learner = method.build(make, head, **options)
        for number, classes in enumerate(tasks):
            names = tuple(f"{number}-{i}" for i in range(classes))
            learner.begin(SeenTask(number, f"task {number + 1}", names, sum(tasks[:number]), **seen))
            then(learner)
    return learner


def count(
    name: str,
    make: Callable[[], nn.Module],
    head: str | None,
    tasks: int,
    rank: int | None = None,
    shape: tuple[int, ...] | None = None,
) -> tuple[str, dict[str, Any]]:
    """The cost of a method's tasks on a network, as text and as JSON: by parts for methods that rectify layers.

    For zero-shot networks only the image encoder is counted, as in the paper.
    """
    from rkr.core.model import RectifiedModel
    from rkr.core.options import Options
    from rkr.networks.interfaces import is_aligned_vae

    network = make()
    zero_shot = is_aligned_vae(network)
    known = methods("zero-shot" if zero_shot else "images")
    if name not in known:
        raise UsageError(f"--method: no method is called {name!r}{choose(name, known)}")
    method = known[name]
    rectifies = set(Options().to_json()) <= set(method.options)
    if rank is not None and not rectifies:
        raise UsageError(f"--rank: {name} has no rank")
    classes = 2 * tasks if head is None else len(network.get_submodule(head).get_parameter("weight"))
    if tasks < 1:
        raise UsageError(f"--tasks must be at least 1, not {tasks}")
    if classes % tasks:
        raise UsageError(f"--tasks: {classes} classes cannot be divided into {tasks} tasks of equal size")
    if not rectifies:
        if zero_shot and "classifier" not in method.options:
            raise UsageError(f"--method: attributes decide on the size of {name}, not the network")
        after: list[Capacity] = []
        each = [classes // tasks] * tasks
        begun(method, make, head or "", {}, each, lambda made: after.append(made.capacity()), zero_shot)
        before = method.learner.learns_its_size
        note = f"training decides on the size of {name}: {before}" if before else ""
        rows = [{**asdict(one), **_shares(one)} for one in after]
        return _table(after, note), {"method": name, "note": note, "after": rows}
    options = {key: value for key, value in method.options.items() if key in Options().to_json()}
    made = network
    network = cast("nn.Module", network.encoder) if zero_shot else network
    model = RectifiedModel(network, Options.from_json(options if rank is None else {**options, "rank": rank}), head)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for number in range(1, tasks + 1):
            model.add_task(f"task {number}", classes=None if head is None else classes // tasks)
    cost = model.cost(shape)
    totals = {"percent": cost.percent, "total_percent": cost.total_percent, "total_bytes": cost.total_bytes}
    further = [p for p in made.parameters() if all(p is not own for own in model.network.parameters())]
    own = sum(task.parameters for task in cost.tasks)
    kept = Capacity(cost.network + own, cost.network, cost.total_bytes, None).keeping(further)
    text = f"{cost}\nto go on learning: {kept.percent_to_learn:.2f} %, {kept.bytes_to_learn:,} bytes"
    return text, {**totals, **asdict(cost), **_shares(kept), "percent": cost.percent}


def _shares(one: Capacity) -> dict[str, float | int | None]:
    return {"percent": one.percent, "percent_to_learn": one.percent_to_learn, "bytes_to_learn": one.bytes_to_learn}


def _table(after: Sequence[Capacity], note: str) -> str:
    """The capacity after each task."""
    rows = [("tasks", "parameters", "%", "bytes", "% to learn", "bytes to learn", "multiply-adds")]
    for number, one in enumerate(after, 1):
        macs, percent, size = (
            "unknown" if value is None else f"{value:{digits}}"
            for value, digits in ((one.multiply_adds, ","), (one.percent_to_learn, ".2f"), (one.bytes_to_learn, ","))
        )
        used = (f"{one.parameters:,}", f"{one.percent:.2f}", f"{one.bytes:,}")
        rows.append((str(number), *used, percent, size, macs))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.append(f"100 % are the {after[0].network:,} parameters of the plain network; to learn: to go on learning too")
    return "\n".join([*lines, note] if note else lines)


def count_named(
    network: str,
    method: str,
    tasks: int,
    rank: int | None = None,
    classes: int | None = None,
    stem: str | None = None,
    shape: tuple[int, ...] | None = None,
    head: str | None = None,
) -> tuple[str, dict[str, Any]]:
    """The cost of a method's tasks on a network by name. `shape` is that of an image, or (number of features,)."""
    from rkr.experiment.recipes.settings import NetworkSettings
    from rkr.networks.interfaces import is_aligned_vae

    if network not in networks:
        raise UsageError(f"no network is called {network!r}{choose(network, networks)}")
    arguments: dict[str, Any] = {
        key: value for key, value in (("classes", classes), ("stem", stem), ("head", head)) if value is not None
    }
    if shape is not None and len(shape) == 1 and network in networks and "in_features" in networks[network].options:
        arguments["in_features"] = shape[0]
    settings = NetworkSettings.checked({"name": network, **arguments})
    layers = [path for path, module in settings.blank.named_modules() if isinstance(module, nn.Linear)]
    if settings.head not in layers and (head is not None or not is_aligned_vae(settings.blank)):
        which = f"choose one of {', '.join(layers)}" if layers else "it has none"
        raise UsageError(f"--head: {network} has no linear layer {settings.head!r}; {which}")
    return count(method, settings.build, settings.head if settings.head in layers else None, tasks, rank, shape)
