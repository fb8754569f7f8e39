"""Shell completion of names. It runs on every press of Tab, so it never imports torch or plug-ins."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rkr import registry

PACKAGE = Path(__file__).parents[1]
RECIPES = PACKAGE / "experiment" / "recipes"
EXHIBITS = PACKAGE / "report" / "paper"


def recipes(incomplete: str) -> list[str]:
    """Names of the recipes that come with the package, and .toml files and directories."""
    folder, _, start = incomplete.rpartition("/")
    here = Path(folder or ("/" if incomplete.startswith("/") else ".")).expanduser()
    prefix = f"{folder}/" if "/" in incomplete else ""
    found = [] if prefix else _starting(start, _stems(RECIPES))
    try:
        paths = sorted(here.iterdir())
    except OSError:
        return found
    for path in paths:
        if path.name.startswith(start) and not path.name.startswith("."):
            if path.is_dir():
                found.append(f"{prefix}{path.name}/")
            elif path.suffix == ".toml":
                found.append(f"{prefix}{path.name}")
    return found


def exhibits(incomplete: str) -> list[str]:
    """Names of the paper's tables and figures."""
    return _starting(incomplete, _stems(EXHIBITS))


def method(incomplete: str) -> list[str]:
    """The name of a method."""
    return _starting(incomplete, registry.names("method"))


def methods(incomplete: str) -> list[str]:
    """The last name of a comma-separated list of methods."""
    before, comma, last = incomplete.rpartition(",")
    return [
        f"{before}{comma}{name}" for name in _starting(last, registry.names("method")) if name not in before.split(",")
    ]


def networks(incomplete: str) -> list[str]:
    """The name of a network."""
    return _starting(incomplete, registry.names("network"))


def anything(incomplete: str) -> list[str]:
    """The name of a recipe, method, network or dataset."""
    return _starting(
        incomplete,
        [*_stems(RECIPES), *(name for kind in ("method", "network", "dataset") for name in registry.names(kind))],
    )


def _stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
