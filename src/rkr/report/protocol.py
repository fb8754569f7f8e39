"""What must be the same for two runs to be compared: data, split, order rule, network, head, augmentation, schedule,
evaluation and precision.

Not part of it: the method and its options, which are what is compared; the order itself and the seed, over which a mean
is taken; and what only rounds differently or takes longer: machine, threads, versions, commit.

Settings count by exclusion. One that is not known here is part of the protocol, so that runs which differ in something
new are never averaged by mistake.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.experiment.results import Result

# What runs did that were made before a setting existed.
STREAM = {"kind": "split", "validation": 0.0, "part": "test", "first": None, "limit": None, "seed": 0}
ZERO_SHOT = {
    "features": "res101",
    "embedding": "att",
    "scaler": "train",
    "part": "test",
    "first": None,
    "limit": None,
    "seed": 0,
}
AUGMENT = {"pad": 0, "flip": False, "rotate": 0.0}
TRAINING = {
    "batch": 128,
    "optimizer": "sgd",
    "momentum": 0.0,
    "weight_decay": 0.0,
    "milestones": [],
    "gamma": 0.1,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "amsgrad": False,
    "sampling": "passes",
}
CLASSIFIER = {
    "epochs": "validation",
    "longest": 100,
    "seen": 200,
    "unseen": 400,
    "source": "attributes",
    "batch": 32,
    "lr": 1e-3,
    "betas": [0.5, 0.999],
}
CLASSIFIERS = "classifier."  # how its fields begin
PRECISION = "32-true"

# Settings that name the run, say what is compared, or change nothing but rounding.
OTHER = ("recipe", "method", "learner", "options", "order", "stream_sha256", "device")
SPLIT = ("tasks", "validation", "limit", "part", "first")  # of the stream's settings; the others are about the data
WITHOUT_OPTIMIZER = {"sgd": ("betas", "eps", "amsgrad"), "adam": ("momentum",)}  # settings that it does not have

PUBLISHED = "ABCDE"
RANDOM_ORDER, PUBLISHED_ORDER = "random, by a seed", "published, A to E"
FIRST_ORDER = "as listed, or with another data set first"
ANOTHER_FIRST = "first-"  # how such orders are called: "first-CUB"


@dataclass(frozen=True)
class Protocol:
    """What a run has in common with those that it can be compared with, by name."""

    fields: Mapping[str, Any]

    @cached_property
    def hash(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 of the fields as JSON, keys sorted, without spaces."""
        return hashlib.sha256(canonical(self.fields).encode()).hexdigest()[:12]

    @property
    def has_classifier(self) -> bool:
        """Whether the method trains classifiers on what its network generates, as most do on zero-shot tasks."""
        return any(name.startswith(CLASSIFIERS) for name in self.fields)


def protocol(result: Result) -> Protocol:
    """The protocol of a run, from its run.json alone. Settings that it lacks count as their defaults.

    It is kept with the run, since every table and figure asks for it again.
    """
    kept: Protocol | None = vars(result).get("_protocol")
    if kept is None:
        kept = Protocol(_fields(result))
        vars(result)["_protocol"] = kept
    return kept


def differences(a: Protocol, b: Protocol) -> dict[str, tuple[Any, Any]]:
    """The fields in which two protocols differ, with both values; None is that of a field which one has not.

    How the classifiers of zero-shot tasks are trained is no difference to a method that has none, such as ridge.
    """
    names = list(dict.fromkeys((*a.fields, *b.fields)))
    if not (a.has_classifier and b.has_classifier):
        names = [name for name in names if not name.startswith(CLASSIFIERS)]
    if a.fields.get("order") != b.fields.get("order"):
        names = [name for name in names if name != "data.sha256"]  # what it is made of depends on the rule
    pairs = {name: (a.fields.get(name), b.fields.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if canonical(pair[0]) != canonical(pair[1])}


def group_by_protocol(results: Iterable[Result]) -> list[tuple[Protocol, list[Result]]]:
    """The runs of each protocol, in the order in which these first come; a group's protocol is that of most fields.

    Runs of methods without a classifier join those with one, unless these have several protocols among them.
    """
    of_runs = [(result, protocol(result)) for result in results]
    distinct = {own.hash: own for _, own in of_runs}
    joins = {}
    for hash_, own in distinct.items():
        others = [o for o in distinct.values() if o.has_classifier and not differences(own, o)]
        joins[hash_] = own if own.has_classifier or len(others) != 1 else others[0]
    groups: dict[str, tuple[Protocol, list[Result]]] = {}
    for result, own in of_runs:
        chosen = joins[own.hash]
        groups.setdefault(chosen.hash, (chosen, []))[1].append(result)
    return list(groups.values())


def require_one_protocol(results: Iterable[Result]) -> None:
    """Raise UsageError, with the fields that differ and two runs that have them, unless all have one protocol."""
    distinct: dict[str, tuple[Result, Protocol]] = {}
    for result in results:
        own = protocol(result)
        distinct.setdefault(own.hash, (result, own))
    for (one, a), (other, b) in combinations(distinct.values(), 2):
        found = differences(a, b)
        if found:
            said = "; ".join(f"{name}: {_shown(x)} and {_shown(y)}" for name, (x, y) in found.items())
            raise UsageError(f"{one.folder} and {other.folder} cannot be compared, their protocols differ in {said}")


def classifier_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """How a run trained its classifiers of zero-shot tasks, defaults among it; nothing if it has none.

    Epochs that were chosen on validation classes are "validation", as recipes say it.
    """
    options = _part(settings, "options")
    if "classifier" not in options:
        return {}
    chosen = {"epochs": "validation"} if settings.get("classifier_epochs") == "validation" else {}
    return {**CLASSIFIER, **_part(options, "classifier"), **chosen}


# ---------------------------------------------------------------------------------------------------------
# Fields


def _fields(result: Result) -> dict[str, Any]:
    settings = result.settings
    recorded, training = _part(settings, "stream"), _part(settings, "training")
    zero_shot = result.measure == "H"
    rule = _order_rule(result.order, zero_shot)

    fields: dict[str, Any] = {}
    for name, value in {**(ZERO_SHOT if zero_shot else STREAM), **recorded}.items():
        if name != "options":
            fields[f"{'split' if name in SPLIT else 'data'}.{name}"] = value
    of_source = _part(recorded, "options")
    fields |= {f"data.options.{name}": value for name, value in of_source.items() if name != "path"}  # where, not what
    stream = _part(result.record, "stream")
    fields |= {f"data.{name}": stream.get(name) for name in ("input_shape", "mean", "std")}
    fields["data.sha256"] = _data_hash(stream, rule, recorded.get("kind"))
    fields["split.tasks"] = len(result.tasks)
    sizes = sorted(map(len, result.groups))
    fields["split.classes"] = sizes[0] if sizes[0] == sizes[-1] else sizes
    fields["order"] = rule

    network = _part(settings, "network")
    fields |= {f"network.{name}": v for name, v in network.items() if name not in ("head", "arguments")}
    fields |= {f"network.{name}": v for name, v in _part(network, "arguments").items()}
    fields["network.parameters"] = _part(result.record, "network").get("parameters")
    fields["head"] = network.get("head", "fc")

    fields |= {f"augmentation.{name}": v for name, v in {**AUGMENT, **_part(training, "augment")}.items()}
    fields |= {f"schedule.{name}": value for name, value in _schedule(training).items()}
    if "classifier" in (options := _part(settings, "options")):
        classifier = {**CLASSIFIER, **_part(options, "classifier")}
        if isinstance(classifier["epochs"], Mapping) or type(classifier["epochs"]) is int:
            del classifier["longest"]  # decides nothing where the epochs are given
        if settings.get("classifier_epochs") == "validation":  # by one rule, though numbers differ between methods
            classifier["epochs"] = "the best on validation classes"
        fields |= {f"{CLASSIFIERS}{name}": value for name, value in classifier.items()}
    fields["evaluation.measures"] = list(result.measures)
    fields["evaluation.task"] = "given"
    fields["precision"] = settings.get("precision", PRECISION)
    known = (*OTHER, "stream", "network", "training", "precision", "classifier_epochs")
    return fields | {name: value for name, value in settings.items() if name not in known}


def _order_rule(order: str, zero_shot: bool) -> str:
    """How orders come about. "fixed" and "first-CUB" of zero-shot tasks are one rule: which data set comes first."""
    if order.isdecimal():
        return RANDOM_ORDER
    if zero_shot and (order == "fixed" or order.startswith(ANOTHER_FIRST)):
        return FIRST_ORDER
    return PUBLISHED_ORDER if len(order) == 1 and order in PUBLISHED else order


def _data_hash(stream: Mapping[str, Any], rule: str, kind: Any) -> str | None:
    """A hash of the data that is the same for every order by the rule; None where the record has nothing for it.

    Where an order only rearranges the same tasks, it is over the checksums of all tasks, sorted. Where a seed decides
    which classes make a task, it is over what tasks together have: the names of classes and the number of test images.
    Of "split-cifar" a seed chooses the classes themselves, so nothing is left.
    """
    tasks = [task for task in stream.get("tasks", ()) if isinstance(task, Mapping)]
    whole = all("unseen" in task for task in tasks)  # zero-shot: a data set is a task, whatever the order
    if rule != RANDOM_ORDER or whole:
        sums = [task.get("sha256") for task in tasks]
        return _digest(sorted(map(canonical, sums))) if sums and all(sums) else None
    if kind == "split-cifar":
        return None
    names = [name for task in tasks for name in _sequence(task.get("class_names"))]
    tests = [_part(task, "images").get("test") for task in tasks]
    if not names or not all(type(count) is int for count in tests):
        return None
    return _digest([sorted(map(str, names)), sum(count for count in tests if count is not None)])


def _schedule(training: Mapping[str, Any]) -> dict[str, Any]:
    """Without what decides nothing: another optimizer's settings, the factor of steps that never come."""
    schedule = {**TRAINING, **training}
    out = {"augment", "seed", "memory_format", *WITHOUT_OPTIMIZER.get(str(schedule["optimizer"]), ())}
    if not schedule["milestones"]:
        out.add("gamma")
    return {name: value for name, value in schedule.items() if name not in out}


def _part(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object within another; empty if there is none."""
    part = values.get(key)
    return part if isinstance(part, Mapping) else {}


def _sequence(values: Any) -> Sequence[Any]:
    return values if isinstance(values, list) else ()


def canonical(value: Any) -> str:
    """JSON that is the same for the same values: 1 and 1.0 are one number."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
