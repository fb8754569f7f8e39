"""A recipe: everything that defines an experiment, and the paper's numbers for it."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from rkr.errors import UsageError
from rkr.experiment.recipes.settings import (
    List,
    MethodSettings,
    NetworkSettings,
    Order,
    PaperNumber,
    ResourceSettings,
    StreamSettings,
    TrainingSettings,
    ZeroShotSettings,
    method_table,
)
from rkr.registry import Entry, methods
from rkr.validation import Settings, choose, problem, wrong

if TYPE_CHECKING:
    from torch import nn

VALIDATION = "validation"


def _kind(stream: Any) -> str:
    if not isinstance(stream, Mapping):
        return "<zero-shot>" if getattr(stream, "kind", None) == "zero-shot" else "<images>"
    meant = "datasets" in stream and "source" not in stream  # regardless of `kind`, which may be misspelt
    return "<zero-shot>" if meant or stream.get("kind") == "zero-shot" else "<images>"


AnyStream = Annotated[
    Annotated[StreamSettings, Tag("<images>")] | Annotated[ZeroShotSettings, Tag("<zero-shot>")], Discriminator(_kind)
]


class Recipe(Settings):
    """An experiment, as defined in a TOML file.

    `recipe.stream(order, data)` loads the data and is the stream of tasks; `recipe.build_network()` is the network.
    """

    name: str  # of the file, without .toml
    title: str
    about: str = ""  # where the paper has it
    orders: Annotated[tuple[Annotated[Order, PlainValidator(lambda order: order)], ...], List, Field(min_length=1)]
    stream: AnyStream
    network: NetworkSettings
    training: TrainingSettings
    classifier: dict[str, Any] = Field(default_factory=dict)  # of zero-shot tasks: see `ClassifierOptions`
    resources: ResourceSettings = ResourceSettings()
    methods: Annotated[dict[str, MethodSettings], Field(min_length=1)]  # methods that run by default
    paper: Annotated[tuple[PaperNumber, ...], List] = ()

    @model_validator(mode="before")
    @classmethod
    def _say_how_long(cls, values: Any) -> Any:
        """Record the rule for the length of classifiers, also where a recipe leaves it out or counts in epochs."""
        if not isinstance(values, dict) or _kind(values.get("stream")) != "<zero-shot>":
            return values
        given = values.get("classifier", {})
        if not isinstance(given, Mapping) or "steps" in given or given.get("epochs", VALIDATION) != VALIDATION:
            return values
        others = {name: value for name, value in given.items() if name != "epochs"}
        return {**values, "classifier": {"steps": VALIDATION, **others}}

    @field_validator("methods", mode="wrap")
    @classmethod
    def _tables(cls, tables: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        if "stream" not in info.data:  # it is wrong, and decides which methods there are
            return tables
        if isinstance(tables, dict):
            setting = info.data["stream"].setting
            tables = {name: method_table(name, table, setting) for name, table in tables.items()}
        return check(tables)

    @property
    def setting(self) -> str:
        """One of `rkr.registry.SETTINGS`."""
        return self.stream.setting

    @property
    def zero_shot(self) -> bool:
        """Whether tasks have unseen classes."""
        return isinstance(self.stream, ZeroShotSettings)

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        for order in self.orders:
            try:
                self.stream.check_order(order)
            except UsageError as error:
                raise problem("orders", str(error)) from None
            if self.orders.count(order) > 1:
                raise problem("orders", f"{order!r} comes more than once")
        for number in self.paper:
            if number.values is not None and len(number.values) != self.stream.tasks:
                text = f"{len(number.values)} values of {number.method} for {self.stream.tasks} tasks"
                raise problem("paper.values", text)
        for name in self.methods:
            try:
                self.training_of(name)
            except UsageError as error:
                raise problem(f"methods.{name}.training", str(error)) from None
        if isinstance(self.stream, ZeroShotSettings):
            self._check_zero_shot(self.stream)
        else:
            if self.classifier:
                raise problem("classifier", "only zero-shot tasks have one")
            if self.training.sampling == "afresh":
                raise problem("training.sampling", "images come in 'passes'")
            self._check_images(self.stream)
        return self

    def _check_zero_shot(self, stream: ZeroShotSettings) -> None:
        import torch

        from rkr.methods.zeroshot import ClassifierOptions
        from rkr.networks.interfaces import is_aligned_vae

        found = wrong(ClassifierOptions, self.classifier)
        if found is not None:
            raise problem(f"classifier.{found[0]}".rstrip("."), found[1])
        for key in ("steps", "epochs"):
            lengths = self.classifier.get(key)
            missing = [name for name in stream.datasets if name not in lengths] if isinstance(lengths, dict) else []
            if missing:
                raise problem(f"classifier.{key}", f"needs a number for {', '.join(missing)} too")
        try:
            network = self.network.blank
        except UsageError as error:
            raise problem("", str(error)) from None
        if not is_aligned_vae(network):
            raise problem("network.name", f"{self.network.name} is not for zero-shot tasks; choose cada-vae")
        if any(self.training.augment.model_dump().values()):
            raise problem("training.augment", "features cannot be augmented")
        for name, method in self.methods.items():
            try:
                with torch.device("meta"):
                    method.method.build(self.network.build, self.network.head, **method.options)
            except UsageError as error:
                raise problem(f"methods.{name}", str(error)) from None

    def _check_images(self, stream: StreamSettings) -> None:
        """Try the network on an image of the source's shape, on the meta device, without computing anything."""
        from torch import nn

        if stream.entry.in_files and not stream.options.get("resident") and self.training.augment.rotate:
            raise problem("training.augment.rotate", f"{stream.source} is read from files, which are not rotated")
        shape, head = stream.entry.shape_with(stream.options), self.network.head
        try:
            layers = [path for path, layer in self.network.blank.named_modules() if isinstance(layer, nn.Linear)]
            if head not in layers:
                raise problem("network.head", f"{self.network.name} has no linear layer {head!r}{choose(head, layers)}")
            if shape is not None:  # otherwise known when the data are read
                self.check_shape(shape)
        except UsageError as error:
            raise problem("network", str(error)) from None

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise UsageError if the network does not accept images of a shape. Nothing is computed."""
        import torch

        network = self.network.blank
        try:
            with torch.device("meta"), torch.no_grad():
                network(torch.zeros(1, *shape))
        except Exception as error:
            name, there = self.network.name, "x".join(map(str, shape))
            source = getattr(self.stream, "source", "the data")
            if hasattr(network, "input_shape"):
                takes = "x".join(map(str, network.input_shape))  # type: ignore[arg-type]
                raise UsageError(f"{name} is for images of {takes}, but those of {source} are {there}") from None
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise UsageError(f"{name} fails on images of {there}, which are those of {source} ({said})") from error

    def method(self, name: str) -> MethodSettings:
        """A method of the recipe, or else one that is registered."""
        if name in self.methods:
            return self.methods[name]
        registered = methods(self.setting)
        if ":" in name:
            raise UsageError(f"{name!r}: in the recipe, add a section [methods.NAME] with learner = {name!r}")
        if name not in registered:
            raise UsageError(f"no method {name!r}{choose(name, dict.fromkeys((*self.methods, *registered)))}")
        return MethodSettings(learner=name, setting=self.setting)

    def entries(self, method: str) -> list[Entry]:
        """The registered entries of a method, its network and its data."""
        sources = [self.stream.entry] if isinstance(self.stream, StreamSettings) else []
        return [self.method(method).method, self.network.entry, *sources]

    def options(self, name: str) -> dict[str, Any]:
        """The options of a method that the recipe sets, for it or for all methods, or its augmentation implies."""
        chosen = self.method(name)
        learner, augment = chosen.method.learner, self.training.augment.model_dump()
        for_all = {option: getattr(self, option) for option in learner.recipe_options}
        return {**{option: augment[option] for option in learner.augment_options}, **for_all, **chosen.options}

    def training_of(self, name: str) -> TrainingSettings:
        """The training settings of a method: its own optimiser if it has one, else the recipe's."""
        return self.training.with_changes(**self.method(name).own_training)

    def changed(self, epochs: int | None = None, seed: int | None = None, limit: int | None = None) -> Recipe:
        """The recipe with a longer or shorter schedule, another seed, or fewer training images of a class."""
        training = self.training if epochs is None else self.training.scaled_to(epochs)
        if seed is not None:
            training = training.with_changes(seed=seed)
        stream = self.stream if limit is None else self.stream.with_changes(limit=limit)
        return self.model_copy(update={"training": training, "stream": stream})

    def on_validation(self) -> Recipe:
        """The recipe with tests on held-out training samples, for choices that must not depend on test samples.

        Of images it is a fifth of every class, unless the recipe has another share; of zero-shot tasks, some classes.
        """
        named = {"name": f"{self.name}-validation", "title": f"{self.title}: tests on what is held out of training"}
        if isinstance(self.stream, StreamSettings):
            images = self.stream.with_changes(part="validation", validation=self.stream.validation or 0.2)
            return self.model_copy(update={**named, "stream": images, "paper": ()})
        stream = self.stream.with_changes(part="validation")
        return self.model_copy(update={**named, "stream": stream, "paper": ()})

    def with_classifier(self, **changes: Any) -> Recipe:
        """The recipe with other settings of the classifiers of zero-shot tasks."""
        return self.model_copy(update={"classifier": {**self.classifier, **changes}})

    @property
    def chooses_steps(self) -> bool:
        """Whether the length of classifier training must be chosen on the validation split before tests."""
        on_test = isinstance(self.stream, ZeroShotSettings) and self.stream.part == "test"
        return on_test and self.classifier.get("steps") == VALIDATION

    def resolved(
        self,
        method: str,
        order: Order,
        epochs: int | None = None,
        seed: int | None = None,
        limit: int | None = None,
    ) -> dict[str, Any]:
        """All settings of one run as plain JSON, the options of its method with their defaults among them."""
        recipe = self.changed(epochs, seed, limit)
        recipe.stream.check_order(order)
        chosen = recipe.method(method)
        options = {**chosen.method.options, **recipe.options(method)}
        parts = recipe.model_dump(mode="json", include={"stream", "network", "training"})
        if chosen.own_training:  # instead of the values of `training`
            trained = recipe.training_of(method).model_dump(mode="json")
            parts["own_training"] = {name: trained[name] for name in chosen.own_training}
        return {
            "recipe": self.name,
            "method": method,
            "learner": chosen.learner,
            "options": options,
            "order": order,
            **parts,
        }

    def build_network(self) -> nn.Module:
        """The network, with random weights."""
        return self.network.build()

    @property
    def takes(self) -> tuple[int, ...]:
        """The shape of a sample that the network is built for."""
        return tuple(self.network.blank.input_shape)  # type: ignore[arg-type]

    def published(
        self, method: str, metric: str = "average accuracy", order: str | None = None
    ) -> float | tuple[float, ...] | None:
        """The paper's number, or None; deltas are resolved.

        If it depends on the order of tasks, it is that of the given order, by default the recipe's first.
        """
        here = (None, str(self.orders[0]) if order is None else order)
        numbers = [number for number in self.paper if number.metric == metric and number.order in here]
        absolute = {number.method: number for number in numbers if number.over is None}
        if method in absolute:
            return absolute[method].values or absolute[method].value
        for number in numbers:
            other = absolute.get(number.over or "")
            if number.method == method and other and other.value is not None and number.value is not None:
                return round(other.value + number.value, 4)
        return None

    def published_numbers(self, order: str | None = None) -> dict[str, tuple[float, float | None]]:
        """The paper's average accuracy for each method, with the half-width of its confidence interval if printed.

        If the paper has numbers for single orders, they are those of the given order, by default the first.
        """
        found: dict[str, tuple[float, float | None]] = {}
        metric = "H" if self.zero_shot else "average accuracy"
        for number in self.paper:
            value = self.published(number.method, metric, order)
            if isinstance(value, tuple):
                value = round(fmean(value), 2)
            if isinstance(value, float):
                spread = number.spread if number.metric == "average accuracy" else None
                found.setdefault(number.method, (value, None))
                if spread is not None:
                    found[number.method] = (value, spread)
        return found
