"""What the training loop asks of a device, and of a learner before it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import execute, make_case
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rkr.errors import UsageError
from rkr.experiment.loop import loss_and_hits
from rkr.methods import Method
from rkr.methods.finetune import Finetune
from rkr.methods.learner import Outcome


class WithoutFloat64(TorchFunctionMode):
    """As if the device had no float64, like Apple's: only what `cpu` has returned may become one."""

    def __init__(self) -> None:
        super().__init__()
        self.home: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is Tensor.cpu:
            self.home.append(found)
        elif isinstance(found, Tensor) and found.dtype == torch.float64:
            assert any(one is args[0] for one in self.home)
        return found


@pytest.mark.parametrize("correct", [torch.tensor(7), torch.tensor(7.0), None])
def test_loss_and_hits(correct: Tensor | None) -> None:
    loss = torch.tensor(0.1, requires_grad=True)
    with WithoutFloat64() as device:
        found = loss_and_hits(Outcome(loss, correct))
    assert found.dtype == torch.float64
    assert found[0].item() == torch.tensor(0.1).double().item()
    assert found[1].item() == 7 if correct is not None else math.isnan(found[1])
    assert len(device.home) == 1  # one transfer for both
    exact = torch.tensor(0.1, dtype=torch.float64)
    assert loss_and_hits(Outcome(exact, correct))[0].item() == 0.1


class Picky(Finetune):
    """Says what it was told."""

    def expects(self, classes: Sequence[int]) -> None:
        assert not self.seen
        raise UsageError(f"cannot learn {list(classes)}")


def test_what_a_learner_cannot_learn_is_said_before_it_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot learn \[2, 2, 2\]"):
        execute(tmp_path, make_case("finetune", learner=Method(Picky, "for tests")))
    assert not (tmp_path / "results.jsonl").exists()
