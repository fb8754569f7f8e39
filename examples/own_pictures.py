"""Your own pictures: a folder with one folder per class becomes a task of a pretrained network.

python examples/own_pictures.py photos/colours photos/new zoo
"""

from __future__ import annotations

import sys

import rkr


def main(pictures: str = "photos/colours", new: str = "photos/new", folder: str = "zoo") -> None:
    zoo = rkr.learn(pictures, model=folder, epochs=3)  # run it again after an interruption: it continues
    (name,) = zoo.tasks
    learned = zoo.tasks[name]
    print(f"{name}: {len(learned.classes)} classes from {learned.pictures} pictures, {learned.nbytes} bytes")

    zoo = rkr.open(folder)  # later, in another process: the folder is all it needs
    for answer in zoo.predict(new, task=name, top=2):
        found = zip(answer.classes, answer.probabilities, strict=True)
        print(answer.path, ", ".join(f"{label} {100 * probability:.0f} %" for label, probability in found))


if __name__ == "__main__":
    main(*sys.argv[1:])
