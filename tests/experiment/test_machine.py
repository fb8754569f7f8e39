"""Processors that announce what they cannot do."""

import os

import pytest

from rkr.experiment import machine


@pytest.mark.parametrize(
    ("announced", "dies", "wanted"), [(True, True, "AVX512_CORE_FP16"), (True, False, None), (False, True, None)]
)
def test_matrix_instructions_are_avoided_only_where_they_fail(
    announced: bool, dies: bool, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(machine.ISA, raising=False)
    monkeypatch.setattr(machine, "_announced", lambda feature: announced)
    monkeypatch.setattr(machine, "_dies", lambda code: dies)
    machine.avoid_broken_amx()
    assert os.environ.get(machine.ISA) == wanted
    monkeypatch.setenv(machine.ISA, "AVX2")  # a choice of the user's
    machine.avoid_broken_amx()
    assert os.environ[machine.ISA] == "AVX2"


def test_a_process_that_is_ended_by_a_signal() -> None:
    assert machine._dies("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert not machine._dies("raise SystemExit(3)")
    assert not machine._announced("no-such-feature")
