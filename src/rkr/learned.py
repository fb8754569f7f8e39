"""What a run has learned, ready for use."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from rkr.errors import FileError, UsageError

if TYPE_CHECKING:
    from rkr.learners import Learner


def load_learner(run: str | os.PathLike[str]) -> Learner:
    """The learner of a complete run on images, of any method, in evaluation mode.

    `learner.predict(x, number)` gives logits over the classes of task `number` (0, 1, ...), `learner.infer(x)` answers
    without being told the task; `learner.seen` has the names of tasks and classes. Inputs are normalised as in the
    run: "mean" and "std" of "stream" in its run.json.

    Args:
        run: Its folder, such as "runs/digits/ewc/fixed".
    """
    from rkr.learners import METHODS
    from rkr.learners.learner import SeenTask
    from rkr.recipes.settings import NetworkSettings

    folder = Path(run)
    try:
        record = json.loads((folder / "run.json").read_text())
        settings, tasks = record["settings"], record["stream"]["tasks"]
        network = NetworkSettings.model_validate(settings["network"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(f"{folder} is no folder of a run: run.json cannot be read ({error})") from error
    if "datasets" in settings["stream"]:
        raise UsageError(f"{folder}: only methods of images can be loaded, not {settings['method']!r}")
    if not (folder / "model").is_dir():
        raise UsageError(f"{folder} has no model yet: complete the run first, with the command that began it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tasks are added before anything is trained: the values come after
        learner = METHODS[settings["learner"]].build(network.build, network.head, **settings["options"])
        learner.expects([len(task["class_names"]) for task in tasks])
        start = 0
        for number, task in enumerate(tasks):
            learner.begin(SeenTask(number, task["name"], tuple(task["class_names"]), start))
            start += len(task["class_names"])
        learner.restore(folder / "model")
    return learner.eval()
