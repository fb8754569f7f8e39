"""The protocol of a run: everything that must be equal for two runs to be comparable.

It covers data, split, order rule, network, head, augmentation, schedule, evaluation and precision. It does not cover
the method and its options, which are compared; the order and the seed, which are averaged over; or anything that
affects only rounding or speed, such as machine, threads, versions and commit.

A setting that is not listed here as excluded is part of the protocol, so runs that differ in a new setting are never
averaged by mistake.
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

# Committed runs from before a setting existed lack it; these are the values that they used.
STREAM = {"part": "test", "first": None}
TRAINING = {"sampling": "passes"}
PRECISION = "32-true"

# Runs record only the classifier settings that their recipe gives. These are the defaults of `ClassifierOptions`.
CLASSIFIER = {
    "longest": 100,
    "seen": 200,
    "unseen": 400,
    "source": "attributes",
    "batch": 32,
    "lr": 1e-3,
    "betas": [0.5, 0.999],
}
CLASSIFIERS = "classifier."  # the prefix of its fields

# Settings that identify the run, that are compared, or that affect only rounding.
OTHER = ("recipe", "method", "learner", "options", "own_training", "order", "stream_sha256", "device")
SPLIT = ("tasks", "validation", "limit", "part", "first")  # settings of the stream; the others describe the data
WITHOUT_OPTIMIZER = {"sgd": ("betas", "eps", "amsgrad"), "adam": ("momentum",)}  # settings that the optimizer ignores

PUBLISHED = "ABCDE"
RANDOM_ORDER, PUBLISHED_ORDER = "random", "published, A to E"
FIRST_ORDER = "as listed, or with another dataset first"
ANOTHER_FIRST = "first-"  # the prefix of such orders, as in "first-CUB"


@dataclass(frozen=True)
class Protocol:
    """The settings that comparable runs share."""

    fields: Mapping[str, Any]

    @cached_property
    def hash(self) -> str:
        """The first 12 hex digits of the SHA-256 of the fields as compact JSON with sorted keys."""
        return hashlib.sha256(canonical(self.fields).encode()).hexdigest()[:12]

    @property
    def has_classifier(self) -> bool:
        """Whether the method trains classifiers on generated features, as most zero-shot methods do."""
        return any(name.startswith(CLASSIFIERS) for name in self.fields)


def protocol(result: Result) -> Protocol:
    """The protocol of a run, from its run.json. It is cached on the run."""
    cached: Protocol | None = vars(result).get("_protocol")
    if cached is None:
        cached = Protocol(_fields(result))
        vars(result)["_protocol"] = cached
    return cached


def differences(a: Protocol, b: Protocol) -> dict[str, tuple[Any, Any]]:
    """The fields in which two protocols differ, with both values (None for a missing field).

    Classifier settings are ignored if one of the methods has no classifier, such as ridge.
    """
    names = list(dict.fromkeys((*a.fields, *b.fields)))
    if not (a.has_classifier and b.has_classifier):
        names = [name for name in names if not name.startswith(CLASSIFIERS)]
    if a.fields.get("order") != b.fields.get("order"):
        names = [name for name in names if name != "data.sha256"]  # its definition depends on the order rule
    pairs = {name: (a.fields.get(name), b.fields.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if canonical(pair[0]) != canonical(pair[1])}


def group_by_protocol(results: Iterable[Result]) -> list[tuple[Protocol, list[Result]]]:
    """Group runs by protocol, in order of first appearance.

    Runs of methods without a classifier join the group of those with one, unless there are several such groups.
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
    """Raise UsageError, naming two runs and the fields in which they differ, unless all runs share one protocol."""
    distinct: dict[str, tuple[Result, Protocol]] = {}
    for result in results:
        own = protocol(result)
        distinct.setdefault(own.hash, (result, own))
    for (one, a), (other, b) in combinations(distinct.values(), 2):
        found = differences(a, b)
        if found:
            said = ", ".join(f"{name} ({_shown(x)} and {_shown(y)})" for name, (x, y) in found.items())
            raise UsageError(f"{one.folder} and {other.folder} cannot be compared: their protocols differ in {said}")


def classifier_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The classifier settings of a zero-shot run, including defaults; empty if the method has no classifier.

    A length that was chosen on validation classes is "validation", as in recipes. Earlier versions chose it in epochs,
    which is another protocol.
    """
    options = _part(settings, "options")
    if "classifier" not in options:
        return {}
    given = _part(options, "classifier")
    length = "steps" if "steps" in given else "epochs"
    chosen = {length: "validation"} if settings.get(f"classifier_{length}") == "validation" else {}
    return {length: "validation", **CLASSIFIER, **given, **chosen}


# ---------------------------------------------------------------------------------------------------------
# Fields


def _fields(result: Result) -> dict[str, Any]:
    settings = result.settings
    recorded, training = _part(settings, "stream"), _part(settings, "training")
    zero_shot = result.measure == "H"
    rule = _order_rule(result.order, zero_shot)

    fields: dict[str, Any] = {}
    for name, value in {**STREAM, **recorded}.items():
        if name != "options":
            fields[f"{'split' if name in SPLIT else 'data'}.{name}"] = value
    of_source = _part(recorded, "options")
    fields |= {
        f"data.options.{name}": value for name, value in of_source.items() if name != "path"
    }  # a location, not content
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
    fields["head"] = network.get("head")

    fields |= {f"augmentation.{name}": v for name, v in _part(training, "augment").items()}
    fields |= {f"schedule.{name}": value for name, value in _schedule(training).items()}
    classifier = classifier_of(settings)
    if "validation" not in (classifier.get("steps"), classifier.get("epochs")):
        classifier.pop("longest", None)  # has no effect if the length is given
    fields |= {f"{CLASSIFIERS}{name}": value for name, value in classifier.items()}
    fields["evaluation.measures"] = list(result.measures)
    fields["evaluation.task"] = "given"
    fields["precision"] = settings.get("precision", PRECISION)
    known = (*OTHER, "stream", "network", "training", "precision", "classifier_steps", "classifier_epochs")
    return fields | {name: value for name, value in settings.items() if name not in known}


def _order_rule(order: str, zero_shot: bool) -> str:
    """The rule of an order. For zero-shot tasks, "fixed" and "first-CUB" are one rule: which dataset is first."""
    if order.isdecimal():
        return RANDOM_ORDER
    if zero_shot and (order == "fixed" or order.startswith(ANOTHER_FIRST)):
        return FIRST_ORDER
    return PUBLISHED_ORDER if len(order) == 1 and order in PUBLISHED else order


def _data_hash(stream: Mapping[str, Any], rule: str, kind: Any) -> str | None:
    """A hash of the data that is equal for all orders of a rule; None if the record has no checksums.

    If an order only rearranges the tasks, this hashes the sorted checksums of all tasks. If the seed also decides which
    classes form a task, it hashes all class names and the total number of test images. In "split-cifar" the seed
    selects the classes themselves, so there is nothing to hash.
    """
    tasks = [task for task in stream.get("tasks", ()) if isinstance(task, Mapping)]
    whole = all("unseen" in task for task in tasks)  # zero-shot: each dataset is one task in every order
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
    """The schedule without settings that have no effect: those of other optimizers, and gamma without milestones."""
    schedule = {**TRAINING, **training}
    out = {"augment", "seed", "memory_format", *WITHOUT_OPTIMIZER.get(str(schedule.get("optimizer")), ())}
    if not schedule.get("milestones"):
        out.add("gamma")
    return {name: value for name, value in schedule.items() if name not in out}


def _part(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A nested object, or {} if it is missing."""
    part = values.get(key)
    return part if isinstance(part, Mapping) else {}


def _sequence(values: Any) -> Sequence[Any]:
    return values if isinstance(values, list) else ()


def canonical(value: Any) -> str:
    """Canonical JSON: equal values give equal text, and 1 equals 1.0."""
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
