"""Candidates of a task: the best is kept, whoever trains them, however often and wherever the run is interrupted."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import HERE, Process, Server
from helpers.marks import slow
from small_candidates import Trials, execute, make_case
from small_runs import FOREVER, Case, Net, few_digits, make_stream, outcome

from rkr.data import Batches, Images, Stream, Task, Training
from rkr.errors import RkrError, UsageError
from rkr.experiment import runner
from rkr.experiment.candidates import Candidate, Tried, best_of, read_trained
from rkr.experiment.events import CandidateEnd, EpochEnd, Event, Progress, Started, Stopped, TaskEnd
from rkr.experiment.executors import Here, Told
from rkr.experiment.jobs import Job
from rkr.experiment.loop import CandidateKey
from rkr.experiment.plan import Plan
from rkr.experiment.processes import make_fabric
from rkr.experiment.recipes import load_recipe
from rkr.experiment.results import read_result
from rkr.experiment.run import Run
from rkr.experiment.runner import Execution
from rkr.experiment.samples import derived, held_out
from rkr.experiment.state import load_state, save_state
from rkr.experiment.workers import Workers
from rkr.methods import METHODS


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fsync guards against, a power failure, is not tested here."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    Trials.log.clear()
    Trials.made = 0


def lines(folder: Path, event: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == event]


def run_of(folder: Path, case: Case | None = None) -> Run:
    run = Run(*(case or make_case()), folder, make_fabric("cpu"), execution=Execution(save_minutes=FOREVER))
    assert run.execute()
    return run


# ---------------------------------------------------------------------------------------------------------
# What happens


def test_the_order_of_hooks(tmp_path: Path) -> None:
    """The learner itself proposes and judges, each candidate is trained on a learner of its own."""
    run_of(tmp_path, make_case(tasks=1))
    calls = [(name, hook) for name, hook, _ in Trials.log]
    places = ["propose", *["score"] * 3, "observe"]
    own = [hook for name, hook in calls if name == 1]
    tested = ["predict"] * 2  # told the task, and not
    assert own == ["begin", *places, *places, "adopt", "end", *tested]
    steps = math.ceil((19 - round(0.25 * 19)) / 8)
    phases = ["prepare", *["loss"] * steps, "prepare", *["loss"] * 2 * steps]
    for name in range(2, 8):
        assert [hook for learner, hook in calls if learner == name] == ["begin", "adopt", *phases, "predict"]
    firsts = [calls.index((name, "begin")) for name in range(2, 8)]
    assert firsts == sorted(firsts)
    assert firsts[2] < calls.index((1, "observe")) < firsts[3]  # a round is judged before the next begins
    keys = [argument["spot"] for _, hook, argument in Trials.log if hook == "adopt"]
    assert keys[:6] == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]


def test_the_best_wins(tmp_path: Path) -> None:
    run_of(tmp_path)
    tried = lines(tmp_path, "candidate")
    assert [(line["number"], line["round"], line["index"]) for line in tried] == [
        (number, at, place) for number in (1, 3) for at in (0, 1) for place in range(3)
    ]
    tasks = lines(tmp_path, "task")
    for number in (1, 3):
        of_task = [line for line in tried if line["number"] == number]
        for line in of_task:
            assert line["score"] == line["accuracy"] - 0.001 * line["candidate"]["width"]
            assert line["candidate"]["spot"] == [line["round"], line["index"]]
        best = max(of_task, key=lambda line: line["score"])  # the first of equals
        assert tasks[number - 1]["notes"]["width"] == best["candidate"]["width"]
        adopted = [argument for name, hook, argument in Trials.log if (name, hook) == (1, "adopt")]
        assert adopted[number // 2] == best["candidate"]
    assert len({line["candidate"]["width"] for line in tried}) > 2
    assert tasks[1]["notes"]["width"] == 0


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([[1.0, 1.0], [1.0]], (0, 0)),
        ([[0.5, 0.7], [0.7]], (0, 1)),
        ([[0.5], [0.2, 0.9]], (1, 1)),
        ([[-math.inf, -3.0], [-math.inf]], (0, 1)),
        ([[-math.inf, math.nan]], None),
        ([], None),
    ],
)
def test_the_first_of_equals(scores: list[list[float]], best: tuple[int, int] | None) -> None:
    tried = [Tried(r, i, None, 0.5, w, 1.0) for r, row in enumerate(scores) for i, w in enumerate(row)]
    found = best_of(tried)
    assert (None if found is None else (found.round, found.index)) == best


def test_equal_ones(tmp_path: Path) -> None:
    run_of(tmp_path, make_case(tasks=1, options={"equal": True}))
    tried = lines(tmp_path, "candidate")
    assert {line["score"] for line in tried} == {1.0}
    assert Trials.log[-4][1:] == ("adopt", tried[0]["candidate"])


def test_a_candidate_is_what_a_loop_by_hand_makes(tmp_path: Path) -> None:
    """Written down once more, without the engine: seeds, samples, phases and steps; the winner's values bit for bit."""
    case = make_case(tasks=1)
    run = run_of(tmp_path, case)
    tried = lines(tmp_path, "candidate")
    best = max(tried, key=lambda line: line["score"])
    key = (best["round"], best["index"])
    torch.manual_seed(derived(0, "learner"))
    learner: Any = Trials(lambda: Net().to(memory_format=torch.channels_last), "fc")
    torch.manual_seed(derived(0, "task", 0))
    learner.begin(run._learner.seen[0])
    torch.manual_seed(derived(0, "adopt", 0, *key))
    learner.adopt(best["candidate"])
    training = case.stream.tasks[0].training
    order = torch.randperm(19, generator=torch.Generator().manual_seed(derived(0, "held out", 0)))
    held, rest = order[:5].sort().values, order[5:].sort().values
    normal: dict[str, Any] = {"mean": case.stream.mean, "std": case.stream.std}
    for number, (epochs, rates) in enumerate([(1, [0.1]), (2, [0.05, 0.005])]):
        torch.manual_seed(derived(0, "phase", 0, number, "candidate", *key))
        learner.prepare(learner.phases()[number], lambda: iter(()))
        optimizer = torch.optim.SGD(learner.groups(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        seed = derived(0, "batches", 0, number, "candidate", *key)
        batches = Batches(training.train.take(rest), 8, seed, case.spec.augment, **normal)
        learner.train()
        for epoch in range(epochs):
            for group in optimizer.param_groups:
                group["lr"] = rates[epoch]
            for x, y in batches.iter_from(epoch):
                optimizer.zero_grad()
                learner.loss(x, y).loss.backward()
                optimizer.step()
    learner.eval()
    found, wanted = run._learner.state_dict(), learner.state_dict()
    compared = [key for key in wanted if key not in ("policy", "memory0")]  # of observe and end
    assert len(compared) > 20
    for key in compared:
        assert torch.equal(found[key], wanted[key]), key
    (x, y), *more = Batches(training.train.take(held), 250, **normal).iter_from(0)
    assert not more
    with torch.no_grad():
        assert best["accuracy"] == int((learner.predict(x, 0).argmax(1) == y).sum()) / 5
    policy = torch.zeros(3)
    for at in (0, 1)[: best["round"] + 1]:  # what observe has taught until the winner began: its state holds that
        policy += 0.25
        if at < best["round"]:
            torch.manual_seed(derived(0, "judge", 0, at))
            policy += torch.tensor([line["score"] for line in tried if line["round"] == at]) + torch.rand(3)
    assert torch.equal(run._learner.policy, policy)


def test_the_epochs_of_the_winner_are_those_of_the_task(tmp_path: Path) -> None:
    events: list[Event] = []
    assert execute(tmp_path, events.append)
    epochs = lines(tmp_path, "epoch")
    assert [(line["number"], line["phase"], line["epoch"]) for line in epochs] == [
        (number, phase, epoch) for number in (1, 2, 3) for phase, epoch in [("branch", 0), ("train", 0), ("train", 1)]
    ]
    assert [line["event"] for line in map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())] == (
        ["candidate"] * 6 + ["epoch"] * 3 + ["task"] + ["epoch"] * 3 + ["task"] + ["candidate"] * 6
    ) + ["epoch"] * 3 + ["task", "end"]
    own = [event for event in events if isinstance(event, EpochEnd) and event.candidate is None]
    assert [(event.loss, event.lr) for event in own] == [(line["loss"], line["lr"]) for line in epochs]
    best = {line["number"]: line for line in sorted(lines(tmp_path, "candidate"), key=lambda line: line["score"])}
    for number in (1, 3):
        of_winner = [
            event.loss
            for event in events
            if isinstance(event, EpochEnd)
            and event.candidate == (best[number]["index"] + 1, 3)
            and event.round == (best[number]["round"] + 1, 2)
            and event.number == number
        ]
        assert of_winner == [e.loss for e in own if e.number == number]


def test_what_is_told_and_recorded(tmp_path: Path) -> None:
    events: list[Event] = []
    assert execute(tmp_path, events.append)
    ends = [event for event in events if isinstance(event, CandidateEnd)]
    assert [(e.number, e.task, e.round, e.candidate) for e in ends] == [
        (number, f"task {number - 1}", (at, 2), (place, 3)) for number in (1, 3) for at in (1, 2) for place in (1, 2, 3)
    ]
    assert [(e.accuracy, e.score) for e in ends] == [
        (line["accuracy"], line["score"]) for line in lines(tmp_path, "candidate")
    ]
    shown = [event.done for event in events if isinstance(event, Progress)]
    assert shown == sorted(shown)
    result = read_result(tmp_path_with_run(tmp_path))
    assert result.finished
    assert len(result.epochs) == 9
    times = [json.loads(line) for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    for number in (1, 3):
        seconds = sum(e.seconds for e in ends if e.number == number)
        assert times[number - 1]["train_seconds"] == pytest.approx(seconds, abs=0.001)
        assert times[number - 1]["epoch_seconds"] > 0
    assert not (tmp_path / "candidates").exists()


def tmp_path_with_run(folder: Path) -> Path:
    """Give the run what only recipes record."""
    path = folder / "run.json"
    stream = make_stream()
    about = {"recipe": "r", "method": "trials", "order": "A", "seed": 0, "stream": stream.describe()}
    path.write_text(json.dumps({**json.loads(path.read_text()), **about}))
    return folder


# ---------------------------------------------------------------------------------------------------------
# Which samples


def numbered(validation: bool) -> Stream:
    """2 tasks whose images are their numbers: 19 to train on, 7 for validation and 10 to test on, each other ones."""

    def part(first: int, count: int) -> Images:
        values = torch.arange(first, first + count, dtype=torch.uint8).view(-1, 1, 1, 1)
        return Images(values.expand(-1, 1, 8, 8).contiguous(), torch.arange(count) % 2)

    tasks = []
    for n in range(2):
        held = part(100 * n + 60, 7) if validation else None
        tasks.append(Task(Training(f"task {n}", ("a", "b"), part(100 * n, 19), held), part(100 * n + 30, 10)))
    return Stream("numbers", tuple(tasks), (0.3,), (0.2,), ((0, 1), (2, 3)))


@pytest.mark.parametrize("validation", [False, True])
def test_nothing_is_trained_on_what_is_held_out(tmp_path: Path, validation: bool) -> None:
    options = {"tries": (2, 1)}
    run_of(tmp_path, make_case(stream=numbered(validation), augment={}, options=options))

    def numbers(learner: int, hook: str) -> set[int]:
        seen = [x for name, called, x in Trials.log if (name, called) == (learner, hook)]
        return {round(v) for x in seen for v in ((x[:, 0, 0, 0] * 0.2 + 0.3) * 255).tolist()}

    train = [set(range(19)), set(range(100, 119))]
    test = set(range(30, 40)) | set(range(130, 140))
    memory = {int(i) for i in read_memory(tmp_path)}
    held = set()
    for learner in range(2, 11):  # 6 candidates of the first task, 3 of the second
        task = 0 if learner < 8 else 1
        trained, tried = numbers(learner, "loss"), numbers(learner, "predict")
        assert not (trained | tried) & test
        exemplars = memory if task else set()
        if validation:
            assert tried == set(range(60 + 100 * task, 67 + 100 * task))
            assert trained == train[task] | exemplars
        else:
            assert len(tried) == 5
            assert tried < train[task]
            assert trained == (train[task] - tried) | exemplars
        held.add((task, tuple(sorted(tried))))
    assert len(held) == 2  # the same for all candidates of a task
    assert not numbers(1, "loss")
    assert numbers(1, "predict") == test
    assert [count for name, hook, count in Trials.log if (name, hook) == (1, "end")] == [19, 19]  # all of it again


def read_memory(folder: Path) -> list[int]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "learner.safetensors")["memory0"].tolist()


@pytest.mark.parametrize(("count", "share", "held"), [(19, 0.25, 5), (19, 0.01, 1), (3, 0.99, 2), (2, 0.5, 1)])
def test_how_many_are_held_out(count: int, share: float, held: int) -> None:
    training = numbered(False).tasks[0].training
    few = Training("few", ("a", "b"), training.train.take(torch.arange(count)))
    samples, rows = held_out(few, share, 5)
    assert rows is not None
    assert len(samples) == len(set(rows.tolist())) == held
    assert torch.equal(samples.y, few.train.y[rows])
    again = held_out(few, share, 5)[1]
    assert again is not None
    assert torch.equal(rows, again)


def test_what_cannot_be_held_out(tmp_path: Path) -> None:
    training = numbered(False).tasks[0].training
    for share in (0, 1, -0.1, 1.5):
        with pytest.raises(UsageError, match=f"holds_out must be a share between 0 and 1, not {share}"):
            held_out(training, share, 0)
    with pytest.raises(UsageError, match="'one' has 1 training sample"):
        held_out(Training("one", ("a", "b"), training.train.take(torch.arange(1))), 0.5, 0)
    with pytest.raises(UsageError, match="holds_out"):
        execute(tmp_path, options={"share": 0})


# ---------------------------------------------------------------------------------------------------------
# Divergence


def test_one_that_diverges_is_worth_nothing(tmp_path: Path) -> None:
    events: list[Event] = []
    assert execute(tmp_path, events.append, tasks=1, options={"wild": [[0, 0], [1, 1]]})
    tried = lines(tmp_path, "candidate")
    assert [line["score"] is None for line in tried] == [True, False, False, False, True, False]
    assert [line["accuracy"] is None for line in tried] == [line["score"] is None for line in tried]
    scores = [argument[2] for _, hook, argument in Trials.log if hook == "observe"]
    assert [[math.isinf(score) for score in row] for row in scores] == [[True, False, False], [False, True, False]]
    assert scores[0][0] == -math.inf
    assert [e.score for e in events if isinstance(e, CandidateEnd)] == [line["score"] for line in tried]
    assert all(e.seconds > 0 for e in events if isinstance(e, CandidateEnd))


def test_all_that_diverge_end_the_run(tmp_path: Path) -> None:
    for _ in range(2):  # and it is so again, without training again
        with pytest.raises(
            RkrError,
            match=r"^training diverged: .*'task 0' is not finite with any of its 6 .*lower learning rate, or ",
        ):
            execute(tmp_path, options={"wild": "all"})
    assert sum(hook == "prepare" for _, hook, _ in Trials.log) == 6


def test_a_round_in_which_all_diverge(tmp_path: Path) -> None:
    assert execute(tmp_path, tasks=1, options={"wild": [[0, 0], [0, 1], [0, 2]]})
    assert [argument for _, hook, argument in Trials.log if hook == "adopt"][-1]["spot"][0] == 1


def test_no_candidates_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trials, "propose", lambda self, number: [])
    monkeypatch.setattr(Trials, "observe", lambda *arguments: None)
    with pytest.raises(RkrError, match=r"'task 0'.* no candidate"):
        execute(tmp_path)


# ---------------------------------------------------------------------------------------------------------
# Interruptions


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What comes out when nothing happens, one after the other."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    assert execute(folder)
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    return outcome(folder)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The same for a single task."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("first")
    assert execute(folder, tasks=1)
    return outcome(folder)


NAMES = ["lock", "model", "results.jsonl", "run.json", "times.jsonl"]


class StoppedAt(Run):
    """As if the user pressed Ctrl-C during a batch."""

    def __init__(self, folder: Path, batch: int, case: Case | None = None) -> None:
        self.events: list[Event] = []
        super().__init__(
            *(case or make_case()), folder, make_fabric("cpu"), self.events.append, Execution(save_minutes=FOREVER)
        )
        self.batch = batch

    def _asked(self) -> bool:
        self.batch -= 1
        self._stop = self.batch == 0
        return self._stop


def test_stop_after_every_batch(tmp_path: Path, first: dict[str, bytes]) -> None:
    """Nothing is trained twice: there are as many batches as without stops."""
    batches = 6 * 3 * 2  # candidates, epochs, batches of an epoch
    stops, ends = 0, Counter[tuple[int, ...]]()
    while True:
        run = StoppedAt(tmp_path / "parts", 1, make_case(tasks=1))
        done = run.execute()
        ends.update((e.number, *e.round, *e.candidate) for e in run.events if isinstance(e, CandidateEnd))
        if done:
            break
        assert isinstance(run.events[-1], Stopped)
        stops += 1
    assert batches == sum(hook == "loss" for _, hook, _ in Trials.log)
    assert stops == batches + 6 * 2  # also after each of two phases
    assert len(ends) == 6
    assert set(ends.values()) == {1}  # a finished candidate is not trained again
    assert outcome(tmp_path / "parts") == first
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == NAMES


@pytest.mark.parametrize("batch", [4, 13, 21, 58, 80])
def test_one_stop(tmp_path: Path, whole: dict[str, bytes], batch: int) -> None:
    assert not StoppedAt(tmp_path, batch).execute()
    assert execute(tmp_path)
    assert outcome(tmp_path) == whole


def test_a_stop_says_where(tmp_path: Path) -> None:
    """At which candidate, where some are trained."""
    asked, ends = 3 * 2 + 2, []  # by a candidate: after its batches and its phases
    for batch in (1, 4 * asked + 4, 6 * asked + 1):  # the last is of the second task, which has none
        run = StoppedAt(tmp_path / str(batch), batch)
        assert not run.execute()
        ends.append(run.events[-1])
    assert [(e.number, e.round, e.candidate) for e in ends if isinstance(e, Stopped)] == [
        (1, (1, 2), (1, 3)),
        (1, (2, 2), (2, 3)),
        (2, None, None),
    ]


class Killed(BaseException):
    pass


CALLS = {
    "rounds": 1,
    "begin": 7,
    "propose": 2,
    "adopt": 7,
    "prepare": 12,
    "score": 6,
    "observe": 2,
    "predict": 6,
    "end": 1,
}
DEATHS = [(hook, at) for hook, count in CALLS.items() for at in sorted({1, (count + 1) // 2, count})]


@pytest.mark.parametrize(("hook", "at"), DEATHS)
def test_a_death_in_any_hook(
    tmp_path: Path, first: dict[str, bytes], hook: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first call, its last and one between, with states saved after every batch; the last adopts the winner."""
    method = getattr(Trials, hook)
    calls = 0

    def mortal(self: Trials, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            method(self, *arguments)
            raise Killed
        return method(self, *arguments)

    monkeypatch.setattr(Trials, hook, mortal)
    with pytest.raises(Killed):
        execute(tmp_path, save_minutes=0, tasks=1)
    assert execute(tmp_path, tasks=1)
    assert outcome(tmp_path) == first


def test_the_files_of_a_round(tmp_path: Path) -> None:
    """Those of the round at hand, and the best of the rounds before; what a killed write has left is removed."""
    assert not StoppedAt(tmp_path, 8 * 3 + 12).execute()  # amid the second candidate of the second round
    state = load_state(tmp_path / "state.safetensors")
    assert state["position"] == [0, 0, 0, 0]
    assert (state["round"]["number"], state["round"]["rounds"]) == (1, 2)
    tried = [Tried(**one) for one in state["round"]["tried"]]
    best = best_of(tried)
    assert best is not None
    files = {path.name for path in (tmp_path / "candidates").glob("*.safetensors")}
    assert files == {CandidateKey(0, 0, best.index).file, "1-2-1.safetensors", "1-2-2.safetensors"}
    assert read_trained(tmp_path / "candidates" / "1-2-1.safetensors") is not None
    assert read_trained(tmp_path / "candidates" / "1-2-2.safetensors") is None
    (tmp_path / "candidates" / ".rkr-0123456789abcdef.tmp").write_bytes(b"half")
    StoppedAt(tmp_path, 1).execute()
    assert not list(tmp_path.rglob("*.tmp"))


def test_files_of_another_time_are_not_used(tmp_path: Path, whole: dict[str, bytes]) -> None:
    """A round that begins finds nothing; a finished run has none."""
    (tmp_path / "candidates").mkdir()
    wrong = {"accuracy": 1.0, "learner": {}, "lines": [], "seconds": 1.0, "epoch_seconds": []}
    for number in (1, 3):
        for at in (1, 2):
            save_state(tmp_path / "candidates" / f"{number}-{at}-1.safetensors", {"trained": wrong})
    assert execute(tmp_path)
    assert outcome(tmp_path) == whole
    (tmp_path / "candidates").mkdir()
    save_state(tmp_path / "candidates" / "3-2-1.safetensors", {"trained": wrong})
    assert execute(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES


def test_one_process_at_a_time_trains_a_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    monkeypatch.setattr("rkr.experiment.candidates.LOCK_SECONDS", 0.1)
    assert not StoppedAt(tmp_path, 2).execute()
    with FileLock(tmp_path / "candidates" / "1-1-1.lock"), pytest.raises(RkrError, match="another process is training"):
        execute(tmp_path)
    assert execute(tmp_path)


# ---------------------------------------------------------------------------------------------------------
# kill -9


@pytest.mark.parametrize("part", [0, *slow(1, 2)])
def test_within_writes(server: Server, tmp_path: Path, first: dict[str, bytes], part: int) -> None:
    """Amid files of candidates, states, results; twice in a row."""
    draw, kills = random.Random(part), 0
    for start in draw.sample(range(3, 190), 3):
        folder, code = tmp_path / str(start), -signal.SIGKILL
        for at in (start, draw.randint(3, 25), 10**9):
            process = server.start("candidates", folder=str(folder), tasks=1, fault=[at, "kill"])
            code = process.wait()
            assert code in (0, -signal.SIGKILL), process.stderr
            kills += code != 0
        assert code == 0
        assert outcome(folder) == first
        assert sorted(path.name for path in folder.iterdir()) == NAMES
    assert kills >= 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_within_every_write(server: Server, tmp_path: Path, first: dict[str, bytes]) -> None:
    """As above, at every single step of writing."""
    at, code = 0, -int(signal.SIGKILL)
    while code:
        at += 1
        folder = tmp_path / "parts"
        shutil.rmtree(folder, ignore_errors=True)
        code = server.start("candidates", folder=str(folder), tasks=1, fault=[at, "kill"]).wait()
        assert code in (0, -signal.SIGKILL)
        again = server.start("candidates", folder=str(folder), tasks=1, save_minutes=FOREVER)
        assert again.wait() == 0, again.stderr
        assert outcome(folder) == first
        assert sorted(path.name for path in folder.iterdir()) == NAMES
    assert at > 190


@pytest.mark.slow
def test_at_random_moments(server: Server, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """By the clock: in a batch, in a test, in a write, at the start. States are saved after every batch."""
    draw = random.Random(0)
    began = time.monotonic()
    assert server.start("candidates", folder=str(tmp_path / "again")).wait() == 0
    span, kills = time.monotonic() - began, 0
    while kills < 6:
        process = server.start("candidates", folder=str(tmp_path / "parts"))
        time.sleep(draw.uniform(0, span / 3))
        code = process.kill()
        assert code in (0, -signal.SIGKILL), process.stderr
        kills += code != 0
        if not code:
            assert outcome(tmp_path / "parts") == whole
            shutil.rmtree(tmp_path / "parts")
    assert server.start("candidates", folder=str(tmp_path / "parts")).wait() == 0
    assert outcome(tmp_path / "parts") == whole


# ---------------------------------------------------------------------------------------------------------
# Other processes


@pytest.fixture(scope="module")
def dies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that can name the width of a candidate whose process dies."""
    return tmp_path_factory.mktemp("dies") / "width"


@pytest.fixture(scope="module")
def crew(dies: Path) -> Iterator[Workers]:
    """Two workers, which take longer to start than any test to run."""
    with pytest.MonkeyPatch.context() as patch, Workers(2, 1) as crew:
        patch.setenv("TRIALS_DIE", str(dies))
        yield crew


def test_workers_give_the_same_bytes(tmp_path: Path, whole: dict[str, bytes], crew: Workers) -> None:
    events: list[Event] = []
    assert execute(tmp_path, events.append, crew=crew)
    assert outcome(tmp_path) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    ends = Counter((e.number, e.round[0], e.candidate[0]) for e in events if isinstance(e, CandidateEnd))
    assert ends == Counter((number, at, place) for number in (1, 3) for at in (1, 2) for place in (1, 2, 3))
    epochs = Counter(e.candidate for e in events if isinstance(e, EpochEnd))
    assert epochs == {None: 9, (1, 3): 12, (2, 3): 12, (3, 3): 12}  # what the workers tell is told
    assert not any(hook == "loss" for name, hook, _ in Trials.log if name > 1)  # not here
    assert isinstance(events[0], Started)
    assert isinstance(events[-2], TaskEnd)


def children(process: Process) -> list[int]:
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for path in found.parent.parent.glob("*/children") for pid in path.read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    end = time.monotonic() + 300
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


LONG = {"epochs": 60, "tasks": 1, "workers": 2}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("long")
    assert execute(folder, epochs=60, tasks=1)
    return outcome(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, *slow(signal.SIGKILL)])
def test_an_end_while_others_are_at_work(server: Server, tmp_path: Path, long: dict[str, bytes], number: int) -> None:
    """Ctrl-C reaches them and they save; after kill -9 of the run they end by themselves."""
    (tmp_path / "together").mkdir()
    pace = {"TRIALS_TOGETHER": str(tmp_path / "together")}  # 30 s are left of both when the second begins
    process = server.start("candidates", pace, folder=str(tmp_path / "run"), **LONG, save_minutes=FOREVER)
    process.until(lambda: len({e["candidate"][0] for e in process.events("epoch")}) == 2)
    others = children(process)
    assert len(others) == 2
    process.signal(number)
    code = process.wait()
    assert code == (0 if number == signal.SIGINT else -number), process.stderr  # the small run has no exit code for it
    assert gone(others)
    states = [load_state(path) for path in (tmp_path / "run" / "candidates").glob("*.safetensors")]
    assert len(states) == 2
    assert all("trained" in state or state["position"] != [0, 0, 0, 0] for state in states)
    if number == signal.SIGINT:
        assert process.events("stopped")[0]["round"] == [1, 2]
        assert process.stderr == ""
    again = server.start("candidates", folder=str(tmp_path / "run"), epochs=60, tasks=1, save_minutes=FOREVER)
    assert again.wait() == 0, again.stderr
    assert again.events("started")[0]["resumed"]
    assert outcome(tmp_path / "run") == long


def test_one_of_them_dies(tmp_path: Path, whole: dict[str, bytes], crew: Workers, dies: Path) -> None:
    """One error that names the candidate; what the others have done is not lost."""
    StoppedAt(tmp_path, 1).execute()
    widths = [c["width"] for c in load_state(tmp_path / "state.safetensors")["round"]["candidates"]]
    assert widths.count(widths[1]) == 1
    dies.write_text(str(widths[1]))
    with pytest.raises(RkrError, match=r"^task 1, round 1, candidate 2: its process ended with code -9[;:]"):
        execute(tmp_path, crew=crew)
    dies.unlink()
    assert execute(tmp_path)
    assert outcome(tmp_path) == whole


def test_one_of_them_fails(tmp_path: Path, crew: Workers) -> None:
    """What it said last is told."""
    with pytest.raises(RkrError, match=r"^task 1, round 1, candidate [12]: its process failed: h"):
        execute(tmp_path, crew=crew, options={"share": 7})


def test_two_processes_of_torchrun(server: Server, tmp_path: Path) -> None:
    """All of them train each candidate together, as they train any task; one has nothing of the last of 17 samples."""
    job = {"dtype": "float64", "dropout": 0.0, "train": 23, "save_minutes": 1e9, "tasks": 1}
    one = server.start("candidates", folder=str(tmp_path / "1"), **job)
    assert one.wait() == 0, one.stderr
    crew = server.together(2, "candidates", folder=str(tmp_path / "2"), **job)
    assert [p.wait() for p in crew] == [0, 0], crew[0].stderr + crew[1].stderr
    assert crew[1].stdout == ""
    for kind in ("candidate", "epoch", "task"):
        for a, b in zip(lines(tmp_path / "1", kind), lines(tmp_path / "2", kind), strict=True):
            if kind == "candidate":
                assert a == b
            elif kind == "epoch":
                assert b["loss"] == pytest.approx(a["loss"], rel=1e-9)
            else:
                assert a["notes"]["width"] == b["notes"]["width"]
                assert a["accuracy"] == b["accuracy"]


@pytest.mark.slow
def test_two_processes_of_torchrun_killed(server: Server, tmp_path: Path) -> None:
    job = {"tasks": 1, "workers": 3}  # which do not matter here
    crew = server.together(2, "candidates", folder=str(tmp_path / "whole"), **job)
    assert [p.wait() for p in crew] == [0, 0], crew[0].stderr
    for at in (20, 95):
        folder = str(tmp_path / str(at))
        crew = server.together(2, "candidates", folder=folder, kill_others=True, fault=(at, "kill"), **job)
        assert crew[0].wait() == -9
        crew = server.together(2, "candidates", folder=folder, **job)
        assert [p.wait() for p in crew] == [0, 0], crew[0].stderr + crew[1].stderr
        assert outcome(tmp_path / str(at)) == outcome(tmp_path / "whole")


# ---------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(METHODS._others, "trials", make_case().spec.learner)
    path = tmp_path / "few.toml"
    path.write_text(few_digits(["trials", "finetune"], tasks=1))
    return path


def test_spare_workers_train_candidates(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_recipe(str(recipe))
    plan = Plan(loaded, str(recipe), ("trials", "finetune"), loaded.orders, tmp_path)  # 2 runs of each
    shares = {workers: list(runner.shares_of(plan, workers).values()) for workers in (1, 2, 4, 5, 6, 9)}
    assert shares == {1: [1] * 4, 2: [1] * 4, 4: [1] * 4, 5: [2, 1, 1, 1], 6: [2, 1, 2, 1], 9: [4, 1, 3, 1]}
    none = Plan(loaded, str(recipe), ("finetune",), loaded.orders[:1], tmp_path)
    assert list(runner.shares_of(none, 8).values()) == [1]
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    given: list[Job] = []

    class Noted(Here):
        def submit(self, job: Job, told: Told) -> Future[bool]:
            given.append(job)
            future: Future[bool] = Future()
            future.set_result(False)
            return future

    monkeypatch.setattr(runner, "make_executor", lambda *rest: Noted())
    one = Plan(loaded, str(recipe), ("trials",), loaded.orders[:1], tmp_path)
    assert runner.run_plan(one, Execution(2), lambda event: None)
    assert runner.run_plan(one, Execution(1), lambda event: None)
    shared, alone = (job.arguments for job in given)
    assert (shared["share"], shared["each"], shared["how"]["threads"]) == (2, 4, None)
    assert (alone["share"], alone["how"]["threads"]) == (1, None)


@pytest.mark.slow  # workers start up for longer than they compute
def test_the_command_with_workers(server: Server, tmp_path: Path, recipe: Path) -> None:
    paths = os.pathsep.join([str(HERE / "registered"), str(HERE.parents[1] / "src")])
    words = ["run", str(recipe), "--method", "trials", "--threads", "1", "--accelerator", "cpu"]

    def start(*more: object) -> Process:
        argv = [*words, *map(str, more)]
        return server.start("trials", argv=argv, environment={"PYTHONPATH": paths})

    one = start("--out", tmp_path / "1")
    assert one.wait() == 0, one.stderr
    assert re.search(r"few trials fixed: task 1/1 \(digits-\d\), round 1/2, candidate 3/3: held-out", one.stdout)
    three = start("--out", tmp_path / "3", "--workers", 3, "--json")
    three.until(lambda: three.events("candidate"))
    three.signal(signal.SIGINT, group=True)
    assert three.wait() == 130, three.stderr
    assert three.stderr == ""
    assert three.events("stopped")
    again = start("--out", tmp_path / "3", "--workers", 3, "--json")
    assert again.wait() == 0, again.stderr
    assert again.events("started")[0]["resumed"]
    folder = Path("few", "trials", "fixed")
    assert outcome(tmp_path / "3" / folder) == outcome(tmp_path / "1" / folder)
    ends = Counter((e["number"], *e["round"], *e["candidate"]) for e in three.events("candidate"))
    ends += Counter((e["number"], *e["round"], *e["candidate"]) for e in again.events("candidate"))
    assert set(ends.values()) == {1}


def test_candidates_know_no_test(tmp_path: Path) -> None:
    """What trains a candidate has no evaluator."""
    assert not StoppedAt(tmp_path, 2).execute()
    run = Run(*make_case(), tmp_path, make_fabric("cpu"))
    made = run._candidate(CandidateKey(0, 0, 0), lambda event: None)
    assert isinstance(made, Candidate)
    assert not hasattr(made, "_evaluator")
