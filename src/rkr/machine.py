"""What a run was made with: the processor, and the commit of this package."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def processor() -> str:
    """What computes, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def commit() -> str | None:
    """The commit of this package's source, if it runs from a checkout; with "+" if something was changed since."""
    here = Path(__file__).parent
    try:  # a package installed somewhere inside another repository is not of that repository's commit
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
