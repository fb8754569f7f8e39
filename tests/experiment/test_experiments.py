"""Several runs of a plan: one after the other or at once, the same bytes; errors and stops are told in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from forked import HERE, Server
from small_runs import outcome

from rkr.errors import FileError, RkrError, UsageError
from rkr.experiment import jobs, runner, signals
from rkr.experiment.events import Event
from rkr.experiment.execution import Diverged, Interrupted
from rkr.experiment.folder import RunFolder
from rkr.experiment.jobs import Job, Site, run_job
from rkr.experiment.machine import commit
from rkr.experiment.plan import Plan, choose_orders, choose_seeds
from rkr.experiment.recipes import load_recipe
from rkr.experiment.run import Run
from rkr.experiment.runner import Execution, run_plan
from rkr.experiment.spec import RunSpec
from rkr.experiment.workers import Worker, Workers
from rkr.importing import importable

WORDS = ("run", "digits", "--method", "rkr,finetune", "--epochs", 1, "--limit", 8, "--threads", 1)
WORDS += ("--accelerator", "cpu", "--json", "--out")


def test_workers_give_the_same_bytes(server: Server, tmp_path: Path) -> None:
    one = server.cli(*WORDS, tmp_path / "1")
    two = server.cli(*WORDS, tmp_path / "2", "--workers", 2)
    assert one.wait() == 0, one.stderr
    assert two.wait() == 0, two.stderr
    for method in ("rkr", "finetune"):
        a, b = (outcome(tmp_path / n / "digits-1-epochs-limit-8" / method / "fixed") for n in ("1", "2"))
        assert a == b
    for kind in ("started", "epoch", "task", "finished", "summary"):  # what the workers tell is told
        assert len(one.events(kind)) == len(two.events(kind)) > 0
    assert {event["run"].split()[1] for event in two.events("task")} == {"rkr", "finetune"}


@pytest.mark.slow
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


def pretend(monkeypatch: pytest.MonkeyPatch, scripts: dict[str, list[list[Any]]]) -> None:
    importable(HERE)

    def job(plan: Plan, execution: Execution, spec: RunSpec, *rest: Any) -> Job:
        return Job(spec.name, "scripted:do", {"steps": scripts[spec.method]})

    monkeypatch.setattr(runner, "run_job", job)


def test_an_error_of_a_worker_names_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []
    begun = str(tmp_path / "begun")  # both workers are at work when one fails
    fails = [["wait", begun], ["fail", "digits rkr fixed", "no room"], ["warn", "warned"], ["print", "{}"]]
    scripts = {"rkr": [*fails, ["file error", "f: no room"]], "finetune": [["touch", begun], ["sleep", 0.2]]}
    pretend(monkeypatch, {**scripts, "joint": [["exit", 9]]})
    with pytest.raises(RkrError) as caught:
        run_plan(plan(tmp_path), Execution(workers=2, threads=1), told.append)
    assert str(caught.value) == "rkr fixed: f: no room; skipped: joint fixed"  # no other run begins after it
    assert [type(event).__name__ for event in told] == ["Failed"]


def test_a_fault_of_a_worker_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no error of the package is named with its class."""
    pretend(monkeypatch, {"rkr": [["fault", "odd"]], "finetune": []})
    with pytest.raises(RkrError, match=r"^rkr fixed: ValueError: odd$"):
        run_plan(plan(tmp_path, ("rkr", "finetune")), Execution(workers=2), lambda event: None)


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
    scripts = {"rkr": [["diverge", "far off"]], "finetune": [["sleep", 0.3]], "joint": [["touch", f"{tmp_path}/begun"]]}
    pretend(monkeypatch, scripts)
    with pytest.raises(Diverged, match=r"^rkr fixed: far off$"):
        run_plan(plan(tmp_path), Execution(workers=2), lambda event: None)
    assert (tmp_path / "begun").exists()
    pretend(monkeypatch, {**scripts, "joint": [["stop"]]})  # as long as others can go on, it is no result
    assert run_plan(plan(tmp_path), Execution(workers=2), lambda event: None) is False
    pretend(monkeypatch, {**scripts, "finetune": [["usage error", "training diverged"]], "joint": []})
    with pytest.raises(RkrError, match="finetune fixed: training diverged") as caught:
        run_plan(plan(tmp_path), Execution(workers=2), lambda event: None)
    assert not isinstance(caught.value, Diverged)


def test_a_killed_worker_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"rkr": [["kill"]], "finetune": []})
    with pytest.raises(RkrError, match=r"^rkr fixed: ended with code -9$"):
        run_plan(plan(tmp_path, ("rkr", "finetune")), Execution(workers=2), lambda event: None)
    pretend(monkeypatch, {"rkr": [["warn", "no memory"], ["exit", 1]], "finetune": []})
    with pytest.raises(RkrError, match=r"^rkr fixed: ended with code 1: no memory$"):
        run_plan(plan(tmp_path, ("rkr", "finetune")), Execution(workers=2), lambda event: None)


def test_a_stopped_worker_stops_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"rkr": [["stop"]], "finetune": [["sleep", 0.5]], "joint": [["touch", f"{tmp_path}/begun"]]})
    assert run_plan(plan(tmp_path), Execution(workers=2), lambda event: None) is False
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_reaches_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    methods = ("rkr", "finetune")
    pretend(monkeypatch, {method: [["until told", str(tmp_path / method)]] for method in methods})

    def stop() -> None:
        while not all((tmp_path / f"{method}.ready").exists() for method in methods):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=stop, daemon=True).start()
    assert run_plan(plan(tmp_path, methods), Execution(workers=2), lambda event: None) is False
    assert all((tmp_path / f"{method}.told").exists() for method in methods)
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_job_of_several_is_stopped(tmp_path: Path) -> None:
    """Its process does the next one."""
    importable(HERE)
    first, second = (Job(name, "scripted:do", {"steps": [["until told", str(tmp_path / name)]]}) for name in "ab")
    third = Job("c", "scripted:do", {"steps": []})
    with Workers(2, 1) as workers:
        ends = [workers.submit(job, lambda job, event: None) for job in (first, second)]
        while not all((tmp_path / f"{name}.ready").exists() for name in "ab"):
            time.sleep(0.01)
        pids = {worker.pid for worker in workers._at_work.values()}
        workers.stop(first)
        assert isinstance(ends[0].exception(60), Interrupted)
        assert workers.submit(third, lambda job, event: None).result(60) is False
        assert not (tmp_path / "b.told").exists()
        assert {worker.pid for worker in (*workers._at_work.values(), *workers._idle)} == pids
        workers.stop()
        assert isinstance(ends[1].exception(60), Interrupted)


def test_workers_have_sessions_of_their_own() -> None:
    """A terminal does not reach them, so they hear of Ctrl-C once, and a second one is a second one."""
    worker = Worker(1)
    assert os.getsid(worker.pid) == os.getpgid(worker.pid) == worker.pid != os.getsid(0)
    worker.stop()
    worker.close()
    assert worker.ended


@pytest.mark.skipif(not Path("/proc").exists(), reason="no /proc to see processes in")
def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """One that is killed leaves none behind, at work or idle."""
    code = f"""
import sys, threading
from rkr.experiment.jobs import Job
from rkr.experiment.workers import Workers
from rkr.importing import importable
importable({str(HERE)!r})
workers = Workers(2, 1)
workers.submit(Job("a", "scripted:do", {{"steps": [["until told", {str(tmp_path / "a")!r}]]}}), print)
workers.submit(Job("b", "scripted:do", {{"steps": []}}), print).result()
while not workers._at_work: pass
print(*(w.pid for w in (*workers._at_work.values(), *workers._idle)), flush=True)
threading.Event().wait()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        while not (tmp_path / "a.ready").exists():
            time.sleep(0.01)
        process.kill()
        process.wait()
    end = time.monotonic() + 300
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left
    assert (tmp_path / "a.told").exists()  # it could save its state


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_second_signal_ends_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is left behind, although they do not hear the terminal."""
    methods, started = ("rkr", "finetune"), []
    pretend(monkeypatch, {method: [["until told", str(tmp_path / method), False]] for method in methods})
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
    pretend(monkeypatch, {method: [["until told", str(tmp_path / method)]] for method in methods})
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
        assert all(process.poll() in (0, -signal.SIGTERM) for process in started)
    finally:
        for process in started:
            process.kill()


def test_jobs_are_given_the_whole_plan(tmp_path: Path) -> None:
    """The plan at the other end has the same run, in the same folder."""
    recipe = load_recipe("digits").on_validation()
    made = dataclasses.replace(
        plan(tmp_path, ("ewc",)), recipe=recipe, seeds=(3,), data="/data", precision="bf16-mixed", on_validation=True
    )
    (spec,) = made.specs
    job = Job.from_json(json.loads(json.dumps(run_job(made, Execution(2, 1, 0.5, True), spec, 1).to_json())))
    assert job.arguments["how"] == {"threads": 1, "save_minutes": 0.5, "tensorboard": True}
    again = jobs._plan(job.arguments["plan"], Site())
    assert again.recipe == recipe
    assert again.specs[0].settings == spec.settings
    assert again.folder(again.specs[0]) == made.folder(spec) == job.path
    for name in ("epochs", "limit", "data", "seeds", "accelerator", "precision", "on_validation", "given"):
        assert getattr(again, name) == getattr(made, name)
    elsewhere = jobs._plan(job.arguments["plan"], Site(root=Path("/there"), data="/sent"))
    assert (elsewhere.out, elsewhere.data) == (Path("/there"), "/sent")


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
    monkeypatch.setattr(runner, "_all_runs", lambda *arguments: True)
    with monkeypatch.context() as patch:  # nothing is to be done
        patch.setattr(RunFolder, "finished", True)
        assert run_plan(made, Execution(), lambda event: None)
    with pytest.raises(UsageError):
        run_plan(made, Execution(), lambda event: None)


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
