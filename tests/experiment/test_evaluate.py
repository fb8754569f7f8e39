"""What is measured is right, the proof is sharp, and learners never get test images to learn from."""

from __future__ import annotations

import gc
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Forgetful, execute, images, make_case, make_stream
from torch import Tensor

from rkr.data import Images, Stream, Task, Training
from rkr.experiment.evaluate import BATCH, Evaluator, _in_order
from rkr.experiment.processes import make_fabric
from rkr.experiment.run import Run
from rkr.methods import Method
from rkr.methods.finetune import Finetune
from rkr.methods.joint import Joint
from rkr.methods.learner import Learner, Outcome, Phase, ReadSamples, SeenTask


class Answers(Learner):
    """Answers with given logits, whatever it is shown: those of the candidate task for the images of a task."""

    def __init__(self, logits: dict[tuple[int, int], Tensor]) -> None:
        super().__init__(lambda: None, "")  # type: ignore[arg-type, return-value]
        self.logits, self.asked = logits, dict.fromkeys(logits, 0)
        for number in range(3):
            self.begin(SeenTask(number, f"t{number}", (), 0))

    def predict(self, x: Tensor, number: int) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        of = int((x[0, 0, 0, 0] * 0.2 + 0.3).mul(255).round())  # the first pixel tells the task
        start = self.asked[of, number]
        self.asked[of, number] = (start + len(x)) % len(self.logits[of, number])
        return self.logits[of, number][start : start + len(x)]


@pytest.fixture
def stream() -> Stream:
    """3 tasks of 7, 3 and 9 classes, more test images than one batch holds."""
    tasks = []
    for number, (classes, test) in enumerate(((7, BATCH + 13), (3, 20), (9, 2 * BATCH))):
        found = images(test, 2, number)
        found.x[:, 0, 0, 0] = number
        y = torch.randint(classes, (test,), generator=torch.Generator().manual_seed(number))
        names = tuple(map(str, range(classes)))
        tasks.append(Task(Training(f"t{number}", names, images(4, 2, 9)), Images(found.x, y)))
    order = (tuple(range(7)), tuple(range(3)), tuple(range(9)))
    return Stream("s", tuple(tasks), (0.3,), (0.2,), order)


@pytest.fixture
def logits(stream: Stream) -> dict[tuple[int, int], Tensor]:
    draw = torch.Generator().manual_seed(5)
    sizes = [len(task.training.class_names) for task in stream.tasks]
    return {
        (of, number): torch.randn(len(stream.tasks[of].test), sizes[number], generator=draw)
        for of in range(3)
        for number in range(3)
    }


def test_accuracies(stream: Stream, logits: dict[tuple[int, int], Tensor]) -> None:
    learner, evaluator = Answers(logits), Evaluator(stream, make_fabric("cpu"))
    row = evaluator.row(learner, 3)
    agnostic = evaluator.agnostic(learner, 3)
    assert row.tested == (BATCH + 13, 20, 2 * BATCH)
    for of, task in enumerate(stream.tasks):
        first = near = both = 0
        for i, label in enumerate(task.test.y.tolist()):
            own = logits[of, of][i].tolist()
            ranks = sorted(range(len(own)), key=lambda c: -own[c])
            first += ranks[0] == label
            near += label in ranks[:5]
            shares = [logits[of, n][i].double().softmax(0).tolist() for n in range(3)]
            task_found = max(range(3), key=lambda n: max(shares[n]))
            both += task_found == of and ranks[0] == label
        count = len(task.test)
        assert row.main[of] == first / count
        assert row.measures["top5"][of] == near / count
        assert agnostic[of] == both / count
        parts = [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in logits[of, of].split(BATCH)]
        assert row.proof[task.name] == hashlib.sha256("".join(parts).encode()).hexdigest()
    assert row.measures["top5"][1] == 1.0  # 3 classes
    fewer = evaluator.row(learner, 2)
    assert (fewer.main, fewer.tested) == (row.main[:2], row.tested[:2])


def test_the_proof_sees_the_last_bit(stream: Stream, logits: dict[tuple[int, int], Tensor]) -> None:
    evaluator = Evaluator(stream, make_fabric("cpu"))
    before = evaluator.row(Answers(logits), 3)
    changed = logits[1, 1].clone()
    changed[-1, 0] = torch.nextafter(changed[-1, 0], torch.tensor(torch.inf))
    after = evaluator.row(Answers({**logits, (1, 1): changed}), 3)
    assert before.main == after.main
    assert [before.proof[name] == after.proof[name] for name in ("t0", "t1", "t2")] == [True, False, True]


class _Rank:
    """As much of Fabric as dealing out batches needs."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world: int) -> None:
        self.global_rank, self.world_size = rank, world


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_batches_are_dealt_out_whole(stream: Stream, world: int) -> None:
    """So the proof has the same bits with any number of processes, be there more of them than batches."""
    for number, task in enumerate(stream.tasks):
        evaluators = [Evaluator(stream, _Rank(rank, world)) for rank in range(world)]  # type: ignore[arg-type]
        shares = [[y for _, y in evaluator._own_batches(number)] for evaluator in evaluators]
        assert torch.equal(torch.cat(_in_order(shares)), task.test.y)
        assert [len(y) for y in _in_order(shares)] == [len(y) for y in task.test.y.split(BATCH)]


def _tasks(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "task"]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("rkr", [True, True, True]),
        ("separate", [True, True, True]),
        ("head-only", [True, True, True]),
        ("forgetful", [True, False, False]),
        ("finetune", [None, None, None]),
    ],
)
def test_unchanged(tmp_path: Path, method: str, expected: list[bool | None]) -> None:
    execute(tmp_path, method)
    assert [line["unchanged"] for line in _tasks(tmp_path)] == expected


def test_agnostic_results_are_the_learner_s_own_answers(tmp_path: Path) -> None:
    """After every task, by `infer`, whatever `predict` says when the task is told."""

    class Always(Finetune):
        def infer(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.full((len(x),), len(self.seen) - 1), torch.zeros(len(x), dtype=torch.int64)

    execute(tmp_path, make_case("rkr", learner=Method(Always, ""), test=9, agnostic="every"))
    assert [line["agnostic"] for line in _tasks(tmp_path)] == [[5 / 9], [0, 5 / 9], [0, 0, 5 / 9]]


@pytest.mark.parametrize("method", ["ewc", "pc", "lwf", "icarl", "eeil"])
def test_both_evaluations(tmp_path: Path, method: str) -> None:
    """Told the task and not told it, against the learner's answers to the test images, one task at a time."""
    case = make_case(method, agnostic="every", lr=0.02, epochs=3, milestones=())
    run = Run(*case, tmp_path, make_fabric("cpu"))
    assert run.execute()
    learner, last = run._learner.eval(), _tasks(tmp_path)[-1]
    aware, agnostic = [], []
    with torch.no_grad():
        for number, task in enumerate(case.stream.tasks):
            x = ((task.test.x / 255 - 0.3) / 0.2).contiguous(memory_format=torch.channels_last)
            aware.append(float((learner.predict(x, number).argmax(1) == task.test.y).float().mean()))
            found, label = learner.infer(x)
            agnostic.append(float(((found == number) & (label == task.test.y)).float().mean()))
    assert last["accuracy"] == pytest.approx(aware, abs=1e-6)
    assert last["agnostic"] == pytest.approx(agnostic, abs=1e-6)
    assert all(a >= b for a, b in zip(aware, agnostic, strict=True))


def test_unchanged_looks_at_the_first_answers(tmp_path: Path) -> None:
    """A learner that forgets the first task but not the ones after is found out after every task."""

    class Once(Forgetful):
        def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
            if self.task.number:
                self.requires_grad_(False)

        def groups(self) -> list[dict[str, Any]]:
            return super().groups() if self.task.number < 2 else [{"params": self.heads.heads[2].parameters()}]

        def train(self, mode: bool = True) -> Once:
            super().train(mode and len(self.seen) < 3)
            return self

    execute(tmp_path, make_case("rkr", learner=Method(Once, "")))
    assert [line["unchanged"] for line in _tasks(tmp_path)] == [True, False, False]
    assert _tasks(tmp_path)[1]["proof"].items() <= _tasks(tmp_path)[2]["proof"].items()


# ---------------------------------------------------------------------------------------------------------
# Who gets what

MARK = 251  # a value that only test images have


def poisoned() -> Stream:
    """A stream in which every pixel of a test image has the marker's value, and no pixel of any other."""
    made = make_stream()
    tasks = tuple(Task(t.training, Images(torch.full_like(t.test.x, MARK), t.test.y)) for t in made.tasks)
    return Stream(made.name, tasks, made.mean, made.std, made.order)


class Recording(Finetune):
    """Keeps everything that it is given to learn from."""

    given: list[Tensor]
    labels: list[Tensor]

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        assert set(vars(task)) == {"number", "name", "class_names", "start", "attributes", "unseen", "scaling"}
        Recording.last = self

    def prepare(self, phase: Phase, train: ReadSamples) -> None:
        self.reachable = reachable_tensors(self, train)

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        self.given.append(x.clone())
        self.labels.append(y.clone())
        return super().loss(x, y)

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        for x, y in train():
            self.given.append(x.clone())
            self.labels.append(y.clone())
        self.reachable += reachable_tensors(self, train, validation)


def reachable_tensors(*roots: object) -> list[Tensor]:
    """Every tensor that can be reached from some objects, modules and classes left aside."""
    seen: dict[int, object] = {}
    waiting: list[object] = list(roots)
    found = []
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, type(gc) | type):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            found.append(thing)
        more = gc.get_referents(thing)
        if hasattr(thing, "__globals__"):  # what a function was given, not what its file can see
            more = [m for m in more if m is not thing.__globals__]
        waiting += more
    return found


def test_learners_never_get_test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "given", [], raising=False)
    monkeypatch.setattr(Recording, "labels", [], raising=False)
    case = make_case("rkr", learner=Method(Recording, ""), stream=poisoned(), agnostic="every")
    marker = (MARK / 255 - 0.3) / 0.2
    predicted: list[Tensor] = []
    predict = Recording.predict
    monkeypatch.setattr(
        Recording, "predict", lambda self, x, number: (predicted.append(x), predict(self, x, number))[1]
    )
    execute(tmp_path, case)
    assert sum(len(x) for x in Recording.given) == 3 * (2 + 1) * 19  # every epoch, and once more for `end`
    assert not any(bool((x - marker).abs().lt(1e-3).any()) for x in Recording.given)
    assert predicted  # test images come without labels, and by this way only
    assert all(bool((x - marker).abs().lt(1e-3).all()) for x in predicted)
    train = torch.cat([task.training.train.y + 2 * n for n, task in enumerate(case.stream.tasks)])
    assert torch.equal(torch.cat(Recording.labels).bincount(), 3 * train.bincount())


def test_learners_cannot_even_reach_test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "given", [], raising=False)
    monkeypatch.setattr(Recording, "labels", [], raising=False)
    execute(tmp_path, make_case("rkr", learner=Method(Recording, ""), stream=poisoned()))
    found = Recording.last.reachable
    assert any(t.dtype == torch.uint8 and t.dim() == 4 for t in found)  # the training images, through `train`
    assert not [t for t in found if t.dtype == torch.uint8 and t.dim() == 4 and bool((t == MARK).any())]


def test_labels_count_over_all_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joint training and memories: each image comes with the label of its own task's classes."""
    found: list[tuple[Tensor, Tensor]] = []

    class Watched(Joint):
        def rehearse(self, images: Any) -> dict[int, Tensor | None]:
            assert list(images) == [18, 12, 6][: self.task.number + 1]
            memories: dict[int, Tensor | None] = {n: torch.tensor([3, 1]) for n in range(self.task.number)}
            return memories if self.task.number == 2 else {**memories, self.task.number: None}

        def loss(self, x: Tensor, y: Tensor) -> Outcome:
            found.append((x, y))
            return super().loss(x, y)

    tasks, sizes, starts = [], (3, 4, 2), (0, 3, 7)
    for number, (classes, train) in enumerate(zip(sizes, (18, 12, 6), strict=True)):
        y = torch.arange(train) % classes
        x = (20 * number + y)[:, None, None, None].expand(-1, 1, 8, 8).to(torch.uint8)  # a pixel tells task and class
        tasks.append(Task(Training(f"t{number}", tuple(map(str, range(classes))), Images(x, y)), Images(x, y)))
    order = tuple(tuple(range(size)) for size in sizes)
    stream = Stream("s", tuple(tasks), (0.0,), (1.0,), order)
    execute(tmp_path, make_case("joint", learner=Method(Watched, ""), stream=stream, augment={}, epochs=1, batch=99))
    assert [len(y) for _, y in found] == [18, 2 + 12, 2 + 2]
    for x, y in found:
        pixel = (x[:, 0, 0, 0] * 255).round().long()
        assert torch.equal(y, torch.tensor(starts)[pixel // 20] + pixel % 20)
    last = found[-1][1]
    assert sorted(last.tolist()) == sorted([0 + 3 % 3, 0 + 1 % 3, 3 + 3 % 4, 3 + 1 % 4])


def test_the_first_process_alone_tells_and_writes(tmp_path: Path) -> None:
    run = Run(*make_case("rkr"), tmp_path, make_fabric("cpu"))
    assert run.fabric.world_size == 1
    assert run.execute()
    assert not run.stop_wanted
