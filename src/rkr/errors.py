"""Every error that the package raises on purpose, and what it warns of."""


class RkrError(Exception):
    """Base of all errors of the package; its message says what is wrong and what to do."""


class UsageError(RkrError, ValueError):
    """The call cannot mean anything: a bad argument, an unknown task, a step out of order."""


class FileError(RkrError):
    """A file is missing, damaged or made for something else. The model in memory is unchanged."""


class DataWarning(UserWarning):
    """Data that can be used, but perhaps not as they were meant."""
