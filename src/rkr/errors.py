"""Errors and warnings that the package raises on purpose."""


class RkrError(Exception):
    """Base class of the package's errors. The message says what is wrong and what to do.

    Example:
        >>> import rkr
        >>> try:
        ...     rkr.load("no-such-folder", rkr.networks.small_cnn())
        ... except rkr.RkrError as error:
        ...     print(type(error).__name__)
        FileError
    """


class UsageError(RkrError, ValueError):
    """A call is invalid: a bad argument, an unknown task, or a step out of order.

    Example:
        >>> import rkr
        >>> rkr.Options(rank=0)
        Traceback (most recent call last):
        ...
        rkr.errors.UsageError: ...
    """


class FileError(RkrError):
    """A file is missing, damaged or of another kind. The model in memory is unchanged.

    Example:
        >>> import rkr
        >>> model = rkr.rectify(rkr.networks.small_cnn(), head="fc")
        >>> model.load_task("no-such-file.safetensors")
        Traceback (most recent call last):
        ...
        rkr.errors.FileError: ...
    """


class DataWarning(UserWarning):
    """The data can be used, but perhaps not as intended."""


class PluginWarning(UserWarning):
    """A plug-in cannot be used. Everything else works."""
