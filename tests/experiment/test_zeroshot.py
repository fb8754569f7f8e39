"""Zero-shot methods through the engine: what is recorded, interruptions anywhere, several processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import Server
from safetensors.torch import load_file
from sklearn.kernel_ridge import KernelRidge  # type: ignore[import-untyped]
from sklearn.metrics import recall_score  # type: ignore[import-untyped]
from sklearn.metrics.pairwise import cosine_similarity  # type: ignore[import-untyped]
from small_runs import FOREVER, Case, execute
from small_zeroshot import BATCHES, CLASSES, EPOCHS, METHODS, STEPS, TEST, TRAIN, make_case, make_stream, outcome
from torch import Tensor
from torch.optim import Adam, Optimizer

from rkr.data import Batches, Stream, Task, Training
from rkr.data.task import Features
from rkr.errors import UsageError
from rkr.experiment.events import EpochEnd, Event, Started, Stopped
from rkr.experiment.execution import Execution
from rkr.experiment.folder import RunFolder
from rkr.experiment.processes import make_fabric
from rkr.experiment.results import read_result
from rkr.experiment.run import Run
from rkr.experiment.samples import derived
from rkr.methods import Method
from rkr.methods.learner import Outcome, Phase, ReadSamples
from rkr.methods.zeroshot import ZeroShot
from rkr.methods.zeroshot import learner as learner_module
from rkr.methods.zeroshot.lzsl import Lzsl


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


class StoppedAt(Run):
    """As if the user pressed Ctrl-C during a batch, or after the last one of a phase."""

    def __init__(self, case: Case, folder: Path, batch: int) -> None:
        super().__init__(*case, folder, make_fabric("cpu"), execution=Execution(save_minutes=FOREVER))
        self.batch = batch

    def _asked(self) -> bool:
        self.batch -= 1
        self._stop = self.batch == 0
        return self._stop


def lines(folder: Path, event: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == event]


@pytest.mark.parametrize("method", METHODS)
def test_what_is_recorded(tmp_path: Path, method: str) -> None:
    assert execute(tmp_path, make_case(method))
    found = lines(tmp_path, "task")
    assert [line["task"] for line in found] == ["set 0", "set 1", "set 2"]
    for number, line in enumerate(found, 1):
        assert {"accuracy", "top5"}.isdisjoint(line)
        assert line["agnostic"] is None
        assert line["tested"] == [TEST] * number
        for h, u, s in zip(line["H"], line["U"], line["S"], strict=True):
            assert 0 <= min(u, s) <= h <= max(u, s) <= 1
            assert h == (2 * u * s / (u + s) if u + s else 0)
        assert len(line["H"]) == number
        assert line["notes"]["classifier_steps"] == STEPS[number - 1]
        assert ("unused_inputs" in line["notes"]) == (method == "lzsl" and number > 1)
        kept = method in ("rkr", "original")
        assert line["unchanged"] is (True if kept else None)
        for name in ("H", "U", "S") if kept else ():  # no forgetting, figure by figure and bit by bit
            assert line[name][:-1] == found[max(0, number - 2)][name][: number - 1]
        if kept and number > 1:
            assert found[number - 2]["proof"].items() < line["proof"].items()
        elif number > 1:
            assert found[number - 2]["proof"]["set 0"] != line["proof"]["set 0"]
    percent = [line["cost"]["percent"] for line in found]
    n = 8 * 7 + 7 + 2 * (7 * 3 + 3)
    own = 16 * (8 + 7 + 2 * (7 + 3)) + 7 + 3 + 3
    expected: dict[str, list[float]] = {
        "base": [100, 100, 100],
        "sft": [100, 100, 100],
        "rkr": [100 * (1 + k * own / n) for k in (1, 2, 3)],
        "original": [100, 200, 300],
    }
    assert percent == pytest.approx(expected.get(method, [100, 100, 100]))
    epochs = lines(tmp_path, "epoch")
    assert all(line["accuracy"] is None and line["loss"] > 0 for line in epochs)
    phases = [line["phase"] for line in epochs]
    if method == "lzsl":
        assert phases == ["train"] * 2 + (["last layer"] * 2 + ["selective retraining"] * 2) * 2
    else:
        assert phases == ["train"] * EPOCHS * 3


def test_ridge_regression(tmp_path: Path) -> None:
    """The map solves the normal equations with the choices in the notes, on all training rows; angles decide."""
    case = make_case("ridge")
    assert execute(tmp_path, case)
    found = lines(tmp_path, "task")
    assert [line["unchanged"] for line in found] == [True, True, True]
    assert not lines(tmp_path, "epoch")
    state = load_file(tmp_path / "model" / "learner.safetensors")
    for number, task in enumerate(case.stream.tasks):
        train, a = task.training.train, task.training.attributes
        assert isinstance(train, Features)
        assert isinstance(task.test, Features)
        assert a is not None
        notes = found[number]["notes"]
        x, wanted = train.x.double().numpy(), a[train.y].double().numpy()
        x0, a0 = notes["centred"] * x.mean(0), notes["centred"] * wanted.mean(0)
        solved = KernelRidge(alpha=notes["strength"]).fit(x - x0, wanted - a0)
        matrix = (x - x0).T @ solved.dual_coef_
        assert np.allclose(state[f"maps.{number}"].numpy(), matrix, atol=1e-3 * np.abs(matrix).max())
        answers = cosine_similarity((task.test.x.double().numpy() - x0) @ matrix, a.double().numpy() - a0).argmax(1)
        unseen = task.training.unseen
        seen = [c for c in range(len(task.training.class_names)) if c not in unseen]
        for name, classes in (("U", unseen), ("S", seen)):
            expected = recall_score(task.test.y, answers, labels=classes, average="macro", zero_division=0)
            assert found[-1][name][number] == pytest.approx(expected, abs=1e-9)


def test_a_run_folder_is_read(tmp_path: Path) -> None:
    execute(tmp_path, make_case("rkr"))
    result = read_result(tmp_path)
    assert result.finished
    assert result.measure == "H"
    assert list(result.measures) == ["H", "U", "S"]
    found = lines(tmp_path, "task")
    for name, rows in result.measures.items():
        assert rows == tuple(tuple(line[name]) for line in found)
    assert result.matrix == result.measures["H"]
    assert [notes["classifier_steps"] for notes in result.notes] == list(STEPS)


# ---------------------------------------------------------------------------------------------------------
# Interruptions

VARIANTS: list[tuple[str, dict[str, Any]]] = [(method, {"tasks": 2}) for method in METHODS]
VARIANTS += [("lzsl", {"tasks": 3}), ("rkr-random", {"tasks": 2}), ("sft", {"tasks": 2, "sampling": "passes"})]
VARIANTS += [
    ("original", {"tasks": 2, "validation": True, "classifier": {"epochs": "validation", "longest": 4}}),
    ("rkr", {"tasks": 2, "classifier": {"source": "images"}}),
]


@pytest.mark.parametrize(("method", "changes"), VARIANTS, ids=lambda value: str(value))
def test_stop_after_every_batch(tmp_path: Path, method: str, changes: dict[str, Any]) -> None:
    case = make_case(method, **changes)
    assert execute(tmp_path / "whole", case)
    stops = 0
    while not StoppedAt(case, tmp_path / "parts", 1).execute():
        stops += 1
    tasks = changes["tasks"]
    phases = tasks if method != "lzsl" else 1 + 2 * (tasks - 1)
    assert stops == phases * (EPOCHS * BATCHES + 1)  # also after each phase
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [2, 8, 14])
def test_one_stop(tmp_path: Path, method: str, batch: int) -> None:
    """In the first task, in a later one, and (of LZSL) in its second pass, the third batch of 6; then all the rest."""
    case = make_case(method)
    execute(tmp_path / "whole", case)
    assert not StoppedAt(case, tmp_path / "parts", batch).execute()
    assert execute(tmp_path / "parts", case)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("method", METHODS)
def test_twice_the_same_and_another_seed_not(tmp_path: Path, method: str) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(seed + 3)  # what was drawn before does not matter
        execute(tmp_path / name, make_case(method, seed=seed))
    a, b, c = (outcome(tmp_path / name) for name in "abc")
    assert a == b
    assert a["results.jsonl"] != c["results.jsonl"]


@pytest.mark.parametrize("method", ["rkr", "lzsl"])
def test_ctrl_c_while_a_classifier_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """It stops at once; the classifier is trained again. Epochs are counted through both passes of LZSL."""
    case = make_case(method)
    execute(tmp_path / "whole", case)
    train, calls = learner_module.train_classifier, 0

    def train_and_stop(*arguments: Any) -> None:
        nonlocal calls
        train(*arguments)
        calls += 1
        if calls == 2:  # of the second task
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("went on")

    monkeypatch.setattr(learner_module, "train_classifier", train_and_stop)
    events: list[Event] = []
    run = Run(*case, tmp_path / "parts", make_fabric("cpu"), events.append, execution=Execution(save_minutes=FOREVER))
    assert not run.execute()
    last = (2 if method == "lzsl" else 1) * EPOCHS - 1
    assert events[-1] == Stopped(case.spec.title, str(tmp_path / "parts"), 2, last)
    events.clear()
    assert Run(
        *case, tmp_path / "parts", make_fabric("cpu"), events.append, execution=Execution(save_minutes=FOREVER)
    ).execute()
    assert isinstance(events[0], Started)
    assert (events[0].number, events[0].epoch, events[0].resumed) == (2, last, True)
    assert events[0].epochs_done == EPOCHS + last + 1
    assert not [event for event in events if isinstance(event, EpochEnd) and event.number < 3]
    assert calls == 4  # one was left, and came again
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_a_complete_run_may_be_found_so_by_several_at_once(tmp_path: Path) -> None:
    """As workers do with the validation run that comes before theirs."""
    case = make_case("rkr", tasks=1)
    assert execute(tmp_path, case)
    with RunFolder(tmp_path).locked():
        assert execute(tmp_path, case)
        with pytest.raises(UsageError, match="holds a run with other settings"):
            execute(tmp_path, make_case("rkr", tasks=1, settings={"method": "other"}))
        other = make_stream(1)
        other.tasks[0].test.x[-1, -1] += 1
        with pytest.raises(UsageError, match=r"holds a run with other settings \(the data have changed\)"):
            execute(tmp_path, make_case("rkr", stream=other))
    (tmp_path / "results.jsonl").unlink()
    with RunFolder(tmp_path).locked(), pytest.raises(UsageError, match="another process is executing this run"):
        execute(tmp_path, case)


# ---------------------------------------------------------------------------------------------------------
# What the engine does with a learner


class Watched(Lzsl):
    """Writes down what happens to it."""

    happened: list[Any]

    def prepare(self, phase: Phase, train: ReadSamples) -> None:
        super().prepare(phase, train)
        self.happened.append(phase.name)

    def begin_epoch(self, progress: float) -> None:
        super().begin_epoch(progress)
        self.happened.append(progress)


class WithOptimizers(Run):
    """Keeps the optimisers that it makes."""

    made: list[Optimizer]

    def _make_optimizer(self, phase: Phase) -> Optimizer:
        self.made.append(super()._make_optimizer(phase))
        return self.made[-1]


def test_both_passes_of_lzsl_share_one_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "happened", [], raising=False)
    case = make_case("lzsl", learner=Method(Watched, ""), epochs=4, tasks=2)
    run = WithOptimizers(*case, tmp_path, make_fabric("cpu"), execution=Execution(save_minutes=FOREVER))
    run.made = []
    assert run.execute()
    passes = [0, 0.25, 0.5, 0.75]
    assert Watched.happened == ["train", *passes, "last layer", *passes, "selective retraining", *passes]
    assert len(run.made) == 2
    first, second = run.made
    assert isinstance(second, Adam)
    steps = {int(state["step"]) for state in first.state.values()}
    assert steps == {4 * BATCHES}
    # Decoders and log-variance went on from the first pass; the rest of the encoder began with the second.
    by_steps = [int(state["step"]) for state in second.state.values()]
    assert sorted(by_steps) == [4 * BATCHES] * 4 + [8 * BATCHES] * (2 + 4 + 10)
    group = second.param_groups[0]
    assert (group["amsgrad"], group["eps"], group["betas"]) == (True, 1e-9, (0.9, 0.999))
    assert all("max_exp_avg_sq" in state for state in second.state.values())


def test_training_is_the_plain_loop(tmp_path: Path) -> None:
    """The engine's first task against CADA-VAE's training written out: one Adam, batches drawn afresh."""
    case = make_case("sft", tasks=1, quiet=True, epochs=5)
    execute(tmp_path, case)
    training = case.stream.tasks[0].training
    assert training.attributes is not None
    torch.manual_seed(derived(0, "learner"))
    network = case.spec.make()
    torch.manual_seed(derived(0, "task", 0))
    vae = network.attribute_vae(training.attributes.shape[1])  # type: ignore[operator]
    optimizer = Adam([*network.parameters(), *vae.parameters()], lr=0.01, eps=1e-9, amsgrad=True)
    batches = Batches(training.train, 8, derived(0, "batches", 0, 0), mean=(), std=(), afresh=True)
    losses = []
    for epoch in range(5):
        total = 0.0
        for x, y in batches.iter_from(epoch):
            assert len(y.unique()) <= len(x) == 8  # the last batch of an epoch is as large as others
            terms = network.terms(network.encoder(x), x, vae, training.attributes[y], epoch / 5)  # type: ignore[operator]
            loss = network.total(terms, epoch / 5) / 8  # type: ignore[operator]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * 8
        losses.append(total / (8 * BATCHES))
    assert [line["loss"] for line in lines(tmp_path, "epoch")] == pytest.approx(losses, rel=1e-5)
    state = load_file(tmp_path / "model" / "learner.safetensors")
    for key, p in network.named_parameters():
        assert torch.allclose(state[f"network.{key}"], p, atol=1e-5)


def test_steps_chosen_on_validation_samples(tmp_path: Path) -> None:
    chosen = {"classifier": {"epochs": "validation", "longest": 6, "lr": 0.05}}  # as earlier versions had it
    execute(tmp_path / "chosen", make_case("original", validation=True, **chosen))
    for line, of_two in zip(lines(tmp_path / "chosen", "task"), STEPS, strict=True):
        curve = line["notes"]["validation_h"]
        assert len(curve) == 6
        epochs = curve.index(max(curve)) + 1 if any(curve) else 6
        assert line["notes"]["classifier_steps"] == epochs * of_two // 2
    with pytest.raises(UsageError, match="'set 0' has no validation samples"):
        execute(tmp_path / "none", make_case("original", **chosen))


MARK = 7.5


class Recording(ZeroShot):
    """Keeps the features that it is given to learn from."""

    given: list[Tensor]

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        self.given.append(x.clone())
        return super().loss(x, y)

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        assert validation is None
        self.given += [x.clone() for x, _ in train()]
        super().end(train, validation)


def test_learners_never_get_test_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "given", [], raising=False)
    made = make_stream()
    tasks = tuple(Task(t.training, Features(torch.full_like(t.test.x, MARK), t.test.y)) for t in made.tasks)  # type: ignore[union-attr]
    stream = Stream(made.name, tasks, (), (), made.order)
    predicted: list[Tensor] = []
    predict = Recording.predict

    def watched(self: Recording, x: Tensor, number: int) -> Tensor:
        predicted.append(x)
        return predict(self, x, number)

    monkeypatch.setattr(Recording, "predict", watched)
    execute(tmp_path, make_case("sft", learner=Method(Recording, ""), stream=stream))
    assert sum(map(len, Recording.given)) == 3 * (EPOCHS * BATCHES * 8 + TRAIN)
    assert not any((x == MARK).any() for x in Recording.given)
    assert all((x == MARK).all() for x in predicted)


def test_streams_with_and_without_unseen_classes_do_not_mix() -> None:
    made = make_stream(2)
    one = Features(torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64))
    plain = Task(Training("plain", ("a",), one), one)
    with pytest.raises(UsageError, match="both tasks with unseen classes and tasks without"):
        Stream("s", (made.tasks[0], plain), (), (), (made.order[0], (1,)))


# ---------------------------------------------------------------------------------------------------------
# Several processes


@pytest.mark.parametrize("method", ["l2", "lzsl", "rkr"])
def test_two_processes_compute_what_one_does(server: Server, tmp_path: Path, method: str) -> None:
    """Without noise, which every process draws for itself. The penalty counts once, not once in each process."""
    job: dict[str, Any] = {"method": method, "quiet": True, "tasks": 2, "optimizer": "sgd", "lr": 1e-3}
    if method == "l2":
        job["options"] = {"strength": 300.0}
    one = server.start("zeroshot", folder=str(tmp_path / "1"), **job)
    assert one.wait() == 0, one.stderr
    crew = server.together(2, "zeroshot", folder=str(tmp_path / "2"), **job)
    assert [p.wait() for p in crew] == [0, 0], crew[0].stderr + crew[1].stderr
    losses = [[line["loss"] for line in lines(tmp_path / n, "epoch")] for n in ("1", "2")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    path = Path("model", "learner", "learner.safetensors") if method == "rkr" else Path("model", "learner.safetensors")
    models = [load_file(tmp_path / n / path) for n in ("1", "2")]
    trained = {key for key in models[0] if not key.startswith(("classifiers", "mask"))}
    for key in trained:
        torch.testing.assert_close(models[0][key], models[1][key], rtol=1e-4, atol=1e-6)
    assert [line["notes"] for line in lines(tmp_path / "1", "task")] == [
        line["notes"] for line in lines(tmp_path / "2", "task")
    ]
    assert len(lines(tmp_path / "2", "task")[-1]["H"]) == len(CLASSES[:2])
