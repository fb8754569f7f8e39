"""Asks a server for the classes of pictures. Start one first: rkr serve zoo/

python examples/serving_client.py http://127.0.0.1:8000 photos/new/red.png photos/new/blue.png
"""

from __future__ import annotations

import sys

import rkr


def main(url: str = "http://127.0.0.1:8000", *pictures: str) -> None:
    client = rkr.Client(url)
    for found in client.predict(pictures or ["photos/new/red.png"], task="auto"):
        (best, *_) = found["answers"] or [{"class": "none of the tasks", "probability": 0}]
        print(f"{found['picture']}: {best['class']} ({found['task']}, {100 * best['probability']:.0f} %)")


if __name__ == "__main__":
    main(*sys.argv[1:])
