"""Peak memory of training above the built model, each case in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CASES = ("full", "naive", "peft", "rkr")


def measure_here(name: str, cl: bool, case: str) -> None:
    """Print the rise of the peak resident size over a few steps, in MiB."""
    import torch
    from steps import SETTINGS, cases

    torch.set_num_threads(1)
    setting = next(s for s in SETTINGS if s.name == name)
    step = cases(setting, cl, only=case)[case]
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of imports and building
    before = resident_kib("VmRSS")
    for _ in range(3):
        step()
    print((resident_kib("VmHWM") - before) / 2**10)


def resident_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def run(only: str = "") -> None:
    """Print the table."""
    from steps import SETTINGS

    print("peak memory of training above the built model (MiB, and relative to full fine-tuning)")
    for setting in SETTINGS:
        if only not in setting.name:
            continue
        rises = {}
        for case in CASES:
            command = [sys.executable, "-W", "ignore", __file__, setting.name, "1" if setting.head else "0", case]
            runs = [float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
            rises[case] = sorted(runs)[1]
        row = "  ".join(f"{case} {mib:.0f} ({mib / rises['full']:.2f})" for case, mib in rises.items())
        print(f"{setting.name:10} batch {setting.batch:<4} {row}", flush=True)


if __name__ == "__main__":
    measure_here(sys.argv[1], sys.argv[2] == "1", sys.argv[3])
