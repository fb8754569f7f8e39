"""`make bench`: all measurements, or the ones named (steps, overhead, serving, growth, memory, epochs, workers,
methods, zeroshot, fisher, pictures, served, cluster)."""

from __future__ import annotations

import argparse
import os
import platform
import re
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
    parser.add_argument("--into", type=Path, help="a page whose listing of each section is replaced by what is printed")
    parser.add_argument("--cluster", metavar="ADDRESS", help="measure on a node of this Ray cluster")
    arguments = parser.parse_args()
    if arguments.data:
        os.environ["RKR_DATA"] = str(arguments.data.absolute())
    names = arguments.sections or list(SECTIONS)
    if len(names) == 1 and not arguments.cluster and not arguments.into:
        print(machine(), flush=True)
        measure(Site(), names[0], arguments.network)
        return
    for name in names:  # one at a time, which is how times are measured
        printed = [machine()]
        print(printed[0], flush=True)
        text = alone("sections:measure", arguments.cluster, name=name, network=arguments.network)
        print(text, end="\n\n", flush=True)
        printed += text.splitlines()
        if arguments.into:
            put(arguments.into, name, printed)


def put(path: Path, name: str, lines: list[str]) -> None:
    """Replace the listing of a section in a page: what follows a line with its name. Without one it comes last."""
    page = path.read_text("utf-8")
    listing = f"`{name}`\n\n```text\n" + "\n".join(lines) + "\n```\n"
    had = re.compile(rf"^`{name}`\n(?:\n```text\n.*?\n```\n)?", re.MULTILINE | re.DOTALL)
    found = had.search(page)
    page = f"{page}\n{listing}" if found is None else page[: found.start()] + listing + page[found.end() :]
    path.write_text(page, "utf-8")


def machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    load = f", load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else ""
    return f"{model}, Python {platform.python_version()}, torch {torch.__version__}, one thread{load}"


if __name__ == "__main__":
    main()
