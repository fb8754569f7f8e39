"""The parts of a recipe, each checked for itself when it is read."""

from __future__ import annotations

import dataclasses
import inspect
import re
from math import floor
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rkr.errors import UsageError
from rkr.experiment.recipes.known import (
    CLASSES,
    NETWORKS,
    check_values,
    network_arguments,
    network_builder,
    source_options,
)
from rkr.experiment.recipes.messages import choose, in_words, problem, shown

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self

    from rkr.data import Stream
    from rkr.data.download import Data
    from rkr.methods import Method

Order = int | str
"""A seed for a random order, "A" to "E" for the published orders of CIFAR-100, or "fixed" for the source's own."""

Positive = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
List = Field(strict=False)  # a list of the file becomes a tuple
JOINED = {"split-cifar": ("cifar100",), "mnist-then": ("cifar10", "cifar100")}


class Settings(BaseModel):
    """Unknown keys are refused, types are taken as they are written, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def checked(cls, values: dict[str, Any]) -> Self:
        """From plain values; UsageError if something is wrong with them."""
        with in_words(cls):
            return cls.model_validate(values)

    def with_changes(self, **changes: Any) -> Self:
        """A copy with some values changed, and checked."""
        return type(self).checked({**dict(self), **changes})


class StreamSettings(Settings):
    """How the tasks come about; call it for the stream itself."""

    kind: Literal["split", "split-cifar", "mnist-then", "zero-shot"] = "split"  # the last is `ZeroShotSettings`
    source: str
    tasks: Positive  # all of them, the CIFAR-10 or MNIST that comes first included
    validation: Share = 0.0  # share of every class that is cut from train
    part: Literal["test", "validation"] = "test"  # what is tested on
    first: Positive | None = None  # only so many tasks, the first ones
    limit: Positive | None = None  # training images of a class
    seed: Whole = 0  # which images these two keep
    options: dict[str, Any] = {}  # for the source, such as the size of images

    @property
    def needs(self) -> tuple[str, ...]:
        """The data: see `rkr.data.missing_data`."""
        first = {"split-cifar": ["cifar10"], "mnist-then": ["mnist"]}.get(self.kind, [])
        return (*first, self.source)

    @property
    def of_source(self) -> int:
        """How many tasks the classes of the source are divided into."""
        return self.tasks if self.kind == "split" else self.tasks - 1

    @model_validator(mode="after")
    def _check(self) -> StreamSettings:
        from rkr.data import SOURCES

        if self.source not in SOURCES:
            raise problem("source", f"no data set is called {self.source!r}{choose(self.source, SOURCES)}")
        if self.kind in JOINED and self.source not in JOINED[self.kind]:
            raise problem("source", f"must be {' or '.join(JOINED[self.kind])} with kind {self.kind!r}")
        known = source_options(self.source)
        for name in self.options:
            if name not in known:
                options = choose(name, known) if known else "; it has none"
                raise problem(f"options.{name}", f"{self.source} has no such option{options}")
        check_values(known, self.options, "options.")
        self._check_tasks()
        if self.part == "validation" and not self.validation:
            raise problem("validation", "must be above 0 to test on it")
        _check_first(self.first, self.tasks)
        return self

    def _check_tasks(self) -> None:
        classes = CLASSES.get(self.source)
        if classes is None:  # a folder: known when it is read
            return
        first = self.tasks - self.of_source
        if self.kind == "split-cifar":
            fitting = [first + n for n in range(1, classes // 10 + 1)]
        else:
            fitting = [first + n for n in range(1, classes + 1) if classes % n == 0]
        if self.tasks not in fitting:
            what = {"split-cifar": "after CIFAR-10, ", "mnist-then": "after MNIST, "}.get(self.kind, "")
            sizes = "groups of 10" if self.kind == "split-cifar" else "equal parts"
            raise problem(
                "tasks",
                f"{what}the {classes} classes of {self.source} cannot be divided into {self.of_source} {sizes}; "
                f"choose one of {', '.join(map(str, fitting))} tasks in all",
            )

    def check_order(self, order: Order) -> None:
        """Raise UsageError if tasks cannot come in this order."""
        from rkr.data import APD_ORDERS

        if isinstance(order, bool) or not isinstance(order, int | str):
            raise UsageError(f"an order is a seed, a letter or 'fixed', not {shown(order)}")
        if isinstance(order, int):
            if order < 0:
                raise UsageError(f"a seed must be at least 0, not {order}")
        elif order in APD_ORDERS:
            if self.source != "cifar100" or self.of_source != 10 or self.kind == "split-cifar":
                raise UsageError(
                    f"the published order {order!r} is for cifar100 in 10 tasks, not for {self.source} in "
                    f"{self.of_source} ({self.kind}); give a seed (0, 1, ...) or 'fixed'"
                )
        elif order != "fixed":
            raise UsageError(f"no order {order!r}; give a seed (0, 1, ...), {', '.join(APD_ORDERS)} or 'fixed'")

    def __call__(self, order: Order, data: Data = None) -> Stream:
        """Load the data (from `data`, $RKR_DATA, the user's cache or its official address) and cut it into tasks."""
        from rkr.data.streams import narrowed

        return narrowed(self._whole(order, data), self.first, self.part == "validation")

    def _whole(self, order: Order, data: Data) -> Stream:
        from rkr.data import load_source, mnist_then, split, split_cifar

        self.check_order(order)
        options = dict(self.options)
        source = load_source(self.source, options.pop("path", None) or data, **options)
        cut: dict[str, Any] = {"validation": self.validation, "limit": self.limit, "seed": self.seed}
        if self.kind == "split-cifar":
            return split_cifar(load_source("cifar10", data), source, order, groups=self.of_source, **cut)
        chosen = tuple(range(len(source.class_names))) if order == "fixed" else order
        if self.kind == "mnist-then":
            return mnist_then(load_source("mnist", data), source, self.of_source, chosen, **cut)
        return split(source, self.of_source, chosen, **cut)


def _check_first(first: int | None, tasks: int) -> None:
    if first is not None and first > tasks:
        raise problem("first", f"{first} is more than the {tasks} tasks that there are")


class ZeroShotSettings(Settings):
    """Zero-shot data sets in the layout of xlsa17, each a task; call it for the stream itself."""

    kind: Literal["zero-shot"]
    datasets: Annotated[tuple[str, ...], List, Field(min_length=1)]  # folders
    features: str = "res101"  # the file of features in each
    embedding: str = "att"  # the variable of attributes in each att_splits.mat
    scaler: Literal["train", "each", "none"] = (
        "train"  # "each" is fitted on test features too, as the authors' code did
    )
    part: Literal["test", "validation"] = "test"  # tested on the published test rows, or on some training classes
    first: Positive | None = None  # only so many tasks, the first ones
    limit: Positive | None = None  # training rows of a class
    seed: Whole = 0  # which rows and classes validation and limit keep

    @property
    def tasks(self) -> int:
        return len(self.datasets)

    @property
    def needs(self) -> tuple[str, ...]:
        """The data: see `rkr.data.missing_data`."""
        from rkr.data.xlsa17 import SPLITS

        return tuple(f"{name}/{file}" for name in self.datasets for file in (f"{self.features}.mat", SPLITS))

    @model_validator(mode="after")
    def _check(self) -> ZeroShotSettings:
        if len(set(self.datasets)) < len(self.datasets):
            raise problem("datasets", f"a data set comes twice: {', '.join(self.datasets)}")
        _check_first(self.first, self.tasks)
        return self

    def check_order(self, order: Order) -> None:
        """Raise UsageError if tasks cannot come in this order."""
        self.ordered(order)

    def ordered(self, order: Order) -> tuple[str, ...]:
        """The data sets in an order: "fixed" as listed, "first-CUB" with it and the first exchanged, or a seed."""
        names = list(self.datasets)
        if isinstance(order, int) and not isinstance(order, bool) and order >= 0:
            import torch

            from rkr.data.cut import generator

            return tuple(names[i] for i in torch.randperm(len(names), generator=generator("datasets", order)))
        swaps = {"fixed": 0, **{f"first-{name}": i for i, name in enumerate(names)}}
        if order not in swaps:
            raise UsageError(f"no order {order!r}; give a seed (0, 1, ...) or one of {', '.join(swaps)}")
        i = swaps[str(order)]
        names[0], names[i] = names[i], names[0]
        return tuple(names)

    def __call__(self, order: Order, data: Data = None) -> Stream:
        """Load the features, from `data`, $RKR_DATA or the user's cache, as tasks."""
        from rkr.data.xlsa17 import load_xlsa17, require_files
        from rkr.data.zeroshot import limited, validation_source, zero_shot_stream

        names = self.ordered(order)[: self.first]
        require_files(names, data, self.features)
        sources = [load_xlsa17(name, data, self.features, self.embedding) for name in names]
        if self.limit is not None:
            sources = [limited(source, self.limit, self.seed) for source in sources]
        if self.part == "test":
            return zero_shot_stream(sources, self.scaler)
        return zero_shot_stream([validation_source(s, self.seed) for s in sources], self.scaler, validation=True)


class NetworkSettings(Settings):
    """A network of `rkr.networks`; other keys than `name` and `head` are arguments of the function that builds it."""

    name: str
    head: str = "fc"  # the classification layer, which every task has for itself; networks without one ignore it
    arguments: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "arguments" in values:
            return values
        own = {key: value for key, value in values.items() if key in ("name", "head")}
        return {**own, "arguments": {key: value for key, value in values.items() if key not in own}}

    @model_validator(mode="after")
    def _check(self) -> NetworkSettings:
        if self.name not in NETWORKS:
            raise problem("name", f"no network is called {self.name!r}{choose(self.name, NETWORKS)}")
        known = inspect.signature(network_builder(self.name), eval_str=True).parameters
        for name in self.arguments:
            if name not in known:
                raise problem(name, f"no such key for {self.name}{choose(name, ('name', 'head', *known))}")
        for name, parameter in known.items():
            if parameter.default is parameter.empty and name not in self.arguments:
                raise problem(name, f"{self.name} needs it, and has no value of its own for it")
        check_values(known, self.arguments)
        return self

    def build(self) -> nn.Module:
        """The network, with random weights."""
        return network_builder(self.name)(**self.arguments)

    @property
    def all_arguments(self) -> dict[str, Any]:
        """Those that are given, and the others' values."""
        return {**network_arguments(self.name), **self.arguments}


class AugmentSettings(Settings):
    """What is done at random to training images; nothing, unless it is asked for. See `rkr.data.Augment`."""

    pad: Whole = 0
    flip: bool = False
    rotate: Annotated[float, Field(ge=0, le=180)] = 0.0


class TrainingSettings(Settings):
    """How every task is trained."""

    epochs: Positive
    batch: Positive = 128
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: Annotated[float, Field(gt=0)]
    momentum: Share = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    milestones: Annotated[tuple[Positive, ...], List] = ()  # after so many epochs `lr` is multiplied by `gamma`
    gamma: Annotated[float, Field(gt=0)] = 0.1
    betas: Annotated[tuple[Share, Share], List] = (0.9, 0.999)  # of adam
    eps: Annotated[float, Field(gt=0)] = 1e-8  # of adam
    amsgrad: bool = False  # of adam
    sampling: Literal["passes", "afresh"] = "passes"  # an epoch meets every sample once, or draws each batch from all
    augment: AugmentSettings = AugmentSettings()
    seed: Whole = 0
    memory_format: Literal["contiguous", "channels_last"] = "channels_last"

    @model_validator(mode="after")
    def _check(self) -> TrainingSettings:
        if list(self.milestones) != sorted(self.milestones):
            raise problem("milestones", f"must ascend, unlike {list(self.milestones)}")
        late = [m for m in self.milestones if m >= self.epochs]
        if late:
            raise problem(
                "milestones",
                f"{late[0]} is not within the {self.epochs} epochs of training; choose from 1 to {self.epochs - 1}",
            )
        if self.optimizer == "adam" and self.momentum:
            raise problem("momentum", "adam has no momentum; leave it out, or choose optimizer 'sgd'")
        return self

    def scaled_to(self, epochs: int) -> TrainingSettings:
        """The same schedule in fewer (or more) epochs: milestones move in proportion.

        They are rounded to whole epochs, at least 1; one that comes to lie at the end is left out.
        """
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise UsageError(f"epochs must be a whole number of at least 1, not {epochs!r}")
        scaled = [max(1, floor(m * epochs / self.epochs + 0.5)) for m in self.milestones]
        return self.with_changes(epochs=epochs, milestones=tuple(m for m in scaled if m < epochs))


class MethodSettings(Settings):
    """A method that a recipe offers: a name of `rkr.methods.METHODS`, and options other than its own.

    With `zero_shot` it is one of `ZERO_SHOT_METHODS`; the recipe's stream decides, and files do not say it.
    """

    learner: str
    options: dict[str, Any] = {}
    zero_shot: bool = False

    @property
    def method(self) -> Method:
        """The method itself, without the options."""
        from rkr.methods import methods_for

        return methods_for(self.zero_shot)[self.learner]

    @model_validator(mode="after")
    def _check(self) -> MethodSettings:
        from rkr.core.options import Options
        from rkr.methods import methods_for

        known_methods = methods_for(self.zero_shot)
        if self.learner not in known_methods:
            raise problem("learner", f"no method is called {self.learner!r}{choose(self.learner, known_methods)}")
        for_all = self.method.learner.recipe_options
        known = {name: value for name, value in self.method.options.items() if name not in for_all}
        for name in self.options:
            if name in for_all:
                raise problem(name, f"the same for all methods, in a section [{name}] of its own")
            if name not in known:
                options = choose(name, known) if known else "; it has none"
                raise problem(name, f"{self.learner} has no such option{options}")
        rectifying = {field.name for field in dataclasses.fields(Options)}
        for name in self.options.keys() & rectifying if rectifying <= known.keys() else ():
            try:
                Options.from_json({name: self.options[name]})
            except UsageError as error:
                raise problem(name, str(error).removeprefix(f"{name} ")) from None
        found = inspect.signature(self.method.learner, eval_str=True).parameters
        plain = {name: p for name, p in found.items() if p.annotation in (int, float, bool, str)}
        check_values(plain, {name: value for name, value in self.options.items() if name in plain})
        return self


METHOD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")  # it names a folder, and is listed between commas


def method_table(name: str, table: Any, zero_shot: bool = False) -> Any:
    """[methods.rkr-k4] as it is written: the learner is called like the section, other keys are options."""
    if not METHOD_NAME.fullmatch(name):
        raise problem(name, "a method's name has letters, digits, '-', '_' and '.' only, and begins with a letter")
    if not isinstance(table, dict):
        return table
    if "learner" in table and isinstance(table.get("options"), dict):
        return {**table, "zero_shot": zero_shot}
    options = {key: value for key, value in table.items() if key != "learner"}
    return {"learner": table.get("learner", name), "options": options, "zero_shot": zero_shot}


Metric = Literal[
    "average accuracy", "top-5 running mean", "capacity", "parameters per task", "multiply-adds", "U", "S", "H"
]
FOR_EACH_TASK = ("top-5 running mean", "U", "S", "H")


class PaperNumber(Settings):
    """A number that the paper prints, in percent.

    "average accuracy" is the mean over tasks after the last one; "top-5 running mean" the same after every task,
    for the five most likely classes; "capacity" what network and tasks have together, the network being 100;
    "parameters per task" and "multiply-adds" what a task adds; "U", "S" and "H" are of every data set at the end, in
    the order in which they are learned.
    """

    method: str
    metric: Metric = "average accuracy"
    value: float | None = None
    values: Annotated[tuple[float, ...] | None, List] = None  # after each task, or of each task
    spread: Annotated[float, Field(ge=0)] | None = None  # half of the 95 % confidence interval
    over: str | None = None  # the number is the difference to this method's
    order: str | None = None  # where it holds for one order of tasks only
    where: str

    @model_validator(mode="after")
    def _check(self) -> PaperNumber:
        wanted, other = ("values", "value") if self.metric in FOR_EACH_TASK else ("value", "values")
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise problem(wanted, f"{self.metric!r} needs {wanted!r}, and not {other!r}")
        return self
