"""Protocols: what makes runs comparable, and nothing else, changes the hash."""

import copy
import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from rkr import UsageError
from rkr.experiment.results import read_result
from rkr.report import comparable, differences, require_one_protocol, summary_json, summary_table
from rkr.report import protocol as module
from rkr.report.groups import by_method, named_apart
from rkr.report.protocol import Protocol, group_by_protocol, protocol
from rkr.report.summary import zero_shot_cells

RESULTS = Path(__file__).parents[2] / "results"
ORDERS = {"A": (0, 1, 2), "B": (2, 0, 1), "0": (1, 2, 0)}
SETTINGS = {
    "recipe": "toy",
    "method": "rkr",
    "learner": "rkr",
    "options": {"rank": 2},
    "order": "A",
    "stream": {
        "kind": "split",
        "source": "folder",
        "tasks": 3,
        "validation": 0.0,
        "limit": None,
        "seed": 0,
        "options": {"path": "/data/photographs", "size": 32},
    },
    "network": {"name": "lenet", "head": "fc", "arguments": {"classes": 6}},
    "training": {
        "epochs": 2,
        "batch": 128,
        "optimizer": "sgd",
        "lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "milestones": [1],
        "gamma": 0.1,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "amsgrad": False,
        "sampling": "passes",
        "augment": {"pad": 4, "flip": True, "rotate": 0.0},
        "seed": 0,
        "memory_format": "channels_last",
    },
    "stream_sha256": "0",
    "precision": "32-true",
    "device": "cpu",
}
ZERO_SHOT = {
    "options": {"classifier": {"epochs": {"APY": 30, "CUB": 70}, "seen": 200}},
    "stream": {"kind": "zero-shot", "datasets": ["APY", "CUB"], "features": "res101", "scaler": "train"},
    "training": {"epochs": 2, "optimizer": "adam", "lr": 1e-4, "betas": [0.9, 0.999], "amsgrad": True},
}


def changed(path: str, value: object, settings: dict = SETTINGS) -> dict:
    """The settings with one of them changed; None takes it away."""
    settings = copy.deepcopy(settings)
    *way, last = path.split(".")
    part = settings
    for key in way:
        part = part.setdefault(key, {})
    if value is None:
        del part[last]
    else:
        part[last] = value
    return settings


@pytest.fixture
def made(a_result, run_folder):
    """A run with checksums; those of a task go with its classes."""

    def make(settings=SETTINGS, order="A", **options):
        folder = run_folder(order=order, settings=settings, **options)
        run = json.loads((folder / "run.json").read_text())
        for task, block in zip(run["stream"]["tasks"], ORDERS.get(str(order), ORDERS["0"]), strict=True):
            kept = f"{block} in order {order}" if str(order).isdecimal() else str(block)
            task["sha256"] = {"train": f"train {kept}", "test": f"test {kept}"}
            task["class_names"] = [f"{block}a", f"{block}b"]
        (folder / "run.json").write_text(json.dumps(run))
        return read_result(folder)

    return make


def test_the_hash_is_that_of_canonical_json():
    fields = {"b": 1.0, "a": [True, None, 0.5], "c": {"y": "ü", "x": 2}}
    text = '{"a":[true,null,0.5],"b":1,"c":{"x":2,"y":"\\u00fc"}}'
    assert Protocol(fields).hash == hashlib.sha256(text.encode()).hexdigest()[:12]
    assert Protocol({"b": 1, "c": {"x": 2, "y": "ü"}, "a": (True, None, 0.5)}).hash == Protocol(fields).hash


def test_the_fields_of_a_run(made):
    found = protocol(made())
    assert found.fields == {
        "data.kind": "split",
        "data.source": "folder",
        "data.seed": 0,
        "data.options.size": 32,
        "data.input_shape": None,
        "data.mean": None,
        "data.std": None,
        "data.sha256": found.fields["data.sha256"],
        "split.tasks": 3,
        "split.classes": 2,
        "split.validation": 0.0,
        "split.limit": None,
        "split.part": "test",
        "split.first": None,
        "order": "published, A to E",
        "network.name": "lenet",
        "network.classes": 6,
        "network.parameters": 1000,
        "head": "fc",
        "augmentation.pad": 4,
        "augmentation.flip": True,
        "augmentation.rotate": 0.0,
        "schedule.epochs": 2,
        "schedule.batch": 128,
        "schedule.optimizer": "sgd",
        "schedule.lr": 0.01,
        "schedule.momentum": 0.9,
        "schedule.weight_decay": 0.0,
        "schedule.milestones": [1],
        "schedule.gamma": 0.1,
        "schedule.sampling": "passes",
        "evaluation.measures": ["accuracy", "top5"],
        "evaluation.task": "given",
        "precision": "32-true",
    }
    assert len(found.hash) == 12


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("recipe", "other"),
        ("method", "ewc"),
        ("learner", "ewc"),
        ("options", {"rank": 8}),
        ("stream_sha256", "1"),
        ("device", "cuda"),
        ("training.seed", 7),
        ("training.memory_format", "contiguous"),
        ("training.batch", 128.0),
        ("training.betas", None),
        ("training.betas", [0.5, 0.9]),  # sgd has none
        ("training.eps", None),
        ("training.amsgrad", None),
        ("training.sampling", None),  # older runs
        ("stream.options.path", "elsewhere"),
        ("precision", None),
    ],
)
def test_what_does_not_count(made, path, value):
    assert protocol(made(changed(path, value))).hash == protocol(made()).hash
    assert differences(protocol(made(changed(path, value))), protocol(made())) == {}


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("stream.source", "cifar100", "data.source"),
        ("stream.seed", 1, "data.seed"),
        ("stream.options.size", 64, "data.options.size"),
        ("stream.limit", 20, "split.limit"),
        ("stream.validation", 0.1, "split.validation"),
        ("network.name", "resnet18", "network.name"),
        ("network.arguments.stem", "cifar", "network.stem"),
        ("network.head", "classifier", "head"),
        ("training.augment.pad", 2, "augmentation.pad"),
        ("training.epochs", 20, "schedule.epochs"),
        ("training.lr", 0.1, "schedule.lr"),
        ("training.milestones", [1, 1], "schedule.milestones"),
        ("training.new_setting", 3, "schedule.new_setting"),
        ("new_setting", 3, "new_setting"),
        ("precision", "bf16-mixed", "precision"),
    ],
)
def test_what_counts_is_named(made, path, value, field):
    a, b = made(order="A"), made(changed(path, value), order="B")
    found = differences(protocol(a), protocol(b))
    assert found == {field: (protocol(a).fields.get(field), value)}
    assert protocol(a).hash != protocol(b).hash
    for refuses in (summary_table, summary_json, require_one_protocol):
        with pytest.raises(UsageError) as error:
            refuses([a, b])
        text = f"{a.folder} and {b.folder} cannot be compared: their protocols differ in {field} ("
        assert str(error.value).startswith(text)
        assert str(error.value).endswith(f"and {json.dumps(value)})")


def test_orders_by_one_rule_have_one_protocol(made):
    published = [protocol(made(order=order)).hash for order in "AB"]
    random = [protocol(made(order=order)).hash for order in (0, 1, 2)]
    assert len(set(published)) == len(set(random)) == 1
    assert published != random[:2]
    both = differences(protocol(made(order="A")), protocol(made(order=0)))
    assert both == {"order": ("published, A to E", "random")}
    assert protocol(made(order="fixed")).fields["order"] == "fixed"
    seeds = [protocol(made(seed=seed)).hash for seed in (0, 5)]
    assert len(set(seeds)) == 1


def test_other_data_is_another_protocol(made):
    for order in ("A", 0):
        folder = made(order=order).folder
        before = protocol(read_result(folder))
        run = json.loads((folder / "run.json").read_text())
        task = run["stream"]["tasks"][1]
        task["sha256"]["test"], task["images"]["test"] = "another", 99
        (folder / "run.json").write_text(json.dumps(run))
        assert list(differences(before, protocol(read_result(folder)))) == ["data.sha256"]


def test_the_seed_of_split_cifar_chooses_the_classes(made):
    """So nothing of the data is the same for two seeds but what the settings say."""
    settings = changed("stream.kind", "split-cifar")
    assert protocol(made(settings, order=0)).fields["data.sha256"] is None


def zero_shot(made, settings=ZERO_SHOT, **options):
    return made(settings, zero_shot=True, **options)


def test_zero_shot_tasks(made):
    found = protocol(zero_shot(made, order="fixed")).fields
    assert found["data.datasets"] == ["APY", "CUB"]
    assert (found["data.features"], found["data.scaler"], found["split.part"]) == ("res101", "train", "test")
    assert found["evaluation.measures"] == ["H", "U", "S"]
    assert found["classifier.epochs"] == {"APY": 30, "CUB": 70}
    assert found["classifier.unseen"] == 400
    assert "classifier.longest" not in found
    assert (found["schedule.betas"], found["schedule.amsgrad"]) == ([0.9, 0.999], True)
    assert "schedule.momentum" not in found
    first = protocol(zero_shot(made, order="first-CUB")).fields
    assert first["order"] == found["order"] == "as listed, or with another dataset first"
    other = changed("stream.features", "efficientnet", ZERO_SHOT)
    with pytest.raises(UsageError, match=r'data\.features \("res101" and "efficientnet"\)'):
        zero_shot_cells([zero_shot(made, order="fixed"), zero_shot(made, other, order="first-CUB")])


def test_epochs_chosen_by_one_rule_may_differ_between_methods(made):
    first = {**ZERO_SHOT, "classifier_epochs": "validation"}
    second = {
        **changed("options.classifier.epochs", {"APY": 20, "CUB": 50}, ZERO_SHOT),
        "classifier_epochs": "validation",
    }
    runs = [zero_shot(made, first, order="fixed"), zero_shot(made, second, method="sft", order="fixed")]
    require_one_protocol(runs)
    assert protocol(runs[0]).fields["classifier.epochs"] == "validation"
    require_one_protocol([*runs, zero_shot(made, {**ZERO_SHOT, "options": {}}, method="ridge", order="fixed")])
    with pytest.raises(UsageError, match=r"classifier\.epochs"):
        require_one_protocol([runs[0], zero_shot(made, method="lzsl", order="fixed")])


def test_epochs_chosen_for_each_order_are_no_options_of_the_method(made):
    """As in gzsl-first-task, whose orders have validation runs of their own."""
    other = changed("options.classifier.epochs", {"APY": 20, "CUB": 50}, ZERO_SHOT)
    by_rule = {"classifier_epochs": "validation"}
    runs = [
        zero_shot(made, {**ZERO_SHOT, **by_rule}, order="fixed"),
        zero_shot(made, {**other, **by_rule}, order="first-CUB"),
    ]
    assert by_method(runs) == {runs[0].method: runs}
    assert named_apart(runs) == runs
    assert len(zero_shot_cells(runs)) == len(zero_shot_cells(runs[:1]))
    with pytest.raises(UsageError, match=r"classifier\.epochs"):  # numbers that somebody gave are settings
        by_method([zero_shot(made, ZERO_SHOT, order="fixed"), zero_shot(made, other, order="first-CUB")])


def test_a_method_without_a_classifier_is_compared_with_those_that_have_one(made):
    ridge = zero_shot(made, {**ZERO_SHOT, "options": {}}, method="ridge", order="fixed")
    short = zero_shot(made, order="fixed")
    long = zero_shot(made, changed("options.classifier.epochs", 99, ZERO_SHOT), method="sft", order="fixed")
    require_one_protocol([ridge, short])
    with pytest.raises(UsageError, match=r"classifier\.epochs \({.*} and 99\)$"):
        require_one_protocol([ridge, short, long])  # ridge would go with either
    assert comparable([ridge, short]) == {"toy": [ridge, short]}
    assert group_by_protocol([ridge, short]) == [(protocol(short), [ridge, short])]
    assert comparable([ridge, short, long]) == {f"toy ({protocol(run).hash})": [run] for run in (ridge, short, long)}


def test_defaults_are_those_of_the_recipes():
    """Changing a default must not change what older runs are compared with."""
    from rkr.experiment.recipes.settings import StreamSettings, TrainingSettings
    from rkr.methods.zeroshot import ClassifierOptions

    for settings, known in ((StreamSettings, module.STREAM), (TrainingSettings, module.TRAINING)):
        assert {name: settings.model_fields[name].default for name in known} == known
    length = {"steps": "validation", "epochs": "validation"}  # of which runs record one
    assert json.loads(json.dumps(vars(ClassifierOptions()))) == {**length, **module.CLASSIFIER}


def test_lengths_chosen_in_steps_and_in_epochs_are_two_protocols(made):
    """Runs of earlier versions recorded epochs, or nothing where they were chosen by the default."""
    steps = {
        **changed("options.classifier", {"steps": {"APY": 900, "CUB": 7}}, ZERO_SHOT),
        "classifier_steps": "validation",
    }
    others = changed("options.classifier", {"steps": {"APY": 5, "CUB": 6}}, ZERO_SHOT) | {
        "classifier_steps": "validation"
    }
    epochs = {**ZERO_SHOT, "classifier_epochs": "validation"}
    runs = [zero_shot(made, settings, order="fixed") for settings in (steps, others, epochs)]
    one, other, earlier = (protocol(run).fields for run in runs)
    assert (one["classifier.steps"], other["classifier.steps"]) == ("validation", "validation")
    assert "classifier.epochs" not in one
    assert (earlier["classifier.epochs"], earlier.get("classifier.steps")) == ("validation", None)
    assert module.classifier_of({"options": {"classifier": {}}})["epochs"] == "validation"
    with pytest.raises(
        UsageError, match=r"classifier\.steps .*classifier\.epochs|classifier\.epochs .*classifier\.steps"
    ):
        require_one_protocol([runs[0], runs[2]])


def test_committed_runs_of_older_versions_have_the_protocol_of_new_ones():
    old, lite = (read_result(RESULTS / "cifar100-lenet" / method / "A") for method in ("rkr", "rkr-lite"))
    assert "betas" not in old.settings["training"]
    assert "precision" not in old.settings
    assert protocol(old).hash == protocol(lite).hash
    new = copy.deepcopy(dict(old.settings)) | {"precision": "32-true", "device": "cpu"}
    new["training"] |= {"betas": [0.9, 0.999], "eps": 1e-8, "amsgrad": False, "sampling": "passes"}
    assert protocol(dataclasses.replace(old, settings=new)).hash == protocol(old).hash
