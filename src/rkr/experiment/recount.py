"""Sizes of runs in result format 1, by the current rule (`rkr.capacity.RULE`).

Format 1 had one count, of all that a method held when a task ended: copies of the network too, those that equal it bit
for bit (the anchors of L2T, SI and P&C) and those that the next task makes anew from it (what LwF, iCaRL, EEIL and
RPS-Net imitate, the previous encoder of L1, L2 and LZSL). What of it is to be kept follows from the run's own record,
without its network: the first task has anchors and samples, and no copy to imitate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from rkr.capacity import Capacity

ANCHORED = {"l2t": (1, 0), "si": (2, 1), "pc": (2, 1), "ewc": (2, 2)}  # copies counted in format 1, and needed to go on
REHEARSING = ("icarl", "eeil", "rps-net")
WITHOUT_REST = (  # count as they did, and go on with what they use
    *("rkr", "rkr-lite", "rectify-only", "scale-only", "rkr-k1", "rkr-k4", "rkr-k8", "rkr-random"),
    *("finetune", "finetune-bn", "separate", "head-only", "pgn", "den", "rcl", "ccll", "eft", "hnet", "apd"),
)
ENCODERS_ONLY = ("base", "original", "ridge")  # zero-shot methods that go on with no decoder


class Recorded(NamedTuple):
    """The record of a run in format 1."""

    learner: str  # the name of its method in the package
    options: Mapping[str, Any]
    zero_shot: bool
    parameters: int | None  # of the whole network
    sample: list[int]  # shape
    tasks: Sequence[Mapping[str, Any]]  # as in run.json


def recounted(run: Recorded, costs: Sequence[Capacity]) -> list[Capacity]:
    """The sizes after each task. Sizes that do not follow from the record are unknown, as for methods of plug-ins."""
    found = _recounted(run, costs) if costs and _complete(run) else list(costs)
    sound = all(new.parameters >= 0 and new.bytes >= 0 and (new.further or 0) >= 0 for new in found)
    return found if sound else list(costs)


def _complete(run: Recorded) -> bool:
    """Whether a record has what is computed with, as all have that the engine wrote."""
    for task in run.tasks:
        names, images, attributes = task.get("class_names"), task.get("images"), task.get("attributes", [])
        if not isinstance(names, list) or not names or not isinstance(images, dict) or not _whole(attributes):
            return False
        if not _whole([images.get("train")]):
            return False
    return _whole(run.sample) and _whole([run.options.get("memory", 1)])


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**40 for n in values)


def _recounted(run: Recorded, costs: Sequence[Capacity]) -> list[Capacity]:
    if run.zero_shot:
        return [_zero_shot(run, cost, number) for number, cost in enumerate(costs)]
    if run.learner in ANCHORED:
        return _anchored(run, costs)
    if run.learner == "lwf":
        return [replace(cost, **_only_network(cost), further=0, further_bytes=0) for cost in costs]
    if run.learner in REHEARSING:
        return _rehearsing(run, costs)
    if run.learner == "joint":
        images = [_train_images(task) * prod(run.sample) for task in run.tasks]
        return [_keeping(cost, sum(images[: number + 1])) for number, cost in enumerate(costs)]
    if run.learner in WITHOUT_REST:
        return [replace(cost, further=0, further_bytes=0) for cost in costs]
    return list(costs)


def _keeping(cost: Capacity, samples: int) -> Capacity:
    return replace(cost, further=samples // 4, further_bytes=samples)


def _only_network(cost: Capacity) -> dict[str, int]:
    """Format 1 counted all beside the network in numbers of 4 bytes."""
    return {"parameters": cost.network, "bytes": cost.bytes - 4 * (cost.parameters - cost.network)}


def _anchored(run: Recorded, costs: Sequence[Capacity]) -> list[Capacity]:
    """What is anchored is all that the first task has beside the network, once or twice."""
    counted, needed = ANCHORED[run.learner]
    shared = (costs[0].parameters - costs[0].network) // counted
    size = 4 * shared
    found = []
    for number, cost in enumerate(costs):
        copies = 1 if needed == 2 and (number == 0 or run.options.get("mode") == "online") else needed
        used = {"parameters": cost.parameters - counted * shared, "bytes": cost.bytes - counted * size}
        found.append(replace(cost, **used, further=copies * shared, further_bytes=copies * size))
    return found


def _rehearsing(run: Recorded, costs: Sequence[Capacity]) -> list[Capacity]:
    """Beside the network: a copy of it as it was before the task, the exemplars, the means of iCaRL's classes.

    Exemplars are as many of each class as the memory has room for, or as there are.
    """
    classes = [len(task["class_names"]) for task in run.tasks]
    found: list[Capacity] = []
    before = 0  # bytes of the network, which the next task copied
    for number, cost in enumerate(costs):
        so_far = classes[: number + 1]
        room = max(1, int(run.options.get("memory", 2000)) // sum(so_far))
        each = [_train_images(task) // count for task, count in zip(run.tasks, so_far, strict=False)]
        kept = prod(run.sample) * sum(min(room, there) * count for there, count in zip(each, so_far, strict=True))
        rest = 4 * (cost.parameters - cost.network) - before - kept  # of iCaRL the means, of RPS-Net modules
        rest -= rest % 4  # in whole numbers
        network = cost.bytes - before - kept
        used = {"parameters": cost.network, "bytes": network}
        biases = 0
        if run.learner == "icarl":  # of the heads, which means take the place of
            network -= rest
            biases = 4 * sum(so_far)
            used["bytes"] = network - biases
        elif run.learner == "rps-net":
            used["parameters"] += rest // 4
        found.append(replace(cost, **used, further=kept // 4, further_bytes=kept + biases))
        before = network
    return found


def _zero_shot(run: Recorded, cost: Capacity, number: int) -> Capacity:
    """Of the encoder of images. Two were counted for methods that compare with the previous one."""
    if run.learner in ("l1", "l2", "lzsl"):
        cost = replace(cost, **_only_network(cost))
    if run.learner == "ridge":
        attributes = 4 * sum(prod(task["attributes"]) for task in run.tasks[: number + 1])
        cost = replace(cost, bytes=cost.bytes + attributes)
    if run.learner in ENCODERS_ONLY:
        return replace(cost, further=0, further_bytes=0)
    if run.learner not in KNOWN_ZERO_SHOT or run.parameters is None:
        return cost
    return _keeping(cost, 4 * (run.parameters - cost.network))


KNOWN_ZERO_SHOT = (
    "sft",
    "l1",
    "l2",
    "lzsl",
    "rkr",
    "rectify-only",
    "scale-only",
    "rkr-k1",
    "rkr-k4",
    "rkr-k32",
    "rkr-random",
)


def _train_images(task: Mapping[str, Any]) -> int:
    return int(task["images"]["train"])
