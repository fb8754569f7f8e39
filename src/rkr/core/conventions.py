"""What other people's code expects of a network, and a network with tasks keeps up.

Training loops inspect the signature of `forward` to find out what to pass. transformers' models compute the loss
themselves, for as many classes as their configuration says. torch.func finds parameters by the path of a module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from rkr.core.state import TaskState

KINDS = inspect.Parameter


def forward_like(model: nn.Module, network: nn.Module) -> Callable[..., Any]:
    """The method `forward` of a model, which shows the parameters of its network's, and `tasks`."""
    function: Any = type(model).forward
    own = inspect.signature(function).parameters
    try:
        found = dict(inspect.signature(network.forward).parameters)
    except (TypeError, ValueError):  # of a C function
        return MethodType(function, model)
    rest = [found.pop(name) for name, p in list(found.items()) if p.kind is KINDS.VAR_KEYWORD]
    shown = [own["self"].replace(kind=KINDS.POSITIONAL_ONLY), *found.values()]
    shown += [own["tasks"]] if "tasks" not in found else []
    code = (function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    same: Any = FunctionType(*code)
    same.__kwdefaults__, same.__doc__ = function.__kwdefaults__, function.__doc__
    same.__signature__ = inspect.Signature([*shown, *rest])
    return MethodType(same, model)


def counting(network: nn.Module) -> list[Any]:
    """The parts of a network that have a number of classes, `num_labels`: modules and configurations."""
    parts = [part for module in network.modules() for part in (module, module.__dict__.get("config"))]
    known = {id(part): part for part in parts if _counts(part)}
    return list(known.values())


def _counts(part: Any) -> bool:
    try:
        return isinstance(getattr(part, "num_labels", None), int)
    except Exception:  # a property of the user's
        return False


_FIELDS = ("num_labels", "id2label", "label2id", "problem_type")  # the last one is set by the first call with labels


@contextmanager
def with_classes(parts: Sequence[Any], task: TaskState | None) -> Iterator[None]:
    """Let parts of a network have as many classes as a task, and then as many as before."""
    had = [{name: vars(part)[name] for name in _FIELDS if name in vars(part)} for part in parts]
    try:
        set_classes(parts, task)
        yield
    finally:
        for part, fields in zip(parts, had, strict=True):
            for name in _FIELDS:
                vars(part).pop(name, None)
            vars(part).update(fields)


def set_classes(parts: Sequence[Any], task: TaskState | None) -> None:
    """Let parts of a network have the classes of a task."""
    if task is None or task.classes is None:
        return
    for part in parts:
        part.num_labels = task.classes
        if task.class_names is not None and "id2label" in vars(part):
            part.id2label = dict(enumerate(task.class_names))
            part.label2id = {name: i for i, name in enumerate(task.class_names)}


# ---------------------------------------------------------------------------------------------------------
# torch.func


class Scope(nn.Module):
    """The tensors of a module whose names begin with a prefix, as if they were those of a submodule.

    Tasks keep "layer1.0.conv1.lm" in one flat dictionary; `torch.func.functional_call` walks along the dots.
    """

    def __init__(self, module: nn.Module, prefix: str) -> None:
        super().__init__()
        kept = {name: _Part(getattr(module, name), prefix) for name in ("_parameters", "_buffers")}
        self.__dict__.update(kept)

    def __getattr__(self, name: str) -> Any:
        return scoped(self, name) or super().__getattr__(name)


def scoped(module: nn.Module, name: str) -> Scope | None:
    """The scope of a name within a module, if any tensor has a name that begins so."""
    kept = vars(module).get("_parameters", {}), vars(module).get("_buffers", {})
    return Scope(module, f"{name}.") if any(key.startswith(f"{name}.") for part in kept for key in part) else None


class _Part(MutableMapping[str, Any]):
    """The items of a dictionary whose keys begin with a prefix, without it."""

    def __init__(self, whole: MutableMapping[str, Any], prefix: str) -> None:
        self.whole, self.prefix = whole, prefix

    def __getitem__(self, key: str) -> Any:
        return self.whole[self.prefix + key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.whole[self.prefix + key] = value

    def __delitem__(self, key: str) -> None:
        del self.whole[self.prefix + key]

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.whole if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
