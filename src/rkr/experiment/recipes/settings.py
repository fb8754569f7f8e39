"""The sections of a recipe, each validated when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import floor
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rkr.errors import UsageError
from rkr.experiment.execution import GPUS, byte_count, is_gpus
from rkr.registry import NAME, SETTINGS, Dataset, E, Entry, Method, Names, Network, datasets, methods, networks
from rkr.validation import Settings, choose, problem, shown

if TYPE_CHECKING:
    from torch import nn

    from rkr.data import Stream
    from rkr.data.download import Data

Order = int | str
"""A seed for a random order, "A" to "E" for the published orders of CIFAR-100, or "fixed" for the source's own."""

Positive = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
List = Field(strict=False)  # a list of the file becomes a tuple
JOINED = {"split-cifar": ("cifar100",), "mnist-then": ("cifar10", "cifar100")}


def found(table: Names[E], name: str, key: str) -> E:
    """In a validator: the entry of a name."""
    try:
        return table[name]
    except KeyError:
        raise problem(key, f"no {table.kind} is called {name!r}{_hint(table, name)}") from None
    except UsageError as error:  # a dotted name that cannot be imported
        raise problem(key, str(error)) from None


def _hint(table: Names[E], name: str) -> str:
    module, dot, attribute = name.rpartition(".")
    if dot and attribute.isidentifier() and all(part.isidentifier() for part in module.split(".")):
        return f"; did you mean '{module}:{attribute}'?"
    return choose(name, table)


def check_options(entry: Entry, given: dict[str, Any], prefix: str = "", **more: Sequence[str]) -> None:
    """In a validator: refuse options that an entry does not have, and values of another type."""
    wrong = entry.wrong_option(given, **more)
    if wrong is not None:
        raise problem(prefix + wrong[0], wrong[1])


class StreamSettings(Settings):
    """How the tasks are made. Call it to load the stream."""

    setting: ClassVar[str] = "images"

    kind: Literal["split", "split-cifar", "mnist-then", "zero-shot"] = "split"  # the last is `ZeroShotSettings`
    source: str
    tasks: Positive  # of all tasks, including CIFAR-10 or MNIST as the first
    validation: Share = 0.0  # fraction of every class that is held out of training
    part: Literal["test", "validation"] = "test"  # the split to test on
    first: Positive | None = None  # number of tasks to use, from the first one
    limit: Positive | None = None  # training images of a class
    seed: Whole = 0  # selects the images that these two keep
    options: dict[str, Any] = Field(default_factory=dict)  # for the source, such as the size of images

    @property
    def entry(self) -> Dataset:
        """What is known of the source."""
        return datasets[self.source]

    @property
    def needs(self) -> tuple[str, ...]:
        """The data: see `rkr.data.missing_data`."""
        first = {"split-cifar": ["cifar10"], "mnist-then": ["mnist"]}.get(self.kind, [])
        return (*first, self.source)

    @property
    def of_source(self) -> int:
        """Number of tasks that the classes of the source are divided into."""
        return self.tasks if self.kind == "split" else self.tasks - 1

    @model_validator(mode="after")
    def _check(self) -> StreamSettings:
        entry = found(datasets, self.source, "source")
        if self.kind in JOINED and self.source not in JOINED[self.kind]:
            raise problem("source", f"must be {' or '.join(JOINED[self.kind])} with kind {self.kind!r}")
        check_options(entry, self.options, "options.")
        self._check_tasks()
        if self.part == "validation" and not self.validation:
            raise problem("validation", "must be above 0 to test on it")
        _check_first(self.first, self.tasks)
        return self

    def _check_tasks(self) -> None:
        classes = self.entry.classes
        if classes is None:  # known when it is read
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
        source = load_source(self.source, data, **self.options)
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
    """Zero-shot datasets in the layout of xlsa17, one task each. Call it to load the stream."""

    setting: ClassVar[str] = "zero-shot"

    kind: Literal["zero-shot"]
    datasets: Annotated[tuple[str, ...], List, Field(min_length=1)]  # folders
    features: str = "res101"  # the file of features in each
    embedding: str = "att"  # the variable of attributes in each att_splits.mat
    scaler: Literal["train", "each", "none"] = "train"  # "each" is fitted on test features too, as in the authors' code
    part: Literal["test", "validation"] = "test"  # tested on the published test rows, or on some training classes
    first: Positive | None = None  # number of tasks to use, from the first one
    limit: Positive | None = None  # training rows of a class
    seed: Whole = 0  # selects the rows and classes that validation and limit keep

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
            raise problem("datasets", f"a dataset is listed twice: {', '.join(self.datasets)}")
        _check_first(self.first, self.tasks)
        return self

    def check_order(self, order: Order) -> None:
        """Raise UsageError if tasks cannot come in this order."""
        self.ordered(order)

    def ordered(self, order: Order) -> tuple[str, ...]:
        """The datasets in an order: "fixed" as listed, "first-CUB" with it and the first exchanged, or a seed."""
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
    """A network; other keys than `name` and `head` are arguments of the function that builds it."""

    name: str  # a registered one, or the dotted name of a function or class
    head: str = "fc"  # the classification layer, of which every task has its own; ignored by networks without one
    arguments: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        own = {key: value for key, value in values.items() if key in ("name", "head", "arguments")}
        if "arguments" not in values:
            own["arguments"] = {key: value for key, value in values.items() if key not in own}
        if "head" not in values and isinstance(values.get("name"), str):
            own["head"] = found(networks, values["name"], "name").head
        return own

    @model_validator(mode="after")
    def _check(self) -> NetworkSettings:
        check_options(found(networks, self.name, "name"), self.arguments, beside=("name", "head"))
        return self

    @property
    def entry(self) -> Network:
        """The registered entry of the network."""
        return networks[self.name]

    def build(self) -> nn.Module:
        """The network, with random weights."""
        return self.entry.build(**self.arguments)

    @cached_property
    def blank(self) -> nn.Module:
        """The network on the meta device, in evaluation mode, to inspect, count and check it without values."""
        import torch

        with torch.device("meta"):
            return self.build().eval()

    @property
    def all_arguments(self) -> dict[str, Any]:
        """The given arguments and the defaults of all others."""
        return {**self.entry.options, **self.arguments}


class AugmentSettings(Settings):
    """Random augmentation of training images. Default: none. See `rkr.data.Augment`."""

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
    sampling: Literal["passes", "afresh"] = "passes"  # each sample once per epoch, or each batch from all samples
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

        They are rounded to whole epochs, at least 1. A milestone at the end is left out.
        """
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise UsageError(f"epochs must be a whole number of at least 1, not {epochs!r}")
        scaled = [max(1, floor(m * epochs / self.epochs + 0.5)) for m in self.milestones]
        return self.with_changes(epochs=epochs, milestones=tuple(m for m in scaled if m < epochs))


class ResourceSettings(Settings):
    """What each run asks of a cluster, where no option of the command says otherwise."""

    threads: Positive | None = None  # CPUs, and threads
    gpus: float | None = None  # or a share of one
    memory: str | None = None  # such as "4GB"

    @property
    def bytes(self) -> int | None:
        """The memory."""
        return byte_count(self.memory)

    @model_validator(mode="after")
    def _check(self) -> ResourceSettings:
        if self.gpus is not None and not is_gpus(self.gpus):
            raise problem("gpus", f"{GPUS}, not {self.gpus:g}")
        try:
            _ = self.bytes
        except UsageError:
            raise problem("memory", f"must be a size such as 4GB, not {shown(self.memory)}") from None
        return self


# Settings of the recipe that a method may override.
OPTIMIZER = (
    "optimizer",
    "lr",
    "momentum",
    "weight_decay",
    "betas",
    "eps",
    "amsgrad",
)


class MethodSettings(Settings):
    """A method that a recipe offers: a registered one, or the dotted name of a class, and options other than its own.

    The recipe's stream decides on the setting, and files do not say it.
    """

    learner: str
    options: dict[str, Any] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)  # overrides of the method's optimiser
    setting: str = SETTINGS[0]

    @property
    def method(self) -> Method:
        """The method itself, without the options."""
        return methods(self.setting)[self.learner]

    @property
    def own_training(self) -> dict[str, Any]:
        """Overrides of the recipe's optimiser: those of the method's class, then those given here."""
        return {**self.method.learner.own_training, **self.training}

    @model_validator(mode="after")
    def _check(self) -> MethodSettings:
        method = found(methods(self.setting), self.learner, "learner")
        for name in self.training:
            if name in TrainingSettings.model_fields.keys() - set(OPTIMIZER):
                raise problem(f"training.{name}", "the same for all methods, in the section [training]")
            if name not in OPTIMIZER:
                raise problem(f"training.{name}", f"no such key{choose(name, OPTIMIZER)}")
        for_all = method.learner.recipe_options
        for name in self.options:
            if name in for_all:
                raise problem(name, f"the same for all methods, in a section [{name}] of its own")
        check_options(method, self.options, leave_out=for_all)
        return self


def method_table(name: str, table: Any, setting: str = SETTINGS[0]) -> Any:
    """Read [methods.rkr-k4]: the default learner has the section's name, and other keys are options."""
    if not NAME.fullmatch(name):
        raise problem(name, "a method's name has letters, digits, '-', '_' and '.' only, and begins with a letter")
    if not isinstance(table, dict):
        return table
    if "learner" in table and isinstance(table.get("options"), dict):
        return {**table, "setting": setting}
    own = {key: table[key] for key in ("learner", "training") if key in table}
    options = {key: value for key, value in table.items() if key not in own}
    return {"learner": name, **own, "options": options, "setting": setting}


Metric = Literal[
    "average accuracy", "top-5 running mean", "capacity", "parameters per task", "multiply-adds", "U", "S", "H"
]
FOR_EACH_TASK = ("top-5 running mean", "U", "S", "H")


class PaperNumber(Settings):
    """A number that the paper prints, in percent.

    "average accuracy" is the mean over tasks after the last one; "top-5 running mean" the same after every task,
    for the five most likely classes; "capacity" what network and tasks have together, the network being 100;
    "parameters per task" and "multiply-adds" what a task adds; "U", "S" and "H" are of every dataset at the end, in
    the order in which they are learned.
    """

    method: str
    metric: Metric = "average accuracy"
    value: float | None = None
    values: Annotated[tuple[float, ...] | None, List] = None  # after each task, or of each task
    spread: Annotated[float, Field(ge=0)] | None = None  # half of the 95 % confidence interval
    over: str | None = None  # the number is the difference to this method's
    order: str | None = None  # if it is for one order of tasks only
    where: str

    @model_validator(mode="after")
    def _check(self) -> PaperNumber:
        wanted, other = ("values", "value") if self.metric in FOR_EACH_TASK else ("value", "values")
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise problem(wanted, f"{self.metric!r} needs {wanted!r}, and not {other!r}")
        return self
