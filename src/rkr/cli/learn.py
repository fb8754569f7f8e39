"""`rkr learn`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rkr.cli.console import watched
from rkr.cli.options import RESOURCES, SCHEDULE, WHAT, Json

EXAMPLES = (
    "rkr learn photos/birds --model zoo/",
    "rkr learn photos/flowers.csv --model zoo/ --task flowers --epochs 10",
    "rkr learn photos/ --model zoo2/ --backbone timm:resnet18.a1_in1k",
)
NETWORK = "Network and pictures (of a new model)"

Zoo = Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder, as made by `rkr learn`.")]
TaskName = Annotated[str | None, typer.Option("--task", help="Name of the task; can be left out if there is only one.")]


def learn(
    pictures: Annotated[
        Path,
        typer.Argument(
            metavar="PICTURES",
            help="Folder with one folder per class (also within train/ and val/), or a .csv or .jsonl file with the "
            "columns path and label.",
        ),
    ],
    model: Annotated[
        Path, typer.Option(metavar="DIR", help="Model folder; made if it does not exist.", rich_help_panel=WHAT)
    ],
    task: Annotated[
        str | None, typer.Option(help="Name of the task (default: that of PICTURES).", rich_help_panel=WHAT)
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Report what would be learned, the time and the size, and write nothing.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Network: efficientnet-lite0 (default), timm:NAME, torchvision:NAME, transformers:NAME or "
            "package.module:function.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(help="Height and width of pictures (default: the network's).", rich_help_panel=NETWORK),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="Name of the classification layer, for package.module:function (default: the last one).",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            help="Rank K of a new model (default: 4); 0 for a linear probe: frozen features and a new head.",
            rich_help_panel=SCHEDULE,
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Maximum number of epochs.", rich_help_panel=SCHEDULE)] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", rich_help_panel=SCHEDULE)] = None,
    batch: Annotated[int | None, typer.Option(help="Pictures per batch.", rich_help_panel=SCHEDULE)] = None,
    patience: Annotated[
        int | None,
        typer.Option(help="Epochs without better validation before training ends.", rich_help_panel=SCHEDULE),
    ] = None,
    validation: Annotated[
        float | None,
        typer.Option(help="Share of each class for validation, without a val/ folder.", rich_help_panel=SCHEDULE),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.", rich_help_panel=SCHEDULE)] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads for decoding and computing (default: all).", rich_help_panel=RESOURCES)
    ] = None,
    accelerator: Annotated[
        str, typer.Option(help="Device: auto, cpu, cuda or mps.", rich_help_panel=RESOURCES)
    ] = "auto",
    precision: Annotated[
        str | None,
        typer.Option(
            help="32-true or bf16-mixed (default: the latter on GPUs that have it).", rich_help_panel=RESOURCES
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Learn a task from a folder of your pictures. Run the command again to resume."""
    if precision == "bf16-mixed":
        from rkr.experiment.machine import avoid_broken_amx

        avoid_broken_amx()
    settings: dict[str, Any] = {
        "rank": rank,
        "epochs": epochs,
        "lr": lr,
        "batch": batch,
        "patience": patience,
        "validation": validation,
        "seed": seed,
    }
    arguments = None if head is None else {"head": head}
    from rkr.pictures.learn import learn as learn_task
    from rkr.pictures.learn import prepare
    from rkr.pictures.plan import plan

    if dry_run:
        request = prepare(pictures, model, task, backbone, arguments, size, settings)
        found = plan(request, accelerator, precision, threads)
        print(json.dumps(found.to_json(), indent=1) if json_ else found.in_words())
        return

    zoo = watched(
        json_,
        lambda watch: learn_task(
            pictures,
            model,
            task,
            backbone=backbone,
            arguments=arguments,
            size=size,
            accelerator=accelerator,
            precision=precision,
            threads=threads,
            watch=watch,
            **settings,
        ),
    )
    name = zoo.model.task
    assert name is not None
    record = zoo.tasks[name]
    if json_:
        print(json.dumps({"event": "learned", **record.to_json()}))
        return
    about = record.about
    kept = f"{record.pictures} pictures of {len(record.classes)} classes, {about['validation']} of them for validation"
    print(f"{name}: {kept}")
    for file in zoo.left_out:
        print(f"left out: {file}")
    if record.accuracy is not None:
        probe = about["probe"]
        beside = "" if probe is None else f" (a linear probe: {100 * probe:.1f} %)"
        print(f"validation accuracy {100 * record.accuracy:.1f} %{beside}")
    if about["kept"] == "probe" and about["settings"]["rank"]:
        print("training made validation no better: the linear probe is kept")
    print(f"saved in {model}: {record.nbytes / 1e6:.2f} MB; answers: rkr predict {model} PICTURES --task {name!r}")
