"""Checks of constructor arguments that every network shares."""

from rkr.errors import UsageError


def require_positive(**sizes: int) -> None:
    """Raise UsageError for the first size below one, by its argument's name."""
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name} must be at least 1, but is {size}.")
