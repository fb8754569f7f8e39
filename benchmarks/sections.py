"""The sections of `benchmarks/run.py`, and the job that measures one."""

from __future__ import annotations

import io
import sys
import warnings
from contextlib import redirect_stdout

import cluster
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

from rkr.experiment.jobs import Site

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
    "cluster": cluster.run,
}


class _Copied(io.StringIO):
    """Keeps what is printed, and prints it."""

    def __init__(self) -> None:
        super().__init__()
        self._out = sys.stdout

    def write(self, text: str) -> int:
        self._out.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._out.flush()


def measure(site: Site, name: str, network: str) -> str:
    """Measure a section: what it prints."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with redirect_stdout(_Copied()) as printed:
        SECTIONS[name](network)
    return printed.getvalue()
