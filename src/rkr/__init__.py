"""Teach neural networks new tasks without forgetting the old ones.

Rectification-based Knowledge Retention (RKR; Singh, Mazumder, Rai, Namboodiri, CVPR 2021) for any PyTorch network.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rkr.errors import FileError, RkrError, UsageError

if TYPE_CHECKING:
    from rkr import networks
    from rkr.core.cost import Cost
    from rkr.core.export import export, export_adapter
    from rkr.core.model import RectifiedModel, load, rectify
    from rkr.core.options import Options
    from rkr.experiment.learned import load_learner
    from rkr.methods.learner import Learner
    from rkr.pictures.learn import learn
    from rkr.pictures.zoo import Zoo
    from rkr.pictures.zoo import open_zoo as open
    from rkr.registry import register
    from rkr.report.frame import results
    from rkr.serve.client import Client

__version__ = "0.1.0"
__all__ = [
    "Client",
    "Cost",
    "FileError",
    "Learner",
    "Options",
    "RectifiedModel",
    "RkrError",
    "UsageError",
    "Zoo",
    "export",
    "export_adapter",
    "learn",
    "load",
    "load_learner",
    "networks",
    "open",
    "rectify",
    "register",
    "results",
]

# Imported when first used: torch takes seconds, which `rkr --help` and reports should not have to wait for.
_PLACES = {
    "Client": "rkr.serve.client",
    "Cost": "rkr.core.cost",
    "Learner": "rkr.methods.learner",
    "Options": "rkr.core.options",
    "RectifiedModel": "rkr.core.model",
    "Zoo": "rkr.pictures.zoo",
    "export": "rkr.core.export",
    "export_adapter": "rkr.core.export",
    "learn": "rkr.pictures.learn",
    "load": "rkr.core.model",
    "load_learner": "rkr.experiment.learned",
    "open": "rkr.pictures.zoo:open_zoo",
    "rectify": "rkr.core.model",
    "register": "rkr.registry",
    "results": "rkr.report.frame",
}


def __getattr__(name: str) -> Any:
    if name == "networks":
        return import_module("rkr.networks")
    if name in _PLACES:
        module, _, attribute = _PLACES[name].partition(":")
        value = getattr(import_module(module), attribute or name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'rkr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
