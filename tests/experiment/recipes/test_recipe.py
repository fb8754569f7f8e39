"""The recipes that come with the package, against the paper; what a recipe makes; shorter schedules."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rkr
from rkr.data import Augment
from rkr.errors import UsageError
from rkr.experiment.recipes import list_recipes, load_recipe
from rkr.experiment.recipes.load import recipe_names
from rkr.experiment.recipes.recipe import Recipe
from rkr.experiment.recipes.settings import (
    AugmentSettings,
    NetworkSettings,
    PaperNumber,
    ResourceSettings,
    StreamSettings,
    TrainingSettings,
    ZeroShotSettings,
)
from rkr.methods import METHODS
from rkr.methods.zeroshot import ClassifierOptions

Write = Callable[..., Path]

NAMES = [
    "ablation-components",
    "ablation-components-lenet",
    "ablation-components-narrow",
    "ablation-first-task",
    "ablation-first-task-narrow",
    "ablation-forward-transfer",
    "ablation-forward-transfer-narrow",
    "ablation-rank",
    "ablation-rank-narrow",
    "cifar100-lenet",
    "cifar100-resnet18",
    "cifar100-resnet18-narrow",
    "digits",
    "gzsl",
    "gzsl-components",
    "gzsl-first-task",
    "gzsl-init",
    "gzsl-local",
    "gzsl-rank",
    "imagenet-resnet18",
    "mnist-cifar100",
    "mnist-cifar100-lenet",
    "split-cifar-resnet32",
    "split-cifar100-resnet32",
]


def test_all_are_there() -> None:
    assert recipe_names() == NAMES
    recipes = list_recipes()
    assert [recipe.name for recipe in recipes] == NAMES
    for recipe in recipes:
        assert recipe.title
        assert recipe.about
        for name in recipe.methods:
            settings = recipe.resolved(name, recipe.orders[0])
            assert json.loads(json.dumps(settings)) == settings


SECTIONS: dict[str, tuple[type, ...]] = {
    "Top level": (Recipe,),
    "`[stream]`": (StreamSettings, ZeroShotSettings),
    "`[network]`": (NetworkSettings,),
    "`[training]`": (TrainingSettings,),
    "`[classifier]`": (ClassifierOptions,),
    "`[resources]`": (ResourceSettings,),
    "`[[paper]]`": (PaperNumber,),
}
ELSEWHERE = {  # no keys of a file by this name, or without a default there
    (Recipe, "name"),
    (StreamSettings, "setting"),
    (ZeroShotSettings, "kind"),
    (NetworkSettings, "arguments"),
    (TrainingSettings, "augment"),
    (ClassifierOptions, "epochs"),
}


def section_of(page: str, heading: str) -> dict[str, str]:
    """The keys in the tables of a section, with their defaults as the page has them."""
    (text,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    said = {}
    for cells in re.findall(r"^\| (`.*?) \| (.*?) ?\|.*\|$", text, re.MULTILINE):
        names, defaults = (re.findall(r"`([^`]+)`", cell) for cell in cells)
        said.update(zip(names, defaults * (len(names) // max(len(defaults), 1)) or [""] * len(names), strict=True))
    return said


def test_the_page_has_every_key_and_what_holds_without_it() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "recipes.md").read_text("utf-8")
    tables = set(re.findall(r"^## `\[+(\w+)", page, re.MULTILINE))
    assert tables == {"stream", "network", "training", "classifier", "methods", "resources", "paper"}
    for heading, kinds in SECTIONS.items():
        said = section_of(page, heading)
        for kind in kinds:
            for name, field in kind.model_fields.items():
                if (kind, name) in ELSEWHERE or (kind is Recipe and name in tables):
                    continue
                default = None if field.is_required() or field.default_factory else field.default
                default = list(default) if isinstance(default, tuple) else default
                assert json.loads(said[name] or "null") == default, name
    (augment,) = re.findall(r"^`\[training.augment\]` has (.*)$", page, re.MULTILINE)
    assert {name: json.loads(value) for name, value in re.findall(r"`(\w+) = ([^`]+)`", augment)} == {
        name: field.default for name, field in AugmentSettings.model_fields.items()
    }


def test_every_number_that_can_be_counted_is_what_the_network_gives() -> None:
    """The paper's percentages belong to the network that the recipe names, and to the method."""
    checked = 0
    for recipe in list_recipes():
        for number in recipe.paper:
            rectifying = number.method in METHODS and "rank" in METHODS[number.method].options
            counted_here = number.metric in ("parameters per task", "capacity") and rectifying
            if not counted_here or recipe.zero_shot:  # those are in tests/learners/test_zeroshot.py
                continue
            options = recipe.resolved(number.method, 0)["options"]
            options.pop("init")
            model = rkr.rectify(recipe.build_network(), head=recipe.network.head, options=rkr.Options(**options))
            model.add_task("task", classes=10)
            percent = model.cost().percent
            counted = percent if number.metric == "parameters per task" else 100 + recipe.stream.tasks * percent
            digits = len(str(number.value).partition(".")[2])
            assert round(counted, digits) == number.value, (recipe.name, number.method)
            checked += 1
    assert checked == 4 + 3 + 3 + 2 + 1


@pytest.mark.parametrize(
    ("recipe", "method", "metric", "value"),
    [
        ("cifar100-lenet", "rkr", "average accuracy", 69.58),
        ("cifar100-lenet", "rkr-lite", "average accuracy", 66.32),
        ("cifar100-lenet", "ccll", "average accuracy", 63.71),
        ("cifar100-lenet", "apd", "capacity", 135.0),
        ("cifar100-resnet18", "rkr", "average accuracy", 87.6),
        ("cifar100-resnet18", "ccll", "average accuracy", 82.5),  # "outperforms CCLL by an absolute margin of 5.1%"
        ("ablation-rank", "rkr-k1", "average accuracy", 85.55),
        ("ablation-rank", "rkr-k8", "average accuracy", 88.49),
        ("ablation-rank", "rkr-k4", "parameters per task", 0.9569),
        ("ablation-components", "scale-only", "average accuracy", 79.2),
        ("ablation-components", "rectify-only", "average accuracy", 87.5),
        ("ablation-components-lenet", "scale-only", "average accuracy", 62.3),
        ("ablation-components-lenet", "rectify-only", "average accuracy", 69.1),
        ("ablation-forward-transfer", "rkr-random", "average accuracy", 86.15),  # "falls by [...] 1.45%"
        ("ablation-rank", "rkr", "multiply-adds", 8.6e-4),
        (
            "imagenet-resnet18",
            "rkr",
            "top-5 running mean",
            (90.2, 88.7, 88.1, 88.2, 86.6, 85.7, 85.0, 84.2, 83.8, 84.4),
        ),
        (
            "imagenet-resnet18",
            "ccll",
            "top-5 running mean",
            (91.4, 88.3, 86.5, 86.6, 84.6, 83.5, 82.7, 81.7, 81.2, 81.3),
        ),
        ("mnist-cifar100", "rkr", "average accuracy", None),  # only a difference is printed
        ("mnist-cifar100", "ccll", "average accuracy", None),
        ("split-cifar-resnet32", "rkr", "average accuracy", None),  # only a figure
    ],
)
def test_the_papers_numbers(recipe: str, method: str, metric: str, value: Any) -> None:
    assert load_recipe(recipe).published(method, metric) == value


def test_the_papers_spreads() -> None:
    found = {n.value: n.spread for name in ("cifar100-lenet", "cifar100-resnet18") for n in load_recipe(name).paper}
    assert found[69.58] == 0.55
    assert found[87.6] == 0.467


@pytest.mark.parametrize(
    ("names", "epochs", "milestones", "gamma"),
    [
        (["cifar100-lenet", "ablation-components-lenet"], 100, (20, 40, 60, 80), 0.5),
        ([n for n in NAMES if re.fullmatch("ablation-.*(?<!lenet)(?<!narrow)", n)], 150, (50, 100, 125), 0.1),
        (["cifar100-resnet18", "split-cifar-resnet32", "mnist-cifar100"], 150, (50, 100, 125), 0.1),
        (["imagenet-resnet18"], 70, (20, 40, 60), 0.2),
    ],
)
def test_the_papers_schedules(names: list[str], epochs: int, milestones: tuple[int, ...], gamma: float) -> None:
    for name in names:
        training = load_recipe(name).training
        assert (training.epochs, training.milestones, training.gamma) == (epochs, milestones, gamma)
        assert (training.optimizer, training.lr) == ("sgd", 0.01)
        assert (training.batch, training.momentum, training.weight_decay) == (128, 0.9, 5e-4)


NARROW = [name for name in NAMES if name.endswith("-narrow")]


@pytest.mark.parametrize("name", NARROW)
def test_narrow_recipes_are_the_full_ones_but_for_network_and_schedule(name: str) -> None:
    narrow, full = load_recipe(name), load_recipe(name.removesuffix("-narrow"))
    assert "narrow ResNet-18" in narrow.title
    assert narrow.paper == ()
    assert narrow.network.arguments == {**full.network.arguments, "width": 16}
    assert narrow.training == full.training.scaled_to(30)
    assert narrow.stream == full.stream
    ours, theirs = (recipe.methods.keys() for recipe in (narrow, full))
    assert ours == theirs | ({"finetune", "separate"} if name == "cifar100-resnet18-narrow" else set())


def test_narrow_recipes_share_their_runs() -> None:
    settings = [load_recipe(name).resolved("rkr", "A") for name in NARROW]
    assert len({json.dumps({**one, "recipe": ""}, sort_keys=True) for one in settings}) == 1


# ---------------------------------------------------------------------------------------------------------
# What a recipe makes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("cifar100-lenet", 3_038_110), ("cifar100-resnet18", 11_220_132), ("imagenet-resnet18", 11_689_512)],
)
def test_network(name: str, parameters: int) -> None:
    assert sum(p.numel() for p in load_recipe(name).build_network().parameters()) == parameters


def test_stream_of_digits() -> None:
    recipe = load_recipe("digits")
    stream = recipe.stream("fixed")
    assert [task.training.class_names for task in stream.tasks] == [
        ("0", "1"),
        ("2", "3"),
        ("4", "5"),
        ("6", "7"),
        ("8", "9"),
    ]
    assert recipe.stream(0).order != stream.order
    few = recipe.changed(limit=5).stream("fixed")
    assert [len(task.training.train) for task in few.tasks] == [10] * 5
    with pytest.raises(UsageError, match="the published order 'A' is for cifar100"):
        recipe.stream("A")


def test_streams_of_two_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which sources are loaded, and how many tasks become of them."""
    from rkr import data as tasks
    from rkr.data import streams

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for name in ("load_source", "split", "split_cifar", "mnist_then"):

        def stand_in(*given: Any, _name: str = name, **named: Any) -> str:
            calls.append((_name, given, named))
            return str(given[0])

        monkeypatch.setattr(streams, "narrowed", lambda stream, first, on_validation: stream)

        monkeypatch.setattr(tasks, name, stand_in)
    cut = {"validation": 0.0, "limit": None, "seed": 0}
    load_recipe("split-cifar-resnet32").stream("fixed", "here")
    assert [given for name, given, _ in calls if name == "load_source"] == [("cifar100", "here"), ("cifar10", "here")]
    assert calls[-1] == ("split_cifar", ("cifar10", "cifar100", "fixed"), {"groups": 5, **cut})
    load_recipe("mnist-cifar100").stream(3)
    assert calls.pop() == ("mnist_then", ("mnist", "cifar100", 10, 3), cut)
    load_recipe("cifar100-lenet").stream("B")
    assert calls.pop() == ("split", ("cifar100", 10, "B"), cut)


def test_a_folder_is_named_from_where_the_recipe_lies(write: Write, tmp_path: Path) -> None:
    """Not from where the command is given; and it is what the source reads."""
    from PIL import Image

    for label in "abcd":
        for i in range(5):
            path = tmp_path / "pictures" / label / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (10 * i, 0, 0)).save(path)
    source = 'kind = "split"\nsource = "folder"\ntasks = 2\noptions = { path = "pictures", size = 32, resident = true }'
    recipe = load_recipe(
        write(
            ('orders = [0, "A", "fixed"]', 'orders = ["fixed"]'),
            ('kind = "split"\nsource = "cifar100"\ntasks = 10', source),
        )
    )
    assert recipe.stream.options["path"] == str(tmp_path / "pictures")
    stream = recipe.stream("fixed", "/nowhere")
    assert [task.training.class_names for task in stream.tasks] == [("a", "b"), ("c", "d")]
    assert stream.input_shape == (3, 32, 32)


def test_own_recipe(write: Write) -> None:
    recipe = load_recipe(write())
    assert recipe.name == "my"
    assert recipe.orders == (0, "A", "fixed")
    settings = recipe.resolved("mine", "A", epochs=20, seed=7, limit=50)
    assert settings["recipe"] == "my"
    assert (settings["method"], settings["learner"], settings["order"]) == ("mine", "rkr", "A")
    assert settings["options"] == {**METHODS["rkr"].options, "rank": 4}
    assert settings["stream"] == {
        "kind": "split",
        "source": "cifar100",
        "tasks": 10,
        "validation": 0.0,
        "part": "test",
        "first": None,
        "limit": 50,
        "seed": 0,
        "options": {},
    }
    assert settings["network"] == {"name": "lenet", "head": "fc", "arguments": {"classes": 100}}
    assert settings["training"] == {
        "epochs": 20,
        "batch": 128,
        "optimizer": "sgd",
        "lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "milestones": [4, 8, 12, 16],
        "gamma": 0.5,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "amsgrad": False,
        "sampling": "passes",
        "augment": {"pad": 4, "flip": True, "rotate": 0.0},
        "seed": 7,
        "memory_format": "channels_last",
    }
    assert Augment(**settings["training"]["augment"]) == Augment(4, True, 0.0)
    assert json.loads(json.dumps(settings)) == settings
    # The parts can be read back, as another process would.
    assert type(recipe.training).checked(settings["training"]) == recipe.changed(epochs=20, seed=7).training
    assert type(recipe.stream).checked(settings["stream"]) == recipe.changed(limit=50).stream
    assert type(recipe.network).checked(settings["network"]) == recipe.network


def test_methods_beyond_the_recipe(write: Write) -> None:
    recipe = load_recipe(write())
    assert recipe.resolved("rkr-lite", 0)["options"]["rectify_weights"] == "conv"
    assert recipe.resolved("rkr", 0)["options"]["rank"] == 2
    with pytest.raises(UsageError, match=r"^no method 'mnie'; did you mean 'mine'\? Choose one of rkr, mine, apd"):
        recipe.resolved("mnie", 0)
    with pytest.raises(UsageError, match=r"^no order 'F'"):
        recipe.resolved("rkr", "F")
    with pytest.raises(UsageError, match=r"^seed: must be at least 0, not -1"):
        recipe.resolved("rkr", 0, seed=-1)
    with pytest.raises(UsageError, match=r"^limit: must be at least 1, not 0"):
        recipe.resolved("rkr", 0, limit=0)


# ---------------------------------------------------------------------------------------------------------
# Shorter schedules


@pytest.mark.parametrize(
    ("name", "epochs", "milestones"),
    [
        ("cifar100-lenet", 20, (4, 8, 12, 16)),
        ("cifar100-lenet", 100, (20, 40, 60, 80)),
        ("cifar100-lenet", 200, (40, 80, 120, 160)),
        ("cifar100-lenet", 5, (1, 2, 3, 4)),
        ("cifar100-lenet", 4, (1, 2, 2, 3)),
        ("cifar100-lenet", 1, ()),
        ("cifar100-resnet18", 20, (7, 13, 17)),
        ("cifar100-resnet18", 30, (10, 20, 25)),
        ("imagenet-resnet18", 7, (2, 4, 6)),
        ("digits", 3, (2,)),
    ],
)
def test_scaled_schedule(name: str, epochs: int, milestones: tuple[int, ...]) -> None:
    training = load_recipe(name).training
    scaled = training.scaled_to(epochs)
    assert (scaled.epochs, scaled.milestones) == (epochs, milestones)
    assert scaled.with_changes(epochs=training.epochs, milestones=training.milestones) == training


@pytest.mark.parametrize("epochs", [0, -5, 1.5, True, "20", None])
def test_nonsense_is_not_a_schedule(epochs: Any) -> None:
    training = TrainingSettings(epochs=100, lr=0.01)
    with pytest.raises(UsageError, match="epochs must be a whole number of at least 1, not"):
        training.scaled_to(epochs)


def test_images_that_are_not_mirrored_in_training_are_not_mirrored_by_a_method() -> None:
    for name, flip in (("digits", False), ("cifar100-lenet", True)):
        recipe = load_recipe(name)
        assert recipe.training.augment.flip is flip
        assert recipe.resolved("icarl", recipe.orders[0])["options"]["flip"] is flip
        assert recipe.method("icarl").options == {}  # nothing was set
        assert "flip" not in recipe.options("eeil")
