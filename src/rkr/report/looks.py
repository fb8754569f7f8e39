"""The colour and the marker of each method: the same in every figure and on the report page, whatever else is shown.

Known methods have a fixed pair of a colour and a marker, no two the same. Any other name takes one of the pairs that
are left, by a hash of the name, so it too looks the same everywhere. Lines of one colour are dashed in different ways,
and so are those of one marker: no picture needs colours to be understood, and no line needs its marks to be followed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

# Okabe & Ito's palette, told apart by colour-blind readers; its yellow is too light for a line on white.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK = COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
DASHES: tuple[tuple[float, ...], ...] = (  # strokes and gaps, in widths of the line; none is a whole line
    (),
    (5, 2),
    (6, 2, 1.5, 2),
    (1.5, 1.5),
    (9, 3),
    (3, 1.5),
    (9, 2, 1.5, 2, 1.5, 2),
    (12, 2, 4, 2),
    (4, 2, 1.5, 2, 1.5, 2, 1.5, 2),
)
MARKERS = "osD^vPX*p"  # as matplotlib calls them: circle, square, diamond, triangles, plus, cross, star, pentagon


@dataclass(frozen=True)
class Look:
    """How a method is drawn."""

    colour: str
    marker: str

    @property
    def dashes(self) -> tuple[float, ...]:
        """How its lines are dashed: by the square of colours and markers that has no way twice in a row or column."""
        return DASHES[(COLOURS.index(self.colour) + MARKERS.index(self.marker)) % len(DASHES)]


KNOWN = {
    # RKR and its variants
    "rkr": Look(BLUE, "o"),
    "rkr-lite": Look(SKY, "s"),
    "rectify-only": Look(GREEN, "D"),
    "scale-only": Look(ORANGE, "^"),
    "rkr-random": Look(PURPLE, "v"),
    "rkr-k1": Look(SKY, "v"),
    "rkr-k4": Look(GREEN, "s"),
    "rkr-k8": Look(ORANGE, "D"),
    "rkr-k32": Look(PURPLE, "^"),
    # Reference points
    "finetune": Look(VERMILION, "X"),
    "separate": Look(BLACK, "s"),
    "joint": Look(GREEN, "P"),
    "head-only": Look(PURPLE, "D"),
    # Against forgetting
    "lwf": Look(BLUE, "P"),
    "si": Look(VERMILION, "v"),
    # Zero-shot tasks
    "base": Look(ORANGE, "p"),
    "sft": Look(VERMILION, "s"),
    "l1": Look(GREEN, "^"),
    "l2": Look(PURPLE, "X"),
    "lzsl": Look(SKY, "P"),
    "original": Look(BLACK, "D"),
    "ridge": Look(ORANGE, "v"),
    # The paper's other methods
    "apd": Look(GREEN, "o"),
    "ccll": Look(PURPLE, "o"),
    "den": Look(ORANGE, "o"),
    "eeil": Look(VERMILION, "p"),
    "ewc": Look(VERMILION, "^"),
    "icarl": Look(GREEN, "*"),
    "l2t": Look(BLACK, "v"),
    "pc": Look(SKY, "*"),
    "pgn": Look(PURPLE, "s"),
    "rcl": Look(SKY, "D"),
    "rps-net": Look(BLACK, "*"),
}
_LEFT = [look for marker in MARKERS for colour in COLOURS if (look := Look(colour, marker)) not in KNOWN.values()]


def look_of(method: str) -> Look:
    """The look of a method, from its name alone."""
    if method in KNOWN:
        return KNOWN[method]
    digest = hashlib.sha256(method.encode("utf-8", "surrogatepass")).digest()
    return _LEFT[int.from_bytes(digest[:4], "big") % len(_LEFT)]
