"""`rkr features`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rkr.cli.console import INTERRUPTED
from rkr.cli.options import OUTPUT, RESOURCES

EXAMPLES = (
    "rkr features photos --out features.mat",
    "rkr features photos --model my_networks:resnet --mean 0.485,0.456,0.406",
)
NETWORK = "Network and images"


def features(
    images: Annotated[
        Path, typer.Argument(metavar="IMAGES", help="Directory with one folder per class: IMAGES/<class>/<image>.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function that returns an nn.Module (default: EfficientNet-Lite0).",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    size: Annotated[
        int, typer.Option(help="Size of the centre crop in pixels, after resizing.", rich_help_panel=NETWORK)
    ] = 224,
    mean: Annotated[
        str | None,
        typer.Option(
            metavar="R,G,B",
            help="Channel means of pixels in 0 to 1 (default with --model: 0.485,0.456,0.406).",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option(
            metavar="R,G,B",
            help="Channel standard deviations (default with --model: 0.229,0.224,0.225).",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Images per batch.", rich_help_panel=RESOURCES)] = 64,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads for decoding and computing (default: all cores).", rich_help_panel=RESOURCES),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="MATLAB file to write.", rich_help_panel=OUTPUT)] = Path(
        "features.mat"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Compute features of your own images for zero-shot learning. Run the command again to resume."""
    from rkr.data.features import Options, extract, progress, three_numbers

    options = Options(
        model,
        size,
        None if mean is None else three_numbers("--mean", mean),
        None if std is None else three_numbers("--std", std),
        batch,
        threads,
        force,
    )
    try:
        with progress() as watch:
            found = extract(images, out, options, watch)
    except KeyboardInterrupt:
        print(INTERRUPTED)
        raise typer.Exit(130) from None  # 128 + SIGINT
    print(f"{out}: {found.images} images of {found.classes} classes, {found.width} features each")
