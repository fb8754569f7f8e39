"""Methods with an optimiser of their own: what they train with, where it is recorded and shown, and resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FOREVER, few_digits, outcome
from torch.optim import SGD, Adam

from rkr.cli.listing import in_words, options_of
from rkr.errors import UsageError
from rkr.experiment.execution import Execution
from rkr.experiment.folder import RunFolder
from rkr.experiment.plan import Plan
from rkr.experiment.processes import make_fabric
from rkr.experiment.recipes import Recipe, load_recipe
from rkr.experiment.recipes.write import recipe_text
from rkr.experiment.results import read_result
from rkr.experiment.run import Run
from rkr.experiment.tune import tuning
from rkr.methods import METHODS
from rkr.methods.learner import Phase
from rkr.report.groups import by_method, named_apart
from rkr.report.html.data import grouped
from rkr.report.html.page import render
from rkr.report.protocol import protocol
from rkr.report.summary import own_optimizers
from rkr.report.tables import summary_table

HNET = {"optimizer": "adam", "lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}
SLOWER = "[methods.slower]\nlearner = 'hnet'\nchunk = 500\ntraining = { lr = 2e-3, betas = [0.5, 0.9] }\n"
PLAIN = "[methods.plain]\nlearner = 'hnet'\ntraining = { optimizer = 'sgd', lr = 0.01, momentum = 0.5 }\n"


def written(folder: Path, more: str = "", methods: tuple[str, ...] = ("hnet", "finetune")) -> Recipe:
    (folder / "few.toml").write_text(few_digits(methods, tasks=2) + more)
    return load_recipe(str(folder / "few.toml"))


class Watched(Run):
    """Keeps the optimiser, and stops after so many batches."""

    def __init__(self, plan: Plan, method: str, folder: Path, batches: float = FOREVER) -> None:
        spec = next(spec for spec in plan.specs if spec.method == method)
        fabric, execution = make_fabric("cpu"), Execution(save_minutes=FOREVER)
        resolved = plan.resolve(spec, "cpu")
        super().__init__(resolved, plan.stream(spec.order), folder, fabric, lambda event: None, execution)
        self.left, self.optimizers = batches, []  # type: list[torch.optim.Optimizer]

    def _asked(self) -> bool:
        self.left -= 1
        return self.left == 0

    def _make_optimizer(self, phase: Phase) -> torch.optim.Optimizer:
        made = super()._make_optimizer(phase)
        self.optimizers.append(made)
        return made


def plan_of(recipe: Recipe, folder: Path) -> Plan:
    return Plan(recipe, str(folder / "few.toml"), tuple(recipe.methods), ("fixed",), folder / "runs")


def test_each_method_trains_with_its_optimiser(tmp_path: Path) -> None:
    """The method's, the recipe's for the method, or the recipe's for all; milestones and gamma are the recipe's."""
    plan = plan_of(written(tmp_path, SLOWER + PLAIN), tmp_path)
    kinds: dict[str, Any] = {}
    for method in ("hnet", "slower", "plain", "finetune"):
        run = Watched(plan, method, tmp_path / method)
        run.execute()
        assert len(run.optimizers) == 2  # a new one for each task
        kinds[method] = run.optimizers[0]
        lines = map(json.loads, (tmp_path / method / "results.jsonl").read_text().splitlines())
        rates = [line["lr"] for line in lines if line["event"] == "epoch"]
        lr = {"hnet": 1e-3, "slower": 2e-3, "plain": 0.01, "finetune": 0.05}[method]
        assert rates == pytest.approx([lr, 0.1 * lr] * 2)
    assert all(isinstance(kinds[method], Adam) for method in ("hnet", "slower"))
    assert all(isinstance(kinds[method], SGD) for method in ("plain", "finetune"))
    assert kinds["hnet"].defaults["betas"] == (0.9, 0.999)
    assert kinds["slower"].defaults["betas"] == (0.5, 0.9)
    decays = {method: made.param_groups[0]["weight_decay"] for method, made in kinds.items()}
    assert decays == {"hnet": 0.0, "slower": 0.0, "plain": 0.0, "finetune": 5e-4}
    momenta = [kinds[method].param_groups[0]["momentum"] for method in ("plain", "finetune")]
    assert momenta == [0.5, 0.9]


def test_what_is_recorded(tmp_path: Path) -> None:
    recipe = written(tmp_path, SLOWER)
    settings = {name: recipe.resolved(name, "fixed") for name in recipe.methods}
    assert settings["hnet"]["own_training"] == HNET
    assert settings["slower"]["own_training"] == {**HNET, "lr": 2e-3, "betas": [0.5, 0.9]}
    assert "own_training" not in settings["finetune"]  # so that runs of earlier versions go on
    assert settings["hnet"]["training"] == settings["finetune"]["training"]  # the schedule of the comparison
    assert recipe.resolved("apd", "fixed")["own_training"] == {"weight_decay": 1e-4}
    assert recipe.training_of("apd") == recipe.training.with_changes(weight_decay=1e-4)


def test_goes_on_bit_for_bit(tmp_path: Path) -> None:
    plan = plan_of(written(tmp_path), tmp_path)
    assert Watched(plan, "hnet", tmp_path / "whole").execute()
    for batches in (3, 4, 2):
        assert not Watched(plan, "hnet", tmp_path / "parts", batches).execute()
    assert Watched(plan, "hnet", tmp_path / "parts").execute()
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_other_settings_do_not_resume_a_run(tmp_path: Path) -> None:
    plan = plan_of(written(tmp_path), tmp_path)
    assert not Watched(plan, "hnet", tmp_path / "run", 3).execute()
    other = plan_of(written(tmp_path, "[methods.hnet.training]\nlr = 5e-4\n", ("finetune",)), tmp_path)
    with pytest.raises(UsageError, match="own_training"):
        Watched(other, "hnet", tmp_path / "run").execute()
    assert not RunFolder(tmp_path / "run").finished


def test_runs_are_compared_and_told_apart(tmp_path: Path) -> None:
    """The optimiser of a method is what is compared, like its options: no other protocol."""
    for name, more in (("one", ""), ("two", "[methods.hnet.training]\nlr = 5e-4\n")):
        plan = plan_of(written(tmp_path, more, ("finetune",) if more else ("hnet", "finetune")), tmp_path)
        assert Watched(plan, "hnet", tmp_path / name / "hnet").execute()
    assert Watched(plan, "finetune", tmp_path / "finetune").execute()
    one, two = (read_result(tmp_path / name / "hnet") for name in ("one", "two"))
    plain = read_result(tmp_path / "finetune")
    assert one.options["training"] == HNET
    assert plain.options.get("training") is None
    assert protocol(one) == protocol(two) == protocol(plain)
    with pytest.raises(UsageError, match="different options"):
        by_method([one, replace(two, seed=1)])
    names = [run.method for run in named_apart([one, two, plain])]
    assert names == ["hnet (training.lr=0.001)", "hnet (training.lr=0.0005)", "finetune"]
    assert own_optimizers([one, plain]) == "hnet: optimizer adam, lr 0.001, momentum 0, weight_decay 0"
    assert own_optimizers([plain]) == ""
    caption = str(summary_table([one, plain]).caption)
    assert "own optimiser: hnet: optimizer adam, lr 0.001" in caption
    assert "own optimiser" not in str(summary_table([plain]).caption)
    page = render(grouped([one, plain]), [])
    assert "With an optimiser of their own: hnet: optimizer adam, lr 0.001, momentum 0, weight_decay 0." in page


def test_written_and_tuned_with_it(tmp_path: Path) -> None:
    recipe = written(tmp_path, SLOWER)
    (tmp_path / "few.toml").write_text(recipe_text(recipe))
    assert load_recipe(str(tmp_path / "few.toml")) == recipe
    search = tuning(recipe, "slower", 2, tmp_path, {"beta": [0.1, 1.0]})
    for name in search.points:
        assert search.recipe.training_of(name).lr == 2e-3
        assert search.recipe.methods[name].options["chunk"] == 500
    assert search.given["training"] == {"lr": 2e-3, "betas": [0.5, 0.9]}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("{ epochs = 3 }", "methods.hnet.training.epochs: the same for all methods, in the section [training]"),
        ("{ lrr = 3.0 }", "methods.hnet.training.lrr: no such key; did you mean 'lr'?"),
        ("{ lr = 'much' }", "methods.hnet.training: lr: must be a number"),
        ("{ momentum = 0.9 }", "methods.hnet.training: momentum: adam has no momentum"),
        ("3", "methods.hnet.training: must be a table"),
    ],
)
def test_mistakes(tmp_path: Path, table: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        written(tmp_path, f"[methods.hnet]\ntraining = {table}\n", ("finetune",))
    assert said in str(error.value)


def test_what_is_listed() -> None:
    assert '  optimizer = "adam"\n  lr = 0.001\n' in in_words("hnet")
    assert "[methods.hnet.training]" in in_words("hnet")
    assert options_of("hnet")["images"]["training"] == HNET
    assert "optimiser" not in in_words("ewc").split("In a recipe")[1]
    own = {name for name, method in METHODS.items() if method.learner.own_training}
    assert own == {"hnet", "apd"}
