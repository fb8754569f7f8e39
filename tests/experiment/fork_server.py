"""A process that has imported everything and starts others by fork, so that each of them is there in no time.

Reads a JSON object a line: {"do": "cli", "argv": [...]} runs the command `rkr`, {"do": "run", ...} a small run; the
answer is the process's id. {"wait": id} answers with its exit code, {"poll": id} too, or null if it still runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import traceback
from typing import Any

import lightning_fabric  # noqa: F401
import matplotlib.figure  # noqa: F401
import sklearn.datasets  # noqa: F401
import small_candidates
import small_runs
import small_zeroshot
import torch
from torch import nn

import rkr.cli
import rkr.experiment.display
import rkr.experiment.runner
import rkr.report.figures
from rkr.experiment.events import Event
from rkr.experiment.processes import make_fabric, over_whole_batches
from rkr.experiment.workers import Workers


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        job = json.loads(line)
        if "do" in job:
            answer: int | None = os.fork()
            if not answer:
                answers.close()
                _child(job)
        else:
            found, status = os.waitpid(job.get("wait", job.get("poll")), 0 if "wait" in job else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        print(json.dumps(answer), file=answers, flush=True)


def _child(job: dict[str, Any]) -> None:
    code = 1
    try:
        os.setsid()
        for number, path in enumerate(("/dev/null", job.pop("stdout"), job.pop("stderr"))):
            os.dup2(os.open(path, (os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if number else os.O_RDONLY, 0o644), number)
        os.environ.update(job.pop("environment"))
        if "pause" in job:
            small_runs.pauses(job.pop("pause"))
        if "fault" in job:
            small_runs.faults(*job.pop("fault"))
        if "file_size" in job:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_size"], resource.RLIM_INFINITY))
            del job["file_size"]
        globals()[f"_{job.pop('do')}"](**job)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _cli(argv: list[str]) -> None:
    sys.argv = ["rkr", *argv]
    rkr.cli.main()


def _trials(argv: list[str]) -> None:
    """The command, with a method of the tests."""
    small_candidates.register()
    _cli(argv)


def _candidates(folder: str, save_minutes: float = 0.0, workers: int = 1, **changes: Any) -> None:
    def watch(event: Event) -> None:
        print(json.dumps(event.to_json()), flush=True)

    crew = Workers(workers, 1) if workers > 1 else None
    with crew or contextlib.nullcontext():
        small_candidates.execute(folder, watch, save_minutes, crew, **changes)


def _run(folder: str, method: str, save_minutes: float = 0.0, **changes: Any) -> None:
    def watch(event: Event) -> None:
        print(json.dumps(event.to_json()), flush=True)

    if "dtype" in changes:
        changes["dtype"] = getattr(torch, changes["dtype"])
    if changes.pop("plain", False):
        changes["augment"] = None
    small_runs.execute(folder, method, watch, save_minutes, **changes)


def _zeroshot(folder: str, method: str, **changes: Any) -> None:
    small_runs.execute(folder, small_zeroshot.make_case(method, **changes))


def _norm(source: str, shares: list[int], target: str) -> None:
    """A BatchNorm layer over the shares of several processes; a share may be empty."""
    from rkr.experiment import processes

    fabric = make_fabric("cpu")
    given = torch.load(source, weights_only=False)  # of the test itself
    network: Any = over_whole_batches(nn.Sequential(given["layer"]))
    network.train()
    start = sum(shares[: fabric.global_rank])
    x = given["x"][start : start + shares[fabric.global_rank]]
    weights = given["weights"][start : start + shares[fabric.global_rank]]
    absent = not len(x)
    if absent:
        x, weights = torch.ones(1, *given["x"].shape[1:], dtype=x.dtype), torch.zeros(1, *given["x"].shape[1:])
    x = x.clone().requires_grad_()
    with processes.placeholder_batch(absent):
        y = network(x)
    (y * weights.to(y.dtype)).sum().backward()
    processes.sum_gradients(fabric, network.parameters())
    found = {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in network[0].named_parameters()}}
    torch.save({**found, **network[0].state_dict(prefix="state.")}, f"{target}.{fabric.global_rank}")


if __name__ == "__main__":
    main()
