"""Tasks come and go while requests come all the time; every answer is compared with a plain model's.

$RKR_SOAK_SECONDS sets how long: 600 is the full test.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.pictures import draw_classes
from helpers.servers import served
from helpers.zoos import CLASSES, make_zoo, picture, task_file

from rkr.core.zoo import add_task_file, drop_task
from rkr.pictures.zoo import open_zoo
from rkr.serve.client import ServerError

SECONDS = float(os.environ.get("RKR_SOAK_SECONDS", "60"))
LEAST = {"200": 300, "404": 1, "changes": 30, "learned": 1}  # that must have happened, however slow the machine is
PATIENCE = 900.0  # seconds
CHANGING = [f"guest-{n}" for n in range(6)]


def shares(folder: Path, file: Path | None, task: str, pictures: list[bytes]) -> list[dict[str, float]]:
    """What a plain network with the task folded in says."""
    zoo = open_zoo(folder, device="cpu")
    if file is not None:
        zoo.model.load_task(file, task)
    network = zoo.model.merged(task).eval()
    squares = torch.stack([zoo.preparation.square(one) for one in pictures])
    with torch.no_grad():
        found = network(zoo.preparation.normalised(zoo.preparation.centre(squares))).softmax(1)
    return [dict(zip(zoo.tasks[task].classes, row, strict=True)) for row in found.tolist()]


def resident(pid: int) -> float:
    """Megabytes of memory."""
    text = Path(f"/proc/{pid}/statm").read_text()
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + PATIENCE + 600)
def test_no_answer_is_wrong_while_tasks_come_and_go(tmp_path: Path) -> None:
    folder = tmp_path / "zoo"
    make_zoo(folder)
    pictures = [picture(tmp_path, seed) for seed in range(6)]
    files = {name: task_file(folder, name, tmp_path / name, ("a", "b", name)) for name in CHANGING}
    right = {name: shares(folder, None, name, pictures) for name in CLASSES}
    right |= {name: shares(folder, file, name, pictures) for name, file in files.items()}
    source = draw_classes(tmp_path / "learned", {"red": 8, "blue": 8})
    counts: Counter[str] = Counter()
    wrong: list[object] = []
    over = threading.Event()

    with served(folder, "--allow-changes", "--wait-ms", "3") as server:

        def ask(seed: int) -> None:
            draws, client = random.Random(seed), server.client(retries=0)
            while not over.is_set():
                task, n = draws.choice([*right, *CLASSES]), draws.randrange(len(pictures))
                try:
                    (found,) = client.predict(pictures[n], task, top=4)
                except ServerError as error:
                    counts[str(error.status)] += 1
                    if error.status != 404 or task in CLASSES:
                        wrong.append((task, error.status, str(error)))
                    continue
                counts["200"] += 1
                expected = right[task][n]
                if found["task"] != task or {a["class"] for a in found["answers"]} != set(expected):
                    wrong.append((task, n, found))
                elif any(abs(a["probability"] - expected[a["class"]]) > 1e-5 for a in found["answers"]):
                    wrong.append((task, n, found, expected))

        def change(by_http: bool, names: list[str], seed: int) -> None:
            draws, client, there = random.Random(seed), server.client(), set[str]()
            while not over.is_set():
                name = draws.choice(names)
                if name in there:
                    client.drop(name) if by_http else drop_task(folder, name)
                    there.remove(name)
                else:
                    client.add(name, files[name]) if by_http else add_task_file(folder, files[name])
                    there.add(name)
                counts["changes"] += 1
                over.wait(draws.uniform(0.05, 0.4))

        def learn() -> None:
            client = server.client()
            while not over.is_set():
                client.learn("learned", source)
                client.drop("learned")
                counts["learned"] += 1
                over.wait(5)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        threads += [threading.Thread(target=change, args=(True, CHANGING[:3], 10))]
        threads += [threading.Thread(target=change, args=(False, CHANGING[3:], 11))]
        threads += [threading.Thread(target=learn)]
        for thread in threads:
            thread.start()
        memory = []
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or any(counts[what] < least for what, least in LEAST.items()):
            assert time.monotonic() < end + PATIENCE, dict(counts)
            time.sleep(SECONDS / 60)
            memory.append(resident(server.process.pid))
        over.set()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
        last = server.client().tasks()
        errors = [line for line in server.lines if line["event"] in ("error", "other", "trouble")]
    early = memory[len(memory) // 6]
    print(dict(counts), f"memory in MB: {early:.1f} after a sixth, {memory[-1]:.1f} at the end, {max(memory):.1f}")
    assert wrong == []
    assert errors == []
    assert set(CLASSES) <= {task["name"] for task in last}
    assert memory[-1] < 1.1 * early + 10
