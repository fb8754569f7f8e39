"""From folders of pictures to tasks: `rkr.learn`, `rkr.open` and the commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from helpers.pictures import TINY, draw_classes, same_answers

import rkr
from rkr import atomic
from rkr.errors import FileError, UsageError
from rkr.experiment.events import EpochEnd, Event, Preparing, Stopped
from rkr.pictures import lesson
from rkr.pictures.learner import repeated
from rkr.pictures.lesson import Lesson
from rkr.pictures.zoo import writing

QUICK: dict[str, Any] = {"backbone": TINY, "epochs": 2, "batch": 16, "seed": 1}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    draw_classes(root / "colours", {"red": 16, "green": 16, "blue": 16})
    draw_classes(root / "shapes", {"disc": 14, "square": 14, "stripes": 14})
    draw_classes(root / "test", {"red": 8, "green": 8, "blue": 8}, seed=9)
    return root


@pytest.fixture(scope="module")
def made(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zoo with the tasks "colours" and "shapes"."""
    folder = tmp_path_factory.mktemp("made") / "zoo"
    for name in ("colours", "shapes"):
        more = {} if name == "shapes" else {"backbone": TINY}
        rkr.learn(pictures / name, folder, epochs=3, batch=16, lr=3e-3, **more)
    return folder


@pytest.fixture
def zoo(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "zoo"))


def squares(zoo: rkr.Zoo, folder: Path) -> torch.Tensor:
    return torch.stack([zoo.preparation.square(path) for path in sorted(folder.rglob("*.png"))])


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# -- learning ---------------------------------------------------------------------------------------------


def test_the_folder_is_all_that_it_takes(pictures: Path, made: Path) -> None:
    zoo = rkr.open(made)
    assert list(zoo.tasks) == ["colours", "shapes"]
    record = zoo.tasks["colours"]
    assert record.classes == ("blue", "green", "red")
    assert record.pictures == 48
    assert record.about["validation"] == 6
    assert record.about["per_class"] == {"blue": 16, "green": 16, "red": 16}
    assert record.settings["epochs"] == 3
    assert zoo.evaluate(pictures / "test", "colours").accuracy >= 0.9
    assert record.nbytes == sum(t.nbytes for t in zoo.model.tasks["colours"].tensors().values())
    json.dumps(record.to_json())


def test_earlier_tasks_answer_bit_for_bit(pictures: Path, tmp_path: Path) -> None:
    first = rkr.learn(pictures / "colours", tmp_path / "zoo", **QUICK)
    x = squares(first, pictures / "test")
    answers, fingerprint = first.logits(x, "colours"), first.model.fingerprint("colours")
    second = rkr.learn(pictures / "shapes", tmp_path / "zoo", epochs=2, batch=16)
    assert same_answers(second.logits(x, "colours"), answers)
    opened = rkr.open(tmp_path / "zoo")
    assert same_answers(opened.logits(x, "colours"), answers)
    assert opened.model.fingerprint("colours") == fingerprint
    assert opened.model.fingerprint("shapes") == second.model.fingerprint("shapes")


def test_the_same_call_gives_the_same_bits(pictures: Path, tmp_path: Path) -> None:
    prints = {rkr.learn(pictures / "shapes", tmp_path / name, **QUICK).model.fingerprint("shapes") for name in "ab"}
    assert len(prints) == 1
    other = rkr.learn(pictures / "shapes", tmp_path / "c", **{**QUICK, "seed": 2})
    assert other.model.fingerprint("shapes") not in prints


class Stop(Exception):
    pass


@pytest.mark.parametrize("epoch", [0, 2])
def test_an_interrupted_lesson_goes_on_to_the_same_bits(
    pictures: Path, tmp_path: Path, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rkr.learn(pictures / "shapes", tmp_path / "whole", **{**QUICK, "epochs": 4})
    lessons: list[Lesson] = []
    begin = Lesson.run
    monkeypatch.setattr(Lesson, "run", lambda self: (lessons.append(self), begin(self))[1])
    events: list[Event] = []

    def watch(event: Event) -> None:
        events.append(event)
        if isinstance(event, EpochEnd) and event.epoch == epoch and not any(isinstance(e, Stopped) for e in events):
            lessons[-1].stop()

    with pytest.raises(KeyboardInterrupt):
        rkr.learn(pictures / "shapes", tmp_path / "zoo", watch=watch, **{**QUICK, "epochs": 4})
    assert isinstance(events[-1], Stopped)
    assert not (tmp_path / "zoo/zoo.json").exists()
    resumed: list[Event] = []
    zoo = rkr.learn(pictures / "shapes", tmp_path / "zoo", watch=resumed.append, **{**QUICK, "epochs": 4})
    assert [e.epoch for e in resumed if isinstance(e, EpochEnd)] == list(range(epoch + 1, 4))
    assert zoo.model.fingerprint("shapes") == whole.model.fingerprint("shapes")
    assert not (tmp_path / "zoo/.learning").exists()


def test_kill_9_leaves_the_zoo_and_the_same_command_goes_on(pictures: Path, zoo: Path) -> None:
    before = content(zoo)
    words = [sys.executable, "-m", "rkr", "learn", str(pictures / "shapes"), "--model", str(zoo), "--task", "again"]
    words += ["--epochs", "60", "--patience", "60", "--json", "--threads", "1"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if '"event": "epoch"' in line and json.loads(line)["epoch"] == 1:
                process.send_signal(signal.SIGKILL)
                break
    assert {name: data for name, data in content(zoo).items() if not name.startswith(".learning")} == before
    events: list[Event] = []

    def watch(event: Event) -> None:
        events.append(event)
        if isinstance(event, EpochEnd):
            raise Stop

    with pytest.raises(Stop):
        rkr.learn(pictures / "shapes", zoo, "again", epochs=60, patience=60, threads=1, watch=watch)
    assert next(e.epoch for e in events if isinstance(e, EpochEnd)) >= 1
    assert content(zoo) == before  # it failed, so nothing is left


def test_rank_0_is_a_linear_probe(pictures: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    zoo = rkr.learn(pictures / "colours", tmp_path / "zoo", **{**QUICK, "rank": 0}, watch=events.append)
    assert not any(isinstance(event, EpochEnd) for event in events)
    assert zoo.tasks["colours"].about["kept"] == "probe"
    x = squares(zoo, pictures / "test")
    task = zoo.model.tasks["colours"]
    direct = torch.nn.functional.linear(zoo.features(x), task.get("head.weight"), task.get("head.bias"))
    torch.testing.assert_close(zoo.logits(x, "colours"), direct, rtol=1e-5, atol=1e-5)


def test_a_probe_that_is_kept_is_fitted_to_all_pictures(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its decay is chosen with 42 pictures for training and 6 for validation; then nothing is left to choose.

    It learns from each picture and two crops of it.
    """
    fits: list[tuple[int, float, torch.Tensor]] = []
    fit = lesson.fit_probe

    def recorded(features: torch.Tensor, y: torch.Tensor, classes: int, decay: float) -> tuple[torch.Tensor, ...]:
        weight, bias = fit(features, y, classes, decay)
        fits.append((len(y), decay, weight))
        return weight, bias

    monkeypatch.setattr(lesson, "fit_probe", recorded)
    zoo = rkr.learn(pictures / "colours", tmp_path / "zoo", **{**QUICK, "rank": 0})
    assert [count for count, _, _ in fits] == [3 * 42, 3 * 42, 3 * 42, 3 * 48]
    assert fits[-1][1] in lesson.DECAYS
    kept = zoo.model.tasks["colours"].get("head.weight")
    assert kept is not None
    assert torch.equal(kept, fits[-1][2])


def test_early_stopping_keeps_the_best_state(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter([(0.5, -1.0), (0.9, -0.5), (0.8, -0.1), (0.9, -0.6), (0.95, -0.4)])
    states: list[dict[str, torch.Tensor]] = []

    def validated(self: Lesson) -> tuple[float, float]:
        states.append({key: value.clone() for key, value in self._learner.state_dict().items()})
        return next(figures)

    monkeypatch.setattr(Lesson, "_validated", validated)
    monkeypatch.setattr(Lesson, "_start", lambda self, features, y: None)
    zoo = rkr.learn(pictures / "colours", tmp_path / "zoo", **{**QUICK, "epochs": 9}, patience=2)
    assert len(states) == 5  # the second was best, two were not better, and the last is the test of what is kept
    kept = zoo.model.tasks["colours"].tensors()
    assert all(torch.equal(kept[key], value) for key, value in states[1].items())
    assert not all(torch.equal(states[3][key], value) for key, value in states[1].items())
    assert zoo.tasks["colours"].about["epochs"] == 4


def test_small_classes_are_repeated() -> None:
    y = torch.tensor([0] * 40 + [1] * 3 + [2] * 20)
    rows = repeated(y, 0.25, seed=0)
    assert rows is not None
    assert torch.bincount(y[rows]).tolist() == [40, 10, 20]
    assert set(rows.tolist()) == set(range(63))
    assert repeated(y, 0.05, seed=0) is None


def test_what_is_left_out_is_said(pictures: Path, tmp_path: Path, command: Command) -> None:
    source = Path(shutil.copytree(pictures / "colours", tmp_path / "colours"))
    (source / "red/bad.png").write_bytes(b"no picture")
    shutil.copy(source / "red/0.png", source / "red/copy.png")
    shutil.copy(source / "red/1.png", source / "blue/other.png")
    shutil.copy(source / "red/2.png", source / "loose.png")
    code, out, _ = command("learn", str(source), "--model", str(tmp_path / "zoo"), "--backbone", TINY, "--epochs", "1")
    assert code == 0
    assert "colours: 47 pictures of 3 classes" in out
    for name in (
        "bad.png: not a picture",
        "copy.png: the same picture is there",
        "other.png: the same",
        "loose.png: is in",
    ):
        assert name in out
    record = rkr.open(tmp_path / "zoo").tasks["colours"]
    assert (record.about["broken"], record.about["copies"]) == (1, 3)


def test_a_csv_with_parts(pictures: Path, tmp_path: Path) -> None:
    lines = ["path,label,part"]
    for label in ("red", "blue"):
        for i in range(12):
            lines.append(f"{pictures}/colours/{label}/{i}.png,{label},{'val' if i < 3 else 'train'}")
    (tmp_path / "two.csv").write_text("\n".join(lines))
    zoo = rkr.learn(tmp_path / "two.csv", tmp_path / "zoo", **QUICK)
    assert zoo.tasks["two"].about["validation"] == 6


# -- what must be refused, and change nothing --------------------------------------------------------------


def folders(root: Path) -> dict[str, Path]:
    """Sources of pictures that cannot be learned."""
    found = {name: root / name for name in ("empty", "one", "broken", "missing")}
    found["empty"].mkdir(parents=True)
    draw_classes(found["one"], {"red": 4})
    for label in ("a", "b"):
        (found["broken"] / label).mkdir(parents=True)
        (found["broken"] / label / "1.png").write_bytes(label.encode())
    return found


REFUSED = [
    ("empty", [], "no pictures found"),
    ("missing", [], "not found"),
    ("one", [], "has one class only, 'red'"),
    ("broken", [], "none of its 2 files can be used, for instance"),
    ("good", [], "has a task 'good' already: choose another name with --task, or drop it first"),
    ("good", ["--task", "auto"], "a task cannot be called 'auto'"),
    (
        "good",
        ["--task", "x", "--backbone", "timm:resnet18"],
        "has the network helpers.pictures:tiny, not timm:resnet18",
    ),
    ("good", ["--task", "x", "--size", "64"], "has pictures of 32 pixels, not 64"),
    ("good", ["--task", "x", "--rank", "7"], "has rank 4, which all of its tasks share, not 7"),
    ("good", ["--task", "x", "--epochs", "0"], "--epochs must be a whole number of at least 1"),
    ("good", ["--task", "x", "--validation", "0.9"], "--validation must be a share of 0 to 0.5"),
    ("good", ["--task", "x", "--lr", "0"], "--lr must be greater than 0"),
    ("good", ["--task", "x", "--accelerator", "tpu"], "--accelerator: choose one of"),
]


@pytest.mark.parametrize(("source", "words", "message"), REFUSED)
def test_bad_input_changes_nothing(
    zoo: Path, tmp_path: Path, pictures: Path, command: Command, source: str, words: list[str], message: str
) -> None:
    sources = folders(tmp_path / "sources")
    rkr.open(zoo).rename("colours", "good")
    sources["good"] = Path(shutil.copytree(pictures / "colours", tmp_path / "good"))
    before = content(zoo)
    code, _, err = command("learn", str(sources[source]), "--model", str(zoo), *words)
    assert code == 2, err
    assert message in err
    assert err.count("\n") == 1
    assert content(zoo) == before
    new = tmp_path / "deep" / "new"
    if not words and source != "good":
        assert command("learn", str(sources[source]), "--model", str(new), "--backbone", TINY)[0] == 2
        assert not new.parent.exists()


BACKBONES = [
    ("resnet18", "no network is called 'resnet18'; give efficientnet-lite0, timm:NAME"),
    ("helpers.pictures:missing", "cannot be imported"),
    ("helpers.pictures:no_network", "must return a torch.nn.Module, not int"),
    ("not_there_at_all:x", "there is no module 'not_there_at_all'"),
    ("timm:", "the name is missing"),
]


@pytest.mark.parametrize(("backbone", "message"), BACKBONES)
def test_bad_backbones(pictures: Path, tmp_path: Path, command: Command, backbone: str, message: str) -> None:
    words = ("learn", str(pictures / "colours"), "--model", str(tmp_path / "zoo"), "--backbone", backbone)
    code, _, err = command(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "zoo").exists()


def test_folders_that_are_no_zoo(pictures: Path, tmp_path: Path, made: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.doc").write_text("x")
    for name, message in (("file", "is a file; --model needs a folder"), ("full", "has files .thesis.doc.")):
        with pytest.raises(FileError, match=message):
            rkr.learn(pictures / "colours", tmp_path / name, **QUICK)
    plain = rkr.rectify(rkr.networks.small_cnn(classes=4, size=4), head="fc")
    plain.add_task("t", classes=2, train_base=False)
    plain.save(tmp_path / "plain")
    for call in (lambda: rkr.open(tmp_path / "plain"), lambda: rkr.learn(pictures / "colours", tmp_path / "plain")):
        with pytest.raises(UsageError, match="does not say how to build its network"):
            call()
    opened = rkr.open(tmp_path / "plain", rkr.networks.small_cnn(classes=4, size=4))
    assert list(opened.tasks) == ["t"]


def test_a_second_writer_is_refused(pictures: Path, zoo: Path, command: Command) -> None:
    before = content(zoo)
    with writing(zoo):
        code, _, err = command("learn", str(pictures / "colours"), "--model", str(zoo), "--task", "x")
        assert (code, err.count("\n")) == (2, 1)
        assert "another process is learning a task there" in err
        rkr.open(zoo).rename("shapes", "forms")  # which harms nobody
    assert rkr.open(zoo).tasks["forms"].pictures == 42
    assert {name for name in before if name not in content(zoo)} == {n for n in before if n.startswith("shapes.")}


@pytest.mark.parametrize("name", ["..", ".", "lock", "../../zoo"])
def test_names_of_tasks_lead_nowhere_else(pictures: Path, zoo: Path, name: str) -> None:
    before = content(zoo)
    learned = rkr.learn(pictures / "colours", zoo, name, epochs=1)
    assert list(learned.tasks) == ["colours", "shapes", name]
    after = content(zoo)
    assert all(after[file] == data for file, data in before.items() if file != "zoo.json")
    assert len(after) == len(before) + 1
    learned.drop(name)
    assert content(zoo).keys() == before.keys()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_a_full_disk_or_no_permission(
    pictures: Path, zoo: Path, command: Command, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    before = content(zoo)

    def refuse(*args: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(atomic.os, "replace", refuse)
    words = ("learn", str(pictures / "colours"), "--model", str(zoo), "--task", "x", "--epochs", "1")
    code, _, err = command(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert f"cannot be written: {error.strerror}" in err
    monkeypatch.undo()
    assert content(zoo) == before
    monkeypatch.setattr(Path, "mkdir", refuse)
    code, _, err = command(*words)
    assert code == 2
    assert str(error.strerror) in err


def test_dry_run_writes_nothing(pictures: Path, made: Path, tmp_path: Path, command: Command) -> None:
    new = tmp_path / "new"
    words = ("learn", str(pictures / "colours"), "--dry-run", "--json", "--model")
    code, out, _ = command(*words, str(new), "--backbone", TINY)
    found = json.loads(out)
    assert (code, found["new"], found["pictures"], found["classes"]) == (0, True, 48, 3)
    assert not new.exists()
    assert found["task_bytes"] == rkr.open(made).tasks["colours"].nbytes
    assert found["decoded_bytes"] == 48 * 36 * 36 * 3
    before = content(made)
    code, out, _ = command(*words[:-2], "--model", str(made), "--task", "x")
    assert code == 0
    assert "'x': adds to" in out
    assert "nothing was written" in out
    assert content(made) == before


# -- answers and tasks -------------------------------------------------------------------------------------


def test_answers(pictures: Path, made: Path) -> None:
    zoo = rkr.open(made)
    files = sorted((pictures / "test").rglob("*.png"))
    answers = zoo.predict(pictures / "test", task="colours", top=2)
    assert [a.path for a in answers] == [str(f) for f in files]
    shares, numbers = zoo.logits(squares(zoo, pictures / "test"), "colours").softmax(1).topk(2)
    for row, answer in enumerate(answers):
        assert answer.classes == tuple(("blue", "green", "red")[n] for n in numbers[row].tolist())
        assert answer.probabilities == pytest.approx(shares[row].tolist(), abs=1e-6)
    one = zoo.predict([files[0].read_bytes(), files[1]], task="colours")
    assert [a.classes[0] for a in one] == [a.classes[0] for a in answers[:2]]


def test_the_task_is_inferred(pictures: Path, made: Path) -> None:
    zoo = rkr.open(made)
    answers = zoo.predict(pictures / "test", task="auto")
    told = [a for a in answers if a.task is not None]
    assert len(told) >= 0.7 * len(answers)
    assert all(0 <= a.task_probability <= 1 for a in answers if a.task_probability is not None)
    assert all(a.classes for a in told)
    assert all(not a.classes for a in answers if a.task is None)


def test_the_command_predict(pictures: Path, made: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"x")
    words = ("predict", str(made), str(pictures / "test/red"), str(tmp_path / "bad.jpg"), "--task", "colours")
    code, out, _ = command(*words, "--top", "2", "--format", "csv")
    rows = [line.split(",") for line in out.splitlines()]
    assert code == 0
    names = ["class_1", "probability_1", "class_2", "probability_2"]
    assert rows[0] == ["path", "task", *names, "task_probability", "error"]
    assert len(rows) == 10
    assert "not a picture" in out.splitlines()[-1]
    code, out, _ = command(*words, "--out", str(tmp_path / "a.json"))
    found = json.loads((tmp_path / "a.json").read_text())
    assert len(found) == 9
    assert found[0]["answers"][0]["class"] == rows[1][2]
    assert "error" in found[-1]
    for bad, message in (
        (["predict", str(made), str(pictures / "test")], "has 2 tasks: give one with --task, or auto"),
        (["predict", str(made), str(pictures / "test"), "--task", "x"], "no task is named 'x'"),
        (["predict", str(made), str(pictures / "no"), "--task", "colours"], "not found"),
        (["predict", str(made), str(pictures / "test"), "--task", "colours", "--top", "0"], "--top must be"),
        (["predict", str(tmp_path), str(pictures / "test")], "not a saved model"),
    ):
        code, _, err = command(*bad)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err


def test_evaluation(pictures: Path, made: Path, tmp_path: Path, command: Command) -> None:
    zoo = rkr.open(made)
    found = zoo.evaluate(pictures / "test", "colours")
    logits, y = zoo.logits(squares(zoo, pictures / "test"), "colours"), torch.arange(3).repeat_interleave(8)
    confusion = torch.zeros(3, 3, dtype=torch.int64)
    for truth, answer in zip(y.tolist(), logits.argmax(1).tolist(), strict=True):
        confusion[truth, answer] += 1
    assert torch.equal(found.confusion, confusion)
    assert found.accuracy == confusion.diagonal().sum() / 24
    picture = tmp_path / "confusion.png"
    code, out, _ = command(
        "evaluate", str(made), str(pictures / "test"), "--task", "colours", "--confusion", str(picture)
    )
    assert code == 0
    assert f"{100 * found.accuracy:.1f} % of 24 pictures" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, _, err = command("evaluate", str(made), str(pictures / "shapes"), "--task", "colours")
    assert code == 2
    assert "class 'disc' is not among those of the task 'colours'" in err


def test_tasks_are_managed(made: Path, zoo: Path, tmp_path: Path, command: Command) -> None:
    prints = {name: rkr.open(made).model.fingerprint(name) for name in ("colours", "shapes")}
    code, out, _ = command("tasks", str(zoo), "--json")
    assert [record["name"] for record in json.loads(out)] == ["colours", "shapes"]
    assert command("tasks", str(zoo), "--rename", "colours", "--to", "paint")[0] == 0
    assert command("tasks", str(zoo), "--copy", "paint", "--into", str(tmp_path / "other"), "--to", "p")[0] == 0
    assert command("tasks", str(zoo), "--drop", "shapes")[0] == 0
    assert "fingerprint  " + prints["colours"] in command("tasks", str(zoo), "--show", "paint")[1]
    left, other = rkr.open(zoo), rkr.open(tmp_path / "other")
    assert list(left.tasks) == ["paint"]
    assert list(other.tasks) == ["p"]
    assert other.tasks["p"].pictures == 48
    assert {left.model.fingerprint("paint"), other.model.fingerprint("p")} == {prints["colours"]}
    for words in (["--drop", "shapes"], ["--rename", "paint"], ["--copy", "paint"], ["--show", "a", "--drop", "b"]):
        code, _, err = command("tasks", str(zoo), *words)
        assert (code, err.count("\n")) == (2, 1)


def test_a_task_stays_with_its_size(pictures: Path, made: Path, tmp_path: Path, command: Command) -> None:
    """The base is the same network, but its answers to pictures of another size are not what the task learned."""
    large = tmp_path / "large"
    rkr.learn(pictures / "colours", large, **{**QUICK, "rank": 0, "size": 64})
    repository = tmp_path / "repository"
    assert command("push", str(large), "colours", "--folder", str(repository))[0] == 0
    before = content(made)
    for words in (
        ["tasks", str(large), "--copy", "colours", "--into", str(made), "--to", "x"],
        ["pull", str(repository), "--model", str(made), "--task", "x"],
    ):
        code, _, err = command(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert f"prepared otherwise (size: 64; {made} has 32)" in err
        assert content(made) == before


def test_events_tell_of_the_preparation(pictures: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    rkr.learn(pictures / "colours", tmp_path / "zoo", **QUICK, watch=events.append)
    counted = [(e.what, e.count, e.total) for e in events if isinstance(e, Preparing)]
    assert ("pictures", 48, 48) in counted
    assert counted[-1] == ("features", 3 * 48, 3 * 48)  # each picture, and two crops of it


def test_export_asks_for_what_the_command_says(
    made: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def export(model: Any, path: Path, **how: Any) -> None:
        asked.append(how)
        assert model.network.input_shape == (3, 32, 32)

    monkeypatch.setattr(rkr, "export", export, raising=False)
    words = ("export", str(made), "--to", str(tmp_path / "x.onnx"))
    assert command(*words, "--task", "shapes")[0] == 0
    assert command(*words, "--style", "all")[0] == 0
    assert asked == [{"tasks": "shapes", "style": "merged"}, {"tasks": ["colours", "shapes"], "style": "all"}]
    code, _, err = command(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert "writes one task, not 2: give --task, or --style all" in err
    assert command(*words, "--task", "x")[0] == 2
