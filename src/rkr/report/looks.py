"""The colour and the marker of each method: the same in every figure and on the report page, whatever else is shown.

Methods of published figures keep their pair of a colour and a marker. All other registered methods, those of plug-ins
included, get pairs of their own: no two are the same as long as there are any left. Other names, such as those that a
recipe gives to a method, take one of what is left by a hash. Lines of one colour are dashed in different ways, and so
are those of one marker: no picture needs colours to be understood, and no line needs its marks to be followed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache

from rkr import registry

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


PUBLISHED = {
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
    "finetune-bn": Look(SKY, "o"),
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
    "eft": Look(BLUE, "s"),
    "ewc": Look(VERMILION, "^"),
    "hnet": Look(SKY, "^"),
    "icarl": Look(GREEN, "*"),
    "l2t": Look(BLACK, "v"),
    "pc": Look(SKY, "*"),
    "pgn": Look(PURPLE, "s"),
    "rcl": Look(SKY, "D"),
    "rps-net": Look(BLACK, "*"),
}
EVERY = [Look(colour, marker) for marker in MARKERS for colour in COLOURS]


def look_of(method: str) -> Look:
    """The look of a method, from its name alone."""
    known = _registered()
    left = [look for look in EVERY if look not in known.values()] or EVERY
    return known.get(method) or left[_digest(method) % len(left)]


@cache
def _registered() -> dict[str, Look]:
    """The looks of all methods that have names in the registry, those of the package before those of plug-ins."""
    found = dict(PUBLISHED)
    for name in registry.names("method"):
        start = _digest(name)
        free = (look for i in range(len(EVERY)) if (look := EVERY[(start + i) % len(EVERY)]) not in found.values())
        if name not in found and len(found) < len(EVERY):
            found[name] = next(free)
    return found


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:4], "big")
