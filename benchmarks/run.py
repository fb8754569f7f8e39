"""`make bench`: all measurements, or the ones named (steps, overhead, serving, growth, memory, epochs, workers,
methods, zeroshot, fisher, pictures, served)."""

from __future__ import annotations

import argparse
import os
import platform
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
    parser.add_argument("--into", type=Path, help="a page whose last code block is replaced by what is printed")
    arguments = parser.parse_args()
    if arguments.data:
        os.environ["RKR_DATA"] = str(arguments.data.absolute())
    names = arguments.sections or list(SECTIONS)
    if len(names) == 1:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        SECTIONS[names[0]](arguments.network)
        return
    printed = [f"{machine()}, torch {torch.__version__}, 1 thread, CPU time, interleaved medians"]
    print(printed[0], flush=True)
    for name in names:  # a process for each, so that none inherits another's memory
        command = [sys.executable, __file__, name, "--network", arguments.network]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in ["\n", *process.stdout]:
                print(line, end="", flush=True)
                printed.append(line.rstrip())
        if process.returncode:
            sys.exit(process.returncode)
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
