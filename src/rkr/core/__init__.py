"""Networks with tasks: the rectified layers, their tasks, files and cost. Knows torch and no other part of the package.

Users get `rectify`, `load`, `RectifiedModel`, `Options` and `Cost` from `rkr` itself. Methods import the names below
from `rkr.core`, and nothing from its modules.

A network and its tasks
    `RectifiedModel`: a network with tasks; `rectify` and `load` make one.
    `Options`: which layers tasks update, and what becomes of normalisation.
    `TaskState`: one task's tensors, by name.
    `read_about`, `read_task_about`: what a model folder or a task file says about itself, without a network.
    `ModelAbout`, `TaskAbout`: what they return.
    `add_task_file`, `drop_task`, `rename_task`: change a model folder without a network.
    `Changes`: what `model.follow` returns. `View`: what `model.for_task` returns.
    `Cost`, `multiply_adds`: what tasks and networks cost.

How tasks update layers
    `LayerUpdate`: what a task has at a layer and computes with it. Methods subclass it.
    `Rectification`: RKR's.
    `TargetLayer`, `Adapter`: a layer that tasks change; an adapter is one whose weight they update.
    `NormLayer`: a normalisation layer that tasks change.

Layers of networks
    `register_layer`: adds a kind of layer.
    `is_standard`: whether a module is a Linear or a convolution, which every method can update.
    `BATCH_NORMS`, `CONVS`: torch's classes of such layers.
    `norm_parameters`: the affine parameters of a network's normalisation layers.
    `convolve`: what a convolution computes with another weight.
    `Tracer`: a torch.fx tracer that keeps layers whole.
    `original_class`: the class of a module before its network was rectified.

Names and versions of tensors
    `join`: the dotted name of a tensor at a layer.
    `STATISTICS`, `is_statistic`: names of running statistics.
    `version_key`: changes whenever a tensor is replaced or written to.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rkr.core.about import ModelAbout, TaskAbout
    from rkr.core.adapters import is_standard, register_layer
    from rkr.core.adapters.base import Adapter, TargetLayer, join
    from rkr.core.adapters.conv import CONVS, convolve
    from rkr.core.adapters.norm import BATCH_NORMS, NormLayer, norm_parameters
    from rkr.core.cost import Cost, multiply_adds
    from rkr.core.exchange import original_class
    from rkr.core.files import read_task_about
    from rkr.core.index import Changes
    from rkr.core.model import RectifiedModel, load, rectify
    from rkr.core.options import Options
    from rkr.core.rowwise import Tracer
    from rkr.core.state import STATISTICS, TaskState, is_statistic, version_key
    from rkr.core.updates import LayerUpdate, Rectification
    from rkr.core.views import View
    from rkr.core.zoo import add_task_file, drop_task, read_about, rename_task

__all__ = [
    "BATCH_NORMS",
    "CONVS",
    "STATISTICS",
    "Adapter",
    "Changes",
    "Cost",
    "LayerUpdate",
    "ModelAbout",
    "NormLayer",
    "Options",
    "Rectification",
    "RectifiedModel",
    "TargetLayer",
    "TaskAbout",
    "TaskState",
    "Tracer",
    "View",
    "add_task_file",
    "convolve",
    "drop_task",
    "is_standard",
    "is_statistic",
    "join",
    "load",
    "multiply_adds",
    "norm_parameters",
    "original_class",
    "read_about",
    "read_task_about",
    "rectify",
    "register_layer",
    "rename_task",
    "version_key",
]

# Imported at first use, because torch takes seconds to import.
_MODULES = {
    "about": ("ModelAbout", "TaskAbout"),
    "adapters": ("is_standard", "register_layer"),
    "adapters.base": ("Adapter", "TargetLayer", "join"),
    "adapters.conv": ("CONVS", "convolve"),
    "adapters.norm": ("BATCH_NORMS", "NormLayer", "norm_parameters"),
    "cost": ("Cost", "multiply_adds"),
    "exchange": ("original_class",),
    "files": ("read_task_about",),
    "index": ("Changes",),
    "model": ("RectifiedModel", "load", "rectify"),
    "options": ("Options",),
    "rowwise": ("Tracer",),
    "state": ("STATISTICS", "TaskState", "is_statistic", "version_key"),
    "updates": ("LayerUpdate", "Rectification"),
    "views": ("View",),
    "zoo": ("add_task_file", "drop_task", "read_about", "rename_task"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'rkr.core' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"rkr.core.{_PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
