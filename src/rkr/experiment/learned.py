"""Loads what a run has learned."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from rkr.errors import FileError, RkrError, UsageError
from rkr.registry import Method, methods

if TYPE_CHECKING:
    from rkr.experiment.results import Result
    from rkr.methods import Learner


def load_learner(run: str | os.PathLike[str]) -> Learner:
    """Load what a run has learned so far, in evaluation mode. Works for all methods but `ridge`.

    `learner.predict(x, number)` gives logits over the classes of task `number` (0, 1, ...); `learner.seen` has the
    names of tasks and classes. Images are normalised as in the run: "mean" and "std" of "stream" in its run.json;
    `learner.infer(x)` answers about them without being told the task. Features for zero-shot tasks are scaled by the
    learner: `learner.predict(learner.scaled(x, number), number)`.

    A run with a method or network of your own names it in its run.json, as "my_package.methods:Mine". It is imported
    from where Python finds modules: folders named in a run are never searched. Load only runs that you trust to name
    what is imported.

    Args:
        run: Its folder, such as "runs/digits/ewc/fixed".

    Returns:
        The learner, which has begun the tasks that were learned.

    Raises:
        UsageError: The run has learned no task, or its method is not installed or cannot be loaded.
        FileError: The folder is no run, or is damaged.

    Example:
        >>> import torch, rkr
        >>> learner = rkr.load_learner("runs/digits-1-epochs/finetune/fixed")
        >>> len(learner.seen), learner.seen[2].class_names
        (5, ('4', '5'))
        >>> learner.predict(torch.rand(3, 1, 8, 8), 2).shape
        torch.Size([3, 2])
    """
    from rkr.experiment.recipes.settings import NetworkSettings
    from rkr.experiment.results import read_result
    from rkr.methods.learner import SeenTask
    from rkr.validation import in_words

    folder = Path(run)
    result = read_result(folder, epochs=False)
    stream = result.record["stream"]
    settings, tasks = result.settings, stream["tasks"][: result.done]
    method = _method(folder, result)
    if not method.learner.loadable:
        raise UsageError(f"{folder}: only methods that train a network can be loaded, not {result.method!r}")
    if not tasks:
        raise UsageError(f"{folder} has learned no task yet: run its command again to resume")
    with in_words(NetworkSettings, str(folder / "run.json")):
        network = NetworkSettings.model_validate(settings.get("network"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tasks are added before anything is trained: the values come after
        options = {**method.learner.unrecorded, **settings["options"]}
        learner = method.build(network.build, network.head, **options)
        learner.expects([len(task["class_names"]) for task in stream["tasks"]])
        start = 0
        for number, task in enumerate(tasks):
            learner.begin(SeenTask(number, task["name"], tuple(task["class_names"]), start, **_zero_shot(task, stream)))
            start += len(task["class_names"])
        try:
            learner.restore(folder / "model")
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            why = " ".join(line.strip() for line in str(error).splitlines()[:2])
            raise FileError(f"{folder / 'model'} cannot be read, or belongs to another run: {why}") from error
    learner.seen = [replace(task, attributes=None, scaling=None) for task in learner.seen]
    return learner.eval()


def _method(folder: Path, result: Result) -> Method:
    """The method of a run."""
    known, name = (
        methods("images" if result.measure == "accuracy" else "zero-shot"),
        str(result.settings.get("learner")),
    )
    try:
        return known[name]
    except KeyError:
        package = result.record.get("plugins", {}).get("method", "the plug-in that brings it")
        raise UsageError(f"{folder}: no method is called {name!r}: install {package}") from None
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from error


def is_intact(run: Path) -> bool:
    """Whether a run is finished, and its results and learner can be read."""
    from rkr.experiment.results import read_result

    try:
        if not read_result(run).finished:
            return False
        with torch.random.fork_rng(devices=()):  # networks start with random weights
            load_learner(run)
    except RkrError:
        return False
    return True


def _zero_shot(task: dict[str, Any], stream: dict[str, Any]) -> dict[str, Any]:
    """The fields that only zero-shot tasks have, tensors as mere shapes.

    `predict` needs none but the scaling, whose values come with the state.
    """
    if "attributes" not in task:
        return {}
    scaling = (torch.zeros(stream["input_shape"]),) * 2
    attributes = torch.zeros(task["attributes"])
    return {"attributes": attributes, "unseen": tuple(task["unseen"]), "scaling": scaling}
