"""A run that is stopped after any batch, or anywhere else, ends as if it had never been."""

from __future__ import annotations

import json
import os
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FOREVER, LEARNERS, Case, execute, make_case, outcome

from rkr.errors import FileError, RkrError, UsageError
from rkr.experiment.evaluate import Row
from rkr.experiment.events import Event, Finished, Started, Stopped
from rkr.experiment.execution import Execution
from rkr.experiment.processes import make_fabric
from rkr.experiment.run import Run
from rkr.experiment.state import load_state
from rkr.methods import METHODS, Learner


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fsync guards against, a power failure, is not tested here."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


class StoppedAt(Run):
    """As if the user pressed Ctrl-C during a batch (also of a candidate), after a phase, or while a task is tested (the
    first, the second, ... of those that are), or while what came out is written."""

    def __init__(self, case: Case, folder: Path, batch: int = -1, testing: int = 0, writing: bool = False) -> None:
        self.events: list[Event] = []
        super().__init__(*case, folder, make_fabric("cpu"), self.events.append, Execution(save_minutes=FOREVER))
        self.batch, self.testing, self.writing = batch, testing, writing

    def _asked(self) -> bool:
        """After every batch, and after every phase."""
        self.batch -= 1
        self._stop = self.batch == 0
        return self._stop

    def _finish_task(self) -> None:
        self.testing -= 1
        self._stop = self.testing == 0
        super()._finish_task()

    def _unchanged(self, row: Row) -> bool | None:
        self._stop = self.writing
        return super()._unchanged(row)


VARIANTS: list[tuple[str, dict[str, Any]]] = [(method, {}) for method in METHODS]
VARIANTS += [("rkr", {"options": {"bn": bn}}) for bn in ("frozen", "affine", "stats", "per_task")]
VARIANTS += [(method, {"optimizer": "adam", "lr": 0.002}) for method in ("rkr", "finetune")]
VARIANTS += [("finetune", {"memory_format": "contiguous"}), ("two-phases", {}), ("two-phases", {"optimizer": "adam"})]
VARIANTS += [("ewc", {"options": {"samples": 7, "mode": "online"}, "optimizer": "adam", "lr": 0.002})]
VARIANTS += [("pc", {"options": {"bn": "frozen"}}), ("lwf", {"options": {"bn": "frozen"}})]
VARIANTS += [(method, {"options": {"memory": 5}}) for method in ("icarl", "eeil")]
VARIANTS += [("rps-net", {"options": {"jump": 1, "candidates": 2}}), ("pgn", {"options": {"lateral": "adapter"}})]
VARIANTS += [("rcl", {"options": {"unit": "absolute", "trials": 3}}), ("hnet", {"optimizer": "adam", "lr": 0.002})]
VARIANTS += [("den", {"options": {"loss_threshold": 100.0}}), ("den", {"options": {"drift_threshold": 1e-3}})]
VARIANTS += [("apd", {"options": {"consolidate": 1}}), ("ccll", {"options": {"where": "after"}})]


# In `make test` a variant that runs the same code as another one is left out, and so are many rounds of candidates.
SLOW = [("rcl", {}), ("rps-net", {}), ("icarl", {}), ("eeil", {}), ("pc", {"options": {"bn": "frozen"}})]
SLOW += [(name, {}) for name, method in METHODS.items() if method.learner is METHODS["rkr"].learner and name != "rkr"]
SLOW += [("rkr", {"options": {"bn": bn}}) for bn in ("frozen", "affine", "stats")]
SLOW += [("den", {"options": {"loss_threshold": 100.0}}), ("den", {"options": {"drift_threshold": 1e-3}})]


@pytest.mark.parametrize(
    ("method", "changes"),
    [pytest.param(*variant, marks=[pytest.mark.slow] if variant in SLOW else []) for variant in VARIANTS],
    ids=lambda value: str(value) if value else "",
)
def test_stop_after_every_batch(tmp_path: Path, method: str, changes: dict[str, Any]) -> None:
    case = make_case(method, tasks=2, **changes)
    whole = StoppedAt(case, tmp_path / "whole", batch=0)  # which is past: never
    assert whole.execute()
    stops = 0
    while True:
        run = StoppedAt(case, tmp_path / "parts", batch=1)
        if run.execute():
            break
        assert isinstance(run.events[-1], Stopped)
        stops += 1
    batches = 2 * 2 * 3  # tasks, epochs, batches of an epoch
    more = {"joint": 2 * 2, "two-phases": 2 * 3, "pc": batches, "lwf": 3}  # 38 images, not 19; more phases
    if method in ("icarl", "eeil"):  # 38 images too, or 19 and 4 exemplars; then 8 in balance
        few = "options" in changes
        more = {"icarl": 0 if few else 2 * 2, "eeil": -2 if few else 2 * 2}
    decides = method == "den" or LEARNERS[method].learner.rounds is not Learner.rounds  # on what it trains
    lines = map(json.loads, (tmp_path / "whole" / "results.jsonl").read_text().splitlines())
    phases = len({(line["number"], line["phase"]) for line in lines if line["event"] == "epoch"})
    assert stops == (-whole.batch if decides else batches + more.get(method, 0) + phases)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("method", ["rkr", "finetune", "separate", "two-phases", "pc", "eeil"])
@pytest.mark.parametrize("batch", [2, 15])
def test_one_stop(tmp_path: Path, method: str, batch: int) -> None:
    """One interruption, then all the rest at once: what the loss of a later batch hides above shows here."""
    case = make_case(method)
    whole = tmp_path / "whole"
    execute(whole, case)
    assert not StoppedAt(case, tmp_path / "parts", batch).execute()
    assert execute(tmp_path / "parts", case)
    assert outcome(tmp_path / "parts") == outcome(whole)


def test_resumed_optimizer_computes_in_the_same_order(tmp_path: Path) -> None:
    """Momentum comes back in the memory layout of its parameter: else other kernels, with other last bits."""
    case = make_case("finetune")
    assert not StoppedAt(case, tmp_path, 4).execute()
    run = StoppedAt(case, tmp_path, 1)
    run.execute()
    assert run._optimizer is not None
    layouts = [(p.stride(), state["momentum_buffer"].stride()) for p, state in run._optimizer.state.items()]
    assert len(layouts) == 12
    assert all(a == b for a, b in layouts)


@pytest.mark.parametrize("method", ["rkr", "head-only", "two-phases", "ewc", "pc", "icarl", "eeil"])
def test_stop_while_testing(tmp_path: Path, method: str) -> None:
    """Nobody waits for the test, and it is done again."""
    case = make_case(method, agnostic="every")
    execute(tmp_path / "whole", case)
    for number in (1, 2, 3):
        run = StoppedAt(case, tmp_path / "parts", testing=1 if number == 1 else 2)
        assert not run.execute()
        stopped = run.events[-1]
        assert isinstance(stopped, Stopped)
        assert stopped.number == number
        assert stopped.epoch == run._counted()[1] - 1
    assert execute(tmp_path / "parts", case)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_stop_while_writing(tmp_path: Path) -> None:
    """A task that is tested is written down, and the next one not begun."""
    case = make_case("rkr")
    execute(tmp_path / "whole", case)
    for number in (1, 2):
        run = StoppedAt(case, tmp_path / "parts", writing=True)
        assert not run.execute()
        assert (run.events[-1].number, run.events[-1].epoch) == (number + 1, 0)  # type: ignore[attr-defined]
    assert StoppedAt(case, tmp_path / "parts", writing=True).execute()  # nothing is left to go on with
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_the_state_says_where_to_go_on(tmp_path: Path) -> None:
    case = make_case("rkr")
    StoppedAt(case, tmp_path, 9).execute()  # the first task has 6 batches and a phase
    state = load_state(tmp_path / "state.safetensors")
    assert state["position"] == [1, 0, 0, 2]
    assert state["begun"] == 2
    assert state["results"] == (tmp_path / "results.jsonl").stat().st_size
    events: list[Event] = []
    execute(tmp_path, case, events.append)
    assert isinstance(events[0], Started)
    assert (events[0].number, events[0].epoch, events[0].resumed) == (2, 0, True)


@pytest.mark.parametrize("method", ["rkr", "l2t", "ewc", "si", "pc", "lwf", "icarl", "eeil"])
def test_twice_the_same_and_another_seed_not(tmp_path: Path, method: str) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(seed + 3)  # what was drawn before does not matter
        execute(tmp_path / name, make_case(method, seed=seed))
    a, b, c = (outcome(tmp_path / name) for name in "abc")
    assert a == b
    assert a["results.jsonl"] != c["results.jsonl"]
    assert not [n for n in c if n.endswith("safetensors") and c[n] == a.get(n)]


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    case = make_case("rkr")
    execute(tmp_path, case)
    assert not (tmp_path / "state.safetensors").exists()
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}
    events: list[Event] = []
    assert execute(tmp_path, case, events.append)
    assert events == [Finished("spots rkr fixed", str(tmp_path), 0.0, True)]
    del before[tmp_path / "lock"]
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before


def test_a_kill_between_the_last_line_and_the_end(tmp_path: Path) -> None:
    case = make_case("rkr")
    execute(tmp_path, case)
    (tmp_path / "state.safetensors").write_bytes(b"left over")
    assert execute(tmp_path, case)
    assert not (tmp_path / "state.safetensors").exists()


def test_other_settings_are_refused(tmp_path: Path) -> None:
    StoppedAt(make_case("rkr"), tmp_path, 1).execute()
    before = (tmp_path / "state.safetensors").read_bytes()
    with pytest.raises(UsageError, match=r"training\.lr is 0\.05 there, 0\.5 now.*--out"):
        execute(tmp_path, "rkr", lr=0.5)
    with pytest.raises(UsageError, match="method is 'rkr' there, 'finetune' now"):
        execute(tmp_path, "finetune")
    assert (tmp_path / "state.safetensors").read_bytes() == before


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_state_is_named(tmp_path: Path, damage: str) -> None:
    case = make_case("rkr")
    StoppedAt(case, tmp_path, 2).execute()
    path = tmp_path / "state.safetensors"
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    path.write_bytes({"cut": data[:middle], "flip": flipped, "empty": b"", "other": b"\x10" + bytes(99)}[damage])
    events: list[Event] = []
    with pytest.raises(FileError, match=str(path)):
        execute(tmp_path, case, events.append)
    assert [type(event).__name__ for event in events] == ["Failed"]
    path.write_bytes(data)
    assert execute(tmp_path, case)


@pytest.mark.parametrize("tail", [b'{"event": "epo', b'{"event": "end", "tasks": 3}', b"\x00" * 50, b'{"a": 1}\n'])
def test_what_came_after_the_state_is_dropped(tmp_path: Path, tail: bytes) -> None:
    case = make_case("rkr")
    execute(tmp_path / "whole", case)
    StoppedAt(case, tmp_path / "parts", 8).execute()
    with open(tmp_path / "parts" / "results.jsonl", "ab") as file:
        file.write(tail)
    assert execute(tmp_path / "parts", case)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("tail", [b"", b'{"event": "epo'])
def test_results_without_a_state_start_anew(tmp_path: Path, tail: bytes) -> None:
    case = make_case("rkr")
    execute(tmp_path / "whole", case)
    (tmp_path / "parts").mkdir()
    lines = (tmp_path / "whole" / "results.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "parts" / "results.jsonl").write_bytes(b"".join(lines[:1]) + tail)
    assert execute(tmp_path / "parts", case)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_results_that_do_not_fit_the_state_are_named(tmp_path: Path) -> None:
    case = make_case("rkr")
    StoppedAt(case, tmp_path, 8).execute()
    path = tmp_path / "results.jsonl"
    data = path.read_bytes()
    for wrong, word in ((data[:-5], "shorter"), (b"not JSON\n" + data, "not JSON")):
        path.write_bytes(wrong)
        with pytest.raises(FileError, match=f"{path}.*{word}"):
            execute(tmp_path, case)
    path.unlink()
    with pytest.raises(FileError, match=f"{path}.*missing"):
        execute(tmp_path, case)


def test_a_damaged_run_file_is_named(tmp_path: Path) -> None:
    case = make_case("rkr")
    StoppedAt(case, tmp_path, 1).execute()
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(FileError, match=r"run\.json"):
        execute(tmp_path, case)


def test_what_a_killed_write_left_is_removed(tmp_path: Path) -> None:
    case = make_case("finetune")
    StoppedAt(case, tmp_path, 8).execute()
    (tmp_path / "model" / "learner").mkdir()  # as zero-shot RKR has it
    for folder in (tmp_path, tmp_path / "model", tmp_path / "model" / "learner"):
        (folder / ".rkr-0123456789abcdef.tmp").write_bytes(b"half")
    execute(tmp_path, case)
    assert not list(tmp_path.rglob("*.tmp"))


def test_divergence_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RkrError, match=r"'task 0'.*lower learning rate"):
        execute(tmp_path, "finetune", lr=1e30)


def test_results_have_every_epoch_and_task(tmp_path: Path) -> None:
    execute(tmp_path, "rkr")
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["epoch", "epoch", "task"] * 3 + ["end"]
    assert [line["lr"] for line in lines if line["event"] == "epoch"] == [0.05, pytest.approx(0.005)] * 3
    tasks = [line for line in lines if line["event"] == "task"]
    assert [len(line["accuracy"]) for line in tasks] == [1, 2, 3]
    assert [line["unchanged"] for line in tasks] == [True] * 3
    assert [line["agnostic"] is None for line in tasks] == [True, True, False]
    assert all(a["proof"].items() <= b["proof"].items() for a, b in pairwise(tasks))


def test_phases_share_the_epochs_and_milestones(tmp_path: Path) -> None:
    """EEIL's 4/7 and 3/7 of 7 epochs, whose milestone is the third: the rate falls after 4/7 * 3 and 3/7 * 3 epochs."""
    execute(tmp_path, "eeil", tasks=2, epochs=7, milestones=(3,), lr=0.04, options={"memory": 4})
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    found = [(line["phase"], line["epoch"], line["lr"]) for line in lines if line["event"] == "epoch"]
    rates = [("train", 0.04, 3), ("train", 0.004, 4), ("unbalanced", 0.04, 2), ("unbalanced", 0.004, 2)]
    rates += [("balanced", 0.004, 2), ("balanced", 0.0004, 1)]
    assert [phase for phase, _, _ in found] == [name for name, _, count in rates for _ in range(count)]
    assert [epoch for _, epoch, _ in found] == [*range(7), *range(4), *range(3)]
    assert [rate for _, _, rate in found] == pytest.approx([rate for _, rate, count in rates for _ in range(count)])
    execute(tmp_path / "pc", "pc", tasks=1)
    lines = [json.loads(line) for line in (tmp_path / "pc" / "results.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines if line["event"] == "epoch"] == ["progress"] * 2 + ["compress"] * 2


def test_every_method_is_covered() -> None:
    assert set(LEARNERS) - {"forgetful"} == {method for method, _ in VARIANTS}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_case("rkr")
