"""`rkr push` and `rkr pull`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rkr.cli.learn import Zoo

PUSH_EXAMPLES = ("rkr push zoo/ birds me/birds", "rkr push zoo/ birds --folder birds-repository/")
PULL_EXAMPLES = ("rkr pull me/birds --model zoo/", "rkr pull birds-repository/ --model zoo/ --task birds")


def push(
    model: Zoo,
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of the task.")],
    repository: Annotated[
        str | None,
        typer.Argument(metavar="[OWNER/NAME]", help="Repository of the Hugging Face Hub; made if necessary."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the repository's files to a folder instead.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    licence: Annotated[
        str | None, typer.Option(help="Licence for the card, such as apache-2.0 (default: that of the base).")
    ] = None,
) -> None:
    """Share a task on the Hugging Face Hub, with a model card."""
    from rkr.pictures.hub import push as push_task
    from rkr.pictures.zoo import open_zoo

    print(push_task(open_zoo(model, device="cpu"), task, repository, folder, private=private, licence=licence))


def pull(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="OWNER/NAME on the Hugging Face Hub, or a folder written by `push`.")
    ],
    model: Annotated[Path, typer.Option(metavar="DIR", help="Model folder; made if it does not exist.")],
    task: Annotated[str | None, typer.Option(help="Another name for the task.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the repository.")] = None,
) -> None:
    """Add a task from the Hugging Face Hub to a model with the same base."""
    from rkr.pictures.hub import pull as pull_task

    zoo, name = pull_task(source, model, task, revision)
    print(f"{model}: has {name!r} now, with {len(zoo.tasks[name].classes)} classes")
