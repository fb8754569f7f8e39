"""Several runs of a plan: one after the other or at once, the same bytes; errors and stops are told in one line."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from forked import Server
from small_runs import outcome

from rkr.errors import FileError, RkrError, UsageError
from rkr.experiment import runner, signals
from rkr.experiment.events import Event
from rkr.experiment.folder import RunFolder
from rkr.experiment.loop import Diverged
from rkr.experiment.machine import commit
from rkr.experiment.plan import Plan, choose_orders, choose_seeds
from rkr.experiment.recipes import load_recipe
from rkr.experiment.run import Run
from rkr.experiment.runner import Execution, run_plan
from rkr.experiment.spec import RunSpec
from rkr.experiment.workers import MARK, Worker

WORDS = ("run", "digits", "--method", "rkr,finetune", "--epochs", 1, "--limit", 8, "--threads", 1)
WORDS += ("--accelerator", "cpu", "--json", "--out")


def test_workers_give_the_same_bytes(server: Server, tmp_path: Path) -> None:
    one = server.cli(*WORDS, tmp_path / "1")
    two = server.cli(*WORDS, tmp_path / "2", "--workers", 2)
    assert one.wait() == 0, one.stderr
    assert two.wait(110) == 0, two.stderr
    for method in ("rkr", "finetune"):
        a, b = (outcome(tmp_path / n / "digits-1-epochs-limit-8" / method / "fixed") for n in ("1", "2"))
        assert a == b
    for kind in ("started", "epoch", "task", "finished", "summary"):  # what the workers tell is told
        assert len(one.events(kind)) == len(two.events(kind)) > 0
    assert {event["run"].split()[1] for event in two.events("task")} == {"rkr", "finetune"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_with_workers(server: Server, tmp_path: Path, number: int) -> None:
    """The terminal tells all processes; a polite kill only the first."""
    words = [1000 if word == 1 else word for word in WORDS[:6]] + [*WORDS[6:], tmp_path, "--workers", 2]
    process = server.cli(*words)
    process.until(lambda: len({event["run"] for event in process.events("epoch")}) == 2)  # both are at work
    process.signal(number, group=number == signal.SIGINT)
    assert process.wait() == 130, process.stderr
    assert len(process.events("stopped")) == 2
    assert len(list(tmp_path.rglob("state.safetensors"))) == 2


# ---------------------------------------------------------------------------------------------------------
# With workers that take no time to start


def plan(out: Path, methods: tuple[str, ...] = ("rkr", "finetune", "joint")) -> Plan:
    recipe = load_recipe("digits")
    return Plan(recipe, "digits", methods, recipe.orders[:1], out, epochs=1, limit=8, accelerator="cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str]) -> None:
    def command(plan: Plan, execution: Execution, spec: RunSpec, *rest: Any) -> list[str]:
        return ["sh", "-c", scripts[spec.method]]

    monkeypatch.setattr(runner, "_command", command)


def test_an_error_of_a_worker_names_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []
    failed = '{"event": "failed", "run": "digits rkr fixed", "folder": "f", "reason": "no room"}'
    begun = tmp_path / "begun"  # both workers are at work when one fails
    wait = f"while [ ! -e {begun} ]; do sleep 0.01; done"
    fails = f"{wait}; echo '{failed}'; echo warned >&2; echo 'rkr: f: no room' >&2; exit 2"
    pretend(monkeypatch, {"rkr": fails, "finetune": f"touch {begun}; sleep 0.2", "joint": "exit 9"})
    with pytest.raises(RkrError) as caught:
        run_plan(plan(tmp_path), Execution(workers=2, threads=1), told.append)
    assert str(caught.value) == "rkr fixed: f: no room; skipped: joint fixed"  # no other run begins after it
    assert [type(event).__name__ for event in told] == ["Failed"]


def test_an_error_names_what_is_skipped_without_workers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(self: Run) -> bool:
        raise Diverged("far off") if "rkr" in self.spec.title else FileError("no room")

    monkeypatch.setattr(Run, "execute", execute)
    with pytest.raises(RkrError) as caught:
        run_plan(plan(tmp_path), Execution(threads=1), lambda event: None)
    assert str(caught.value) == "rkr fixed: far off; finetune fixed: no room; skipped: joint fixed"
    assert type(caught.value) is RkrError
    with pytest.raises(FileError, match=r"^no room$"):  # a single run is as it is
        run_plan(plan(tmp_path, ("joint",)), Execution(threads=1), lambda event: None)


def test_a_worker_that_diverges_does_not_keep_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told by its exit code, whatever it says."""
    scripts = {"rkr": "echo 'rkr: far off' >&2; exit 3", "finetune": "sleep 0.3", "joint": f"touch {tmp_path}/begun"}
    pretend(monkeypatch, scripts)
    with pytest.raises(Diverged, match=r"^rkr fixed: far off$"):
        run_plan(plan(tmp_path), Execution(workers=2), lambda event: None)
    assert (tmp_path / "begun").exists()
    pretend(monkeypatch, {**scripts, "joint": "exit 130"})  # as long as others can go on, it is no result
    assert run_plan(plan(tmp_path), Execution(workers=2), lambda event: None) is False
    pretend(monkeypatch, {**scripts, "finetune": "echo 'training diverged' >&2; exit 2", "joint": "exit 0"})
    with pytest.raises(RkrError, match="finetune fixed: training diverged") as caught:
        run_plan(plan(tmp_path), Execution(workers=2), lambda event: None)
    assert not isinstance(caught.value, Diverged)


def test_a_killed_worker_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"rkr": "kill -9 $$", "finetune": "exit 0"})
    with pytest.raises(RkrError, match=r"^rkr fixed: ended with code -9$"):
        run_plan(plan(tmp_path, ("rkr", "finetune")), Execution(workers=2), lambda event: None)


def test_a_stopped_worker_stops_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"rkr": "exit 130", "finetune": "sleep 0.3", "joint": f"touch {tmp_path}/begun"})
    assert run_plan(plan(tmp_path), Execution(workers=2), lambda event: None) is False
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_reaches_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    script = "trap 'touch {0}.told; exit 130' TERM; touch {0}.ready; while :; do sleep 0.02; done"
    methods = ("rkr", "finetune")
    pretend(monkeypatch, {method: script.format(tmp_path / method) for method in methods})

    def stop() -> None:
        while not all((tmp_path / f"{method}.ready").exists() for method in methods):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=stop, daemon=True).start()
    assert run_plan(plan(tmp_path, methods), Execution(workers=2), lambda event: None) is False
    assert all((tmp_path / f"{method}.told").exists() for method in methods)
    assert signal.getsignal(signal.SIGTERM) is before


def test_workers_have_sessions_of_their_own() -> None:
    """A terminal does not reach them, so they hear of Ctrl-C once, and a second one is a second one."""
    worker = Worker(["sleep", "60"], 1)
    pid = worker._process.pid
    assert os.getsid(pid) == os.getpgid(pid) == pid != os.getsid(0)
    worker.stop()
    assert worker.end()[0] == -signal.SIGTERM


def test_a_second_signal_ends_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is left behind, although they do not hear the terminal."""
    methods, started = ("rkr", "finetune"), []
    script = "trap 'touch {0}.told' TERM; touch {0}.ready; while :; do sleep 0.02; done"
    pretend(monkeypatch, {method: script.format(tmp_path / method) for method in methods})
    monkeypatch.setattr(signals, "SAME_SIGNAL_SECONDS", 0)
    start = subprocess.Popen

    def noted(*words: Any, **options: Any) -> Any:
        started.append(start(*words, **options))
        return started[-1]

    def stop() -> None:
        for state in ("ready", "told"):
            while not all((tmp_path / f"{method}.{state}").exists() for method in methods):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", noted)
    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan(tmp_path, methods), Execution(workers=2), lambda event: None)
    assert [process.poll() for process in started] == [-signal.SIGKILL] * 2


def test_a_stop_reaches_a_worker_that_is_being_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ("rkr", "finetune")
    pretend(monkeypatch, dict.fromkeys(methods, "trap 'exit 130' TERM; while :; do sleep 0.02; done"))
    start, started = subprocess.Popen, []

    def slow_start(*words: Any, **options: Any) -> Any:
        process = start(*words, **options)
        started.append(process)
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # the main thread deals with it now, before this process is known
        return process

    monkeypatch.setattr(subprocess, "Popen", slow_start)
    try:
        assert run_plan(plan(tmp_path, methods), Execution(workers=2), lambda event: None) is False
        assert all(process.poll() in (130, -signal.SIGTERM) for process in started)
    finally:
        for process in started:
            process.kill()


def test_workers_are_given_the_whole_plan(tmp_path: Path) -> None:
    made = dataclasses.replace(plan(tmp_path, ("rkr",)), seeds=(3,), data="/data", precision="bf16-mixed")
    words = runner._command(made, Execution(2, 1, 0.5, True), made.specs[0], 1)
    assert words[:7] == [sys.executable, "-m", "rkr", "run", "digits", "--json", "--no-figures"]
    given = dict(zip(words[7:-1:2], words[8:-1:2], strict=True))
    assert given == {
        "--method": "rkr",
        "--order": "fixed",
        "--out": str(tmp_path),
        "--epochs": "1",
        "--seed": "3",
        "--limit": "8",
        "--data": "/data",
        "--threads": "1",
        "--accelerator": "cpu",
        "--precision": "bf16-mixed",
        "--save-minutes": "0.5",
    }
    assert words[-1] == "--tensorboard"


def test_folders_and_jobs(tmp_path: Path) -> None:
    recipe = load_recipe("cifar100-lenet")
    made = Plan(recipe, "cifar100-lenet", ("rkr", "finetune"), ("A", "B"), tmp_path, epochs=20)
    assert [(s.method, s.order, s.seed) for s in made.specs] == [
        ("rkr", "A", 0),
        ("finetune", "A", 0),
        ("rkr", "B", 0),
        ("finetune", "B", 0),
    ]
    assert made.folder(made.specs[0]) == tmp_path / "cifar100-lenet-20-epochs" / "rkr" / "A"
    several = dataclasses.replace(made, seeds=(0, 1, 2))
    assert several.folder(several.specs[8]) == tmp_path / "cifar100-lenet-20-epochs" / "rkr" / "A-seed-2"
    assert [spec.name for spec in several.specs[:4]] == [spec.name for spec in made.specs]
    assert len({several.folder(spec) for spec in several.specs}) == 12
    assert choose_seeds(recipe, None, []) == (0,)
    assert choose_seeds(recipe, 3, []) == (0, 1, 2)
    assert choose_seeds(recipe, None, ["4", "7"]) == (4, 7)


def test_orders_that_the_paper_has_numbers_of_are_all_run() -> None:
    recipe = load_recipe("gzsl-first-task")
    assert choose_orders(recipe, None, []) == ("fixed", "first-AWA1", "first-CUB", "first-SUN")
    assert choose_orders(recipe, 2, []) == ("fixed", "first-AWA1")
    assert choose_orders(load_recipe("cifar100-lenet"), None, []) == ("A",)


def test_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no method 'rrk'"):
        run_plan(plan(tmp_path, ("rrk",)), Execution(), lambda event: None)
    with pytest.raises(UsageError, match="at least 1, not 0"):
        run_plan(plan(tmp_path), Execution(workers=0), lambda event: None)
    for precision in ("64-true", "16-mixed"):
        with pytest.raises(UsageError, match=f"one of 32-true, bf16-mixed, not '{precision}'"):
            dataclasses.replace(plan(tmp_path), precision=precision)
    with pytest.raises(UsageError, match="either --orders"):
        choose_orders(load_recipe("digits"), 1, ["fixed"])
    with pytest.raises(UsageError, match="1 order: give no more"):
        choose_orders(load_recipe("digits"), 2, [])
    with pytest.raises(UsageError, match="either --seeds"):
        choose_seeds(load_recipe("digits"), 1, ["0"])
    with pytest.raises(UsageError, match="at least 0, not '-1'"):
        choose_seeds(load_recipe("digits"), None, ["-1"])
    with pytest.raises(UsageError, match="at least 1, not 0"):
        choose_seeds(load_recipe("digits"), 0, [])
    for name in ("--5", "²", "9" * 5000):
        with pytest.raises(UsageError, match=f"no order '{name}'; give a seed"):
            choose_orders(load_recipe("digits"), None, [name])
        with pytest.raises(UsageError, match=f"at least 0, not '{name}'"):
            choose_seeds(load_recipe("digits"), None, [name])
    with pytest.raises(UsageError, match="at least 0, not -1"):
        choose_orders(load_recipe("digits"), None, ["-1"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"^--workers: .* either torchrun or --workers$"):
        run_plan(plan(tmp_path), Execution(workers=2), lambda event: None)
    assert not list(tmp_path.iterdir())


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the commit cannot be found, none is recorded."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None


def test_another_precision_is_another_run(tmp_path: Path) -> None:
    assert run_plan(plan(tmp_path, ("rkr",)), Execution(threads=1), lambda event: None)
    other = dataclasses.replace(plan(tmp_path, ("rkr",)), precision="bf16-mixed")
    with pytest.raises(UsageError, match="precision is '32-true' there, 'bf16-mixed' now"):
        run_plan(other, Execution(threads=1), lambda event: None)


def test_a_run_that_diverges_does_not_keep_others_from_running(tmp_path: Path) -> None:
    recipe = load_recipe("digits")
    wild = recipe.method("finetune").model_copy(update={"learner": "lwf", "options": {"strength": 1e30}})
    recipe = recipe.model_copy(update={"methods": {"wild": wild, "finetune": recipe.method("finetune")}})
    made = Plan(recipe, "digits", ("wild", "finetune"), ("fixed",), tmp_path, epochs=4, limit=8)
    with pytest.raises(Diverged, match=r"^wild fixed: training diverged: the loss of task 'digits-2' is (nan|inf)"):
        run_plan(made, Execution(threads=1), lambda event: None)
    assert [RunFolder(made.folder(spec)).finished for spec in made.specs] == [False, True]


def test_impossible_options_are_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("digits")
    wrong = recipe.method("finetune").model_copy(update={"learner": "ewc", "options": {"strength": -1}})
    recipe = recipe.model_copy(update={"methods": {"finetune": recipe.method("finetune"), "firm": wrong}})
    made = Plan(recipe, "digits", ("finetune", "firm"), ("fixed",), tmp_path, epochs=1, limit=8)
    for workers in (1, 2):
        with pytest.raises(UsageError, match=r"^methods\.firm: strength must be"):
            run_plan(made, Execution(workers, 1), lambda event: None)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(runner, "_one_by_one", lambda *arguments: True)
    with monkeypatch.context() as patch:  # nothing is to be done
        patch.setattr(RunFolder, "finished", True)
        assert run_plan(made, Execution(), lambda event: None)
    with monkeypatch.context() as patch:  # the process that started this one has done it
        patch.setenv(MARK, "1")
        assert run_plan(made, Execution(), lambda event: None)
    with pytest.raises(UsageError):
        run_plan(made, Execution(), lambda event: None)
    worker = Worker(["sh", "-c", f"echo ${MARK} >&2"], 1)
    assert worker.end() == (0, "1")


def test_how_is_checked_once_for_all_commands() -> None:
    for wrong, said in (
        ({"threads": 0}, "--threads must be at least 1, not 0"),
        ({"workers": 0}, "--workers must be at least 1, not 0"),
        ({"save_minutes": -1.0}, r"--save-minutes must be at least 0, not -1\.0"),
        ({"save_minutes": float("nan")}, "--save-minutes must be at least 0, not nan"),
    ):
        with pytest.raises(UsageError, match=said):
            Execution(**wrong)


@pytest.mark.parametrize("threads", [1, None])
def test_images_are_decoded_by_as_many_processes_as_a_run_has_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None
) -> None:
    seen: list[int | None] = []
    monkeypatch.setattr(Run, "execute", lambda self: seen.append(self.execution.threads) is None)
    assert run_plan(plan(tmp_path, ("rkr",)), Execution(threads=threads), lambda event: None)
    assert seen == [threads]
