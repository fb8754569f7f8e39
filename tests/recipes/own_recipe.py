"""A recipe of a user's own, for tests to change."""

from collections.abc import Callable
from pathlib import Path

Write = Callable[..., Path]


def writer(folder: Path, base: str) -> Write:
    """Writes `base` to my.toml in a folder, with some of its text exchanged."""

    def made(*changes: tuple[str, str]) -> Path:
        text = base
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        path = folder / "my.toml"
        path.write_text(text)
        return path

    return made
