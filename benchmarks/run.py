"""`make bench`: all measurements, or the ones named (steps, overhead, serving, growth, memory, epochs, workers,
methods, zeroshot, fisher, pictures, served)."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import warnings
from pathlib import Path

import epochs
import fisher
import growth
import memory
import methods
import overhead
import pictures
import served
import serving
import steps
import torch
import zeroshot

SECTIONS = {
    "steps": steps.run,
    "overhead": overhead.run,
    "serving": serving.run,
    "growth": growth.run,
    "memory": memory.run,
    "epochs": epochs.run,
    "workers": epochs.workers,
    "methods": methods.run,
    "zeroshot": zeroshot.run,
    "fisher": fisher.run,
    "pictures": pictures.run,
    "served": served.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="default: all")
    parser.add_argument("--network", default="", help="only networks whose name contains this")
    parser.add_argument("--data", type=Path, help="where CIFAR-100 lies; $RKR_DATA or the user's cache else")
    parser.add_argument("--into", type=Path, help="a page whose listing of each section is replaced by what is printed")
    parser.add_argument("--here", action="store_true", help="the first section, in this process")
    arguments = parser.parse_args()
    if arguments.data:
        os.environ["RKR_DATA"] = str(arguments.data.absolute())
    names = arguments.sections or list(SECTIONS)
    if arguments.here:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        SECTIONS[names[0]](arguments.network)
        return
    for name in names:  # a process for each, so that none inherits another's memory
        command = [sys.executable, __file__, name, "--here", "--network", arguments.network]
        printed = [machine()]
        print(printed[0], flush=True)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                printed.append(line.rstrip())
        if process.returncode:
            sys.exit(process.returncode)
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
