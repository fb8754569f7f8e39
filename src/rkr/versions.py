"""Versions of the files that rkr writes.

Each format has its own version, so a change to one leaves files of the others readable:

| format | files | version | constant |
|---|---|---|---|
| rkr-task | task files | 1 | `rkr.core.files.TASK` |
| rkr-base | base of a model folder | 1 | `rkr.core.zoo.BASE` |
| rkr-zoo | `zoo.json` of a model folder, and its journal | 2 | `rkr.core.index.ZOO` |
| rkr-state | `state.safetensors` and `candidates/` of a run folder | 1 | `rkr.experiment.state.STATE` |
| rkr-results | `run.json` of a run folder, for all of its JSON files | 3 | `rkr.experiment.results.RUN_FORMAT` |
| rkr-learner | `learner.safetensors` of a run folder | 2 | `rkr.methods.learner_file.LEARNER` |
| rkr-features | the folder `<file>.part` of `rkr features` | 1 | `rkr.data.features.parts.PARTS` |

To change a format, increase its version and add a function to `upgrades` that converts content of the previous version.
Then keep a file of the previous version with `tests/formats/make.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rkr.errors import FileError


@dataclass(frozen=True)
class Format:
    """One file format.

    Attributes:
        name: How files state their format, such as "rkr-task".
        version: The version that is written.
        upgrades: For each older version that can be read, a function from its content to that of the next version.
    """

    name: str
    version: int
    upgrades: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)

    @property
    def stated(self) -> dict[str, str]:
        """What files state about themselves."""
        return {"format": self.name, "version": str(self.version)}

    def upgraded(self, path: str | os.PathLike[str], version: Any, content: Any) -> Any:
        """Content of any version that can be read, as content of the current version."""
        found = self.check(path, version)
        while found < self.version:
            content = self.upgrades[found](content)
            found += 1
        return content

    def check(self, path: str | os.PathLike[str], version: Any) -> int:
        """The version as a number. Raise FileError if this version of rkr cannot read it.

        Args:
            path: The file, for the message.
            version: What the file states: a whole number, or one in digits.
        """
        found = int(version) if isinstance(version, str) and re.fullmatch("[1-9][0-9]{0,8}", version) else version
        oldest = min([self.version, *self.upgrades])
        reads = f"version {oldest}" if oldest == self.version else f"versions {oldest} to {self.version}"
        if type(found) is not int or found < oldest:
            raise FileError(
                f"{path}: format version {version!r} is unknown; this version of rkr reads {reads} of {self.name}: "
                "restore the file from a backup, or write it again"
            )
        if found > self.version:
            raise FileError(
                f"{path}: format version {found} of {self.name}, but this version of rkr reads {reads}: upgrade rkr"
            )
        return found
