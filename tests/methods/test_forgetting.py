"""What the methods are for: handwritten digits in 5 tasks, of which fine-tuning forgets a good part."""

from __future__ import annotations

from pathlib import Path

import pytest

from rkr.experiment.metrics import average, backward_transfer, during
from rkr.experiment.plan import Plan
from rkr.experiment.recipes import load_recipe
from rkr.experiment.results import Result, read_result
from rkr.experiment.runner import Execution, run_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def learned(out: Path, method: str, strength: float | None = None) -> Result:
    """By the recipe, a penalty's strength excepted: it depends on how small the gradients of old tasks have become."""
    recipe = load_recipe("digits")
    if strength is not None:
        chosen = recipe.method(method).model_copy(update={"options": {"strength": strength}})
        recipe = recipe.model_copy(update={"methods": {**recipe.methods, method: chosen}})
    plan = Plan(recipe, "digits", (method,), recipe.orders[:1], out, accelerator="cpu")
    assert run_plan(plan, Execution(threads=1), lambda event: None)
    return read_result(out / "digits" / method / "fixed")


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """With batch normalisation shared by all tasks, and with one for each, as penalties have it."""
    return [learned(tmp_path_factory.mktemp(method), method) for method in ("finetune", "finetune-bn")]


@pytest.mark.parametrize(
    ("method", "strength"),
    [("l2t", None), ("ewc", 1e5), ("si", None), ("pc", 1e4), ("lwf", None), ("icarl", None), ("eeil", None)],
)
def test_less_is_forgotten_than_by_fine_tuning(
    tmp_path: Path, finetuned: list[Result], method: str, strength: float | None
) -> None:
    """And by that, not by a better start: new tasks are learned as well as the network can, or a little less."""
    result = learned(tmp_path, method, strength)
    lost = -100 * (backward_transfer(result.matrix) or 0)
    for reference in finetuned:
        before = -100 * (backward_transfer(reference.matrix) or 0)
        assert before > 15
        assert lost < before / 2
        assert 100 * average(result.matrix) > 100 * average(reference.matrix) + 8
    assert min(during(result.matrix)) > 0.95
