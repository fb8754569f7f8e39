"""The environment of a run: the processor, its defects, and the commit of this package."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ISA = "ONEDNN_MAX_CPU_ISA"  # the newest instructions that torch's kernels may use, for oneDNN
TRIAL = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"


def avoid_broken_amx() -> None:
    """Keep torch from matrix instructions (AMX) that the processor reports but cannot execute.

    On some virtual machines bfloat16 computations crash because of them. Call this before torch computes anything.
    """
    if ISA not in os.environ and _announced("amx_bf16") and _dies(TRIAL):
        os.environ[ISA] = "AVX512_CORE_FP16"


def _announced(feature: str) -> bool:
    try:
        return feature in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False


def _dies(code: str) -> bool:
    """Whether a process that runs this code is killed by a signal."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode < 0


def processor() -> str:
    """The processor, as far as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def commit() -> str | None:
    """The commit of this package's source, if it runs from a checkout; with "+" if there are local changes."""
    here = Path(__file__).parent
    try:  # the package may be installed inside another repository
        subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True, check=True)
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude", "*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def environment() -> dict[str, Any]:
    """Versions, processor and commit, for the record of a run."""
    import torch

    import rkr

    return {
        "versions": {"rkr": rkr.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"processor": processor(), "threads": torch.get_num_threads()},
        "commit": commit(),
    }
