"""`make bench`: all measurements, or the ones named (steps, overhead, serving, growth, memory, epochs, workers,
methods, zeroshot, fisher, pictures, served, cluster)."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import torch
from measure import alone
from sections import SECTIONS, measure

from rkr.experiment.jobs import Site


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="default: all")
    parser.add_argument("--network", default="", help="only networks whose name contains this")
    parser.add_argument("--data", type=Path, help="where CIFAR-100 lies; $RKR_DATA or the user's cache else")
    parser.add_argument("--into", type=Path, help="a page whose last code block is replaced by what is printed")
    parser.add_argument("--cluster", metavar="ADDRESS", help="measure on a node of this Ray cluster")
    arguments = parser.parse_args()
    if arguments.data:
        os.environ["RKR_DATA"] = str(arguments.data.absolute())
    names = arguments.sections or list(SECTIONS)
    if len(names) == 1 and not arguments.cluster:
        measure(Site(), names[0], arguments.network)
        return
    printed = [f"{machine()}, torch {torch.__version__}, 1 thread, CPU time, interleaved medians"]
    print(printed[0], flush=True)
    for name in names:  # one at a time, which is how times are measured
        text = alone("sections:measure", arguments.cluster, name=name, network=arguments.network)
        print("\n" + text, end="", flush=True)
        printed += ["", *text.splitlines()]
    if arguments.into:
        page = arguments.into.read_text("utf-8")
        kept = page[: page.rindex("```", 0, page.rindex("```"))]
        arguments.into.write_text(kept + "```text\n" + "\n".join(printed) + "\n```\n", "utf-8")


def machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{model}, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
