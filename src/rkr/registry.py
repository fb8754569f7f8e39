"""Methods, networks and datasets by name: those of the package and those of plug-ins.

Inside the package each is one file with a decorator:

    @register.method("ewc", "Fisher-weighted penalty", citation="Kirkpatrick et al., PNAS 2017")
    class Ewc(Learner): ...

Names and descriptions are read from the source of these files, which are imported only when an entry is used. So
listing them does not need torch, and the arguments of these decorators must be literals.

Outside the package there are three ways:

- a dotted name, "my_package.methods:Mine", wherever a name is accepted,
- an entry point in the group rkr.methods, rkr.networks or rkr.datasets,
- the decorators `rkr.register.method`, `.network` and `.dataset`, in any module that one of the others imports.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rkr.errors import PluginWarning, RkrError, UsageError
from rkr.importing import first_line, imported, place

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from pydantic import BaseModel

__all__ = ["SETTINGS", "Dataset", "Entry", "Method", "Names", "Network", "datasets", "methods", "networks", "register"]

SETTINGS = ("images", "zero-shot")
"""Task-incremental classification of images, and generalised zero-shot learning."""

IN_WORDS = {"images": "images", "zero-shot": "zero-shot tasks"}

PACKAGE = Path(__file__).parent
NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")  # names become folders, and are separated by commas

DECLARED = re.compile(r"^(@register\.[\s\S]*?)^(?:class|def) (\w+)", re.MULTILINE)

T = TypeVar("T", bound=Callable[..., Any])


# ---------------------------------------------------------------------------------------------------------
# Entries


@dataclass(frozen=True, eq=False)
class Entry:
    """What is known of a method, network or dataset.

    Attributes:
        target: The class or function, or its place: "rkr.methods.ewc:Ewc".
        description: One line.
        name: How it is called in recipes and commands.
        citation: Where it was published.
        origin: Where it comes from: a distribution and its version, or a dotted name; "" for this package.
    """

    target: Any
    description: str = ""
    name: str = ""
    citation: str = ""
    origin: str = ""

    kind: ClassVar[str]
    not_options: ClassVar[tuple[str, ...]] = ()
    """Parameters of the target that no recipe sets."""

    @cached_property
    def object(self) -> Any:
        """The class or function. Imports its module."""
        return imported(self.target) if isinstance(self.target, str) else self.target

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters of the target that a recipe may set: those whose defaults can be written to a TOML file."""
        from rkr.validation import is_plain, parameters_of  # imports pydantic

        known = parameters_of(self.object, self.not_options)
        return {name: p for name, p in known.items() if p.default is p.empty or is_plain(p.default)}

    @cached_property
    def model(self) -> type[BaseModel]:
        """Checks options, as pydantic does."""
        """The options as a pydantic model."""
        from rkr.validation import model_of

        return model_of(self.name or place(self.object), self.parameters)

    @property
    def options(self) -> dict[str, Any]:
        """Every option and its default; None for those that must be given."""
        fields = self.model.model_fields
        known = {name: None if f.is_required() else f.get_default() for name, f in fields.items()}
        return {name: known[name] for name in (*self.parameters, *known)}  # its own first

    def wrong_option(
        self, given: Mapping[str, Any], leave_out: Sequence[str] = (), beside: Sequence[str] = ()
    ) -> tuple[str, str] | None:
        """The first option with a wrong name or value, and what is wrong.

        `beside` names other keys that are allowed there.
        """
        from rkr.validation import choose, wrong

        known = [name for name in self.options if name not in leave_out]
        for name in given:
            if name not in known:
                names = [*beside, *known]
                return name, f"{self.name} has no such option{choose(name, names) if names else '; it has none'}"
        found = wrong(self.model, given)
        if found is not None and found[1] == "is missing":
            return found[0], f"is missing: {self.name} has no default for it"
        return found

    def call(self, *arguments: Any, **options: Any) -> Any:
        """Call the target. If a plug-in fails, raise UsageError with the reason."""
        try:
            return self.object(*arguments, **options)
        except Exception as error:
            if not self.origin or isinstance(error, RkrError):
                raise
            raise UsageError(f"{self.name} fails ({type(error).__name__}: {' '.join(str(error).split())})") from error

    @property
    def summary(self) -> str:
        """The description, with citation and origin."""
        cited = f"({self.citation})" if self.citation else ""
        origin = f"[from {self.origin}]" if self.origin else ""
        return " ".join(filter(None, [self.description, cited, origin]))

    @classmethod
    def check(cls, made: Any, name: str) -> None:
        """Raise UsageError if a target cannot be one of this kind."""
        if not callable(made):
            raise UsageError(f"{name} must be a function, not {type(made).__name__}")


@dataclass(frozen=True, eq=False)
class Method(Entry):
    """A subclass of `rkr.Learner`, with some of its options set.

    Attributes:
        preset: Options that differ from the defaults.
        search: Search budgets as its authors set them, by option. Tables mark runs with smaller values.
    """

    preset: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, int] = field(default_factory=dict)

    kind: ClassVar[str] = "method"
    not_options: ClassVar[tuple[str, ...]] = ("make", "head")

    @property
    def learner(self) -> Any:
        """The subclass of `rkr.Learner`."""
        return self.object

    @cached_property
    def model(self) -> type[BaseModel]:
        """Checks options, as pydantic does."""
        from rkr.validation import model_of

        return model_of(self.name or place(self.object), self.parameters, self.learner.passes_on)

    @property
    def options(self) -> dict[str, Any]:
        """Its options with their values, those of the preset included."""
        known = {name: list(v) if isinstance(v, tuple) else v for name, v in super().options.items()}
        return {**known, **self.preset}

    def build(self, make: Callable[[], Any], head: str, **options: Any) -> Any:
        """A new learner. `make` is a function, because some methods need several networks."""
        from rkr.validation import plain, sentence

        if _is_module(make):
            name = type(make).__name__
            raise UsageError(f"give a function that builds the network, such as lambda: {name}(...), not a network")
        found = self.wrong_option(options)
        if found is not None:
            raise UsageError(sentence(*found))
        return self.call(make, head, **{**self.preset, **{name: plain(value) for name, value in options.items()}})

    @classmethod
    def check(cls, made: Any, name: str) -> None:
        """Raise UsageError if a target is no learner, or lacks what every learner must define."""
        base: Any = importlib.import_module("rkr.methods.learner").Learner
        if not (isinstance(made, type) and issubclass(made, base)):
            raise UsageError(f"{name} must be a subclass of rkr.Learner, not {getattr(made, '__name__', made)!r}")
        hooks = ["predict", "capacity"]
        if base.phases is getattr(made, "phases", None):  # phases of its own may be none
            hooks += ["groups", "loss"]
        missing = [hook for hook in hooks if getattr(made, hook) is getattr(base, hook)]
        if missing:
            raise UsageError(f"{name} must define {', '.join(missing)}")


@dataclass(frozen=True, eq=False)
class Network(Entry):
    """A function or class that builds an `nn.Module`.

    Attributes:
        head: Default name of the classification layer.
    """

    head: str = "fc"

    kind: ClassVar[str] = "network"

    def build(self, **arguments: Any) -> Any:
        """The network, with random weights."""
        made = self.call(**arguments)
        if not _is_module(made):
            raise UsageError(f"{self.name} must return a torch.nn.Module, not {type(made).__name__}")
        return made


@dataclass(frozen=True, eq=False)
class Dataset(Entry):
    """A function that loads a `rkr.data.Source`.

    If it has a parameter `data`, it gets the dataset directory, or None for the default places.

    Attributes:
        classes: Number of classes; None if it is only known when the data are read.
        shape: Shape of a sample; None if it is only known when the data are read. A string is the name of an option
            whose value is used.
        files: Paths in a dataset directory, any one of which is enough.
        without: What happens, or what you can do, if none of these files exists.
        in_files: Whether images are read from their files in training, unless the option `resident` is set.
    """

    classes: int | None = None
    shape: tuple[int | str, ...] | None = None
    files: tuple[str, ...] = ()
    without: str = ""
    in_files: bool = False

    kind: ClassVar[str] = "dataset"
    not_options: ClassVar[tuple[str, ...]] = ("data",)

    def load(self, data: Any = None, **options: Any) -> Any:
        """The source."""
        takes = inspect.signature(self.object).parameters
        return self.call(**({"data": data} if "data" in takes else {}), **options)

    def shape_with(self, options: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The shape of a sample with these options; None if it is only known when the data are read."""
        if self.shape is None:
            return None
        given = {**self.options, **options}
        return tuple(given[size] if isinstance(size, str) else size for size in self.shape)


def _is_module(made: Any) -> bool:
    """Whether this is an `nn.Module`. Does not import torch."""
    return not isinstance(made, type) and hasattr(made, "named_modules")


E = TypeVar("E", bound=Entry)


# ---------------------------------------------------------------------------------------------------------
# Tables


class Names(Mapping[str, E], Generic[E]):
    """The entries of a kind by name. Looking up a dotted name imports it.

    Args:
        entry: The class of entries.
        folder: The folder whose files declare the package's own entries.
        setting: The setting that methods are for.
    """

    def __init__(self, entry: type[E], folder: str, setting: str = "") -> None:
        self._entry, self._folder, self._setting = entry, folder, setting
        self._others: dict[str, E] = {}  # of plug-ins, and by dotted name

    @property
    def kind(self) -> str:
        """What the entries are: "method", "network" or "dataset"."""
        return self._entry.kind

    @cached_property
    def _own(self) -> dict[str, E]:
        return {entry.name: entry for entry in _declared(self._entry, self._folder)}

    def __getitem__(self, name: str) -> E:
        if ":" in name:
            return self._dotted(name)
        if name not in self._own:
            _load_entry_points(self._entry.kind)
        found = self._own.get(name) or self._others.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        _load_entry_points(self._entry.kind)
        return iter(self.declared())

    def __len__(self) -> int:
        return len(list(iter(self)))

    def declared(self) -> list[str]:
        """The names that are known without importing plug-ins."""
        return sorted(name for name in (*self._own, *self._others) if ":" not in name)

    def add(self, entry: E) -> None:
        """Add an entry of a plug-in."""
        if not NAME.fullmatch(entry.name):
            raise UsageError(f"a {entry.kind} cannot be called {entry.name!r}: use letters, digits, '-', '_' and '.'")
        there = self._own.get(entry.name) or self._others.get(entry.name)
        if there is not None and (there.name in self._own or place(there.object) != place(entry.object)):
            raise UsageError(f"there is a {entry.kind} {entry.name!r} already ({there.origin or 'of the package'})")
        self._others[entry.name] = entry

    def of(self, made: Any) -> E | None:
        """The entry that registers a class or function under a short name, if any."""
        named = (entry for name, entry in self._others.items() if ":" not in name)
        return next((entry for entry in named if entry.target is made and not getattr(entry, "preset", {})), None)

    def _dotted(self, name: str) -> E:
        if name not in self._others:
            made = imported(name)
            self._entry.check(made, name)
            if self._setting and made.setting != self._setting:
                raise UsageError(f"{name} is a method for {IN_WORDS[made.setting]}, not for {IN_WORDS[self._setting]}")
            known = self.of(made) or self._entry(made, first_line(made))
            self._others[name] = replace(known, name=name, origin=name)
        return self._others[name]


METHODS = {
    "images": Names(Method, "methods", "images"),
    "zero-shot": Names(Method, "methods/zeroshot", "zero-shot"),
}
networks = Names(Network, "networks")
datasets = Names(Dataset, "data")


def methods(setting: str) -> Names[Method]:
    """The methods for a setting."""
    return METHODS[setting]


def _tables(kind: str) -> Sequence[Names[Any]]:
    tables: dict[str, Sequence[Names[Any]]] = {
        "method": list(METHODS.values()),
        "network": [networks],
        "dataset": [datasets],
    }
    return tables[kind]


def names(kind: str) -> list[str]:
    """All names of a kind, those of the package first, without importing any of them."""
    tables = _tables(kind)
    own = {name for table in tables for name in table._own}
    others = {name for table in tables for name in table.declared()} | {point.name for point in _entry_points(kind)}
    return [*sorted(own), *sorted(others - own)]


def _declared(entry: type[E], folder: str) -> Iterator[E]:
    """The entries that the files of a room declare, read without importing them."""
    for path in sorted((PACKAGE / folder).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if f"@register.{entry.kind}(" not in text:
            continue
        module = ".".join(("rkr", *folder.split("/"), path.stem))
        for decorators, target in DECLARED.findall(text):
            for call in ast.parse(f"{decorators}class _: pass").body[0].decorator_list:  # type: ignore[attr-defined]
                try:
                    name, *rest = map(ast.literal_eval, call.args)
                    options = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
                except ValueError as error:
                    raise ValueError(f"{path}: @register above {target}: {error}: only literals can be read") from error
                yield entry(f"{module}:{target}", *rest, **{**options, "name": name})


# ---------------------------------------------------------------------------------------------------------
# Registering


class Register:
    """Decorators that register methods, networks and datasets under a name, and `layer` for kinds of layers.

    Example:
        >>> import rkr
        >>> from torch import nn
        >>> @rkr.register.network("one-layer", "a linear layer for 8x8 images", head="1")
        ... def build(classes: int = 10) -> nn.Module:
        ...     return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
        >>> from rkr.registry import networks
        >>> networks["one-layer"].description
        'a linear layer for 8x8 images'
    """

    def method(
        self,
        name: str,
        description: str = "",
        *,
        citation: str = "",
        preset: Mapping[str, Any] | None = None,
        search: Mapping[str, int] | None = None,
    ) -> Callable[[T], T]:
        """Register a subclass of `rkr.Learner` as a method.

        Args:
            name: Its name in recipes and commands.
            description: One line. Default: the first line of the docstring.
            citation: Where it was published.
            preset: Options that differ from the defaults. A class may have several names with different presets.
            search: Search budgets as its authors set them, by option. Tables mark runs with smaller values.

        Returns:
            A decorator that registers the class and returns it.
        """

        def add(made: T) -> T:
            Method.check(made, place(made))
            more = {"preset": preset or {}, "search": search or {}}
            return self._add(methods(made.setting), Method, made, name, description, citation, **more)  # type: ignore[attr-defined]

        return add

    def network(self, name: str, description: str = "", *, citation: str = "", head: str = "fc") -> Callable[[T], T]:
        """Register a function or class that builds a network; recipes set its parameters.

        Args:
            name: Its name in recipes and commands.
            description: One line. Default: the first line of the docstring.
            citation: Where it was published.
            head: The name of its classification layer.

        Returns:
            A decorator that registers what it is given and returns it.
        """
        return lambda made: self._add(networks, Network, made, name, description, citation, head=head)

    def dataset(
        self,
        name: str,
        description: str = "",
        *,
        citation: str = "",
        classes: int | None = None,
        shape: tuple[int | str, ...] | None = None,
        files: Sequence[str] = (),
        without: str = "",
        in_files: bool = False,
    ) -> Callable[[T], T]:
        """Register a function that loads a `rkr.data.Source`; recipes set its parameters under [stream.options].

        With `classes` and `shape`, recipes are checked before anything is loaded.

        Args:
            name: Its name in recipes and commands.
            description: One line. Default: the first line of the docstring.
            citation: Where it was published.
            classes: How many there are.
            shape: Of a sample. A string is the name of an option whose value is used.
            files: Paths in a dataset directory, any one of which is enough.
            without: What happens, or what you can do, if none of these files exists.
            in_files: Whether images are read from their files in training, unless the option `resident` is set.

        Returns:
            A decorator that registers the function and returns it.
        """
        known = {"classes": classes, "shape": shape, "files": tuple(files), "without": without, "in_files": in_files}
        return lambda made: self._add(datasets, Dataset, made, name, description, citation, **known)

    def layer(self, module_class: type, adapter: type) -> None:
        """Rectify layers of a class, and of its subclasses, with an adapter.

        Args:
            module_class: The class of the layers.
            adapter: A subclass of `rkr.core.Adapter`.
        """
        importlib.import_module("rkr.core").register_layer(module_class, adapter)

    def _add(
        self, table: Names[E], entry: type[E], made: T, name: str, description: str, citation: str, **more: Any
    ) -> T:
        entry.check(made, place(made))
        if not made.__module__.startswith("rkr."):  # the package's own are read from their files
            known = {"name": name, "citation": citation, "origin": _bringing or place(made), **more}
            table.add(entry(made, description or first_line(made), **known))
        return made


register = Register()

_bringing = ""  # the distribution whose entry points are being loaded
_tried: set[EntryPoint] = set()


def _entry_points(kind: str) -> Sequence[EntryPoint]:
    return _entry_points_on(tuple(sys.path), kind)


@cache
def _entry_points_on(path: tuple[str, ...], kind: str) -> Sequence[EntryPoint]:
    from importlib.metadata import entry_points  # slow to import

    return tuple(entry_points(group=f"rkr.{kind}s"))


def _load_entry_points(kind: str) -> None:
    """Import the plug-ins of a kind. One that fails is named in a warning."""
    global _bringing
    for point in _entry_points(kind):
        if point in _tried:
            continue
        _tried.add(point)
        _bringing = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        try:
            _add_entry_point(kind, point, point.load())
        except (Exception, SystemExit) as error:  # importing runs other people's code
            said = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
            warnings.warn(
                f"plug-in {_bringing}: {kind} {point.name!r} is left out ({' '.join(said.split())})",
                PluginWarning,
                stacklevel=2,
            )
        finally:
            _bringing = ""


def _add_entry_point(kind: str, point: EntryPoint, made: Any) -> None:
    """Register the object of an entry point, unless its decorator has done so. Modules register by decorators only."""
    for table in _tables(kind):
        known = table._others.get(point.name)
        if known is not None and known.target is made:
            table._others[point.name] = replace(known, origin=_bringing)
            return
    if not isinstance(made, ModuleType):
        getattr(register, kind)(point.name)(made)
