"""The state of a run in one file: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rkr.atomic import write_atomic
from rkr.errors import FileError
from rkr.experiment.state import load_state, save_state

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
DTYPES += (torch.int8, torch.uint8, torch.bool, torch.complex64)


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


def through(folder: Path, state: Any) -> Any:
    save_state(folder / "state.safetensors", state)
    return load_state(folder / "state.safetensors")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_of_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (3, 4, 2)).to(dtype)
    found = through(tmp_path, {"a": values, "none": torch.empty(0, 3, dtype=dtype), "one": values[0, 0, 0]})
    assert found["a"].dtype == dtype
    assert torch.equal(found["a"], values)
    assert found["none"].shape == (0, 3)
    assert found["one"].shape == ()


def test_bits_are_kept(tmp_path: Path) -> None:
    strange = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45, 1 / 3])
    assert torch.equal(through(tmp_path, [strange])[0].view(torch.int32), strange.view(torch.int32))


def test_a_tree(tmp_path: Path) -> None:
    tree = {
        0: {"momentum": None, 1: [1, 2.5, True, False, "text"], "": {}},
        "floats": [math.inf, -math.inf, 1 / 3, 5e-324, -0.0, 1e300],
        "t": {"d": [], "l": {"t": 3}},  # the words that the file itself uses
        "nested": [[[]], {"a": {2: [torch.ones(2)]}}],
        "large": 2**70,
    }
    found = through(tmp_path, tree)
    assert torch.equal(found["nested"][1]["a"][2].pop(), torch.ones(2))
    tree["nested"][1]["a"][2].pop()  # type: ignore[index]
    assert found == tree
    assert repr(found) == repr(tree)  # 1 is not True, -0.0 is not 0.0
    assert math.isnan(through(tmp_path, {"x": math.nan})["x"])


def test_tuples_become_lists(tmp_path: Path) -> None:
    assert through(tmp_path, {"betas": (0.9, 0.999)}) == {"betas": [0.9, 0.999]}


def test_shared_memory_and_layouts(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(1, 4, 2, 3)
    parts = {"whole": whole, "again": whole, "row": whole[0, 1], "step": whole[:, ::2], "turned": whole.transpose(1, 3)}
    parts["last"] = whole.contiguous(memory_format=torch.channels_last)
    parts["wide"] = whole[:1, :1, :1].expand(3, 2, 2, 3)
    found = through(tmp_path, parts)
    assert all(torch.equal(found[key], value) for key, value in parts.items())
    found["whole"].zero_()
    assert torch.equal(found["again"], whole)


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
trees = st.recursive(
    leaves, lambda t: st.lists(t, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=3), t, max_size=3)
)


@given(tree=trees)
@settings(max_examples=40, deadline=None)
def test_any_tree(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    assert repr(through(tmp_path_factory.getbasetemp(), tree)) == repr(tree)


def test_what_it_cannot_hold_is_refused_before_writing(tmp_path: Path) -> None:
    save_state(tmp_path / "s", {"a": 1})
    with pytest.raises(TypeError, match="cannot contain set"):
        save_state(tmp_path / "s", {"a": {1, 2}})
    assert load_state(tmp_path / "s") == {"a": 1}


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_state(path, {"weights": torch.arange(6.0), "lr": 0.1})
    data = path.read_bytes()
    harmless = 0
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        try:
            found = load_state(path)
        except FileError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:  # white space within the header
            harmless += 1
            assert torch.equal(found["weights"], torch.arange(6.0))
            assert found["lr"] == 0.1
    assert harmless < 8
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(FileError, match=str(path)):
            load_state(path)


def test_another_kind_of_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        load_state(tmp_path / "none")
    write_atomic(tmp_path / "text", b"hello")
    with pytest.raises(FileError, match="safetensors"):
        load_state(tmp_path / "text")
