"""kill -9 at any moment, then the same again: results and model files have the bytes of a run that was never killed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from forked import Process, Server
from helpers.marks import slow
from small_runs import execute, few_digits, outcome

from rkr.experiment.events import Event, Finished
from rkr.experiment.folder import RunFolder
from rkr.experiment.plan import Plan
from rkr.experiment.recipes import load_recipe
from rkr.experiment.runner import Execution, run_plan
from rkr.experiment.state import load_state


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "few.toml"
    path.write_text(few_digits(["rkr", "finetune"], augment=True))
    return path


KILLS = 5  # of each method by the clock; with 6 within writes, and others, there are 45


@pytest.mark.parametrize("method", ["rkr", *slow("finetune", "separate", "icarl")])
def test_at_random_moments(server: Server, tmp_path: Path, method: str) -> None:
    """By the clock: in a batch, in a test, in a write, at the start. States are saved after every batch."""
    draw = random.Random(method)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert server.start("run", folder=str(whole), method=method).wait() == 0
    began = time.monotonic()
    assert server.start("run", folder=str(tmp_path / "again"), method=method).wait() == 0
    span = time.monotonic() - began
    kills = 0
    while kills < KILLS:
        process = server.start("run", folder=str(parts), method=method)
        time.sleep(draw.uniform(0, span / 2))
        code = process.kill()
        assert code in (0, -signal.SIGKILL), process.stderr
        kills += code != 0
        if not code:  # it was too late
            assert outcome(parts) == outcome(whole)
            shutil.rmtree(parts)
    process = server.start("run", folder=str(parts), method=method)
    assert process.wait() == 0, process.stderr
    assert outcome(parts) == outcome(whole)
    assert sorted(path.name for path in parts.iterdir()) == sorted(path.name for path in whole.iterdir())


STEPS = 110  # a run of 18 batches has more steps of writing: half a write, fsync, rename, fsync of the folder


@pytest.mark.parametrize("method", ["rkr", *slow("finetune", "separate")])
def test_within_writes(server: Server, tmp_path: Path, method: str) -> None:
    """After half of a file, before and after fsync and rename: of settings, results, times, state and model files."""
    execute(tmp_path / "whole", method)
    draw, kills = random.Random(method), 0
    for first in (1, draw.randint(5, STEPS), STEPS):
        parts, code = tmp_path / str(first), -signal.SIGKILL
        for at in (first, draw.randint(3, 15), 10**9):
            process = server.start("run", folder=str(parts), method=method, fault=[at, "kill"])
            code = process.wait()
            assert code in (0, -signal.SIGKILL), process.stderr
            kills += code != 0
        assert code == 0
        assert outcome(parts) == outcome(tmp_path / "whole")
        assert not list(parts.rglob("*.tmp"))
    assert kills == 6


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rkr", "finetune", "separate", "two-phases"])
def test_within_every_write(server: Server, tmp_path: Path, method: str) -> None:
    """As above, at every single step of writing."""
    execute(tmp_path / "whole", method)
    at, code = 0, -int(signal.SIGKILL)
    while code:
        at += 1
        folder = tmp_path / "parts"
        shutil.rmtree(folder, ignore_errors=True)
        code = server.start("run", folder=str(folder), method=method, fault=[at, "kill"]).wait()
        assert code in (0, -signal.SIGKILL)
        assert server.start("run", folder=str(folder), method=method).wait() == 0
        assert outcome(folder) == outcome(tmp_path / "whole")
    assert at > STEPS


def test_killed_again_and_again_at_its_start(server: Server, tmp_path: Path) -> None:
    """A process that resumes, and is killed before it has done anything, loses nothing."""
    execute(tmp_path / "whole", "rkr")
    job = {"folder": str(tmp_path / "parts"), "method": "rkr"}
    process = server.start("run", **job, pause=0.5)
    process.until(lambda: process.events("task"))
    assert process.kill() == -signal.SIGKILL
    state = (tmp_path / "parts" / "state.safetensors").read_bytes()
    for _ in range(3):
        process = server.start("run", **job, fault=[1, "kill"])
        assert process.wait() == -signal.SIGKILL
        assert (tmp_path / "parts" / "state.safetensors").read_bytes() == state
    assert server.start("run", **job).wait() == 0
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


# ---------------------------------------------------------------------------------------------------------
# The command


def started(process: Process) -> None:
    process.until(lambda: process.events("started"))
    assert process.poll() is None, process.stderr


FOLDER = Path("few", "rkr", "fixed")


def words(recipe: Path, out: Path, *more: object, method: str = "rkr") -> tuple[object, ...]:
    return ("run", recipe, "--method", method, "--out", out, "--threads", 1, "--accelerator", "cpu", *more)


@pytest.fixture(scope="module")
def whole(server: Server, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command leaves when nothing happens."""
    out = tmp_path_factory.mktemp("whole")
    process = server.cli(*words(recipe, out))
    assert process.wait() == 0, process.stderr
    return out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c(server: Server, tmp_path: Path, recipe: Path, whole: Path, number: int) -> None:
    process = server.cli(*words(recipe, tmp_path), pause=0.5)
    process.until(lambda: "task 1/5" in process.stdout)
    process.signal(number, group=True)
    assert process.wait() == 130
    assert process.stderr == ""
    *_, stopped, advice = process.stdout.splitlines()
    assert re.fullmatch(
        r"few rkr fixed: stopped at task \d, .* the state is saved; run the same command again to resume", stopped
    )
    assert advice == "Interrupted. Run the same command to resume."
    assert (tmp_path / FOLDER / "state.safetensors").exists()
    process = server.cli(*words(recipe, tmp_path, "--json"))
    assert process.wait() == 0, process.stderr
    assert process.events("started")[0]["resumed"] is True
    assert outcome(tmp_path / FOLDER) == outcome(whole / FOLDER)


def test_kill_9_of_the_command(server: Server, tmp_path: Path, recipe: Path, whole: Path) -> None:
    for task in (1, 2, 4):
        process = server.cli(*words(recipe, tmp_path, "--json", "--save-minutes", 0), pause=0.3)
        process.until(lambda: any(end["number"] >= task for end in process.events("task")))  # noqa: B023
        assert process.kill() == -signal.SIGKILL
    assert server.cli(*words(recipe, tmp_path)).wait() == 0
    assert outcome(tmp_path / FOLDER) == outcome(whole / FOLDER)


def test_ctrl_c_ends_all_runs_of_a_command(server: Server, tmp_path: Path, recipe: Path) -> None:
    process = server.cli(*words(recipe, tmp_path, "--json", method="rkr,finetune"), pause=0.3)
    process.until(lambda: process.events("task"))
    process.signal(signal.SIGINT)
    process.signal(signal.SIGTERM)  # at once, as torchrun does it: still the same stop
    assert process.wait() == 130
    assert len(process.events("started")) == len(process.events("stopped")) == 1
    assert not (tmp_path / "few" / "finetune").exists()


def test_ctrl_c_while_the_last_task_is_tested(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is complete then, but the next one must not begin."""
    loaded = load_recipe(str(recipe))
    plan = Plan(
        loaded, str(recipe), ("rkr", "finetune"), loaded.orders[:1], tmp_path, epochs=1, limit=4, accelerator="cpu"
    )
    close = RunFolder.close

    def stop_and_close(self: RunFolder, tasks: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        close(self, tasks)

    monkeypatch.setattr(RunFolder, "close", stop_and_close)
    events: list[Event] = []
    assert run_plan(plan, Execution(threads=1), events.append) is False
    assert isinstance(events[-1], Finished)
    assert RunFolder(plan.folder(plan.specs[0])).finished
    assert not plan.folder(plan.specs[1]).exists()


def test_two_processes_on_one_folder(server: Server, tmp_path: Path, recipe: Path) -> None:
    command = words(recipe, tmp_path, "--json", "--epochs", 500)
    first = server.cli(*command)
    started(first)
    folder = tmp_path / "few-500-epochs" / "rkr" / "fixed"
    for _ in range(2):
        second = server.cli(*command)
        assert second.wait() == 2
        assert second.stderr == f"rkr: {folder}: another process is executing this run: wait for it, or stop it first\n"
    assert first.poll() is None
    assert first.kill() == -signal.SIGKILL
    third = server.cli(*command)
    started(third)
    assert third.kill() == -signal.SIGKILL


def test_the_command_does_not_run_a_finished_run(server: Server, recipe: Path, whole: Path) -> None:
    before = outcome(whole / FOLDER)
    again = server.cli(*words(recipe, whole, "--json"))
    assert again.wait() == 0
    assert [json.loads(line)["event"] for line in again.stdout.splitlines()] == ["finished", "summary"]
    assert again.events("finished")[0]["already"] is True
    assert outcome(whole / FOLDER) == before


# ---------------------------------------------------------------------------------------------------------
# A full disk


@pytest.mark.parametrize("at", [1, 9, 36, *slow(3, 5, 7, 17, 34, 101)])
def test_full_disk(server: Server, tmp_path: Path, small: dict[str, bytes], at: int) -> None:
    """No room from some step of writing on, be it settings, results, a state or a model file."""
    job = {"folder": str(tmp_path), "method": "rkr"}
    process = server.start("run", **job, fault=[at, "full"])
    assert process.wait() == 1
    error = process.stderr.splitlines()[-1]
    assert re.match(rf"rkr\.errors\.FileError: {tmp_path}/\S+: .*No space left on device", error)
    assert process.events("failed")[0]["reason"] in error
    assert not list(tmp_path.rglob("*.tmp"))
    state = tmp_path / "state.safetensors"
    if at > 8:  # there was room for one
        assert load_state(state)["begun"] >= 1
    again = server.start("run", **job)
    assert again.wait() == 0, again.stderr
    assert again.events("started")[0]["resumed"] is (at > 8)
    assert outcome(tmp_path) == small


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("small")
    torch.set_num_threads(1)
    execute(folder, "rkr")
    return outcome(folder)


def test_full_disk_by_the_command(server: Server, tmp_path: Path, recipe: Path, whole: Path) -> None:
    """The system itself refuses to write: a limit on the size of files, which the state is too large for."""
    process = server.cli(*words(recipe, tmp_path, "--json", "--save-minutes", 0), file_size=20_000)
    assert process.wait() == 2
    state = tmp_path / FOLDER / "state.safetensors"
    assert process.stderr == f"rkr: {state}: cannot be written: File too large\n"
    assert process.events("failed")
    assert not state.exists()
    assert server.cli(*words(recipe, tmp_path)).wait() == 0
    assert outcome(tmp_path / FOLDER) == outcome(whole / FOLDER)
