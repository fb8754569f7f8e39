"""Errors and warnings that the package raises on purpose."""


class RkrError(Exception):
    """Base class of the package's errors. The message says what is wrong and what to do."""


class UsageError(RkrError, ValueError):
    """A call is invalid: a bad argument, an unknown task, or a step out of order."""


class FileError(RkrError):
    """A file is missing, damaged or of another kind. The model in memory is unchanged."""


class DataWarning(UserWarning):
    """The data can be used, but perhaps not as intended."""


class PluginWarning(UserWarning):
    """A plug-in cannot be used. Everything else works."""
