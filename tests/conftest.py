"""What tests of several folders use."""

import signal
import sys
from collections.abc import Callable

import hypothesis
import pytest

from rkr import cli
from rkr.experiment.machine import avoid_broken_amx

avoid_broken_amx()  # in processes that tests start too
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell, which commands would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("untimed", deadline=None)  # machines are slow at times
hypothesis.settings.load_profile("untimed")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Exit code, stdout and stderr of `rkr words`, in this process."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rkr", *words])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, out, err

    return run
