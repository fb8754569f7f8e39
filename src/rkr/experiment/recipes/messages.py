"""What is wrong with a recipe, in words: the key as it stands in the file, what may stand there, what was meant."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails, PydanticCustomError

from rkr.errors import UsageError

_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "tuple_type": "a list in brackets",
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
    """A question after a typo, "; did you mean 'epochs'?", or nothing if nothing allowed is close."""
    close = get_close_matches(str(given), list(allowed), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def choose(given: object, allowed: Iterable[str]) -> str:
    """A hint and all that is allowed, to follow after what is wrong."""
    names = list(allowed)
    hint = meant(given, names)
    return f"{hint or ';'} {'Choose' if hint else 'choose'} one of {', '.join(names)}"


@contextmanager
def in_words(model: type[BaseModel], where: str = "") -> Iterator[None]:
    """Turn pydantic's errors about a model into one UsageError; `where` names the file."""
    try:
        yield
    except ValidationError as error:
        found = _most_telling(error.errors(include_url=False))
        key, text = explained(found[0], model)
        more = f" ({len(found) - 1} more to mend)" if len(found) > 1 else ""
        raise UsageError(": ".join(filter(None, [where, key, text])) + more) from None


def _most_telling(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Keys that do not exist come first, and what is missing because its key is misspelt is no error of its own."""
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
    """The key of an error as a user sees it, and what is wrong there."""
    kind, loc, given = error["type"], error["loc"], shown(error["input"])
    context = error.get("ctx", {})
    if kind == "recipe":
        return _key((*loc, *filter(None, [context["key"]]))), context["text"]
    if kind == "missing":
        text = "is missing"
    elif kind == "extra_forbidden":
        keys = [name for name in _model_at(model, loc[:-1]).model_fields if name != "name" or len(loc) > 1]
        hint = meant(loc[-1], keys)
        text = f"no such key{hint or ';'} {'The' if hint else 'the'} keys here are {', '.join(keys)}"
    elif kind == "literal_error":
        allowed = [part.strip("' ") for part in context["expected"].replace(" or ", ", ").split(",")]
        text = f"must not be {given}{choose(error['input'], allowed)}"
    elif kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        text = f"must be {words} {context[name]:g}, not {given}"
    elif kind == "too_short":
        text = "must not be empty"
    elif kind == "is_instance_of" and context["class"] == "Sequence":
        text = f"must be {_KINDS['tuple_type']}, not {given}"
    elif kind in _KINDS:
        text = f"must be {_KINDS[kind]}, not {given}"
    else:
        text = error["msg"]
    return _key(loc), text


def explained_choice(errors: list[ErrorDetails], model: type[BaseModel]) -> tuple[str, str]:
    """As `explained`, of the first key with errors; where it may be one of several types, pydantic has one of each."""
    key = errors[0]["loc"][0]
    same = [e for e in errors if e["loc"][0] == key]
    if get_origin(model.model_fields[str(key)].annotation) not in (Union, UnionType) or len(same) < 2:
        return explained(errors[0], model)
    for e in same:
        e["loc"] = (key, *e["loc"][2:])  # without the name of the type
    inside = next((e for e in same if len(e["loc"]) > 1), None)  # it is of that type, but for something in it
    if inside is not None:
        return explained(inside, model)
    kinds = [_KINDS.get(e["type"], e["msg"]) for e in same]
    return _key((key,)), f"must be {' or '.join(kinds)}, not {shown(same[0]['input'])}"


def _key(loc: tuple[Any, ...]) -> str:
    """training.epoch; entries of a list are counted from 1, as people do."""
    entries = [f" (entry {part + 1})" for part in loc if isinstance(part, int)]
    names = [str(part) for part in loc if not isinstance(part, int) and part not in TAGS]
    return ".".join(names) + "".join(entries)


def _model_at(model: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel]:
    """The model that a place in a recipe is read into."""
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
    """A value as it would stand in a TOML file, not too long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_values(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any], prefix: str = "") -> None:
    """In a validator: refuse values of another type than a function's parameters have; their names are right."""
    fields: dict[str, Any] = {name: (parameters[name].annotation, ...) for name in given}
    model = create_model("Values", __config__=ConfigDict(strict=True, allow_inf_nan=False), **fields)
    try:
        model.model_validate(dict(given))
    except ValidationError as error:
        key, text = explained_choice(error.errors(), model)
        raise problem(prefix + key, text) from None
