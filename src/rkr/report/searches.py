"""What `rkr tune --search` has written beside its runs: the trials, and how much each option matters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rkr.experiment.results import Result


@dataclass(frozen=True)
class Trial:
    """A trial.

    Attributes:
        number: From 1.
        options: What it tried.
        value: Its result, in percent; None if it has none.
        last: The result after its last task, in percent; None if it has learned none.
    """

    number: int
    options: Mapping[str, Any]
    value: float | None
    last: float | None

    @property
    def words(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in self.options.items())


@dataclass(frozen=True)
class Search:
    """A search.

    Attributes:
        method: Whose options.
        name: The method, the sampler and its seed.
        trials: As they began.
        importance: Each option's share of the differences between results, in percent (functional ANOVA, by Optuna).
    """

    method: str
    name: str
    trials: tuple[Trial, ...]
    importance: Mapping[str, float]

    @property
    def finished(self) -> list[tuple[int, float]]:
        """The numbers and results of trials that have one."""
        return [(trial.number, trial.value) for trial in self.trials if trial.value is not None]

    @property
    def stopped(self) -> list[tuple[int, float]]:
        """Those of trials that were stopped after some task."""
        return [(t.number, t.last) for t in self.trials if t.value is None and t.last is not None]

    @property
    def best(self) -> list[float]:
        """The best result so far, after each that has one."""
        values = [value for _, value in self.finished]
        return [max(values[:count]) for count in range(1, len(values) + 1)]


def searches(results: Sequence[Result]) -> list[Search]:
    """The searches that have trials with results, by the folders and the recipe of these runs."""
    folders = dict.fromkeys((result.folder.parent.parent.parent, result.recipe) for result in results)
    found = []
    for folder, recipe in folders:
        for path in sorted(folder.glob("search-*.json")):
            try:
                read = json.loads(path.read_text())
                search = _search(read)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            if search.finished and read.get("recipe", recipe) == recipe:
                found.append(search)
    return found


def _search(read: Mapping[str, Any]) -> Search:
    trials = []
    for trial in read["trials"]:
        after = [_percent(value) for value in trial["after_task"].values()]
        value = None if trial["value"] is None else _percent(trial["value"])
        trials.append(Trial(int(trial["number"]) + 1, dict(trial["options"]), value, after[-1] if after else None))
    name = f"{read['method']}, {read['sampler']}, seed {read['seed']}"
    importance = {str(option): _percent(share) for option, share in read.get("importance", {}).items()}
    return Search(str(read["method"]), name, tuple(trials), importance)


def _percent(share: float) -> float:
    if not 0 <= share <= 1:
        raise ValueError(f"{share} is no share")
    return round(100 * share, 6)
