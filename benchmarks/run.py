"""`make bench`: all measurements, or the ones named on the command line (steps, serving, growth, memory)."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import warnings

import growth
import memory
import serving
import steps
import torch

SECTIONS = {"steps": steps.run, "serving": serving.run, "growth": growth.run, "memory": memory.run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="default: all")
    parser.add_argument("--network", default="", help="only networks whose name contains this")
    arguments = parser.parse_args()
    names = arguments.sections or list(SECTIONS)
    if len(names) > 1:  # a process for each, so that none inherits another's memory
        print(f"torch {torch.__version__}, Python {platform.python_version()}, 1 thread, CPU time, interleaved medians")
        for name in names:
            print(flush=True)
            command = [sys.executable, __file__, name, "--network", arguments.network]
            subprocess.run(command, check=True)
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    SECTIONS[names[0]](arguments.network)


if __name__ == "__main__":
    main()
