"""`make bench`: all measurements, or the ones named on the command line (steps, serving, growth, memory)."""

from __future__ import annotations

import argparse
import platform
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
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, 1 thread, CPU time, interleaved medians")
    for name in arguments.sections or SECTIONS:
        print()
        SECTIONS[name](arguments.network)


if __name__ == "__main__":
    main()
