"""`rkr export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rkr.cli.learn import Zoo
from rkr.errors import UsageError

EXAMPLES = ("rkr export zoo/ --task birds --to birds.onnx", "rkr export zoo/ --style all --to zoo.onnx")


def export(
    model: Zoo,
    to: Annotated[Path, typer.Option(metavar="FILE", help="The ONNX file to write.")],
    task: Annotated[
        list[str] | None, typer.Option(help="Name of a task; repeat it for several (default: all).")
    ] = None,
    style: Annotated[
        Literal["merged", "all", "adapter"],
        typer.Option(
            help="Style: merged (one task as a plain network), all (the base and every task, chosen by an input) or "
            "adapter (the base, with a task's tensors as inputs)."
        ),
    ] = "merged",
) -> None:
    """Write tasks of a model as an ONNX file, for programs without PyTorch."""
    from rkr.pictures.zoo import open_zoo

    zoo = open_zoo(model, device="cpu")
    names = [zoo.chosen(name) for name in task] if task else list(zoo.tasks)
    if style == "merged" and len(names) != 1:
        raise UsageError(f"--style merged writes one task, and {model} has {len(names)}: give --task, or --style all")
    zoo.export(to, names, style)
    print(f"{to}: {', '.join(names)}; input (N, 3, {zoo.preparation.size}, {zoo.preparation.size})")
