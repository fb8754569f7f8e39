"""Peak memory of training above the built model, each case in a process of its own."""

from __future__ import annotations

import warnings
from pathlib import Path

from measure import alone

from rkr.experiment.jobs import Site

CASES = ("full", "naive", "peft", "rkr")


def rise(site: Site, name: str, cl: bool, case: str) -> float:
    """The rise of the peak resident size over a few steps, in MiB."""
    import torch
    from steps import SETTINGS, cases

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    setting = next(s for s in SETTINGS if s.name == name)
    step = cases(setting, cl, only=case)[case]
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of imports and building
    before = resident_kib("VmRSS")
    for _ in range(3):
        step()
    return (resident_kib("VmHWM") - before) / 2**10


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
            runs = [alone("memory:rise", name=setting.name, cl=bool(setting.head), case=case) for _ in range(3)]
            rises[case] = sorted(runs)[1]
        row = "  ".join(f"{case} {mib:.0f} ({mib / rises['full']:.2f})" for case, mib in rises.items())
        print(f"{setting.name:10} batch {setting.batch:<4} {row}", flush=True)
