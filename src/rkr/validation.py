"""Checks recipes and options, and explains errors: the key, the value, what is allowed and what was probably meant.

All settings are pydantic models: those of recipes subclass `Settings`, options of functions and classes subclass
`Options`, or are made from a signature by `model_of`.
"""

from __future__ import annotations

import builtins
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral, Real
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, create_model, model_validator
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import ErrorDetails, PydanticCustomError

from rkr.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

# ---------------------------------------------------------------------------------------------------------
# Models


class Settings(BaseModel):
    """Base of all settings: unknown keys are refused, types are not converted, and instances are immutable."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_numbers(cls, values: Any) -> Any:
        return {key: plain(value) for key, value in values.items()} if isinstance(values, dict) else values

    @classmethod
    def checked(cls, values: dict[str, Any]) -> Self:
        """Create from plain values, or raise UsageError."""
        with in_words(cls):
            return cls.model_validate(values)

    def with_changes(self, **changes: Any) -> Self:
        """A validated copy with some values changed."""
        return type(self).checked({**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


class Options(Settings):
    """Options that are given as arguments: `Options(rank=0)` raises UsageError."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UsageError(sentence(*first_problem(error, type(self)))) from None


def plain(value: Any) -> Any:
    """Convert numpy's numbers to Python's."""
    if isinstance(value, int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def is_plain(value: object) -> bool:
    """Whether a value can be written to a TOML or JSON file."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(inside) for key, inside in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def parameters_of(made: Callable[..., Any], leave_out: Iterable[str] = ()) -> dict[str, inspect.Parameter]:
    """The parameters of a function or class that can be given by name.

    If the constructor of a class passes `**options` on to its base class, those of the base class are among them.
    """
    found: dict[str, inspect.Parameter] = {}
    for function in _constructors(made) if isinstance(made, type) else [made]:
        for name, parameter in _signature(function).items():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(name, parameter)
    return {name: p for name, p in found.items() if name not in (*leave_out, "self") and not name.startswith("_")}


def _constructors(cls: type) -> Iterator[Callable[..., Any]]:
    for base in cls.__mro__:
        if "__init__" in vars(base):
            yield vars(base)["__init__"]
            passes_on = any(
                p.kind is p.VAR_KEYWORD for p in inspect.signature(vars(base)["__init__"]).parameters.values()
            )
            if not passes_on or vars(base).get("passes_on") is not None:
                return


def _signature(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters with their types. Types that only type checkers import are `Any`."""
    try:
        return inspect.signature(function, eval_str=True, locals=_Names(function)).parameters
    except Exception:  # such a type with brackets, or another one that cannot be evaluated
        found = inspect.signature(function).parameters
        return {name: p.replace(annotation=Any) for name, p in found.items()}


class _Names(dict[str, Any]):
    """Values of names in annotations."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._known = getattr(function, "__globals__", {})

    def __missing__(self, name: str) -> Any:
        return self._known.get(name, getattr(builtins, name, Any))


def model_of(
    name: str, parameters: Mapping[str, inspect.Parameter], more: type[Options] | None = None
) -> type[BaseModel]:
    """A model whose fields are the parameters, and the fields of `more`."""
    types = {key: Any if p.annotation is p.empty else p.annotation for key, p in parameters.items()}
    fields: dict[str, Any] = {
        key: (types[key], ... if p.default is p.empty else p.default) for key, p in parameters.items()
    }
    base: type[BaseModel] = more or Settings
    try:
        return create_model(name, __base__=base, **fields)
    except PydanticSchemaGenerationError:  # a type that pydantic does not know
        return model_of(name, {key: p.replace(annotation=Any) for key, p in parameters.items()}, more)


def wrong(model: type[BaseModel], values: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first key with a wrong value, and what is wrong with it; None if all values are valid."""
    try:
        BaseModel.__init__(model.__new__(model), **values)  # raises pydantic's own error for `Options` too
    except ValidationError as error:
        return first_problem(error, model)
    return None


# ---------------------------------------------------------------------------------------------------------
# Words


_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "tuple_type": "a list in brackets",
    "list_type": "a list in brackets",
    "dict_type": "a table",
    "model_type": "a table",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def problem(key: str, text: str) -> PydanticCustomError:
    """An error to raise in a validator, at a key below the model that is validated ("" for the model itself)."""
    return PydanticCustomError("recipe", "{text}", {"key": key, "text": text})


TAGS = ("<images>", "<zero-shot>")  # kinds of streams, which pydantic names among the keys


def meant(given: object, allowed: Iterable[str]) -> str:
    """A hint after a typo, "; did you mean 'epochs'?", or "" if no allowed name is close."""
    close = get_close_matches(str(given), list(allowed), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def choose(given: object, allowed: Iterable[str]) -> str:
    """A hint and the allowed names, to end an error message."""
    names = list(allowed)
    hint = meant(given, names)
    return f"{hint or ';'} {'Choose' if hint else 'choose'} one of {', '.join(names)}"


@contextmanager
def in_words(model: type[BaseModel], where: str = "") -> Iterator[None]:
    """Turn pydantic's errors about a model into one UsageError; `where` names the file."""
    try:
        yield
    except ValidationError as error:
        key, text = first_problem(error, model)
        count = len(_most_telling(error.errors())) - 1
        more = f" ({count} more {'errors' if count > 1 else 'error'})" if count else ""
        raise UsageError(": ".join(filter(None, [where, key, text])) + more) from None


def sentence(key: str, text: str) -> str:
    """An error about an argument as one sentence."""
    return f"{key} {text}" if text.startswith(("must ", "is ")) else f"{key}: {text}"


def first_problem(error: ValidationError, model: type[BaseModel]) -> tuple[str, str]:
    """The key of the most informative error, as a user writes it, and what is wrong."""
    found = _most_telling(error.errors(include_url=False))
    return _of_a_choice(found, model) or explained(found[0], model)


def _most_telling(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Unknown keys come first. A required key that is misspelt is not reported as missing too."""
    unknown = [e for e in errors if e["type"] == "extra_forbidden"]
    others = [e for e in errors if e["type"] != "extra_forbidden"]
    misspelt = {
        (*e["loc"][:-1], m["loc"][-1])
        for e in unknown
        for m in others
        if m["type"] == "missing" and meant(e["loc"][-1], [str(m["loc"][-1])])
    }
    return unknown + [e for e in others if e["type"] != "missing" or e["loc"] not in misspelt]


def explained(error: ErrorDetails, model: type[BaseModel]) -> tuple[str, str]:
    """The key of an error, as a user writes it, and what is wrong."""
    kind, loc, given = error["type"], error["loc"], shown(error["input"])
    context = error.get("ctx", {})
    if kind == "recipe":
        return _key((*loc, *filter(None, [context["key"]]))), context["text"]
    if kind == "missing":
        text = "is missing"
    elif kind == "extra_forbidden":
        there = _model_at(model, loc[:-1])
        keys = [name for name in there.model_fields if name != "name" or len(loc) > 1]
        if issubclass(there, Options):
            return _key(loc), f"no such option{choose(loc[-1], keys)}"
        hint = meant(loc[-1], keys)
        text = f"no such key{hint or ';'} {'The' if hint else 'the'} keys here are {', '.join(keys)}"
    elif kind == "literal_error":
        allowed = [part.strip("' ") for part in context["expected"].replace(" or ", ", ").split(",")]
        text = f"must not be {given}{choose(error['input'], allowed)}"
    elif kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        text = f"must be {words} {context[name]:g}, not {given}"
    elif kind == "too_short" and context["min_length"] == 1:
        text = "must not be empty"
    elif kind == "value_error":
        text = str(context["error"])
    elif kind == "is_instance_of" and context["class"] == "Sequence":
        text = f"must be {_KINDS['tuple_type']}, not {given}"
    elif kind in _KINDS:
        text = f"must be {_KINDS[kind]}, not {given}"
    else:
        text = error["msg"]
    return _key(loc), text


def _of_a_choice(errors: list[ErrorDetails], model: type[BaseModel]) -> tuple[str, str] | None:
    """What is wrong with a value that may have one of several types: pydantic reports an error for each type."""
    key = errors[0]["loc"][:1]
    field = model.model_fields.get(str(*key))
    if field is None or get_origin(field.annotation) not in (Union, UnionType):
        return None
    same = [e for e in errors if e["loc"][:1] == key]
    if len(same) < 2:
        return None
    for e in same:
        e["loc"] = (*key, *e["loc"][2:])  # without the name of the type
    right_type = [e for e in same if len(e["loc"]) > 1 or e["type"] in (*_BOUNDS, "finite_number", "too_short")]
    if right_type:  # it has one of the types, but an invalid value
        return explained(right_type[0], model)
    kinds = [e["ctx"]["expected"] if e["type"] == "literal_error" else _KINDS.get(e["type"], e["msg"]) for e in same]
    return _key(key), f"must be {' or '.join(kinds)}, not {shown(same[0]['input'])}"


def _key(loc: tuple[Any, ...]) -> str:
    """A dotted key such as training.epoch. List entries are counted from 1."""
    entries = [f" (entry {part + 1})" for part in loc if isinstance(part, int)]
    names = [str(part) for part in loc if not isinstance(part, int) and part not in TAGS]
    return ".".join(names) + "".join(entries)


def _model_at(model: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel]:
    """The model that validates a place in a recipe."""
    for part in loc:
        if part in TAGS:  # which of several models it was: `model` is the first of them
            continue
        if part in model.model_fields:
            annotation = model.model_fields[part].annotation
            inner = [a for a in _types(annotation) if issubclass(a, BaseModel)]
            chosen = len(inner) > 1 and TAGS[1] in loc
            model = inner[1 if chosen else 0] if inner else model
    return model


def _types(annotation: Any) -> list[type]:
    """All classes in an annotation such as a list of them or a choice between them, in order."""
    if isinstance(annotation, type):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _types(argument)]


def shown(value: object) -> str:
    """A value as in a TOML file, shortened if it is long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
