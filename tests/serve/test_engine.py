"""The engine: answers are those of the plain model, batches are mixed, tasks come and go between batches."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.waiting import until
from helpers.zoos import CLASSES, make_zoo, task_file
from torch import Tensor

from rkr.core.zoo import add_task_file, drop_task
from rkr.pictures.predict import Prediction
from rkr.pictures.zoo import Zoo, open_zoo
from rkr.serve.compute import Computer
from rkr.serve.engine import LOOK, Batch, Engine
from rkr.serve.limits import Busy, Limits, NotFound, Refused

Start = Callable[..., Engine]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_zoo(tmp_path / "zoo")
    return tmp_path / "zoo"


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        limits, times = Limits(**options.pop("limits", {})), options.pop("times", None)
        engines.append(Engine(open_zoo(folder, device="cpu"), limits, threads=1, **options))
        if times is not None:  # a device as it is wanted
            computer = engines[-1].computer
            computer.measure = lambda *_: None  # type: ignore[method-assign]
            computer.alone = computer.together = times
        engines[-1].start()
        until(lambda: engines[-1].ready)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def squares(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, 3, 36, 36), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def plain(folder: Path, square: Tensor, task: str) -> dict[str, float]:
    """What a plain network with the task folded in says."""
    zoo = open_zoo(folder, device="cpu")
    network = zoo.model.merged(task).eval()
    with torch.no_grad():
        x = zoo.preparation.normalised(zoo.preparation.centre(square[None]))
        shares = network(x).softmax(1)[0].tolist()
    return dict(zip(zoo.tasks[task].classes, shares, strict=True))


def check(folder: Path, answer: Prediction, square: Tensor, task: str) -> None:
    expected = plain(folder, square, task)
    assert answer.task == task
    assert list(answer.classes) == sorted(expected, key=expected.__getitem__, reverse=True)[: len(answer.classes)]
    for name, p in zip(answer.classes, answer.probabilities, strict=True):
        assert p == pytest.approx(expected[name], abs=2e-6)


@pytest.mark.parametrize("together", [True, False])
def test_a_batch_of_many_tasks_is_answered_as_by_each_task(folder: Path, together: bool) -> None:
    """By one pass for all and task by task, with numbers of classes that differ."""
    zoo = open_zoo(folder, device="cpu")
    computer, names = Computer(zoo), [list(CLASSES)[i % 3] for i in range(16)]
    computer.alone = {1: 1.0, 16: 16.0}
    computer.together = {1: 1e-3, 16: 1e-2} if together else {}
    x = squares(16)
    found = computer(x, names)
    assert (computer._gathering is not None) is together
    for logits, name, square in zip(found, names, x, strict=True):
        torch.testing.assert_close(logits, zoo.logits(square[None], name)[0], rtol=1e-5, atol=1e-5)


def test_computing_together_shares_the_base(folder: Path) -> None:
    """The network that computes batches has the base's own memory, and lets tasks leave memory."""
    zoo = open_zoo(folder, device="cpu")
    computer = Computer(zoo)
    computer.alone, computer.together = {1: 1.0}, {1: 1e-3}
    computer(squares(2), ["birds", "cars"])
    assert computer._gathering is not None
    own = {p.data_ptr() for p in zoo.model.network.parameters()}
    conv = [m for m in computer._gathering.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(conv) == 3
    assert {m.weight.data_ptr() for m in conv} <= own
    zoo.model.tasks.shrink(0)
    assert [zoo.model.tasks.in_memory(name) for name in ("birds", "cars")] == [None, None]


def test_tables_take_in_tasks_as_they_come(folder: Path, tmp_path: Path) -> None:
    zoo = open_zoo(folder, device="cpu")
    computer = Computer(zoo)
    computer.alone, computer.together = {1: 1.0}, {1: 1e-3}
    x = squares(2)
    computer(x, ["birds", "cars"])
    found = computer(x, ["trees", "cars"])
    assert list(computer._resident) == ["birds", "cars", "trees"]
    torch.testing.assert_close(found[0], zoo.logits(x[:1], "trees")[0], rtol=1e-5, atol=1e-5)
    add_task_file(folder, task_file(folder, "new", tmp_path / "t", ("a", "b"), seed=5), "cars", replace=True)
    before = zoo.logits(x[1:], "cars")[0]
    zoo.follow()
    computer.forget()
    found = computer(x, ["trees", "cars"])
    assert not torch.allclose(found[1], before)
    torch.testing.assert_close(found[1], zoo.logits(x[1:], "cars")[0], rtol=1e-5, atol=1e-5)


def test_the_quicker_way_is_chosen(folder: Path) -> None:
    computer = Computer(open_zoo(folder, device="cpu"))
    computer.alone = {1: 1.0, 2: 2.0, 4: 4.0}  # nothing is gained by batches
    assert computer.size == 1
    computer.alone = {1: 0.010, 2: 0.014, 4: 0.024, 8: 0.047}  # 10, 7, 6 and 5.9 ms a picture
    assert computer.size == 4
    computer.together = {1: 0.014, 2: 0.020, 4: 0.032, 8: 0.056}
    assert computer.size == 8
    computer.merging = 0.0
    assert not computer._together_is_quicker({"birds": 4, "cars": 4})  # 48 ms task by task
    assert computer._together_is_quicker({"birds": 1, "cars": 1, "trees": 2})  # 34 ms task by task, 32 together
    computer.merging = 0.010
    assert computer._together_is_quicker({"birds": 4, "cars": 4})
    computer.alone = {1: 0.4, 2: 0.7, 4: 1.2}  # a batch of 4 would keep others waiting for too long
    computer.together = {}
    assert computer.size == 1


def test_answers_are_those_of_the_plain_model(folder: Path, start: Start) -> None:
    batches: list[Batch] = []
    engine = start(watch=batches.append, limits={"wait": 60.0}, times={1: 0.1, 16: 0.16})
    x, names = squares(24), [list(CLASSES)[i % 3] for i in range(24)]
    futures = [engine.submit(square, name, top=2) for square, name in zip(x, names, strict=True)]
    until(lambda: len(batches) == 1)
    engine.hurry()  # the second batch does not fill
    for future, square, name in zip(futures, x, names, strict=True):
        check(folder, future.result(60), square, name)
    until(lambda: len(batches) == 2)
    assert [b.pictures for b in batches] == [16, 8]
    assert [b.tasks for b in batches] == [3, 3]


def test_one_picture_at_a_time_has_always_the_same_bits(folder: Path, start: Start) -> None:
    engine = start(limits={"batch": 1})
    alone = engine.submit(squares(1)[0], "birds", top=3).result(60)
    crowd = [engine.submit(square, task, top=3) for square in squares(8) for task in CLASSES]
    assert crowd[0].result(60) == alone
    expected = open_zoo(folder, device="cpu").logits(squares(1), "birds").softmax(1)[0]
    assert sorted(alone.probabilities) == sorted(expected.tolist())


def test_inferred_tasks_are_those_of_the_rule(folder: Path, start: Start) -> None:
    engine, zoo = start(), open_zoo(folder, device="cpu")
    x = squares(6)
    found = zoo.rule()(zoo.features(x), 0.05)
    answers = [future.result(60) for future in [engine.submit(square, "auto") for square in x]]
    for row, one in enumerate(answers):
        expected = None if bool(found.none[row]) else zoo.rule().names[int(found.task[row])]
        assert one.task == expected
        assert one.task_probability == pytest.approx(float(found.probability[row].max()), abs=1e-5)


def test_tasks_of_other_processes_come_by_themselves(folder: Path, start: Start, tmp_path: Path) -> None:
    engine, square = start(), squares(1)[0]
    add_task_file(folder, task_file(folder, "ships", tmp_path / "ships.safetensors"))
    until(lambda: "ships" in engine.tasks)
    check(folder, engine.submit(square, "ships").result(60), square, "ships")
    drop_task(folder, "ships")
    until(lambda: "ships" not in engine.tasks)
    with pytest.raises(NotFound, match="'ships'"):
        engine.submit(square, "ships").result(60)


def test_the_folder_is_looked_at_all_the_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether pictures come one after the other or none does."""
    assert LOOK <= 0.25  # of the second in which tasks are to come
    engine, looks = start(times={1: 0.01}), Counter[str]()
    monkeypatch.setattr(engine.zoo, "follow", lambda: looks.update(["one"]))
    until(lambda: looks["one"] > 3)
    looks.clear()
    until(lambda: engine.submit(squares(1)[0], "birds").result(60) and looks["one"] > 3)


def test_a_replaced_task_answers_anew(folder: Path, start: Start, tmp_path: Path) -> None:
    engine, square = start(), squares(1)[0]
    before = engine.submit(square, "cars", top=2).result(60)
    add_task_file(folder, task_file(folder, "new", tmp_path / "t", ("bus", "van"), seed=3), "cars", replace=True)
    engine.refresh().result(60)
    after = engine.submit(square, "cars", top=2).result(60)
    assert after.probabilities != before.probabilities
    check(folder, after, square, "cars")


def test_a_damaged_task_is_named_and_hurts_no_other(folder: Path, tmp_path: Path, start: Start) -> None:
    path = next(folder.glob("cars.*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    said: list[dict[str, Any]] = []
    engine = start(tell=lambda event, **fields: said.append({"event": event, **fields}))
    until(lambda: all(e.fingerprint or e.damaged for e in engine.tasks.values()))
    assert "checksum" in (engine.tasks["cars"].damaged or "")
    assert [line["task"] for line in said if line["event"] == "damaged"] == ["cars"]
    x = squares(2)
    good, bad = engine.submit(x[0], "birds"), engine.submit(x[1], "cars")
    check(folder, good.result(60), x[0], "birds")
    with pytest.raises(Refused, match="damaged") as caught:
        bad.result(60)
    assert caught.value.status == 409
    assert engine.submit(x[0], "auto").result(60).task in (None, "birds", "trees")


def test_fingerprints_are_the_models_own(folder: Path, start: Start) -> None:
    engine, zoo = start(), open_zoo(folder, device="cpu")
    until(lambda: all(e.fingerprint for e in engine.tasks.values()))
    assert {n: e.fingerprint for n, e in engine.tasks.items()} == {n: zoo.model.fingerprint(n) for n in CLASSES}


def test_one_bad_picture_of_a_batch_does_not_cost_the_others_their_answers(folder: Path, start: Start) -> None:
    engine = start(limits={"wait": 60.0}, times={1: 0.1, 4: 0.16})
    x = squares(3)
    wrong = torch.zeros(1, 36, 36, dtype=torch.uint8)
    futures = [engine.submit(x[0], "birds"), engine.submit(wrong, "cars"), engine.submit(x[2], "trees")]
    engine.hurry()
    check(folder, futures[0].result(60), x[0], "birds")
    check(folder, futures[2].result(60), x[2], "trees")
    assert futures[1].exception(30) is not None


def test_beyond_the_bound_it_is_busy(start: Start) -> None:
    engine = start(limits={"batch": 2, "queue": 4})
    engine.accept(3)
    with pytest.raises(Busy, match="3 pictures are waiting already, 4 is the limit") as caught:
        engine.accept(2)
    assert (caught.value.status, caught.value.after) == (503, 1)
    engine.accept(1)
    engine.release(4)
    assert engine.accepted == 0


def test_nobody_waits_for_cancelled_pictures(folder: Path, start: Start) -> None:
    batches: list[Batch] = []
    engine = start(watch=batches.append, limits={"wait": 60.0}, times={1: 0.1, 8: 0.16})
    futures = [engine.submit(square, "birds") for square in squares(4)]
    assert all(future.cancel() for future in futures[1:])
    engine.hurry()
    futures[0].result(60)
    until(lambda: batches)
    assert [b.pictures for b in batches] == [1]


def test_what_was_accepted_is_answered_before_the_end(folder: Path, start: Start) -> None:
    engine = start(limits={"wait": 1000.0}, times={1: 0.1, 32: 0.16})
    x = squares(6)
    futures = [engine.submit(square, "birds") for square in x]
    engine.close(120)  # it does not wait for a fuller batch
    for future, square in zip(futures, x, strict=True):
        check(folder, future.result(0), square, "birds")
    with pytest.raises(Busy, match="shutting down"):
        engine.submit(x[0], "birds")


def test_a_folder_with_another_base_is_told_and_the_old_one_serves_on(folder: Path, start: Start) -> None:
    engine, x = start(), squares(1)
    before = engine.submit(x[0], "birds").result(60)
    zoo: Zoo = make_zoo(folder.parent / "other")
    with torch.no_grad():
        next(zoo.model.network.parameters()).add_(1)
    zoo.model.save(folder.parent / "third")
    for path in (folder.parent / "third").glob("*.safetensors"):
        os.replace(path, folder / path.name)
    os.replace(folder.parent / "third" / "zoo.json", folder / "zoo.json")
    until(lambda: engine.trouble)
    assert "another base" in engine.trouble
    assert engine.submit(x[0], "birds").result(60) == before
