"""Shell completion of names. It runs on every press of Tab, so it only lists files and never imports torch."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
RECIPES = PACKAGE / "experiment" / "recipes"
EXHIBITS = PACKAGE / "report" / "paper"

# The registries import torch, so their names are repeated here. A test compares the two.
METHODS = (
    *("rkr", "rkr-lite", "rectify-only", "scale-only", "rkr-k1", "rkr-k4", "rkr-k8", "rkr-k32", "rkr-random"),
    *("finetune", "finetune-bn", "separate", "joint", "head-only", "l2t", "ewc", "si", "pc", "lwf", "icarl", "eeil"),
    *("rps-net", "pgn", "den", "rcl", "ccll", "eft", "hnet", "apd"),
    *("base", "sft", "l1", "l2", "lzsl", "original", "ridge"),
)
NETWORKS = ("lenet", "resnet18", "resnet32", "digits-net", "cada-vae")


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
    return _starting(incomplete, METHODS)


def methods(incomplete: str) -> list[str]:
    """The last name of a comma-separated list of methods."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _starting(last, METHODS) if name not in before.split(",")]


def networks(incomplete: str) -> list[str]:
    """The name of a network."""
    return _starting(incomplete, NETWORKS)


def anything(incomplete: str) -> list[str]:
    """The name of a recipe, method or network."""
    return _starting(incomplete, [*_stems(RECIPES), *METHODS, *NETWORKS])


def _stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def _starting(incomplete: str, names: list[str] | tuple[str, ...]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
