"""`rkr demo`."""

from __future__ import annotations

from pathlib import Path

from rkr.cli.options import Json, Out
from rkr.cli.run import run_and_show


def demo(out: Out = Path("runs"), json_: Json = False) -> None:
    """Learn 5 tasks of handwritten digits with RKR and with fine-tuning. Takes a minute and downloads nothing."""
    from rkr.experiment.execution import Execution
    from rkr.experiment.plan import Plan
    from rkr.experiment.recipes import load_recipe

    recipe = load_recipe("digits")
    plan = Plan(recipe, "digits", tuple(recipe.methods), recipe.orders[:1], out)
    run_and_show(plan, Execution(threads=1), json_, matrices=True)
