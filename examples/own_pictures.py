"""Your own pictures: a folder with one folder per class becomes a task of a pretrained network.

python examples/draw_pictures.py photos
python examples/own_pictures.py photos/colours photos/new colours-zoo
"""

from __future__ import annotations

import sys
from pathlib import Path

import rkr


def main(pictures: str = "photos/colours", new: str = "photos/new", folder: str = "colours-zoo") -> None:
    name = Path(pictures).stem
    zoo = rkr.learn(pictures, model=folder, task=name, epochs=3)  # run it again after an interruption: it continues
    learned = zoo.tasks[name]
    print(f"{name}: {len(learned.classes)} classes from {learned.pictures} pictures, {learned.nbytes} bytes")

    zoo = rkr.open(folder)  # later, in another process: the folder is all it needs
    for answer in zoo.predict(new, task=name, top=2):
        found = zip(answer.classes, answer.probabilities, strict=True)
        print(answer.path, ", ".join(f"{label} {100 * probability:.0f} %" for label, probability in found))


if __name__ == "__main__":
    main(*sys.argv[1:])
