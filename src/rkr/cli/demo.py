"""`rkr demo`."""

from __future__ import annotations

from pathlib import Path

from rkr.cli.options import Json, Out
from rkr.cli.run import run_and_show


def demo(out: Out = Path("runs"), json_: Json = False) -> None:
    """Learn 5 tasks of handwritten digits with RKR and with fine-tuning, and write a report page.

    Takes a minute and downloads nothing.
    """
    import json

    from rkr.experiment.execution import Execution
    from rkr.experiment.plan import Plan
    from rkr.experiment.recipes import load_recipe

    recipe = load_recipe("digits")
    plan = Plan(recipe, "digits", tuple(recipe.methods), recipe.orders[:1], out)
    run_and_show(plan, Execution(threads=1), json_, matrices=True)

    from rkr.report.html import write_report

    page = write_report([plan.root], plan.root / "report", figures=False, title="Five tasks of handwritten digits").page
    print(json.dumps({"event": "report", "page": str(page)}) if json_ else f"report: open {page} in a browser")
