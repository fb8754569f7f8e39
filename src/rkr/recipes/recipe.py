"""A recipe: everything that decides an experiment, and the numbers that the paper has for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PlainValidator, field_validator, model_validator

from rkr.errors import UsageError
from rkr.recipes.known import image_shape
from rkr.recipes.messages import choose, problem
from rkr.recipes.settings import (
    List,
    MethodSettings,
    NetworkSettings,
    Order,
    PaperNumber,
    Settings,
    StreamSettings,
    TrainingSettings,
    method_table,
)

if TYPE_CHECKING:
    from torch import nn


class Recipe(Settings):
    """An experiment, as one TOML file holds it.

    `recipe.stream(order, data)` loads the data and is the stream of tasks; `recipe.build_network()` is the network.
    """

    name: str  # of the file, without .toml
    title: str
    about: str = ""  # where the paper has it
    orders: Annotated[tuple[Annotated[Order, PlainValidator(lambda order: order)], ...], List, Field(min_length=1)]
    stream: StreamSettings
    network: NetworkSettings
    training: TrainingSettings
    methods: Annotated[dict[str, MethodSettings], Field(min_length=1)]  # those that run unless others are asked for
    paper: Annotated[tuple[PaperNumber, ...], List] = ()

    @field_validator("methods", mode="before")
    @classmethod
    def _tables(cls, tables: Any) -> Any:
        return {n: method_table(n, table) for n, table in tables.items()} if isinstance(tables, dict) else tables

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
        in_files = self.stream.source in ("imagenet", "folder") and not self.stream.options.get("resident")
        if in_files and self.training.augment.rotate:
            raise problem("training.augment.rotate", f"{self.stream.source} is read from files, which are not rotated")
        self._check_network()
        return self

    def _check_network(self) -> None:
        """Try the network on an image of the source's shape, on the meta device, where nothing is computed."""
        import torch
        from torch import nn

        with torch.device("meta"), torch.no_grad():
            try:
                network = self.network.build().eval()
            except UsageError as error:
                raise problem("network", str(error)) from None
            layers = [path for path, layer in network.named_modules() if isinstance(layer, nn.Linear)]
            head = self.network.head
            if head not in layers:
                raise problem("network.head", f"{self.network.name} has no linear layer {head!r}{choose(head, layers)}")
            shape = image_shape(self.stream.source, self.stream.options)
            try:
                network(torch.zeros(1, *shape))
            except Exception:
                takes = "x".join(map(str, getattr(network, "input_shape", ("other",))))
                text = f"{self.network.name} is for images of {takes}, but those of {self.stream.source} are "
                raise problem("network", text + "x".join(map(str, shape))) from None

    def method(self, name: str) -> MethodSettings:
        """A method of the recipe, or else one that is registered in `rkr.learners.METHODS`."""
        from rkr.learners import METHODS

        if name in self.methods:
            return self.methods[name]
        if name in METHODS:
            return MethodSettings(learner=name)
        names = dict.fromkeys((*self.methods, *METHODS))
        raise UsageError(f"no method {name!r}{choose(name, names)}")

    def changed(self, epochs: int | None = None, seed: int | None = None, limit: int | None = None) -> Recipe:
        """The recipe with a longer or shorter schedule, another seed, or fewer training images of a class."""
        training = self.training if epochs is None else self.training.scaled_to(epochs)
        if seed is not None:
            training = training.with_changes(seed=seed)
        stream = self.stream if limit is None else self.stream.with_changes(limit=limit)
        return self.model_copy(update={"training": training, "stream": stream})

    def resolved(
        self,
        method: str,
        order: Order,
        epochs: int | None = None,
        seed: int | None = None,
        limit: int | None = None,
    ) -> dict[str, Any]:
        """All settings of one run as plain JSON, the options of its method with their defaults among them."""
        from rkr.learners import METHODS

        recipe = self.changed(epochs, seed, limit)
        recipe.stream.check_order(order)
        chosen = recipe.method(method)
        options = {**METHODS[chosen.learner].options, **chosen.options}
        parts = recipe.model_dump(mode="json", include={"stream", "network", "training"})
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

    def published(self, method: str, metric: str = "average accuracy") -> float | tuple[float, ...] | None:
        """The paper's number, a difference added to what it is a difference to; None if there is none."""
        numbers = [number for number in self.paper if number.metric == metric]
        absolute = {number.method: number for number in numbers if number.over is None}
        if method in absolute:
            return absolute[method].values or absolute[method].value
        for number in numbers:
            other = absolute.get(number.over or "")
            if number.method == method and other and other.value is not None and number.value is not None:
                return round(other.value + number.value, 4)
        return None

    def published_numbers(self) -> dict[str, tuple[float, float | None]]:
        """For each method the paper's average accuracy, with half of its confidence interval where it is printed."""
        found: dict[str, tuple[float, float | None]] = {}
        for number in self.paper:
            value = self.published(number.method)
            if isinstance(value, float):
                spread = number.spread if number.metric == "average accuracy" else None
                found.setdefault(number.method, (value, None))
                if spread is not None:
                    found[number.method] = (value, spread)
        return found
